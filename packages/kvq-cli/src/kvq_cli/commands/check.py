"""`kvq check`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvq_cli.commands.messages import plain_errors, refuse
from kvq_cli.commands.options import CheckBackend, CheckCacheDtypes, Device

DISAGREES = 1


@plain_errors
def check(
    kv_cache_dtype: CheckCacheDtypes = None,
    shape: Annotated[
        str, typer.Option(metavar="HEADS/KV_HEADSxHEAD_DIM", help="The layer that is tried.")
    ] = "32/8x128",
    page_tokens: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens a page.")] = 16,
    device: Device = "auto",
    attention_backend: CheckBackend = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Try what computes attention on this machine and compare it with the formats' definition."""
    from kvq_cli.checking import check as tried
    from kvq_cli.commands.check_view import show
    from kvq_cli.commands.screen import Screen

    record = tried(kv_cache_dtype or (), shape, page_tokens, device, attention_backend)
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(Screen(), record)
    if not record["agrees"]:
        refuse("\n".join(record["problems"]), DISAGREES)
