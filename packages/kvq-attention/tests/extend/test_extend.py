"""What SUPPORT claims of the Triton extend kernel, each row against float64 attention."""

from __future__ import annotations

import pytest
import torch

import kvq_codecs
from kvq_attention import launches

from ..decode.cases import DTYPES, PAGE_TOKENS, ieee, judge, name_of, scoring_of
from ..decode.places import INTERPRETED, KINDS, TRITONS, Place, each_codec, each_place
from .cases import check, check_output, extend, scene_of

pytestmark = ieee

# Where a test is about indices, it runs in the interpreter alone: a GPU would compile each of its
# shapes for seconds.
in_interpreter = each_place([INTERPRETED])
# A codec and one with a different number of bits, twice; K's and V's head_dim.
MIXED = [
    *[(k, v, 128, 128) for k, v in zip(kvq_codecs.names(), kvq_codecs.names()[4:], strict=False)],
    *[("nvfp4", "bf16", 64, 128), ("iso3", "q8_0", 256, 96), ("fp8_e4m3", "fp32", 192, 80)],
    *[("iso4", "nvfp4", 128, 112), ("q4_0", "fp16", 96, 64), ("fp32", "iso3", 80, 128)],
]


@pytest.mark.proves("triton.extend.plain")
@each_codec(places=TRITONS)
def test_triton_extends_every_codec(codec: str, place: Place) -> None:
    scene = scene_of(
        place, codec, heads=4, kv_heads=2, dim=128, lengths=(5, 150, 17), queries=(5, 40, 1)
    )
    with launches.counting() as counted:
        out = extend(place, scene)
    assert counted["triton"]["extend"] > 0, "the kernel ran, not the reference"
    check_output(scene, out)


@each_codec(places=[INTERPRETED])
def test_every_head_dim_of_every_codec(codec: str, place: Place) -> None:
    for dim in place.dims_of(codec):
        check(place, codec, heads=2, kv_heads=1, dim=dim, lengths=(47, 5), queries=(7, 5))


@pytest.mark.proves("triton.extend.mixed_codecs")
@pytest.mark.parametrize("case", MIXED, ids=name_of)
@in_interpreter
def test_triton_extends_two_codecs(case: tuple[str, str, int, int], place: Place) -> None:
    k, v, dim, v_dim = case
    check(place, k, v, heads=2, dim=dim, v_dim=v_dim, lengths=(90,), queries=(9,))


@pytest.mark.proves("triton.extend.value_dim")
@pytest.mark.parametrize("dims", [(64, 256), (256, 64), (96, 80), (192, 128)])
@in_interpreter
def test_triton_extends_two_head_dims(dims: tuple[int, int], place: Place) -> None:
    check(place, "fp8", dim=dims[0], v_dim=dims[1])


@pytest.mark.proves("triton.extend.gqa")
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 20])
@in_interpreter
def test_triton_extends_shared_kv_heads(group: int, place: Place) -> None:
    check(place, "q8_0", heads=2 * group, kv_heads=2)


@pytest.mark.proves("triton.extend.window")
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 64, 1000, 2**31, 2**63 - 1])
@each_place(TRITONS)
def test_triton_extends_a_window(window: int, place: Place) -> None:
    check(place, "q8_0", heads=4, lengths=(5, 17, 200), queries=(5, 1, 90), window=window)


@pytest.mark.proves("triton.extend.softcap")
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e8])
@each_place(TRITONS)
def test_triton_extends_capped_scores(softcap: float, place: Place) -> None:
    check(place, "q8_0", heads=6, softcap=softcap, scale=0.3)


@pytest.mark.proves("triton.extend.sinks")
@each_place(TRITONS)
def test_triton_extends_sinks(place: Place) -> None:
    sinks = torch.tensor([-30.0, 0.0, 1.5, 4.0, 0.25, 8.0], device=place.device)
    scene = scene_of(place, "q8_0", heads=6)
    for scoring in (
        {"sinks": sinks},
        {"sinks": sinks.bfloat16(), "window": 7},
        {"sinks": sinks.half(), "softcap": 2.0},
    ):
        check_output(scene, extend(place, scene, **scoring), **scoring)
    everything = extend(place, scene, sinks=torch.full((6,), 1e4, device=place.device))
    assert torch.equal(everything, torch.zeros_like(everything))
    nothing = extend(place, scene, sinks=torch.full((6,), -torch.inf, device=place.device))
    check_output(scene, nothing)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_codec(KINDS, [INTERPRETED])
def test_p051_every_dtype_of_queries_and_rows(codec: str, dtype: torch.dtype, place: Place) -> None:
    shape = {"heads": 2, "kv_heads": 1, "dim": 128, "lengths": (5, 90), "queries": (5, 40)}
    check(place, codec, **shape, dtype=dtype, **scoring_of("all", 2, 128, place.device))


@pytest.mark.parametrize("own", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_interpreter
def test_rows_of_the_step_may_have_another_dtype(
    dtype: torch.dtype, own: torch.dtype, place: Place
) -> None:
    scene = scene_of(place, "q8_0", dtype=torch.bfloat16)  # which all of them hold
    q, k, v = (x.to(t) for x, t in zip((scene.q, *scene.fresh()), (dtype, own, own), strict=True))
    judge(extend(place, scene, rows=(q, k, v)), scene.expected(fresh=True), dtype)


@each_codec(("q4_0", "iso3"), [INTERPRETED])
@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
def test_p057_pasts_around_the_edges_of_pages(codec: str, page_tokens: int, place: Place) -> None:
    pasts = (0, 1, page_tokens - 1, page_tokens, page_tokens + 1)
    lengths = tuple(past + 3 for past in pasts)
    check(
        place,
        codec,
        heads=1,
        kv_heads=1,
        dim=128,
        page_tokens=page_tokens,
        lengths=lengths,
        queries=3,
    )


@pytest.mark.parametrize("group", [1, 6])
@in_interpreter
def test_chunks_of_many_row_tiles(group: int, place: Place) -> None:
    for scoring in ({}, {"window": 70}):
        check(
            place,
            "q4_0",
            heads=group,
            kv_heads=1,
            lengths=(200, 90),
            queries=(130, 90),
            **scoring,
        )
