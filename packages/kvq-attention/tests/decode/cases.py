"""What tests of decode share whatever the backend: what they sweep, who judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import kvq_codecs
from kvq_attention import Batch, Table
from kvq_codecs import Encoded

from .. import oracle, scene
from ..scene import TIER, Scene
from ..tolerances import KERNEL

# Kernels take logarithms of 0 and differences of infinities on purpose; NumPy, which runs Triton's
# in the interpreter, says so. Not left out: overflow of an integer, which NumPy calls a scalar's.
ieee = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|overflow|All-NaN slice) encountered"
    "(?! in scalar):RuntimeWarning"
)

FULL = ("fp32", "bf16", "fp16")
PACKED = tuple(name for name in kvq_codecs.names() if name not in FULL)
PAGE_TOKENS = (16, 32, 64, 128)
# Every dtype that a query may have, the most exact one last.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

SCORINGS = ("plain", "window", "softcap", "sinks", "all")


def scoring_of(name: str, heads: int, dim: int, device: str = "cpu") -> dict[str, Any]:
    """The arguments of a scoring: a window that cuts pages, a cap that bends scores, sinks."""
    parts: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": 21},
        "softcap": {"softcap": 1.5, "scale": 2 * dim**-0.5},
        "sinks": {"sinks": torch.linspace(-2, 3, heads, device=device)},
    }
    if name == "all":
        return {key: value for part in parts.values() for key, value in part.items()}
    return parts[name]


def name_of(case: Any) -> str:
    """A test id."""
    parts = case.values() if isinstance(case, dict) else case
    return "-".join(str(part).removeprefix("torch.").replace(" ", "") for part in parts)


def check_output(built: Scene, out: torch.Tensor, **scoring: Any) -> None:
    """The output is that of float64 attention over what the scene's caches were filled with."""
    geometry = built.geometry
    judge(out, built.expected(fresh=False, **scoring), geometry.dtype)
    assert out.shape == (sum(geometry.counts), geometry.heads, geometry.dims[1])


def judge(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Each token and head within the kernels' tolerance of float64 attention."""
    assert out.dtype == dtype
    error = oracle.relative_error(out, expected)
    assert error <= KERNEL[dtype], f"relative error {error:.3g}"


def refill(built: Scene) -> None:
    """Write a scene's raw K and V, changed in place by a test, into its caches again."""
    for r, length in enumerate(built.geometry.lengths):
        for cache, rows in zip(built.caches, (built.ks[r], built.vs[r]), strict=True):
            scene.put(cache, rows, built.slots(r, 0, length))


def held(built: Scene) -> list[list[torch.Tensor]]:
    """Per request: the K and V [L, Hkv, dim] that the caches hold, whatever wrote them; float64."""
    requests = []
    for r, length in enumerate(built.geometry.lengths):
        page, offset = np.divmod(built.slots(r, 0, length), built.geometry.page_tokens)
        rows = []
        for cache in built.caches:
            arrays = {name: plane.cpu().numpy() for name, plane in cache.planes.items()}
            packed = {name: array[page, :, offset] for name, array in arrays.items()}
            codec = kvq_codecs.get(cache.spec.name)
            decoded = codec.decode(Encoded(cache.spec, cache.dim, packed))
            rows.append(torch.from_numpy(decoded).double())
        requests.append(rows)
    return requests


def expected_of_cache(built: Scene, **scoring: Any) -> torch.Tensor:
    """float64 attention over what the caches hold."""
    outs = [
        oracle.attention(q, *rows, **{"scale": built.scale, **scoring})
        for q, rows in zip(built.qs, held(built), strict=True)
    ]
    return torch.cat(outs)


def rows_of(built: Scene, request: int) -> slice:
    """Rows of the step's T that are a request's queries."""
    counts = built.geometry.counts
    start = sum(counts[:request])
    return slice(start, start + counts[request])


def with_table(batch: Batch, page_table: torch.Tensor) -> Batch:
    """The batch with other pages."""
    slots = batch.tables[TIER].slot_mapping
    return Batch(
        batch.query_offsets,
        batch.seq_lens,
        {TIER: Table(page_table.to(torch.int32), slots)},
        batch.page_tokens,
    )


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """What torch hands out unwritten is full of NaN from now on; the shapes are noted."""
    made: list[torch.Size] = []

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                made.append(tensor.shape)
                tensor.fill_(torch.nan)
            return tensor

        return run

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
    return made


def pairwise(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Cases in which every allowed pair of values of two axes occurs, greedily few of them.

    `allowed` says of a case, or of a part of one, whether its values go together.
    """
    names = list(axes)
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
        if allowed({a: x, b: y})
    }
    order = {(n, x): (i, j) for i, n in enumerate(names) for j, x in enumerate(axes[n])}
    while missing:
        # the first missing pair, then for each axis left what makes most of the missing ones
        case = dict(min(missing, key=lambda pair: sorted(order[item] for item in pair)))
        for name in names:
            if name not in case:
                values = [x for x in axes[name] if allowed({**case, name: x})]
                gains = [
                    sum(frozenset({(name, x), item}) in missing for item in case.items())
                    for x in values
                ]
                case[name] = values[gains.index(max(gains))]
        missing -= {frozenset(pair) for pair in combinations(case.items(), 2)}
        yield {name: case[name] for name in names}
