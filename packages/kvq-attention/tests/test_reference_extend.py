"""`extend`: the step's own K and V as they came, earlier tokens packed, in float64 beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import SlotError, ops, reference

from .oracle import attention, relative_error
from .scene import TIER, Geometry, Scene, build, dims_of
from .tolerances import OUTPUT, REORDERED

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Per request: nothing before the chunk; a page, a page and a token, most of a page before it.
LENGTHS, QUERIES = (5, 17, 23, 30, 53), (5, 1, 6, 15, 40)

every_codec = pytest.mark.parametrize("codec", kvq_codecs.names())


def geometry(*codecs: str, **others: Any) -> Geometry:
    return Geometry(*codecs, **{"lengths": LENGTHS, "queries": QUERIES, **others})


def extend(
    scene: Scene, only: int | None = None, released: int = 0, **scoring: Any
) -> torch.Tensor:
    q, (k, v) = scene.q, scene.fresh()
    if only is not None:
        counts = scene.geometry.counts
        q, k, v = (x.split(counts)[only] for x in (q, k, v))
    scoring = {"scale": scene.scale, **scoring}
    return ops.extend(
        q, k, v, *scene.caches, scene.batch(only, released), TIER, **scoring, backend="reference"
    )


def check(shape: Geometry, device: str = "cpu", **scoring: Any) -> None:
    """The chunk's own slots hold 0xFF bytes, NaN: reading one would show."""
    scene = build(shape, device, stored_queries=False)
    out = extend(scene, **scoring)
    assert out.dtype == shape.dtype
    assert out.shape == (sum(shape.counts), shape.heads, shape.dims[1])
    error = relative_error(out, scene.expected(fresh=True, **scoring))
    assert error <= OUTPUT[shape.dtype]


@pytest.mark.proves("reference.extend.plain")
@every_codec
def test_extend_attends_over_every_codec(codec: str, device: str) -> None:
    for dim in dims_of(codec):
        check(geometry(codec, dim=dim), device)


@every_codec
@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64])
def test_extend_after_the_edges_of_pages(codec: str, page_tokens: int) -> None:
    pasts = sorted({0, 1, page_tokens - 1, page_tokens, page_tokens + 1})
    lengths = tuple(past + 3 for past in pasts)
    check(
        geometry(codec, dim=dims_of(codec)[0], page_tokens=page_tokens, lengths=lengths, queries=3)
    )


@pytest.mark.proves("reference.extend.mixed_codecs")
@pytest.mark.parametrize(
    "codecs", [("q8_0", "q4_0"), ("iso3", "fp8"), ("nvfp4", "bf16"), ("fp32", "iso4")]
)
def test_extend_reads_two_codecs(codecs: tuple[str, str], device: str) -> None:
    check(geometry(*codecs, dim=128), device)


@pytest.mark.proves("reference.extend.value_dim")
@pytest.mark.parametrize("dims", [(64, 256), (256, 64), (96, 80)])
def test_extend_reads_two_head_dims(dims: tuple[int, int], device: str) -> None:
    check(geometry("fp8", dim=dims[0], v_dim=dims[1]), device)


@pytest.mark.proves("reference.extend.gqa")
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_extend_shares_kv_heads(group: int, device: str) -> None:
    check(geometry("q8_0", heads=3 * group, kv_heads=3), device)


@pytest.mark.proves("reference.extend.window")
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000])
def test_extend_slides_a_window(window: int, device: str) -> None:
    check(geometry("q8_0", heads=4), device, window=window)


@pytest.mark.proves("reference.extend.softcap")
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_extend_caps_scores(softcap: float, device: str) -> None:
    check(geometry("q8_0", heads=6), device, softcap=softcap, scale=1.0)


@pytest.mark.proves("reference.extend.sinks")
def test_extend_joins_sinks(device: str) -> None:
    sinks = torch.tensor([-30.0, 0.0, 1.5, 4.0, 0.25, 30.0], device=device)
    check(geometry("q8_0", heads=6), device, sinks=sinks)
    check(geometry("q8_0", heads=6), device, sinks=sinks.bfloat16(), window=7)
    scene = build(geometry("q8_0", heads=6), device, stored_queries=False)
    everything = extend(scene, sinks=torch.full((6,), 1e4, device=device))
    assert torch.equal(everything, torch.zeros_like(everything))


def test_extend_has_all_features_at_once() -> None:
    shape = geometry("q8_0", "q4_0", heads=10, dim=128, v_dim=64)
    sinks = torch.linspace(-2, 2, 10)
    check(shape, scale=0.4, window=9, softcap=2.0, sinks=sinks)


@pytest.mark.proves("reference.extend.float64")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_codec
def test_p051_extend_takes_every_dtype(codec: str, dtype: torch.dtype) -> None:
    check(geometry(codec, dim=dims_of(codec)[0], heads=4, dtype=dtype))


@pytest.mark.parametrize("codec", ["bf16", "q4_0", "q6_0", "iso3"])
def test_f03_extend_obeys_each_caches_own_strides(codec: str) -> None:
    for dim in (d for d in dims_of(codec) if d in (64, 128, 256)):
        for pads in ((0, 3), (1, 0), (2, 5)):
            check(geometry(codec, dim=dim, heads=6, kv_heads=3, pads=pads))


@every_codec
def test_f21_a_chunk_never_reads_its_own_quantization(codec: str) -> None:
    dim, length = dims_of(codec)[0], 21
    scene = build(
        geometry(codec, dim=dim, lengths=(length,), queries=(length,)), stored_queries=False
    )
    (q,), (k,), (v,) = scene.qs, scene.ks, scene.vs

    # The first chunk is attention over the unquantized tensors.
    exact = attention(q, k, v, scale=scene.scale)
    first = extend(scene)
    assert relative_error(first, exact) <= OUTPUT[torch.float32]

    # What its slots hold does not matter: poison before, its own quantization now.
    ops.store(k, v, *scene.caches, scene.batch().tables[TIER].slot_mapping, backend="reference")
    assert torch.equal(extend(scene), first)

    # A second chunk reads the first packed and itself as it came.
    second = cut(scene, 13)
    expected = second.expected(fresh=True)
    error = relative_error(extend(second), expected)
    assert error <= OUTPUT[torch.float32]
    if codec != "fp32":
        assert relative_error(expected, exact[13:]) > 10 * error, "the prefix was not packed"


def test_a_lossless_cache_gives_the_same_at_every_cut() -> None:
    shape = geometry("fp32", heads=6, lengths=(53,), queries=(53,))
    scene = build(shape, stored_queries=False)
    whole = extend(scene)
    ops.store(
        *scene.fresh(), *scene.caches, scene.batch().tables[TIER].slot_mapping, backend="reference"
    )
    for start in (1, 15, 16, 17, 52):
        assert relative_error(extend(cut(scene, start)), whole[start:]) <= REORDERED


@every_codec
def test_p074_a_batch_gives_each_request_the_bits_it_gets_alone(codec: str, device: str) -> None:
    scene = build(geometry(codec, dim=dims_of(codec)[0], heads=6), device, stored_queries=False)
    together = extend(scene).split(QUERIES)
    for r in range(len(LENGTHS)):
        assert torch.equal(extend(scene, only=r), together[r])


def test_pages_before_the_window_are_never_touched() -> None:
    shape = geometry("q8_0", lengths=(70, 64, 81), queries=(4, 6, 30))
    scene = build(shape, stored_queries=False)
    window = 16  # the earliest query, at 51, sees positions from 36 on: pages 0 and 1 are gone
    released = extend(scene, released=2, window=window)
    assert torch.equal(released, extend(scene, window=window))
    with pytest.raises(SlotError, match=r"request 0, positions \[0, 66\).*released"):
        extend(scene, released=2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_token_of_the_chunk_reaches_only_those_that_see_it(bad: float) -> None:
    scene = build(geometry("q8_0", lengths=(30, 12), queries=(9, 9)), stored_queries=False)
    clean = scene.expected(fresh=True, window=3)
    scene.ks[0][25] = bad  # query 4 of 9, seen by queries 4, 5 and 6
    scene.vs[0][25] = bad
    out = extend(scene, window=3)
    seen = [4, 5, 6]
    untouched = [row for row in range(18) if row not in seen]
    assert relative_error(out[untouched], clean[untouched]) <= OUTPUT[torch.float32]
    assert not torch.isfinite(out[seen]).any(), "what is seen must not be hidden either"


def test_requests_may_have_no_query_tokens() -> None:
    check(geometry("q8_0", queries=(0, 2, 0, 1, 0)))


def test_the_size_of_the_blocks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = geometry("q8_0", heads=4, lengths=(150, 40), queries=(100, 40))
    for rows in (1, 7, 64):
        monkeypatch.setattr(reference, "BLOCK_ROWS", rows)
        check(shape)
        check(shape, window=33)


def cut(scene: Scene, start: int) -> Scene:
    """The only request of a scene with its queries from `start` on as the step."""
    length = scene.geometry.lengths[0]
    shape = replace(scene.geometry, queries=(length - start,))
    return replace(scene, geometry=shape, qs=[scene.qs[0][start:]])
