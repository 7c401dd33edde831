"""`kvq --version`."""

from __future__ import annotations

from importlib.metadata import version

import typer

PACKAGES = ("kvq-cli", "kvq-attention", "kvq-pools", "kvq-codecs")


def print_versions(asked: bool) -> None:
    """Print the version of each package and end the program, if `asked`."""
    if not asked:
        return
    for package in PACKAGES:
        print(f"{package} {version(package)}")
    raise typer.Exit
