"""A plan as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvq_cli.capacity import BASELINE, Capacity, Planner
from kvq_cli.config import ModelGeometry, UnsupportedModel, check_servable, quality_notes
from kvq_cli.evaluation.evidence import Evidence
from kvq_cli.quoting import printable

LEAST_COLUMNS = 160  # figures are never cut to fit; a narrow terminal wraps whole lines


def titles(name: str, planner: Planner) -> tuple[str, str, str]:
    """What is planned, what its cache consists of, and under which conditions."""
    limits = planner.limits
    ranks = f", on each of {limits.ranks} ranks" if limits.ranks > 1 else ""
    return (
        f"{printable(name)}: tokens of KV cache in {_size(planner.budget_bytes)}{ranks}",
        describe(planner.model),
        f"pages of {limits.page_tokens} tokens, "
        f"{limits.max_running_requests} running requests, "
        f"{limits.max_prefill_tokens} prompt tokens a step",
    )


def describe(model: ModelGeometry) -> str:
    """A model's cache in a line."""
    layers = f"{len(model.cached_layers)} of {model.num_layers} layers cached"
    rows = f"{model.num_kv_heads} KV heads × {model.head_dim}"
    if model.latent is not None:
        rows = f"latent rows of {model.latent.dim} + {model.latent.rope_dim}"
    parts = [f"{model.model_type} ({model.family})", layers, rows]
    if model.window is not None:
        own = f" with {model.window_kv_heads} × {model.window_head_dim}"
        parts.append(
            f"{len(model.window_layers)} layers see {model.window:,} tokens"
            f"{own if model.window_head_dim else ''}"
        )
    if model.index is not None:
        each = f"per {model.index.ratio} tokens" if model.index.ratio > 1 else "per token"
        parts.append(f"index keys of {model.index.dim} {each} in {len(model.index.layers)} layers")
    return ", ".join([*parts, f"at most {model.max_position:,} positions"])


def show(
    name: str,
    planner: Planner,
    rows: Sequence[Capacity],
    notes: Sequence[str],
    evidence: Evidence | None = None,
) -> None:
    """Print what fits, what it costs, how full pages are, and notes."""
    width = max(LEAST_COLUMNS, get_terminal_size().columns)
    console = Console(highlight=False, width=width)
    title, *subtitles = titles(name, planner)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text("\n".join(subtitles)), soft_wrap=True)
    for heading, table in (
        ("What fits: tokens in all, the longest request, how many requests of a length", _fits),
        ("What it costs, in bytes: tokens and pages of each tier, and what does not grow", _costs),
        ("Waste: the part of a request's pages that holds nothing to read, by its length", _pages),
    ):
        console.print(Text(f"\n{heading}"), soft_wrap=True)
        console.print(table(planner, rows))
    if evidence is not None:
        heading = f"What it does to the model, measured by kvq eval on {evidence.source}"
        console.print(Text(f"\n{heading}"), soft_wrap=True)
        console.print(_quality(rows, evidence))
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def assumptions(filled_in: Mapping[str, int]) -> list[str]:
    """That a config is silent on what was filled in."""
    if not filled_in:
        return []
    said = ", ".join(f"{key} {value:,}" for key, value in filled_in.items())
    return [f"not in this config, taken from the family's defaults: {said}"]


def notes(
    planner: Planner, rows: Sequence[Capacity], evidence: Evidence | None = None
) -> list[str]:
    """What a plan does not show and its reader should know."""
    found = list[str]()
    for row in rows:
        if evidence is not None and evidence[str(row.formats)] is not None:
            found += evidence.warnings(str(row.formats))
        else:
            found += quality_notes(planner.model, row.formats)
    try:
        check_servable(planner.model)
    except UnsupportedModel as error:
        found.append(f"planned, but not yet served by kvq: {error}")
    return list(dict.fromkeys(found))


def _fits(planner: Planner, rows: Sequence[Capacity]) -> Table:
    reference = next((row.tokens for row in rows if row.formats == BASELINE), 0)
    lengths = [f"{length:,}" for length in planner.lengths]
    table = _table(["format", "tokens", "× bf16", "longest", "bound by", *lengths])
    for row in rows:
        ratio = f"{row.tokens / reference:.2f}" if reference else "-"
        counts = ["-" if n is None else f"{n:,}" for n in row.requests.values()]
        table.add_row(
            *(str(row.formats), f"{row.tokens:,}", ratio, f"{row.context:,}", row.limit),
            *counts,
            style="bold" if row.formats == BASELINE else None,
        )
    return table


def _quality(rows: Sequence[Capacity], evidence: Evidence) -> Table:
    """Of the formats that were measured; those that none is better than are bold."""
    best = {row.format for row in evidence.ladder}
    table = _table(["format", "bytes/token", "mean KL", "next tokens of fp32"])
    for row in rows:
        measured = evidence[str(row.formats)]
        if measured is not None:
            table.add_row(
                measured.format,
                f"{row.token_bytes:,.10g}",
                f"{measured.kl:.3g}",
                f"{measured.agreement:.2%}",
                style="bold" if measured.format in best else None,
            )
    return table


def _costs(planner: Planner, rows: Sequence[Capacity]) -> Table:
    reference = planner.plan(BASELINE).token_bytes
    tiers = list(rows[0].token_bytes_by_tier)
    table = _table(
        [
            *("format", *(f"token, {tier}" for tier in tiers), "of bf16", "tokens/GiB"),
            *(f"page, {tier}" for tier in tiers),
            "fixed",
            *(["states", "snapshots"] if planner.model.state else []),
            "workspace",
        ],
    )
    for row in rows:
        states = f"{row.state_bytes:,}", f"{row.snapshot_bytes:,}"
        table.add_row(
            str(row.formats),
            *(f"{row.token_bytes_by_tier[tier]:,.10g}" for tier in tiers),
            f"{row.token_bytes / reference:.1%}",
            f"{row.tokens_per_gib:,}",
            *(f"{row.page_bytes_by_tier[tier]:,}" for tier in tiers),
            f"{row.fixed_bytes:,}",
            *(states if planner.model.state else []),
            f"{row.workspace_bytes:,}",
            style="bold" if row.formats == BASELINE else None,
        )
    return table


def _pages(planner: Planner, _: Sequence[Capacity]) -> Table:
    lengths = [f"{length:,}" for length in planner.lengths]
    table = _table(["tier", "page tokens", *lengths])
    for tier in planner.pages():
        waste = ["-" if share is None else f"{share:.2%}" for share in tier.waste.values()]
        table.add_row(tier.tier, str(tier.page_tokens), *waste)
    return table


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    return table


def as_json(
    name: str,
    planner: Planner,
    rows: Sequence[Capacity],
    notes: Sequence[str],
    evidence: Evidence | None = None,
) -> dict[str, Any]:
    """The same as data; sizes in bytes."""
    model, limits = planner.model, planner.limits
    measured = {row.format: row.kl for row in evidence.rows} if evidence is not None else {}
    bf16 = planner.capacity(BASELINE)
    return {
        "model": {
            "name": name,
            "model_type": model.model_type,
            "family": model.family,
            "num_layers": model.num_layers,
            "cached_layers": list(model.cached_layers),
            "max_position": model.max_position,
        },
        "budget_bytes": planner.budget_bytes,
        "page_tokens": limits.page_tokens,
        "max_running_requests": limits.max_running_requests,
        "max_prefill_tokens": limits.max_prefill_tokens,
        "ranks": limits.ranks,
        "state_snapshots": limits.state_snapshots,
        "formats": [
            {
                "format": str(row.formats),
                "token_bytes": row.token_bytes,
                "token_bytes_by_tier": row.token_bytes_by_tier,
                "page_bytes_by_tier": row.page_bytes_by_tier,
                "fixed_bytes": row.fixed_bytes,
                "state_bytes": row.state_bytes,
                "snapshot_bytes": row.snapshot_bytes,
                "workspace_bytes": row.workspace_bytes,
                "tokens_per_gib": row.tokens_per_gib,
                "tokens": row.tokens,
                "longest_request": row.context,
                "limit": row.limit,
                "requests": row.requests,
                "token_bytes_of_bf16": row.token_bytes / bf16.token_bytes,
                "tokens_of_bf16": row.tokens / bf16.tokens if bf16.tokens else None,
                "kl_mean": measured.get(str(row.formats)),
            }
            for row in rows
        ],
        "evaluated_on": None if evidence is None else evidence.source,
        "notes": list(notes),
        "pages": [
            {"tier": tier.tier, "page_tokens": tier.page_tokens, "waste": tier.waste}
            for tier in planner.pages()
        ],
    }


def _size(nbytes: int) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.4g} {unit}"
    return f"{nbytes:,} bytes"
