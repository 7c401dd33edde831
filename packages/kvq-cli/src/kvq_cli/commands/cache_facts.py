"""What a running server says of its cache, for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.panel import Panel

from kvq_cli.commands.screen import framed, mebibytes, served_by, token_price
from kvq_cli.engine.params import AttentionCheck

Json = dict[str, Any]


def status(url: str, found: Json) -> Panel:
    """GET /v1/kv/status as a panel."""
    token, bf16 = found["bytes_per_token"], found["bf16_bytes_per_token"]
    last = found["last_rebuild"]
    return framed(
        url,
        [
            ("state", found["state"] + (f": {found['failure']}" if found["failure"] else "")),
            ("model", found["model"]),
            ("cache", found["kv_cache_dtype"]),
            ("token", token_price(token, bf16)),
            ("room", f"{found['num_tokens']:,} tokens in {mebibytes(found['bytes'])}"),
            ("longest request", f"{found['max_model_len']:,} tokens, prompt and answer together"),
            ("attention", served_by(found["attention"])),
            *_checked(found["attention_check"]),
            *_routes(found["extend_routes"]),
            ("weights", found["weights"]),
            *((f"layers, {tier['name']}", _stored(tier["stored"])) for tier in found["tiers"]),
            *((f"pages, {tier['name']}", _pages(tier)) for tier in found["tiers"]),
            ("prefix cache", _prefix(found["prefix_cache"])),
            *([("states", _states(found["states"]))] if found["states"] else []),
            ("requests", "{running:,} running, {waiting:,} waiting".format(**found["requests"])),
            *([("last rebuild", _when(last))] if last is not None else []),
        ],
    )


def change(rebuild: Json) -> Panel:
    """The answer of POST /v1/kv/rebuild as a panel."""
    before, after = rebuild["before"], rebuild["after"]
    tiers = rebuild["cached_pages"]
    return framed(
        f"rebuilt in {rebuild['seconds']:.2f} s",
        [
            ("cache", _arrow(before["kv_cache_dtype"], after["kv_cache_dtype"])),
            ("room", _arrow(f"{before['num_tokens']:,}", f"{after['num_tokens']:,}") + " tokens"),
            ("memory", _arrow(mebibytes(before["bytes"]), mebibytes(after["bytes"]))),
            (
                "token",
                _arrow(f"{before['bytes_per_token']:,.10g}", f"{after['bytes_per_token']:,.10g}")
                + " bytes",
            ),
            (
                "longest request",
                _arrow(f"{before['max_model_len']:,}", f"{after['max_model_len']:,}") + " tokens",
            ),
            (
                "attention",
                _arrow(served_by(before["attention"]), served_by(after["attention"])),
            ),
            (
                "running requests",
                "{kept:,} kept their pages, {requeued:,} computed again".format(
                    **rebuild["requests"]
                ),
            ),
            *(
                (f"cached pages, {tier}", f"{kept:,} kept, {tiers['dropped'][tier]:,} dropped")
                for tier, kept in tiers["kept"].items()
            ),
        ],
    )


def _checked(check: Json | None) -> list[tuple[str, str]]:
    if check is None:
        return []
    words = AttentionCheck(check["kernels"], check["seconds"])
    return [("checked", str(words)), *(("note", each) for each in check["fallbacks"])]


def _routes(launches: Json) -> list[tuple[str, str]]:
    said = ", ".join(f"{route} {count:,} times" for route, count in launches.items())
    return [("extended by", said)] if said else []


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _stored(stored: list[Json]) -> str:
    """`k q8_0 0-5, 7; v …`: neighbouring layers as a range."""
    return "; ".join(f"{s['name']} {s['codec']} {_ranges(s['layers'])}" for s in stored)


def _ranges(layers: list[int]) -> str:
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    pairs = zip(sorted(starts), sorted(ends), strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _pages(tier: Json) -> str:
    pages = "{total:,}: {free:,} free, {cached:,} cached, {used:,} used".format(**tier["pages"])
    window = f", window {tier['window']:,}" if tier["window"] is not None else ""
    return f"{pages}; {tier['page_bytes']:,} bytes each{window}"


def _prefix(prefix: Json) -> str:
    if not prefix["enabled"]:
        return "off"
    asked, found = prefix["queried_tokens"], prefix["hit_tokens"]
    share = f" ({found / asked:.1%})" if asked else ""
    return (
        f"{found:,} of {asked:,} tokens of {prefix['lookups']:,} requests found{share}; "
        f"{prefix['evicted_pages']:,} pages evicted"
    )


def _states(states: Json) -> str:
    taken = (states["running"] + states["snapshots"]) * states["state_bytes"]
    counts = "{running:,} running, {held:,} of {snapshots:,} snapshots; {hits:,} hits, {evicted:,} "
    return (
        f"{mebibytes(taken)}: {counts.format(**states)}evicted, {states['missed_tokens']:,} cached "
        "tokens computed for want of one"
    )


def _when(rebuild: Json) -> str:
    at = datetime.fromtimestamp(rebuild["finished_at"]).strftime("%Y-%m-%d %H:%M:%S")
    before, after = rebuild["before"], rebuild["after"]
    if rebuild["error"]:
        return f"{at} failed, the old cache serves on: {rebuild['error']}"
    size = _arrow(f"{before['num_tokens']:,}", f"{after['num_tokens']:,}")
    return f"{at} {size} tokens, {_arrow(before['kv_cache_dtype'], after['kv_cache_dtype'])}"
