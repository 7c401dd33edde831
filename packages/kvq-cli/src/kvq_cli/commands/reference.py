"""The command line as a page of the documentation."""

from __future__ import annotations

from typing import Any

import typer

HEAD = """# Command line

Written from the program itself by `nox -s gen`.
"""
EXIT_CODES = """
## Exit codes

| code | means |
| --- | --- |
| 0 | done; also a server that Ctrl-C ended |
| 1 | `kvq check`: something does not agree; any command: a defect, with its traceback |
| 2 | wrong input, or a server refused it: one message on standard error says what is allowed |
| 3 | `kvq ctl`: no server answers at the URL, or it is not kvq's |
| 4 | `kvq ctl`: the server failed at it; the message says whether it serves on |
| 4 | `kvq bench`: an output is wrong or a kernel failed; the message names each |
| 130 | Ctrl-C before `kvq serve` was up, or of another command; a server that was asked goes on |
| 130 | `kvq eval`: Ctrl-C; what was finished is shown and, with `--json`, kept |
"""


def markdown() -> str:
    """Every command with its arguments and options; the same text on every machine."""
    from kvq_cli.main import app

    root: Any = typer.main.get_command(app)
    return HEAD + "".join(_sections("kvq", root)) + EXIT_CODES


def _sections(name: str, command: Any) -> list[str]:
    """A command's and, after it, its subcommands'."""
    subcommands = getattr(command, "commands", {}).items()
    below = [text for n, c in subcommands for text in _sections(f"{name} {n}", c)]
    return [_section(name, command), *below]


def _section(name: str, command: Any) -> str:
    rows = [_row(parameter) for parameter in command.params if not parameter.hidden]
    table = ["| option | default | meaning |", "| --- | --- | --- |", *rows] if rows else []
    return "\n".join([f"\n## {name}\n", f"{command.help}\n", *table, ""])


def _row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    value = "" if is_argument or not parameter.metavar else f" {parameter.metavar}"
    names = [parameter.metavar] if is_argument else [f"{opt}{value}" for opt in parameter.opts]
    default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
    cells = [", ".join(f"`{name}`" for name in names), default, parameter.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
