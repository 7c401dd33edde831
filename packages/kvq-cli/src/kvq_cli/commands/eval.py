"""`kvq eval`."""

from __future__ import annotations

from kvq_cli.commands import eval_options as o
from kvq_cli.commands.messages import check_file, check_svg, plain_errors, write_file


@plain_errors
def evaluate(
    model: o.ModelArgument,
    text: o.Text,
    kv_cache_dtype: o.CacheDtypes = None,
    tokens: o.Tokens = None,
    context: o.Context = None,
    chunk_tokens: o.ChunkTokens = 256,
    page_tokens: o.PageTokens = 16,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    attention_backend: o.AttentionBackend = "auto",
    threads: o.Threads = None,
    json_file: o.JsonFile = None,
    plot: o.Plot = None,
) -> None:
    """Measure what cache formats cost a model in quality, through the cache that serves it."""
    from kvq_cli.commands.screen import Screen
    from kvq_cli.commands.sizes import parse_tokens
    from kvq_cli.evaluation import report
    from kvq_cli.evaluation.picture import scatter
    from kvq_cli.evaluation.session import EvalOptions, Session

    check_svg(plot)
    if plot is not None:
        check_file(plot, "plot")
    options = EvalOptions(
        model=model,
        text=text,
        formats=kv_cache_dtype or (),
        tokens=parse_tokens(tokens) if tokens else None,
        context=parse_tokens(context) if context else None,
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens,
        dtype=dtype,
        device=device,
        attention_backend=attention_backend,
        threads=threads,
        record=json_file,
    )
    screen, session = Screen(), Session()
    try:
        with screen.progress() as progress:
            session.run(options, screen.say, progress)
    finally:  # what is finished is shown, whatever ended the rest
        if session.record.get("rows"):
            for table in report.tables(session.record):
                screen.table(table.title, table.columns, table.rows)
            for note in report.notes(session.record):
                screen.say(note)
            if plot is not None:
                write_file(plot, scatter(session.record), "plot")
