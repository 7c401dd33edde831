"""What a command says: errors in one message on stderr, never a traceback for wrong input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec

import typer

from kvq_cli.quoting import quoted

P = ParamSpec("P")

WRONG_INPUT = 2
UNREACHABLE = 3
FAILED = 4
INTERRUPTED = 130


def plain_errors(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose refusals and interruption end it with a message and an exit code.

    kvq's own ValueErrors are refusals written for the user. Any other exception is a defect and
    keeps its traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except ValueError as error:
            if not type(error).__module__.startswith("kvq_"):
                raise
            refuse(str(error))

    return wrapped


def write_file(path: Path, text: str, what: str) -> None:
    """Write a file that the user asked for, or say why it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        refuse(f"the {what} cannot be written to {path}: {error.strerror}")


def check_file(path: Path, what: str) -> None:
    """Refuse a file that cannot be written, before what it is to hold is computed."""
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        refuse(f"the {what} cannot be written to {path}: {error.strerror}")


def check_svg(plot: Path | None) -> None:
    """Refuse a plot whose name promises another kind of picture."""
    if plot is not None and plot.suffix.lower() != ".svg":
        given = quoted(str(plot))
        refuse(f"--plot draws an SVG: the file's name must end in .svg, got {given}")


def refuse(message: str, code: int = WRONG_INPUT) -> NoReturn:
    """End the program with a message, because of wrong input unless `code` says otherwise."""
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(("error: ", "bold red"), message)
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
    raise typer.Exit(code)
