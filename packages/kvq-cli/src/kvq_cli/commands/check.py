"""`kvq check`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvq_cli.commands import options as o
from kvq_cli.commands.messages import plain_errors, refuse

DISAGREES = 1
SHAPE = "32/8x128"

CheckModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model as `kvq serve` takes it: every kernel that serving it would run is tried. "
        "Weights are not loaded; a directory with a config.json is enough.",
        show_default=False,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="HEADS/KV_HEADSxHEAD_DIM",
        help=f"The layer that is tried where no MODEL is given. Default: {SHAPE}.",
        show_default=False,
    ),
]


@plain_errors
def check(
    model: CheckModel = None,
    kv_cache_dtype: o.CheckCacheDtypes = None,
    shape: Shape = None,
    page_tokens: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens a page.")] = 16,
    device: o.Device = "auto",
    dtype: o.CheckDtype = "auto",
    attention_backend: o.CheckBackend = "auto",
    prefill_reads: o.CheckPrefillReads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Try what computes attention on this machine and compare it with the formats' definition."""
    if model is not None and shape is not None:
        raise typer.BadParameter("a MODEL has layers of its own", param_hint="--shape")
    if model is None and prefill_reads is not None:
        raise typer.BadParameter("it needs a MODEL", param_hint="--prefill-reads")

    from kvq_cli import checking
    from kvq_cli.commands.check_view import show, show_model
    from kvq_cli.commands.screen import Screen

    given = kv_cache_dtype or (), page_tokens, device, attention_backend, dtype
    if model is None:
        record, view = checking.check(shape or SHAPE, *given), show
    else:
        record, view = checking.check_model(model, *given, prefill_reads or "own"), show_model
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        view(Screen(), record)
    if not record["agrees"]:
        refuse("\n".join(record["problems"]), DISAGREES)
