"""`kvq bench`: how fast this machine is at what kvq does."""

from __future__ import annotations

from typing import Any

import typer

from kvq_cli.commands import bench_options as o
from kvq_cli.commands.messages import FAILED, plain_errors, refuse, write_file

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.command()
@plain_errors
def attention(
    op: o.Op = "decode",
    codecs: o.Codecs = None,
    cases: o.Cases = None,
    pages: o.Pages = None,
    shape: o.LayerShape = None,
    store_tokens: o.StoreTokens = None,
    copy_tokens: o.CopyTokens = None,
    backend: o.Backend = None,
    device: o.Device = "cuda",
    repeat: o.Repeat = None,
    budget_seconds: o.BudgetSeconds = 330.0,
    jobs: o.Jobs = None,
    quick: o.Quick = False,
    json_file: o.JsonFile = None,
    plot: o.Plot = None,
) -> None:
    """Measure decode, store and page copies, or extend, of every cache format beside bf16."""
    from kvq_attention import bench as attention_bench
    from kvq_cli.commands.screen import Screen
    from kvq_cli.plots import bar_chart, has_figures
    from kvq_cli.quoting import quoted

    plan = attention_bench.plan(
        op=op, codecs=codecs, cases=cases, pages=pages, shape=shape,
        store_tokens=store_tokens, copy_tokens=copy_tokens, backend=backend or "auto",
        device=device, repeat=repeat, budget_seconds=budget_seconds, jobs=jobs, quick=quick,
    )  # fmt: skip
    if plot is not None and plot.suffix.lower() != ".svg":
        refuse(f"--plot draws an SVG: the file's name must end in .svg, got {quoted(str(plot))}")
    for option, path in (("--json", json_file), ("--plot", plot)):
        if path is not None:
            attention_bench.check_writable(option, path)

    def keep(record: dict[str, Any]) -> None:
        if json_file is not None:
            write_file(json_file, attention_bench.as_json(record), "record")

    screen = Screen()
    with screen.progress() as tell:
        record = attention_bench.run(plan, lambda _, done, of: tell("measuring", done, of), keep)
    for table in attention_bench.tables(record):
        screen.table(table.title, table.columns, table.rows)
    for note in attention_bench.notes(record):
        screen.say(note)
    if plot is not None and has_figures(record):
        write_file(plot, bar_chart(record), "plot")
    elif plot is not None:
        screen.say("no plot was written: it draws decode speeds, and none was measured")
    wrong = attention_bench.problems(record)
    if wrong:
        refuse("\n".join(wrong), FAILED)
