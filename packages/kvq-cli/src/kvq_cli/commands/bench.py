"""`kvq bench`: how fast this machine is at what kvq does."""

from __future__ import annotations

from typing import Any

import typer

from kvq_cli.commands import bench_options as o
from kvq_cli.commands.messages import FAILED, check_svg, plain_errors, refuse, write_file

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

    plan = attention_bench.plan(
        op=op, codecs=codecs, cases=cases, pages=pages, shape=shape,
        store_tokens=store_tokens, copy_tokens=copy_tokens, backend=backend or "auto",
        device=device, repeat=repeat, budget_seconds=budget_seconds, jobs=jobs, quick=quick,
    )  # fmt: skip
    check_svg(plot)
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


@app.command()
@plain_errors
def engine(
    model: o.EngineModel = None,
    random: o.RandomSize = None,
    shape: o.EngineShape = "32/8x128",
    kv_cache_dtype: o.EngineFormats = "bf16,q8_0,q4_0",
    cases: o.Steps = "1x1000,64x1000,2k+8k",
    dtype: o.EngineDtype = "auto",
    device: o.EngineDevice = "auto",
    attention_backend: o.EngineBackend = "auto",
    page_tokens: o.EnginePage = 16,
    cuda_graph_max_bs: o.EngineGraphs = None,
    cuda_graph_max_prefill_tokens: o.EngineGraphTokens = None,
    max_model_len: o.EngineLongest = None,
    compile: o.EngineCompile = False,
    peer: o.EnginePeer = False,
    extend_routes: o.EngineRoutes = False,
    repeat: o.EngineRepeat = 20,
    json_file: o.JsonFile = None,
    plot: o.Plot = None,
) -> None:
    """Measure steps of the engine, decodes and prompts, of a model or one of random weights."""
    if (model is None) == (random is None):
        raise typer.BadParameter("give a MODEL or --random, one of them", param_hint="MODEL")

    from kvq_attention import bench as attention_bench
    from kvq_cli import benching
    from kvq_cli.benching.plan import RandomModel, parse_steps
    from kvq_cli.commands.screen import Screen
    from kvq_cli.config import split_formats
    from kvq_cli.plots import bar_chart

    plan = benching.EnginePlan(
        model=RandomModel.parse(random, shape) if random is not None else model or "",
        formats=tuple(dict.fromkeys(split_formats(kv_cache_dtype))),
        cases=parse_steps(cases),
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        page_tokens=page_tokens,
        graph_rows=cuda_graph_max_bs,
        graph_tokens=cuda_graph_max_prefill_tokens,
        compile=compile,
        peer=peer,
        extend_routes=extend_routes,
        max_model_len=max_model_len,
        repeat=repeat,
    )
    check_svg(plot)
    for option, path in (("--json", json_file), ("--plot", plot)):
        if path is not None:
            attention_bench.check_writable(option, path)
    said = [f"--random {random} --shape {shape}"] if random is not None else [model or ""]
    said += [f"--kv-cache-dtype {kv_cache_dtype} --cases {cases} --device {device}"]
    said += [f"--dtype {dtype} --attention-backend {attention_backend}"]
    said += [f"--page-tokens {page_tokens} --repeat {repeat}"]
    if cuda_graph_max_bs is not None:
        said += [f"--cuda-graph-max-bs {cuda_graph_max_bs}"]
    if cuda_graph_max_prefill_tokens is not None:
        said += [f"--cuda-graph-max-prefill-tokens {cuda_graph_max_prefill_tokens}"]
    if max_model_len is not None:
        said += [f"--max-model-len {max_model_len}"]
    flags = {"--compile": compile, "--peer": peer, "--extend-routes": extend_routes}
    said += [option for option, on in flags.items() if on]
    command = " ".join(["kvq bench engine", *said])

    record: dict[str, Any] = {}

    def keep(measured: dict[str, Any]) -> None:
        record.update(measured)
        if json_file is not None:
            write_file(json_file, attention_bench.as_json(record), "record")

    screen = Screen()
    try:
        with screen.progress() as tell:
            benching.run(plan, command, tell, keep)
    finally:  # what is measured is shown, whatever ended the rest
        if record:
            for table in benching.tables(record):
                screen.table(table.title, table.columns, table.rows)
            for note in benching.notes(record):
                screen.say(note)
            if plot is not None:
                write_file(plot, bar_chart(record), "plot")
