"""Assert what an environment holds: `check_environment.py kvq-codecs kvq-pools [--only NAME …]`.

The packages named must come from this environment, complete, and no other package of ours may be
importable. With --only, nothing but them and the distributions named may be installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

OURS = ("kvq-codecs", "kvq-pools", "kvq-attention", "kvq-cli")


def problems(packages: Iterable[str], only: Iterable[str] | None) -> list[str]:
    """What is wrong with the running interpreter's environment."""
    found = []
    for package in OURS:
        module = package.replace("-", "_")
        spec = find_spec(module)
        if package not in packages:
            if spec is not None:
                found.append(f"{package} is not declared and yet importable from {spec.origin}")
            continue
        if spec is None or spec.origin is None:
            found.append(f"{package} is not importable")
            continue
        folder = Path(spec.origin).parent
        if not folder.is_relative_to(sys.prefix):
            found.append(f"{package} comes from {folder}, outside of {sys.prefix}")
        if not (folder / "py.typed").is_file():
            found.append(f"{package} lacks py.typed")
        imported, declared = import_module(module).__version__, metadata.version(package)
        if imported != declared:
            found.append(f"{package} says it is {imported} and its metadata {declared}")
    if only is not None:
        installed = {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()}
        expected = {*packages, *only}
        if installed != expected:
            found.append(f"installed are {sorted(installed)}, expected {sorted(expected)}")
    return found


def main() -> None:
    """Print what is wrong and exit 1, or print what was found right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="+", choices=OURS)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    wrong = problems(options.packages, options.only)
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"this environment holds {', '.join(options.packages)} and no other package of ours")


if __name__ == "__main__":
    main()
