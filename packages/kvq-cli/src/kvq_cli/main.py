"""`kvq`: the commands. What a command needs is imported when it runs, not here."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kvq_cli.commands import absent, bench, ctl
from kvq_cli.commands.check import check
from kvq_cli.commands.eval import evaluate
from kvq_cli.commands.formats import formats
from kvq_cli.commands.plan import plan
from kvq_cli.commands.serve import serve
from kvq_cli.commands.version import print_versions

app = typer.Typer(
    name="kvq",
    help="Serve language models from quantized, paged key/value caches.",
    epilog="Exit codes: 0 done (or a server ended by Ctrl-C), 1 a check that disagrees, 2 wrong "
    "input or refused, 3 no kvq server answers (ctl), 4 it failed at what was asked (ctl, bench), "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=absent.Command)(serve)
app.command()(plan)
app.command()(formats)
app.command()(check)
app.command("eval")(evaluate)
app.add_typer(ctl.app, name="ctl")
app.add_typer(bench.app, name="bench")


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_versions,
            is_eager=True,
            help="Print the versions of the four kvq packages and exit.",
        ),
    ] = False,
) -> None:
    """Options of `kvq` itself."""


def main() -> None:
    """Run the command that the command line names."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
