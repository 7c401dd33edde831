"""The compiled decode kernel at real sizes, against float64 attention on the GPU.

Nearly all of these run one shape a codec (`SHAPE`, with eight requests or one), as each shape is
compiled for a second or more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import ops

from .. import big
from ..scene import TIER, V_GAIN, Geometry
from .cases import PACKED, name_of, poison_new_tensors, scoring_of
from .places import CUDA, ON_GPU, TRITON, Place, each_codec, each_place

SHAPE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": torch.bfloat16}
RAGGED = (1, 20000, 15, 16, 4097, 513, 777, 1024)
QUERIES = (1, 1, 2, 3, 4, 7, 8, 0)


def seed_of(*what: Any) -> int:
    """Data of its own for every test."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(repr(what)))


def check(place: Place, geometry: Geometry, seed: int, **scoring: Any) -> None:
    scene = big.build(geometry, seed)
    big.check(scene, place.attend(scene, **scoring), **scoring)


@each_codec(places=ON_GPU)
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_eight_requests_of_four_thousand_tokens(codec: str, place: Place, page_tokens: int) -> None:
    shape = Geometry(codec, **SHAPE, page_tokens=page_tokens, lengths=(4096,) * 8)
    check(place, shape, seed_of(codec, page_tokens))


@each_codec(places=ON_GPU)
def test_nearly_uniform_attention_over_thirty_two_thousand_tokens(codec: str, place: Place) -> None:
    """The output is a small rest of large terms: every bias of a tile shows."""
    shape = Geometry(codec, **{**SHAPE, "dtype": place.dtype(codec)}, lengths=(32768,))
    scene = big.build(shape, seed_of(codec))
    out = place.attend(scene)
    assert float(out.abs().max()) < V_GAIN / 10
    big.check(scene, out)
    # and uniform: every key weighs the same
    scene.qs[0].zero_()
    big.check(scene, place.attend(scene))


@each_codec(places=ON_GPU)
def test_ragged_lengths_and_several_queries(codec: str, place: Place) -> None:
    scene = big.build(Geometry(codec, **SHAPE, lengths=RAGGED, queries=QUERIES), seed_of(codec))
    for scoring in ("plain", "all"):
        given = scoring_of(scoring, 32, 128, "cuda")
        big.check(scene, place.attend(scene, **given), **given)


@each_codec(places=ON_GPU)
def test_f49_scratch_full_of_nan_changes_nothing_on_a_gpu(
    codec: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = big.build(Geometry(codec, **SHAPE, lengths=RAGGED, queries=QUERIES), seed_of(codec, 49))
    clean, q, batch = place.attend(scene), scene.q, scene.batch()
    assert torch.isfinite(clean).all()
    with monkeypatch.context() as patched:
        made = poison_new_tensors(patched)
        out = place.attend(scene, q=q, batch=batch)
    assert made and torch.equal(out, clean)


@each_codec(places=ON_GPU)
def test_sixty_four_requests(codec: str, place: Place) -> None:
    lengths = tuple(1 + 37 * (i * i % 64) for i in range(64))
    narrow = place.dtypes(codec)[0]
    shape = Geometry(codec, **{**SHAPE, "dtype": narrow}, lengths=lengths)
    check(place, shape, seed_of(codec))


# Per codec another head_dim, where there are any, page and group size than elsewhere.
TRITON_SHAPES = [
    *[("fp32", 80, 32, 5, 1), ("bf16", 112, 64, 6, 2), ("fp16", 96, 128, 7, 3)],
    *[("q8_0", 96, 32, 3, 4), ("q6_0", 192, 64, 8, 5), ("q4_0", 64, 128, 16, 6)],
    *[("fp8_e4m3", 256, 32, 1, 7), ("fp8", 80, 64, 20, 8), ("nvfp4", 112, 128, 2, 1)],
    *[("iso3", 256, 64, 4, 2), ("iso4", 128, 128, 6, 8)],
]
CUDA_SHAPES = [
    *[("bf16", 64, 64, 6, 2), ("fp16", 256, 128, 7, 3), ("q8_0", 64, 32, 3, 4)],
    *[("q6_0", 256, 64, 8, 5), ("q4_0", 64, 128, 16, 6), ("fp8_e4m3", 256, 32, 1, 7)],
    *[("fp8", 64, 64, 16, 8), ("nvfp4", 256, 128, 2, 1), ("iso3", 256, 64, 4, 2)],
    *[("iso4", 256, 128, 6, 8)],
]
TRITON_PAIRS = [
    *[("q8_0", "q4_0", 128, 128), ("iso4", "fp8", 128, 64), ("nvfp4", "iso3", 192, 128)],
]
CUDA_PAIRS = [
    *[("q8_0", "q4_0", 128, 128), ("iso4", "fp8", 128, 128), ("nvfp4", "iso3", 256, 256)],
]


def by_place(triton: list[Any], cuda: list[Any]) -> list[Any]:
    """What is asked of each backend."""
    return [
        pytest.param(place, case, marks=place.marks, id=f"{place}-{name_of(case)}")
        for place, cases in ((TRITON, triton), (CUDA, cuda))
        for case in cases
    ]


@pytest.mark.parametrize(("place", "shape"), by_place(TRITON_SHAPES, CUDA_SHAPES))
def test_other_sizes(place: Place, shape: tuple[str, int, int, int, int]) -> None:
    codec, dim, page_tokens, group, queries = shape
    geometry = Geometry(
        codec,
        heads=3 * group,
        kv_heads=3,
        dim=dim,
        page_tokens=page_tokens,
        lengths=(3000, 9, page_tokens, 4 * page_tokens + 1),
        queries=queries,
        dtype=torch.bfloat16,
    )
    check(place, geometry, seed_of(shape))


@pytest.mark.parametrize(("place", "pair"), by_place(TRITON_PAIRS, CUDA_PAIRS))
def test_two_codecs_and_head_dims(place: Place, pair: tuple[str, str, int, int]) -> None:
    k, v, dim, v_dim = pair
    shape = Geometry(k, v, heads=8, kv_heads=2, dim=dim, v_dim=v_dim, lengths=(2500, 70), queries=2)
    check(place, shape, seed_of(k, v))


@each_codec(places=ON_GPU)
def test_what_is_stored_is_attended_to(codec: str, place: Place) -> None:
    """A long prefill and a step of four tokens per request, by our own store, then decode."""
    shape = Geometry(codec, **SHAPE, lengths=(3001, 500, 4, 16, 65), queries=4)
    scene = big.build(shape, seed_of(codec))
    before = big.expected(scene)
    random = torch.Generator("cuda").manual_seed(seed_of(codec, "fresh"))
    for r, length in enumerate(shape.lengths):
        k, v = (big.normal(random, torch.bfloat16, length, 8, 128) for _ in range(2))
        for start, stop in ((0, length - 4), (length - 4, length)):
            slots = torch.tensor(scene.slots(r, start, stop), dtype=torch.int64, device="cuda")
            ops.store(k[start:stop], v[start:stop], *scene.caches, slots, backend="triton")
    big.check(scene, place.attend(scene))
    assert (big.expected(scene) != before).any(dim=-1).all(), "these are the new rows"


@pytest.mark.parametrize("edge", [63, 64, 255, 256])
@each_place(ON_GPU)
def test_f11_rows_at_the_edges_of_pages_of_64(edge: int, place: Place) -> None:
    """The pool ends with the last row that is asked for: edge // 64 + 1 pages, and page 0."""
    shape = Geometry("fp8", heads=4, dim=128, page_tokens=64, lengths=(edge + 1,), queries=1)
    scene = big.build(shape, seed_of(edge))
    assert scene.k_cache.lead[0] == 1 + edge // 64 + 1
    big.check(scene, place.attend(scene))


@each_codec(PACKED, ON_GPU)
def test_no_decoded_cache_is_made_on_the_way(codec: str, place: Place) -> None:
    """The most memory that a call takes beyond its caches is far below a decoded cache."""
    scene = big.build(Geometry(codec, **SHAPE, lengths=(8192,) * 8), seed_of(codec))
    q, batch = scene.q, scene.batch()

    def call() -> None:
        ops.decode(q, *scene.caches, batch, TIER, scale=scene.scale, backend=place.backend)
        torch.cuda.synchronize()

    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    decoded = 2 * 8 * 8192 * 8 * 128 * 2
    assert torch.cuda.max_memory_allocated() - before < decoded / 10
