"""Rules of the house that no linter knows; prints each breach and exits 1."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 400


def long_files() -> Iterator[str]:
    """A file holds one subject and is read in one sitting."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        lines = len(path.read_text().splitlines())
        if lines > MOST_LINES:
            yield f"{path.relative_to(ROOT)}: {lines} lines, at most {MOST_LINES}"


def silent_sessions() -> Iterator[str]:
    """`nox -l` explains each session in one line."""
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if any("session" in ast.unparse(d) for d in node.decorator_list):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if not first.endswith("."):
                yield f"noxfile.py: session {node.name} needs a docstring of one sentence"


def unmentioned_versions() -> Iterator[str]:
    """A package's changelog begins with the version that its source declares."""
    for package in sorted(ROOT.glob("packages/*/")):
        source = package / "src" / package.name.replace("-", "_") / "__init__.py"
        declared = re.search(r'^__version__ = "(.+)"$', source.read_text(), re.MULTILINE)
        changes = re.search(r"^## (\S+)", (package / "CHANGELOG.md").read_text(), re.MULTILINE)
        if declared is None or changes is None or declared[1] != changes[1]:
            yield (
                f"packages/{package.name}: __version__ is {declared and declared[1]}, "
                f"the newest section of CHANGELOG.md {changes and changes[1]}"
            )


def main() -> None:
    """Print what is wrong and exit 1 if anything is."""
    breaches = [*long_files(), *silent_sessions(), *unmentioned_versions()]
    if breaches:
        sys.exit("\n".join(breaches))


if __name__ == "__main__":
    main()
