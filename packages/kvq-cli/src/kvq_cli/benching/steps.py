"""Steps of an engine, timed: decodes, and prompts by one route of extend or by several in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq_attention import UnsupportedError, launches
from kvq_attention.bench.cases import Case, Extend
from kvq_attention.bench.extend import CHOSEN
from kvq_attention.routes import Route
from kvq_cli.benching.engines import about_to_decode, about_to_extend
from kvq_cli.engine.engine import Engine

WARM_UP = 3  # steps before the first that counts


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of one case.

    Attributes
    ----------
    times : milliseconds of each
    route : of `kvq_attention.bench.extend.routes`
    took : routes that launches of extends recorded, with commas; empty where a backend has one way
    graphs : whether they were replayed from a CUDA graph
    """

    times: list[float]
    route: str = CHOSEN
    took: str = ""
    graphs: bool = False


def decodes(engine: Engine, case: Case, count: int) -> Timed:
    """So many steps that follow each other."""
    about_to_decode(engine, case, count + WARM_UP + 2)
    times = [_step(engine) for _ in range(count + WARM_UP)][WARM_UP:]
    return Timed(times, graphs=case.batch <= engine.runner.graph_rows)


def prompts(
    engine: Engine, case: Extend, count: int, ways: Mapping[str, Route | None]
) -> tuple[list[Timed], dict[str, str]]:
    """So many steps by each of these routes; and the routes that refuse, with their reasons.

    They take turns, back and forth: what drifts meanwhile, as a GPU's clock does, is alike for all.
    """
    times: dict[str, list[float]] = {}
    took: dict[str, str] = {}
    graphs: dict[str, bool] = {}
    refused: dict[str, str] = {}
    for name, route in ways.items():
        before = launches.routes()
        try:
            times[name] = [_prompt(engine, case, route)]
        except UnsupportedError as error:
            if route is None:
                raise
            refused[name] = str(error)
        else:
            took[name] = _launched(before)
            graphs[name] = engine.runner.replays_prompt(case.tokens, case.past)
    for turn in range(1, WARM_UP + count):
        for name in reversed(times) if turn % 2 else times:
            times[name].append(_prompt(engine, case, ways[name]))
    measured = [
        Timed(found[WARM_UP:], name, took[name], graphs[name]) for name, found in times.items()
    ]
    return measured, refused


def _prompt(engine: Engine, case: Extend, route: Route | None) -> float:
    about_to_extend(engine, case, route)
    milliseconds = _step(engine)
    while engine.has_work:
        engine.step()
    return milliseconds


def _step(engine: Engine) -> float:
    """Milliseconds; a step ends with its tokens on the host. What was not computed is no step."""
    start = time.perf_counter()
    deltas = engine.step()
    milliseconds = (time.perf_counter() - start) * 1e3
    runner: Any = engine.runner
    refused, runner.refused = runner.refused, None
    if refused is not None:
        raise refused
    for _, delta in deltas:
        if delta.error:
            raise RuntimeError(f"a step that was to be timed failed: {delta.error}")
    return milliseconds


def _launched(before: Mapping[tuple[str, str, str], int]) -> str:
    """The routes of extends launched since."""
    counts = launches.routes().items()
    new = (key for key, count in counts if count > before.get(key, 0))
    return ", ".join(sorted({route for _, op, route in new if op == "extend"}))
