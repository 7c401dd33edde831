"""A run: the measurements of a plan one after another, the record they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from kvq_attention.bench import machine
from kvq_attention.bench.ahead import compile_ahead
from kvq_attention.bench.cases import Case, Shape, Spot
from kvq_attention.bench.ceilings import measure_ceilings
from kvq_attention.bench.decode import decode_row, sdpa_row
from kvq_attention.bench.extend import CHOSEN, extend_row, peer_row, peers, routes
from kvq_attention.bench.plan import BASELINE, Plan
from kvq_attention.bench.report import TABLES
from kvq_attention.bench.rows import Ceilings, Row
from kvq_attention.bench.store import copy_row, store_row

Record = dict[str, Any]

SCHEMA = 2  # rows name their shape; 1 had one shape, named once
SDPA_CASES = 2  # of the plan's first
WHAT = (
    "microseconds of one call, the median of timed repetitions of a group of calls on inputs of "
    "their own, together far more than the L2 holds; N(0, 1) rows encoded by the ops themselves, "
    "pages in random order; GB/s are bytes as stored (decode), or read and written (store, copy), "
    "over that time; error is ‖Δ‖ / ‖reference‖ against attention in float64 over the decoded cache"
)


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: the table of the record that takes its row, and what makes the row."""

    table: str
    name: str
    work: Callable[[Ceilings], Row]


TITLES = {"decode": "Attention", "extend": "Extend"}
# What a record's plot shows: which rows, which of their figures, and that in words
PLOTS: dict[str, tuple[Row, str, str]] = {
    "decode": ({}, "speed_up", "times as fast as bf16"),
    "extend": ({"route": CHOSEN}, "tflop_per_s", "TFLOP/s by the route that is chosen"),
}


def tasks(plan: Plan) -> Iterator[Task]:
    """The measurements, the most telling first: a budget may cut the rest off."""
    if plan.extends:
        yield from _extends(plan)
        return
    first, *others = plan.shapes

    def decodes(shape: Shape, cases: tuple[Case, ...]) -> Iterator[Task]:
        for case in cases:
            for spot in (spot for spot in plan.spots if spot.shape == shape):
                what = f"decode {case.name}, page {spot.page_tokens}"
                yield from _on_each(plan, "decode", what, spot, partial(decode_row, plan, case))

    def stores(counts: tuple[int, ...]) -> Iterator[Task]:
        for tokens in counts:
            for spot in _caches(plan):
                what = f"store {tokens} tokens"
                yield from _on_each(plan, "store", what, spot, partial(store_row, plan, tokens))

    yield from decodes(first, plan.cases[:1])
    yield from stores(plan.store_tokens[:1])
    yield from decodes(first, plan.cases[1:])
    if plan.device == "cuda":
        for case in plan.cases[:SDPA_CASES]:
            yield Task("peers", f"torch SDPA {case.name}", partial(sdpa_row, plan, case))
    for shape in others:
        yield from decodes(shape, plan.cases)
    yield from stores(plan.store_tokens[1:])
    for tokens in plan.copy_tokens:
        for spot in _caches(plan):
            what = f"copy pages of {tokens} tokens"
            yield from _on_each(plan, "copy_pages", what, spot, partial(copy_row, plan, tokens))


def _extends(plan: Plan) -> Iterator[Task]:
    """The measurements of extend: each case on every layer and format, by each route there is."""
    for case in plan.extends:
        for spot in plan.spots:
            for backend, told in plan.ways("extend", spot).items():
                for route in routes(backend, spot.formats).items():
                    work = partial(extend_row, plan, case, route, spot, told)
                    what = f"extend {case.name}, page {spot.page_tokens}, {route[0]}"
                    yield Task("extend", _said(plan, "extend", what, spot, backend), work)
        if plan.device == "cuda":
            for peer in peers():
                yield Task("peers", f"{peer} {case.name}", partial(peer_row, plan, case, peer))


def _on_each(
    plan: Plan, op: str, what: str, spot: Spot, work: Callable[[Spot, str, Ceilings], Row]
) -> Iterator[Task]:
    """A measurement on every backend that serves it."""
    table = "copy" if op == "copy_pages" else op
    for backend, told in plan.ways(op, spot).items():
        yield Task(table, _said(plan, op, what, spot, backend), partial(work, spot, told))


def _said(plan: Plan, op: str, what: str, spot: Spot, backend: str) -> str:
    """A measurement's name: with it what other measurements of the plan differ in."""
    said = [what, spot.formats.name]
    said += [spot.shape.name] if len(plan.shapes) > 1 else []
    said += [backend] if len(plan.told(op)) > 1 else []
    return ", ".join(said)


def _caches(plan: Plan) -> Iterator[Spot]:
    """Of layers that differ in query heads alone the first: their caches are alike."""
    alike: dict[tuple[int, int], Shape] = {}
    for shape in plan.shapes:
        alike.setdefault((shape.kv_heads, shape.dim), shape)
    for shape in alike.values():
        for formats in plan.formats:
            yield Spot(shape, plan.page_tokens[0], formats)


def run(
    plan: Plan,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    keep: Callable[[Record], None] = lambda _: None,
) -> Record:
    """Measure, and return the record.

    Parameters
    ----------
    tell : takes (what is measured next, measurements done, all of them)
    keep : takes the record after every measurement, so that a run that is cut off leaves it

    A measurement that raises is listed under `failed` and the others go on; those that the budget
    leaves no time for are listed under `left_out`.
    """
    begin = time.monotonic()
    todo = list(tasks(plan))
    tell("kernels and ceilings", 0, len(todo))
    if plan.jobs:
        compile_ahead(plan, plan.jobs)
    ceilings, ways = measure_ceilings(plan.device, plan.repeat)
    record = _empty(plan, ceilings, ways)
    works = True
    for done, task in enumerate(todo):
        seconds = time.monotonic() - begin
        if not works or seconds > plan.budget_seconds:
            record["left_out"].append(task.name)
            continue
        tell(task.name, done, len(todo))
        try:
            row = task.work(ceilings)
        except Exception as error:  # one kernel's defect must not cost the other figures
            why = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
            record["failed"].append({"what": task.name, "why": why})
            works = _device_works(plan.device)
        else:
            record[task.table].append(row)
            if task.table in ("decode", "extend"):
                compare_with_bf16(record[task.table])
        record["seconds"] = round(time.monotonic() - begin, 2)
        keep(record)
        if plan.device == "cuda" and works:
            torch.cuda.empty_cache()
    keep(record)
    return record


def _empty(plan: Plan, ceilings: Ceilings, ways: list[Row]) -> Record:
    hardware, page_tokens = machine.hardware(plan.device), plan.page_tokens[-1]
    shapes = [shape.name for shape in plan.shapes]
    of = f", layers {', '.join(shapes)}" if len(shapes) > 1 else ""
    shown, values, words = PLOTS[plan.op]
    return {
        "kind": "attention",
        "schema": SCHEMA,
        "title": f"{TITLES[plan.op]} on {hardware.partition(',')[0]}{of}",
        "what": WHAT,
        "plot": {
            "of": plan.op,
            "where": {"page_tokens": page_tokens, "shape": shapes[0], **shown},
            "label": "{codec}" if len(plan.told(plan.op)) == 1 else "{codec}, {backend}",
            "series": "case",
            "values": values,
            "title": f"{plan.op}, {words}, {page_tokens} tokens a page",
        },
        "hardware": hardware,
        "capability": machine.capability(plan.device),
        "versions": machine.versions(plan.device),
        "command": plan.command,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": 0.0,
        "shapes": shapes,
        "ceilings": {"read_gb_per_s": ceilings.read, "copy_gb_per_s": ceilings.copy, "ways": ways},
        **{table: [] for table in (*TABLES, "failed", "left_out")},
        "not_served": plan.not_served(),
    }


def compare_with_bf16(rows: list[Row]) -> None:
    """Say of each row how many times as fast it is as bf16 where bf16 is the fastest.

    That is on any backend, at the same case, shape and page size; None where it has no figure.
    """

    def at(row: Row) -> tuple[object, ...]:
        return row["case"], row["shape"], row["page_tokens"]

    fastest: dict[tuple[object, ...], float] = {}
    for row in rows:
        if row["codec"] == BASELINE.name:
            fastest[at(row)] = min(row["us"], fastest.get(at(row), row["us"]))
    for row in rows:
        base = fastest.get(at(row))
        row["speed_up"] = None if base is None else round(base / row["us"], 3)


def _device_works(device: str) -> bool:
    """Whether the device still computes; an illegal access ends it for the whole process."""
    if device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
