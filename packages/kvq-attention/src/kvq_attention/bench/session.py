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
from kvq_attention.bench.ceilings import measure_ceilings
from kvq_attention.bench.decode import decode_row, sdpa_row
from kvq_attention.bench.plan import BASELINE, Plan
from kvq_attention.bench.rows import Ceilings, Row
from kvq_attention.bench.store import copy_row, store_row

Record = dict[str, Any]

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


def tasks(plan: Plan) -> Iterator[Task]:
    """The measurements, the most telling first: a budget may cut the rest off."""

    def decodes(begin: int, end: int | None) -> Iterator[Task]:
        for case in plan.cases[begin:end]:
            for page_tokens in plan.page_tokens:
                for formats in plan.formats:
                    name = f"decode {case.name}, page {page_tokens}, {formats.name}"
                    yield Task(
                        "decode", name, partial(decode_row, plan, case, page_tokens, formats)
                    )

    def stores(begin: int, end: int | None) -> Iterator[Task]:
        for tokens in plan.store_tokens[begin:end]:
            for formats in plan.formats:
                name = f"store {tokens} tokens, {formats.name}"
                yield Task("store", name, partial(store_row, plan, tokens, formats))

    yield from decodes(0, 1)
    yield from stores(0, 1)
    yield from decodes(1, None)
    if plan.device == "cuda":
        for case in plan.cases[:SDPA_CASES]:
            yield Task("peers", f"torch SDPA {case.name}", partial(sdpa_row, plan, case))
    yield from stores(1, None)
    for tokens in plan.copy_tokens:
        for formats in plan.formats:
            name = f"copy pages of {tokens} tokens, {formats.name}"
            yield Task("copy", name, partial(copy_row, plan, tokens, formats))


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
            if task.table == "decode":
                row["speed_up"] = _speed_up(row, record["decode"])
            record[task.table].append(row)
        record["seconds"] = round(time.monotonic() - begin, 2)
        keep(record)
        if plan.device == "cuda" and works:
            torch.cuda.empty_cache()
    keep(record)
    return record


def _empty(plan: Plan, ceilings: Ceilings, ways: list[Row]) -> Record:
    hardware = machine.hardware(plan.device)
    return {
        "kind": "attention",
        "title": f"Attention on {hardware.partition(',')[0]}",
        "what": WHAT,
        "plot": {
            "of": "decode",
            "where": {"page_tokens": plan.page_tokens[-1]},
            "label": "{codec}",
            "series": "case",
            "values": "speed_up",
            "title": f"decode, times as fast as bf16, {plan.page_tokens[-1]} tokens a page",
        },
        "hardware": hardware,
        "versions": machine.versions(plan.device),
        "command": plan.command,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": 0.0,
        "shape": plan.shape.name,
        "ceilings": {"read_gb_per_s": ceilings.read, "copy_gb_per_s": ceilings.copy, "ways": ways},
        **{table: [] for table in ("decode", "peers", "store", "copy", "failed", "left_out")},
    }


def _speed_up(row: Row, rows: list[Row]) -> float | None:
    """Times as fast as bf16 at the same case and page size; None if that has no figure."""
    if row["codec"] == BASELINE.name:
        return 1.0
    same = ("case", "page_tokens", "backend")
    for other in rows:
        if other["codec"] == BASELINE.name and all(other[key] == row[key] for key in same):
            return round(float(other["us"] / row["us"]), 3)
    return None


def _device_works(device: str) -> bool:
    """Whether the device still computes; an illegal access ends it for the whole process."""
    if device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
