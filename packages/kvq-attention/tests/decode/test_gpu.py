"""The compiled decode kernel at real sizes, against float64 attention on the GPU.

Nearly all of these run one shape a codec (`SHAPE`, with eight requests or one), as each shape is
compiled for a second or more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import ops

from ..scene import TIER, V_GAIN, Geometry
from . import big
from .cases import BACKEND, PACKED, attend, compiled, each_codec, poison_new_tensors
from .test_decode import scoring_of

pytestmark = [pytest.mark.gpu, compiled]

SHAPE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": torch.bfloat16}
RAGGED = (1, 20000, 15, 16, 4097, 513, 777, 1024)
QUERIES = (1, 1, 2, 3, 4, 7, 8, 0)


def seed_of(*what: Any) -> int:
    """Data of its own for every test."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(repr(what)))


def check(geometry: Geometry, seed: int, **scoring: Any) -> None:
    scene = big.build(geometry, seed)
    big.check(scene, attend(scene, **scoring), **scoring)


@each_codec
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_eight_requests_of_four_thousand_tokens(codec: str, page_tokens: int) -> None:
    shape = Geometry(codec, **SHAPE, page_tokens=page_tokens, lengths=(4096,) * 8)
    check(shape, seed_of(codec, page_tokens))


@each_codec
def test_nearly_uniform_attention_over_thirty_two_thousand_tokens(codec: str) -> None:
    """The output is a small rest of large terms: every bias of a tile shows."""
    shape = Geometry(codec, **{**SHAPE, "dtype": torch.float32}, lengths=(32768,))
    scene = big.build(shape, seed_of(codec))
    out = attend(scene)
    assert float(out.abs().max()) < V_GAIN / 10
    big.check(scene, out)
    # and uniform: every key weighs the same
    scene.qs[0].zero_()
    big.check(scene, attend(scene))


@each_codec
def test_ragged_lengths_and_several_queries(codec: str) -> None:
    scene = big.build(Geometry(codec, **SHAPE, lengths=RAGGED, queries=QUERIES), seed_of(codec))
    for scoring in ("plain", "all"):
        given = scoring_of(scoring, 32, 128, "cuda")
        big.check(scene, attend(scene, **given), **given)


@each_codec
def test_f49_scratch_full_of_nan_changes_nothing_on_a_gpu(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = big.build(Geometry(codec, **SHAPE, lengths=RAGGED, queries=QUERIES), seed_of(codec, 49))
    clean, q, batch = attend(scene), scene.q, scene.batch()
    assert torch.isfinite(clean).all()
    with monkeypatch.context() as patched:
        made = poison_new_tensors(patched)
        out = attend(scene, q=q, batch=batch)
    assert made and torch.equal(out, clean)


@each_codec
def test_sixty_four_requests(codec: str) -> None:
    lengths = tuple(1 + 37 * (i * i % 64) for i in range(64))
    shape = Geometry(codec, **{**SHAPE, "dtype": torch.float16}, lengths=lengths)
    check(shape, seed_of(codec))


# Per codec a head_dim that is no power of two, another page and group size than elsewhere.
SHAPES = [
    *[("fp32", 80, 32, 5, 1), ("bf16", 112, 64, 6, 2), ("fp16", 96, 128, 7, 3)],
    *[("q8_0", 96, 32, 3, 4), ("q6_0", 192, 64, 8, 5), ("q4_0", 64, 128, 16, 6)],
    *[("fp8_e4m3", 256, 32, 1, 7), ("fp8", 80, 64, 20, 8), ("nvfp4", 112, 128, 2, 1)],
    *[("iso3", 256, 64, 4, 2), ("iso4", 128, 128, 6, 8)],
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_other_sizes(shape: tuple[str, int, int, int, int]) -> None:
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
    check(geometry, seed_of(shape))


@pytest.mark.parametrize(
    ("k", "v", "dim", "v_dim"),
    [("q8_0", "q4_0", 128, 128), ("iso4", "fp8", 128, 64), ("nvfp4", "iso3", 192, 128)],
)
def test_two_codecs_and_head_dims(k: str, v: str, dim: int, v_dim: int) -> None:
    shape = Geometry(k, v, heads=8, kv_heads=2, dim=dim, v_dim=v_dim, lengths=(2500, 70), queries=2)
    check(shape, seed_of(k, v))


@each_codec
def test_what_is_stored_is_attended_to(codec: str) -> None:
    """A long prefill and a step of four tokens per request, by our own store, then decode."""
    shape = Geometry(codec, **SHAPE, lengths=(3001, 500, 4, 16, 65), queries=4)
    scene = big.build(shape, seed_of(codec))
    before = big.expected(scene)
    random = torch.Generator("cuda").manual_seed(seed_of(codec, "fresh"))
    for r, length in enumerate(shape.lengths):
        k, v = (big.normal(random, torch.bfloat16, length, 8, 128) for _ in range(2))
        for start, stop in ((0, length - 4), (length - 4, length)):
            slots = torch.tensor(scene.slots(r, start, stop), dtype=torch.int64, device="cuda")
            ops.store(k[start:stop], v[start:stop], *scene.caches, slots, backend=BACKEND)
    big.check(scene, attend(scene))
    assert (big.expected(scene) != before).any(dim=-1).all(), "these are the new rows"


@pytest.mark.parametrize("edge", [63, 64, 255, 256])
def test_f11_rows_at_the_edges_of_pages_of_64(edge: int) -> None:
    """The pool ends with the last row that is asked for: edge // 64 + 1 pages, and page 0."""
    shape = Geometry("fp8", heads=4, dim=128, page_tokens=64, lengths=(edge + 1,), queries=1)
    scene = big.build(shape, seed_of(edge))
    assert scene.k_cache.lead[0] == 1 + edge // 64 + 1
    big.check(scene, attend(scene))


@pytest.mark.parametrize("codec", PACKED)
def test_no_decoded_cache_is_made_on_the_way(codec: str) -> None:
    """The most memory that a call takes beyond its caches is far below a decoded cache."""
    scene = big.build(Geometry(codec, **SHAPE, lengths=(8192,) * 8), seed_of(codec))
    q, batch = scene.q, scene.batch()

    def call() -> None:
        ops.decode(q, *scene.caches, batch, TIER, scale=scene.scale, backend=BACKEND)
        torch.cuda.synchronize()

    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    decoded = 2 * 8 * 8192 * 8 * 128 * 2
    assert torch.cuda.max_memory_allocated() - before < decoded / 10
