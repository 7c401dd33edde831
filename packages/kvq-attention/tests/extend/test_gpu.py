"""The compiled extend kernels at real sizes, against float64 attention on the GPU.

Nearly all of these run one shape a codec, as each shape is compiled for seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvq_attention import Batch, Table, launches, ops
from kvq_attention.triton.extending import routes

from .. import big, oracle
from ..decode.cases import PACKED, judge, poison_new_tensors, scoring_of
from ..decode.places import TRITON, Place, each_codec, each_place
from ..scene import TIER, V_GAIN, Geometry, Scene

SHAPE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": torch.bfloat16}
# Nothing before the chunk; parts of a past; both routes of packed formats; a decode beside them.
LENGTHS, QUERIES = (700, 9000, 5000, 4097, 1, 3000), (700, 20, 300, 1100, 1, 1)
MIB = 1 << 20


@dataclass(frozen=True)
class Given:
    """A scene whose cache has other rows in the step's slots, and the step's own rows."""

    scene: Scene
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, geometry: Geometry, seed: int) -> Given:
        scene = big.build(geometry, seed)
        random = torch.Generator("cuda").manual_seed(seed + 1)
        k, v = (
            gain * big.normal(random, geometry.dtype, sum(geometry.counts), geometry.kv_heads, dim)
            for gain, dim in zip((1.0, V_GAIN), geometry.dims, strict=True)
        )
        return cls(scene, k, v)

    def extend(self, **given: Any) -> torch.Tensor:
        scene = self.scene
        given = {"scale": scene.scale, "backend": "triton", **given}
        return ops.extend(scene.q, self.k, self.v, *scene.caches, scene.batch(), TIER, **given)

    def check(self, out: torch.Tensor, **scoring: Any) -> None:
        """Each request's output against attention over its decoded past and its own rows."""
        scene, g = self.scene, self.scene.geometry
        own = self.k.split(g.counts), self.v.split(g.counts)
        for r, part in enumerate(out.split(g.counts)):
            past = g.lengths[r] - g.counts[r]
            rows = [
                torch.cat([big.read(cache, past, scene.pages[r]).double(), new[r].double()])
                for cache, new in zip(scene.caches, own, strict=True)
            ]
            given = {"scale": scene.scale, **scoring}
            judge(part, oracle.attention(scene.qs[r], *rows, **given, device="cuda"), g.dtype)


@each_codec(places=[TRITON])
def test_ragged_chunks(codec: str, place: Place) -> None:
    given = Given.of(Geometry(codec, **SHAPE, lengths=LENGTHS, queries=QUERIES), len(codec))
    for name in ("plain", "all"):
        scoring = scoring_of(name, 32, 128, "cuda")
        given.check(given.extend(**scoring), **scoring)
    given.check(given.extend(scratch_bytes=0))


@each_codec(PACKED, [TRITON])
def test_a_scratch_gives_what_the_loop_gives(codec: str, place: Place) -> None:
    given = Given.of(Geometry(codec, **SHAPE, lengths=(5000,), queries=(1100,)), 3)
    assert routes.BREAK_EVEN <= 1100 * 4
    loop, through = given.extend(scratch_bytes=0), given.extend()
    given.check(through)
    assert float((loop.float() - through.float()).abs().max()) <= 2e-2 * float(loop.abs().max())


@pytest.mark.parametrize("dim", [64, 256])
@each_codec(("bf16", "fp8", "q4_0", "nvfp4", "iso4"), [TRITON])
def test_other_head_dims(codec: str, dim: int, place: Place) -> None:
    if dim not in place.dims_of(codec):
        dim = 256
    shape = {**SHAPE, "heads": 6, "kv_heads": 1, "dim": dim, "page_tokens": 64}
    given = Given.of(Geometry(codec, **shape, lengths=(900, 70), queries=(400, 3)), dim)
    given.check(given.extend())


@each_place([TRITON])
def test_p016_64k_tokens_of_the_past_take_no_more_than_the_bound(place: Place) -> None:
    bound = 8 * MIB
    shape = Geometry("q4_0", **SHAPE, lengths=(65536,), queries=(1024,))
    given = Given.of(shape, 5)
    given.extend(scratch_bytes=bound)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = given.extend(scratch_bytes=bound)
    torch.cuda.synchronize()
    # the batch that the call made, and torch's granularity
    taken = torch.cuda.max_memory_allocated() - before - out.nbytes
    loop = 4 * 1024 * 32 * 130  # a request of few rows could have been cut into parts
    assert bound // 2 < taken <= bound + loop * 16 + MIB
    given.check(out)


@each_codec(("bf16", "q8_0", "iso3"), [TRITON])
def test_new_tensors_full_of_nan_change_nothing(
    codec: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given.of(Geometry(codec, **SHAPE, lengths=LENGTHS, queries=QUERIES), 7)
    clean = given.extend()
    with monkeypatch.context() as patched:
        made = poison_new_tensors(patched)
        out = given.extend()
    assert made and torch.equal(out, clean)


TOKENS, REQUESTS, PAGES, COLUMNS = 1024, 4, 700, 160
STEPS = [
    ([2500, 700, 33], [600, 20, 1]),
    ([1024], [1024]),
    ([], []),
    ([1, 2049, 1300, 90], [1, 1, 700, 90]),
    ([2560], [3]),
]


def tensors_of(lengths: list[int], queries: list[int], seed: int) -> list[torch.Tensor]:
    """Offsets, lengths, table, slots, q, k, v of a step; what is left is padding, k and v NaN."""
    random = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randperm(PAGES, generator=random, device="cuda").int()
    table = torch.full((REQUESTS, COLUMNS), -1, dtype=torch.int32, device="cuda")
    for r, length in enumerate(lengths):
        size = -(-length // 16)
        table[r, :size], ids = ids[:size], ids[size:]
    spare = [0] * (REQUESTS - len(lengths))
    rows = [big.normal(random, torch.bfloat16, TOKENS, n, 128) for n in (32, 8, 8)]
    for x in rows:
        x[sum(queries) :] = torch.nan
    return [
        torch.tensor([0, *queries, *spare], device="cuda").cumsum(0).int(),
        torch.tensor([*lengths, *spare], dtype=torch.int32, device="cuda"),
        table,
        torch.full((TOKENS,), -1, device="cuda"),
        *rows,
    ]


@each_codec(("bf16", "q4_0", "iso3"), [TRITON])
def test_a_replay_gives_the_bits_of_an_eager_call(codec: str, place: Place) -> None:
    caches = [big.empty(codec, PAGES, 8, 16, 128) for _ in range(2)]
    random = torch.Generator("cuda").manual_seed(len(codec))
    for cache in caches:
        big.put(cache, big.normal(random, torch.float32, PAGES * 16, 8, 128), list(range(PAGES)))

    def run(given: list[torch.Tensor]) -> torch.Tensor:
        offsets, lengths, table, slots, q, k, v = given
        batch = Batch(offsets, lengths, {TIER: Table(table, slots)}, 16)
        sinks = torch.linspace(-2, 2, 32, device="cuda")
        return ops.extend(q, k, v, *caches, batch, TIER, scale=0.1, sinks=sinks, backend="triton")

    static = tensors_of(*STEPS[0], seed=100)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with launches.counting() as counted, torch.cuda.graph(graph):
        out = run(static)
    assert counted["triton"]["extend"] == 1
    for seed, (lengths, queries) in enumerate([*STEPS, *STEPS[::-1]]):
        given = tensors_of(lengths, queries, seed)
        for own, other in zip(static, given, strict=True):
            own.copy_(other)
        graph.replay()
        assert torch.equal(out, run(given))
        padding = out[sum(queries) :]
        assert torch.equal(padding, torch.zeros_like(padding))
        assert torch.isfinite(out).all()
