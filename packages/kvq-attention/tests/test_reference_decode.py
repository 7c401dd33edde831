"""`decode` against float64 attention over the decoded cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import SlotError, ops, reference
from kvq_codecs import Encoded

from .oracle import relative_error
from .scene import TIER, Geometry, Scene, build, dims_of, put
from .tolerances import OUTPUT, WRONG_SCALE_MIN

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCALES = ("scale", "row_scale", "block_scale")

every_codec = pytest.mark.parametrize("codec", kvq_codecs.names())


def decode(
    scene: Scene, only: int | None = None, released: int = 0, **scoring: Any
) -> torch.Tensor:
    q = scene.q if only is None else scene.qs[only]
    scoring = {"scale": scene.scale, **scoring}
    return ops.decode(
        q, *scene.caches, scene.batch(only, released), TIER, **scoring, backend="reference"
    )


def check(geometry: Geometry, device: str = "cpu", **scoring: Any) -> None:
    scene = build(geometry, device, stored_queries=True)
    out = decode(scene, **scoring)
    assert out.dtype == geometry.dtype
    assert out.shape == (sum(geometry.counts), geometry.heads, geometry.dims[1])
    error = relative_error(out, scene.expected(fresh=False, **scoring))
    assert error <= OUTPUT[geometry.dtype]


def replaced(cache: Encoded, fill: dict[str, float]) -> Encoded:
    """A copy of a cache with some planes filled with one value."""
    planes = {
        name: torch.full_like(plane, fill[name]) if name in fill else plane.clone()
        for name, plane in cache.planes.items()
    }
    return Encoded(cache.spec, cache.dim, planes)


@pytest.mark.proves("reference.decode.plain")
@every_codec
def test_decode_attends_over_every_codec(codec: str, device: str) -> None:
    for dim in dims_of(codec):
        check(Geometry(codec, dim=dim), device)


@every_codec
@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64])
def test_decode_at_the_edges_of_pages(codec: str, page_tokens: int) -> None:
    edges = {1, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens} - {0}
    lengths = tuple(sorted(edges))
    check(Geometry(codec, dim=dims_of(codec)[0], page_tokens=page_tokens, lengths=lengths))


@pytest.mark.proves("reference.decode.mixed_codecs")
@pytest.mark.parametrize(
    "codecs", [("q8_0", "q4_0"), ("iso3", "fp8"), ("nvfp4", "bf16"), ("fp32", "iso4")]
)
def test_decode_reads_two_codecs(codecs: tuple[str, str], device: str) -> None:
    check(Geometry(*codecs, dim=128), device)


@pytest.mark.proves("reference.decode.value_dim")
@pytest.mark.parametrize("dims", [(64, 256), (256, 64), (96, 80)])
def test_decode_reads_two_head_dims(dims: tuple[int, int], device: str) -> None:
    check(Geometry("fp8", dim=dims[0], v_dim=dims[1]), device)


@pytest.mark.proves("reference.decode.gqa")
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_decode_shares_kv_heads(group: int, device: str) -> None:
    check(Geometry("q8_0", heads=3 * group, kv_heads=3), device)
    check(Geometry("q4_0", heads=group, kv_heads=1, queries=3), device)


@pytest.mark.proves("reference.decode.window")
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("queries", [1, 5])
def test_decode_slides_a_window(window: int, queries: int, device: str) -> None:
    check(Geometry("q8_0", queries=queries), device, window=window)


@pytest.mark.proves("reference.decode.softcap")
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_decode_caps_scores(softcap: float, device: str) -> None:
    check(Geometry("q8_0", heads=6, queries=3), device, softcap=softcap, scale=1.0)


@pytest.mark.proves("reference.decode.sinks")
def test_decode_joins_sinks(device: str) -> None:
    sinks = torch.tensor([-30.0, 0.0, 1.5, 4.0, 0.25, 30.0], device=device)
    check(Geometry("q8_0", heads=6, queries=3), device, sinks=sinks)
    check(Geometry("q8_0", heads=6, queries=3), device, sinks=sinks.bfloat16(), window=7)
    scene = build(Geometry("q8_0", heads=6, queries=3), device, stored_queries=True)
    everything = decode(scene, sinks=torch.full((6,), 1e4, device=device))
    assert torch.equal(everything, torch.zeros_like(everything))


def test_decode_has_all_features_at_once() -> None:
    geometry = Geometry("q8_0", "q4_0", heads=10, dim=128, v_dim=64, queries=4)
    sinks = torch.linspace(-2, 2, 10)
    check(geometry, scale=0.4, window=9, softcap=2.0, sinks=sinks)


@pytest.mark.proves("reference.decode.float64")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_codec
def test_p051_decode_takes_every_query_dtype(codec: str, dtype: torch.dtype) -> None:
    check(Geometry(codec, dim=dims_of(codec)[0], heads=4, queries=2, dtype=dtype))


@every_codec
def test_several_query_tokens_are_causal(codec: str) -> None:
    check(Geometry(codec, dim=dims_of(codec)[0], queries=(1, 4, 16, 2, 9)))


def test_requests_may_have_no_query_tokens() -> None:
    check(Geometry("q8_0", queries=(0, 2, 0, 1, 0)))


@pytest.mark.parametrize("codec", ["bf16", "q4_0", "q6_0", "iso3"])
def test_f03_decode_obeys_each_caches_own_strides(codec: str) -> None:
    for dim in (d for d in dims_of(codec) if d in (64, 128, 256)):
        for pads in ((0, 3), (1, 0), (2, 5)):
            check(Geometry(codec, dim=dim, heads=6, kv_heads=3, pads=pads))


@pytest.mark.parametrize(
    "codec", [c for c in kvq_codecs.names() if c not in ("fp32", "bf16", "fp16")]
)
def test_f01_decode_uses_the_scales(codec: str) -> None:
    scene = build(Geometry(codec, dim=dims_of(codec)[-1]), stored_queries=True)
    expected, batch = decode(scene), scene.batch()
    for i, cache in enumerate(scene.caches):
        scales = [name for name in cache.planes if name in SCALES]
        assert scales
        for name in scales:
            one = 0x38 if name == "block_scale" else 1.0  # e4m3 code of 1.0
            caches = list(scene.caches)
            caches[i] = replaced(cache, {name: one})
            out = ops.decode(scene.q, *caches, batch, TIER, scale=scene.scale, backend="reference")
            # A request of one token gives its V row whatever its K row says.
            long = slice(1, None)
            assert relative_error(out[long], expected[long]) > WRONG_SCALE_MIN


@every_codec
def test_p049_a_scale_of_four_is_read_as_four(codec: str) -> None:
    geometry = Geometry(codec, dim=dims_of(codec)[0], heads=4)
    scene = build(geometry, stored_queries=True)
    for r, length in enumerate(geometry.lengths):
        slots = scene.slots(r, 0, length)
        put(scene.k_cache, scene.ks[r], slots)
        put(scene.v_cache, scene.vs[r], slots)
    plain = decode(scene)
    for r, length in enumerate(geometry.lengths):
        slots = scene.slots(r, 0, length)
        put(scene.k_cache, 4 * scene.ks[r], slots)
        put(scene.v_cache, 4 * scene.vs[r], slots)
    # Powers of two are exact all the way: the bits agree.
    assert torch.equal(decode(scene, scale=scene.scale / 4), 4 * plain)


@every_codec
def test_p074_a_batch_gives_each_request_the_bits_it_gets_alone(codec: str, device: str) -> None:
    geometry = Geometry(codec, dim=dims_of(codec)[0], heads=6, queries=(1, 1, 3, 1, 7))
    scene = build(geometry, device, stored_queries=True)
    together = decode(scene).split(geometry.counts)
    for r in range(len(geometry.lengths)):
        assert torch.equal(decode(scene, only=r), together[r])


@pytest.mark.parametrize("scoring", [{}, {"window": 21}], ids=["plain", "window"])
def test_a_query_has_the_same_bits_wherever_its_prompt_is_cut(scoring: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"heads": 6, "dim": 128}
    whole = build(Geometry("q4_0", lengths=(50,), queries=50, **shape), stored_queries=True)
    wanted = decode(whole, **scoring)
    for size in (1, 7, 16, 17):
        for start in range(0, 50, size):
            stop = min(start + size, 50)
            shape_of_part = Geometry("q4_0", lengths=(stop,), queries=stop - start, **shape)
            part = replace(whole, geometry=shape_of_part, qs=[whole.qs[0][start:stop]])
            assert torch.equal(decode(part, **scoring), wanted[start:stop])


def test_pages_before_the_window_are_never_touched() -> None:
    geometry = Geometry("q8_0", lengths=(70, 64, 81), queries=2)
    scene = build(geometry, stored_queries=True)
    window = 16  # the first query of the shortest sees positions from 47 on: pages 0 and 1 are gone
    released = decode(scene, released=2, window=window)
    assert torch.equal(released, decode(scene, window=window))
    with pytest.raises(SlotError, match=r"request 0, positions \[0, 70\).*released"):
        decode(scene, released=2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_a_query_does_not_see_may_be_anything(bad: float) -> None:
    """Rows that only later queries see, and rows that have left the window of earlier ones."""
    geometry = Geometry("fp32", lengths=(40, 20), queries=6)
    scene = build(geometry, stored_queries=True)
    clean = scene.expected(fresh=False, window=12)
    newest, oldest = 37, 23  # seen by queries 3 … 5, and by query 0 (at 34) alone
    for position in (newest, oldest):
        (slot,) = scene.slots(0, position, position + 1)
        for cache in scene.caches:
            cache.planes["values"][slot // 16, :, slot % 16] = bad
    out = decode(scene, window=12)
    untouched = [1, 2, *range(6, 12)]
    assert relative_error(out[untouched], clean[untouched]) <= OUTPUT[torch.float32]
    assert not torch.isfinite(out[[0, 3, 4, 5]]).any(), "what is seen must not be hidden either"


def test_padding_gives_zero() -> None:
    scene = build(Geometry("q8_0", queries=2), stored_queries=True)
    batch, real = scene.batch(), sum(scene.geometry.counts)
    none = torch.full((3,), -1)
    table = batch.tables[TIER]
    padded = type(batch)(
        # a padded request of two rows, and one padded row beyond all requests
        query_offsets=torch.cat([batch.query_offsets, torch.tensor([real + 2])]).int(),
        seq_lens=torch.cat([batch.seq_lens, torch.tensor([0])]).int(),
        tables={
            TIER: type(table)(
                torch.cat([table.page_table, torch.full_like(table.page_table[:1], -1)]),
                torch.cat([table.slot_mapping, none]),
            )
        },
        page_tokens=16,
    )
    q = torch.cat([scene.q, torch.full((3, 2, 64), torch.nan)])
    out = ops.decode(q, *scene.caches, padded, TIER, scale=scene.scale, backend="reference")
    assert torch.equal(out[:real], decode(scene))
    assert torch.equal(out[real:], torch.zeros(3, 2, 64))


def test_the_size_of_the_blocks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry("q8_0", heads=4, lengths=(150, 40), queries=(100, 40))
    for rows in (1, 7, 64):
        monkeypatch.setattr(reference, "BLOCK_ROWS", rows)
        check(geometry)
        check(geometry, window=33)
    for score_bytes in (1, 4 * 4 * 150 * 3):
        monkeypatch.setattr(reference, "SCORE_BYTES", score_bytes)
        check(geometry)


@pytest.mark.parametrize(("page", "said"), [(-1, "never allocated"), (99, r"\[0, ")])
def test_pages_that_the_cache_does_not_have_are_refused(page: int, said: str) -> None:
    scene = build(Geometry("q8_0"), stored_queries=True)
    scene.pages[4][2] = page
    with pytest.raises(SlotError, match=f"request 4.*{page}.*{said}"):
        decode(scene)
