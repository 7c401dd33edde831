"""The past of requests of many rows is decoded once, into a scratch of a bounded size."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq_attention import AttentionError, launches
from kvq_attention.scoring import Scoring
from kvq_attention.triton.extending import routes, scratch, step, within
from kvq_attention.triton.extending.step import Step
from kvq_attention.triton.side import Side

from ..decode.cases import PACKED, ieee, poison_new_tensors, rows_of, scoring_of, with_table
from ..decode.places import INTERPRETED, TRITONS, Place, each_codec, each_place
from ..scene import TIER, Scene, put
from ..tolerances import KERNEL
from .cases import check_output, company, extend, scene_of

pytestmark = ieee

# Query rows from which on a scratch is used here, and requests of fewer, as many and more.
BREAK_EVEN = 24
SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 128}
LENGTHS, QUERIES = (40, 60, 17, 150), (1, 12, 11, 40)
OURS = [module.__name__ for module in (scratch, step, within)]


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no time for more."""
    monkeypatch.setattr(routes, "BREAK_EVEN", BREAK_EVEN)
    monkeypatch.setattr(scratch, "LEAST_SHARE", 64)


def built(place: Place, codec: str, v: str | None = None, **shape: Any) -> Scene:
    return scene_of(place, codec, v, **{**SHAPE, "lengths": LENGTHS, "queries": QUERIES, **shape})


def in_the_loop(place: Place, scene: Scene, **given: Any) -> torch.Tensor:
    """The same without a scratch."""
    return extend(place, scene, scratch_bytes=0, **given)


def agree(out: torch.Tensor, other: torch.Tensor) -> None:
    """Both have errors of their own: a tile's values are rounded to fp16 once, or once more."""
    error = (out.double() - other.double()).norm(dim=-1) / other.double().norm(dim=-1)
    assert bool((error <= KERNEL[out.dtype]).all())


@each_codec(PACKED, TRITONS)
def test_every_codec(codec: str, place: Place) -> None:
    scene = built(place, codec)
    with launches.counting() as counted:
        out = extend(place, scene)
    assert counted["triton"]["extend"] == 1
    check_output(scene, out)


@each_codec(("q4_0",), TRITONS, on_gpu=["iso3"])
def test_a_scratch_gives_what_the_loop_gives(codec: str, place: Place) -> None:
    scene, given = built(place, codec), scoring_of("all", 4, 128, place.device)
    out = extend(place, scene, **given)
    check_output(scene, out, **given)
    agree(out, in_the_loop(place, scene, **given))


@pytest.mark.parametrize(
    "codecs", [("q8_0", "bf16"), ("fp16", "iso4"), ("nvfp4", "q6_0"), ("fp32", "fp8")]
)
@each_place([INTERPRETED])
def test_two_codecs_of_which_one_may_be_plain(codecs: tuple[str, str], place: Place) -> None:
    scene = built(place, *codecs, v_dim=256)
    check_output(scene, extend(place, scene))


@each_codec(("q4_0",), TRITONS, on_gpu=["iso3"])
def test_a_smaller_scratch_takes_heads_and_parts_in_turn(
    codec: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[scratch.Plan] = []
    planning = scratch.plan

    def noted(*given: Any) -> scratch.Plan | None:
        found = planning(*given)
        plans.extend([found] if found else [])
        return found

    monkeypatch.setattr(scratch, "plan", noted)
    scene, sinks = built(place, codec), torch.linspace(-2, 3, 4, device=place.device)
    whole = extend(place, scene, sinks=sinks)
    with monkeypatch.context() as patched:
        poison_new_tensors(patched)
        for bound in (400 << 10, 240 << 10):
            assert torch.equal(extend(place, scene, sinks=sinks, scratch_bytes=bound), whole)
            assert plans[-1].nbytes <= bound
    assert [(each.heads, each.parts) for each in plans] == [(2, 1), (1, 1), (1, 3)]


@pytest.mark.parametrize("codecs", [("q8_0", "q4_0"), ("bf16", "q8_0"), ("q8_0", "fp16")])
@each_place([INTERPRETED])
def test_the_last_heads_of_a_scratch_may_be_fewer(codecs: tuple[str, str], place: Place) -> None:
    """Three heads, of which two are decoded at a time, and then one, in the same memory."""
    shape = {"heads": 6, "kv_heads": 3, "dim": 64, "v_dim": 128, "lengths": LENGTHS[1:]}
    scene = built(place, *codecs, **shape, queries=QUERIES[1:])
    whole = extend(place, scene)
    check_output(scene, whole)
    step_of = Step.of(
        *(scene.q, *scene.fresh()),
        tuple(Side.of(cache, scene.q.dtype) for cache in scene.caches),
        scene.batch(),
        TIER,
        Scoring(scene.scale),
    )
    k, v = routes.packed(codecs)
    dims = tuple(dim for dim, is_packed in ((64, k), (128, v)) if is_packed)
    tiles = -(-step_of.visible // step_of.shape.tokens)
    head_bytes = 2 * tiles * scratch.tile_bytes(dims, step_of.shape.tokens)
    assert torch.equal(extend(place, scene, scratch_bytes=2 * head_bytes), whole)


@each_place([INTERPRETED])
def test_parts_of_a_window(place: Place) -> None:
    scene, given = built(place, "q8_0"), {"window": 90, "softcap": 2.0}
    small = extend(place, scene, scratch_bytes=300 << 10, **given)
    assert torch.equal(small, extend(place, scene, **given))


@each_place([INTERPRETED])
def test_nothing_but_the_output_is_larger_than_the_bound(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, bound = built(place, "q8_0"), 240 << 10
    kept: list[torch.Tensor] = []
    new_empty = torch.Tensor.new_empty

    def noting(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = new_empty(self, *args, **kwargs)
        if sys._getframe(1).f_globals["__name__"] in OURS:  # the interpreter makes copies
            kept.append(made)
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", noting)
    out = extend(place, scene, scratch_bytes=bound)
    taken = [x for x in kept if x is not out]
    assert len(taken) == len(kept) - 1
    # of the loop's route there is a number that is not looked at
    assert bound // 2 < sum(x.nbytes for x in taken) <= bound + scene.v_cache.dim * 8


@each_place([INTERPRETED])
def test_p074_a_route_does_not_depend_on_company(place: Place) -> None:
    scene = built(place, "q4_0")
    together = extend(place, scene).split(QUERIES)
    for requests, spare_columns in (([3], 0), ([1], 9), ([2, 0], 0), ([0, 1, 3], 0)):
        batch, rows = company(scene, requests, spare_columns)
        outs = extend(place, scene, batch=batch, rows=rows)
        for r, out in zip(requests, outs.split([QUERIES[r] for r in requests]), strict=True):
            assert torch.equal(out, together[r]), f"request {r} among {requests}"


@each_place([INTERPRETED])
def test_padding_gives_zero_and_bad_pages_nan(place: Place) -> None:
    scene = built(place, "q8_0")
    clean, batch = extend(place, scene), scene.batch()
    for request, column in ((1, 1), (3, 6)):
        page_table = batch.tables[TIER].page_table.clone()
        page_table[request, column] = -1
        out = extend(place, scene, batch=with_table(batch, page_table))
        rows = rows_of(scene, request)
        assert out[rows].isnan().all()
        out[rows] = clean[rows]
        assert torch.equal(out, clean)
    padded = replace(batch, seq_lens=batch.seq_lens * torch.tensor([1, 1, 1, 0]).int())
    out = extend(place, scene, batch=padded)
    assert torch.equal(out[:24], clean[:24]) and not out[24:].any()


@each_place([INTERPRETED])
def test_pages_that_a_window_left_behind_are_not_needed(place: Place) -> None:
    scene = built(place, "q6_0", lengths=(97, 150), queries=(20, 30))
    released = extend(place, scene, batch=scene.batch(released=2), window=40)
    assert torch.equal(released, extend(place, scene, window=40))
    agree(released, in_the_loop(place, scene, window=40))


@pytest.mark.parametrize("gain", [1e-5, 1e3])
@each_codec(("fp8", "q8_0", "iso4"), [INTERPRETED])
def test_magnitudes_beyond_those_of_a_16_bit_scratch(codec: str, gain: float, place: Place) -> None:
    """fp16 would lose values of 1e-5, and has none of 37e3 times those of N(0, 1)."""
    scene = built(place, codec, lengths=(150,), queries=(20,))
    gains = gain, gain / 10 if codec == "iso4" else gain  # whose norms are fp16
    for rows, cache, factor in zip((scene.ks, scene.vs), scene.caches, gains, strict=True):
        rows[0].mul_(factor)
        put(cache, rows[0][:130], scene.slots(0, 0, 130))
    scoring = {"scale": scene.scale / gain}
    check_output(scene, extend(place, scene, **scoring), **scoring)


@pytest.mark.parametrize("scratch_bytes", [-1, 1.5, None, True])
@each_place([INTERPRETED])
def test_a_bound_is_a_number_of_bytes(scratch_bytes: Any, place: Place) -> None:
    with pytest.raises(AttentionError, match="scratch_bytes must be an int of at least 0, got"):
        extend(place, built(place, "q8_0"), scratch_bytes=scratch_bytes)
