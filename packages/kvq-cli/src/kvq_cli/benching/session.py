"""The measurements of an engine, as a record."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

import kvq_cli
import kvq_pools
from kvq_attention.bench import machine
from kvq_attention.bench.cases import Case, Extend
from kvq_attention.bench.extend import CHOSEN
from kvq_cli.benching.engines import make_engine, make_model
from kvq_cli.benching.peer import step_ms
from kvq_cli.benching.plan import EnginePlan, RandomModel
from kvq_cli.benching.steps import WARM_UP, Timed, decodes, prompts
from kvq_cli.benching.ways import ways
from kvq_cli.config import ModelGeometry, geometry
from kvq_cli.engine.engine import Engine
from kvq_cli.engine.graphs import OnGpu
from kvq_cli.engine.states import StatePool
from kvq_cli.models.compiled import compile_parts
from kvq_cli.models.linear import Part

Record = dict[str, Any]
Row = dict[str, Any]

WHAT = (
    "milliseconds of one step of the engine, sampling and all that the host does included, median; "
    "tokens that a step computes or, of decodes, generates a second; alone: the model as it is, "
    "without attention to a cache, from a CUDA graph on a GPU; transformers: a step of its own "
    "generate with its dynamic cache, by SDPA, of prompts where nothing is before them; prompts "
    "before the engine's steps are not computed, the cache's rows are zeros"
)
ROUTES = (
    "; route: how prompts read the tokens before them, as the backend chooses or by one of its "
    "ways, in turn on one engine; took: what the launches of a step said"
)


def run(
    plan: EnginePlan,
    command: str,
    tell: Callable[[str, int, int], None],
    keep: Callable[[Record], None] = lambda _: None,
) -> Record:
    """Measure every case in every format; `keep` is given the record after each."""
    begin, record = time.monotonic(), Record()
    tell("making the model", 0, 1)
    model = make_model(plan)
    device = next(model.parameters()).device
    todo = [(case, cache) for case in plan.cases for cache in plan.formats]
    alone: dict[Case | Extend, float] = {}
    peers: dict[Case | Extend, float | None] = {}
    for case in plan.cases:
        tell(f"{case.name}, others", 0, len(todo))
        if plan.peer:
            peers[case] = step_ms(model, case)
        alone[case] = _alone(model, case, plan.repeat)
    if plan.compile:
        compile_parts(model)
    rows: list[Row] = []
    left_out: list[Row] = []
    for done, (case, cache) in enumerate(todo):
        tell(f"{case.name}, {cache}", done, len(todo))
        engine = make_engine(model, plan, cache, case)
        found, refused = _measured(engine, case, plan)
        for timed in found:
            told = {"route": timed.route, "took": timed.took} if plan.extend_routes else {}
            rows.append(_row(case, cache, told, engine, timed, alone[case], peers.get(case)))
        left_out += [
            {"case": case.name, "cache": cache, "route": route, "reason": reason}
            for route, reason in refused.items()
        ]
        record = _record(plan, command, device.type, rows, time.monotonic() - begin)
        if plan.extend_routes:
            record["left_out"] = list(left_out)
        keep(record)
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return record


def _tokens(case: Case | Extend) -> int:
    """That a step computes."""
    return case.batch if isinstance(case, Case) else case.tokens


def _measured(
    engine: Engine, case: Case | Extend, plan: EnginePlan
) -> tuple[list[Timed], dict[str, str]]:
    """A case by each of its routes, of which most have one; and why others are left out."""
    if isinstance(case, Case):
        return [decodes(engine, case, plan.repeat)], {}
    by, idle = ways(engine) if plan.compares(case) else ({CHOSEN: None}, {})
    found, refused = prompts(engine, case, plan.prompt_steps, by)
    return found, idle | refused


class _NoAttention:
    """In place of a step's context: queries are what attention gives.

    Linear-attention layers are computed as in a step, from states of zeros.
    """

    def __init__(self, shape: ModelGeometry, states: Sequence[Part]) -> None:
        self.windows = shape.windows or (None,) * shape.num_layers
        self.states = states

    def attend(self, layer: int, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q


@torch.inference_mode()
def _alone(model: Any, case: Case | Extend, repeat: int) -> float:
    """Milliseconds of the model over a case's tokens without attention to a cache."""
    shape, tokens = geometry(model.config.to_dict()), _tokens(case)
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    context = _NoAttention(shape, _states(shape, case, device, dtype))
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    last = torch.arange(max(0, tokens - 1), tokens, device=device)

    def forward() -> torch.Tensor:
        output = model(
            input_ids=ids,
            position_ids=ids,
            use_cache=False,
            logits_to_keep=last,
            kvq_step=context,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    work: Callable[[], Any] = forward
    if device.type == "cuda":
        work, _ = OnGpu()(forward)
    times = []
    for _ in range(WARM_UP + max(3, repeat // 2)):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[WARM_UP:])


def _states(
    shape: ModelGeometry, case: Case | Extend, device: torch.device, dtype: torch.dtype
) -> list[Part]:
    """What linear-attention layers of a step go on from."""
    if shape.state is None:
        return []
    if isinstance(case, Extend):
        return [Part(slice(0, case.tokens), None)]
    pool = StatePool(shape.state, case.batch, device=device, dtype=dtype)
    pool.reserve_replayed(case.batch)
    return [pool.static_part(torch.arange(case.batch, device=device))]


def _row(
    case: Case | Extend,
    cache: str,
    told: Row,
    engine: Engine,
    timed: Timed,
    alone: float,
    peer: float | None,
) -> Row:
    tokens, ordered, median = _tokens(case), sorted(timed.times), statistics.median(timed.times)
    backends = engine.cache.choice.backends
    return {
        "case": case.name,
        "cache": cache,
        "backend": backends.decode if isinstance(case, Case) else backends.extend,
        **told,
        "graphs": timed.graphs,
        "step_ms": round(median, 3),
        "p10_ms": round(ordered[len(ordered) // 10], 3),
        "p90_ms": round(ordered[-1 - len(ordered) // 10], 3),
        "tokens_per_s": round(tokens / median * 1e3, 1),
        "alone_ms": round(alone, 3),
        "times_alone": round(median / alone, 3),
        "transformers_ms": peer and round(peer, 3),
        "transformers_tokens_per_s": peer and round(tokens / peer * 1e3, 1),
    }


def _record(plan: EnginePlan, command: str, device: str, rows: list[Row], seconds: float) -> Record:
    name = plan.model.name if isinstance(plan.model, RandomModel) else plan.model
    kind = "Steps of the engine"
    kind += ", compiled" * plan.compile + ", by route of extend" * plan.extend_routes
    kind += ", prompts without graphs" * (plan.graph_tokens == 0)
    hardware = machine.hardware(device)
    versions = machine.versions(device)
    packages = {"transformers": transformers, "kvq-cli": kvq_cli, "kvq-pools": kvq_pools}
    versions |= {name: package.__version__ for name, package in packages.items()}
    plot: dict[str, Any] = {"label": "{cache}", "series": "case", "values": "tokens_per_s"}
    if plan.peer:
        plot = {
            "label": "{case}, {cache}",
            "values": ["tokens_per_s", "transformers_tokens_per_s"],
        }
    if plan.extend_routes:
        plot["label"] += ", {route}"
    return {
        "kind": "engine-steps",
        "title": f"{kind}, {name}, {hardware.partition(',')[0]}",
        "what": WHAT + ROUTES if plan.extend_routes else WHAT,
        "plot": plot,
        "hardware": hardware,
        "versions": versions,
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds, 1),
        "rows": rows,
    }
