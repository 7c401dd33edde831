"""`kvq plan`."""

from __future__ import annotations

import json

import typer

from kvq_cli.commands import plan_options as o
from kvq_cli.commands.messages import plain_errors, write_file


@plain_errors
def plan(
    budget: o.BudgetSize,
    model: o.ModelArgument = None,
    config: o.Config = None,
    kv_cache_dtype: o.CacheDtypes = None,
    lengths: o.Lengths = "8ki,32ki,128ki",
    page_tokens: o.PageTokens = None,
    max_running_requests: o.MaxRunningRequests = 16,
    max_prefill_tokens: o.MaxPrefillTokens = 512,
    state_snapshots: o.StateSnapshots = None,
    prefill_scratch_mb: o.PrefillScratch = 128,
    tp: o.TensorParallel = 1,
    workspace: o.WorkspaceSize = None,
    as_json: o.Json = False,
    plot: o.Plot = None,
) -> None:
    """Print what a memory budget holds of a model in every cache format."""
    if (model is None) == (config is None):
        raise typer.BadParameter("give one model, as argument or with --config", param_hint="MODEL")

    from kvq_cli.capacity import Planner
    from kvq_cli.chart import bar_chart
    from kvq_cli.commands import plan_view
    from kvq_cli.commands.sizes import parse_bytes, parse_lengths
    from kvq_cli.config import filled_in, geometry, kernels_serve, parse_formats
    from kvq_cli.evaluation import evidence as evaluations
    from kvq_cli.models.raw_config import find_config, raw_config
    from kvq_cli.serve_options import ServeOptions
    from kvq_cli.sizing import Limits, default_snapshots

    name, path = find_config(config if config is not None else str(model))
    said = raw_config(path)
    shape = geometry(said)
    evidence = evaluations.known(path, shape)
    grouped = shape.index is not None and shape.index.ratio > 1
    page_tokens = page_tokens or (64 if grouped else 16)
    served = ServeOptions(
        name, max_running_requests=max_running_requests, max_prefill_tokens=max_prefill_tokens
    )
    limits = Limits(
        shape.max_position,
        page_tokens,
        max_running_requests,
        max_prefill_tokens,
        by_reference=not kernels_serve(shape, page_tokens),
        scratch_bytes=prefill_scratch_mb << 20,
        graph_rows=served.graph_rows(on_host=False),
        graph_tokens=served.graph_tokens(shape, on_host=False),
        ranks=tp,
        workspace_bytes=parse_bytes(workspace) if workspace else None,
        state_snapshots=(
            default_snapshots(max_running_requests) if state_snapshots is None else state_snapshots
        ),
    )
    planner = Planner(shape, parse_bytes(budget), limits, parse_lengths(lengths))
    measured = [row.format for row in evidence.ladder] if evidence else []
    wanted = [parse_formats(text, shape) for text in (*measured, *(kv_cache_dtype or ()))]
    formats = {str(each): each for each in (*planner.formats(), *wanted)}
    rows = planner.capacities(formats.values())
    notes = [
        *plan_view.assumptions(filled_in(said)),
        *evaluations.notes(path, shape),
        *plan_view.notes(planner, rows, evidence),
    ]
    if plot is not None:
        title, *subtitles = plan_view.titles(name, planner)
        write_file(plot, bar_chart(title, subtitles, rows), "plot")
    if as_json:
        print(json.dumps(plan_view.as_json(name, planner, rows, notes, evidence), indent=2))
    else:
        plan_view.show(name, planner, rows, notes, evidence)
