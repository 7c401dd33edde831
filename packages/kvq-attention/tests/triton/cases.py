"""What the tests of the Triton decode kernel share: where they run, what they sweep, who judges.

On the CPU the kernels run in Triton's interpreter, which TRITON_INTERPRET=1 turns on before triton
is imported; without it those tests are skipped. On CUDA the compiled kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import kvq_codecs
from kvq_attention import Batch, Table, ops
from kvq_attention.triton.compat import unavailable
from kvq_codecs import Encoded

from .. import oracle, scene
from ..scene import TIER, Geometry, Scene
from ..tolerances import KERNEL

BACKEND = "triton"

_NO_INTERPRETER = unavailable("cpu")
interpreted = pytest.mark.skipif(_NO_INTERPRETER is not None, reason=str(_NO_INTERPRETER))
compiled = pytest.mark.skipif(
    _NO_INTERPRETER is None, reason="Triton's interpreter is on: kernels are not compiled"
)
on_cpu = pytest.param("cpu", marks=interpreted)
on_cuda = pytest.param("cuda", marks=[pytest.mark.gpu, compiled])
each_device = pytest.mark.parametrize("device", [on_cpu, on_cuda])
each_codec = pytest.mark.parametrize("codec", kvq_codecs.names())
# A codec of each way in which the kernel treats scales: none, one a row, one a block, two, rotated.
KINDS = ("bf16", "fp8", "q4_0", "nvfp4", "iso3")
each_kind = pytest.mark.parametrize("codec", KINDS)
# Where a test is about indices, it runs in the interpreter alone: a GPU would compile each of its
# shapes for seconds. test_decode_gpu*.py ask the same at real sizes, of all codecs in one shape.
in_interpreter = pytest.mark.parametrize("device", [on_cpu])

# Kernels take logarithms of 0 and differences of infinities on purpose; NumPy, which runs them in
# the interpreter, says so. Not left out: overflow of an integer, which NumPy calls a scalar's.
ieee = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|overflow|All-NaN slice) encountered"
    "(?! in scalar):RuntimeWarning"
)

FULL = ("fp32", "bf16", "fp16")
PACKED = tuple(name for name in kvq_codecs.names() if name not in FULL)
DIMS = (64, 80, 96, 112, 128, 192, 256)
PAGE_TOKENS = (16, 32, 64, 128)
# Every dtype that a query may have.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dims_of(codec: str) -> tuple[int, ...]:
    """The head_dims of the kernels that a codec stores."""
    divisor = kvq_codecs.get(codec).spec.divisor
    return tuple(dim for dim in DIMS if dim % divisor == 0)


def attend(
    scene: Scene,
    only: int | None = None,
    released: int = 0,
    batch: Batch | None = None,
    q: torch.Tensor | None = None,
    backend: str = BACKEND,
    **scoring: Any,
) -> torch.Tensor:
    """The kernel's output for a scene's batch, for one request of it, or for what is given."""
    if q is None:
        q = scene.q if only is None else scene.qs[only]
    scoring = {"scale": scene.scale, **scoring}
    batch = batch or scene.batch(only, released)
    return ops.decode(q, *scene.caches, batch, TIER, **scoring, backend=backend)


def check(geometry: Geometry, device: str = "cpu", seed: int = 0, **scoring: Any) -> torch.Tensor:
    """Attend in a scene of this geometry, judge the output, return it."""
    built = scene.build(geometry, device, stored_queries=True, seed=seed)
    out = attend(built, **scoring)
    judge(out, built.expected(fresh=False, **scoring), geometry.dtype)
    assert out.shape == (sum(geometry.counts), geometry.heads, geometry.dims[1])
    return out


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
