"""Requests whose sizes the host knows go through dense kernels, with the same tolerance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq_attention import BatchError
from kvq_attention.triton.extending import dense, portions

from ..decode.cases import PACKED, ieee, judge, poison_new_tensors, rows_of, with_table
from ..decode.places import INTERPRETED, TRITONS, Place, each_codec, each_place
from ..scene import TIER, Scene
from .cases import check_output, company, extend, scene_of

pytestmark = ieee

FEWEST = (
    528 * 4 * 128
)  # products here, with requests of fewer, as many and more; none and some past
SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 128}
LENGTHS, QUERIES = (40, 60, 17, 210, 33), (1, 12, 11, 70, 33)


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no time for more."""
    monkeypatch.setattr(dense, "FEWEST_PRODUCTS", FEWEST)
    monkeypatch.setattr(portions, "GRAIN", 16)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests that went through dense kernels."""
    found: list[int] = []
    real = dense.extend_densely

    def noted(*given: Any) -> None:
        found.append(given[3].index)
        real(*given)

    monkeypatch.setattr(dense, "extend_densely", noted)
    return found


def built(place: Place, codec: str, v: str | None = None, **shape: Any) -> Scene:
    given = {**SHAPE, "lengths": LENGTHS, "queries": QUERIES, **shape}
    if place != INTERPRETED:
        given = {"dtype": torch.bfloat16, **given}
    return scene_of(place, codec, v, **given)


def densely(place: Place, scene: Scene, batch: Any = None, **given: Any) -> torch.Tensor:
    batch = batch or scene.batch()
    return extend(place, scene, batch=replace(batch, host=tuple(batch.requests())), **given)


@each_codec((*PACKED, "bf16", "fp16"), TRITONS)
def test_every_codec(codec: str, place: Place, served: list[int]) -> None:
    scene = built(place, codec)
    check_output(scene, densely(place, scene))
    assert served == [1, 3, 4]


@each_codec(("bf16", "q4_0"), TRITONS)
def test_sinks(codec: str, place: Place) -> None:
    scene, sinks = built(place, codec), torch.linspace(-2, 3, 4, device=place.device)
    check_output(scene, densely(place, scene, sinks=sinks), sinks=sinks)


@pytest.mark.parametrize("shape", [{"heads": 5, "kv_heads": 5, "dim": 64}, {"dim": 256}])
@each_place(TRITONS)
def test_other_sizes(shape: dict[str, int], place: Place, served: list[int]) -> None:
    scene = built(place, "q8_0", "q4_0", page_tokens=32, **shape)
    check_output(scene, densely(place, scene))
    assert served


@pytest.mark.parametrize("given", [{"window": 50}, {"softcap": 5.0}], ids=["window", "softcap"])
@each_place([INTERPRETED])
def test_a_window_and_a_soft_cap_go_elsewhere(
    given: dict[str, Any], place: Place, served: list[int]
) -> None:
    scene = built(place, "q8_0")
    check_output(scene, densely(place, scene, **given), **given)
    assert not served


@pytest.mark.parametrize("scale", [-0.1, 0.0])
@each_place([INTERPRETED])
def test_a_scale_that_a_mask_does_not_stand_goes_elsewhere(
    scale: float, place: Place, served: list[int]
) -> None:
    scene = built(place, "q8_0")
    check_output(scene, densely(place, scene, scale=scale), scale=scale)
    assert not served


@each_place([INTERPRETED])
def test_full_precision_goes_elsewhere(place: Place, served: list[int]) -> None:
    for formats in (("fp32", "fp32"), ("q8_0", "fp32")):
        scene = built(place, *formats)
        check_output(scene, densely(place, scene))
    assert not served


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@each_place([INTERPRETED])
def test_an_infinity_shows_in_the_rows_that_see_it_and_in_no_others(
    which: int, place: Place, served: list[int]
) -> None:
    scene = built(place, "q8_0", lengths=(210,), queries=(70,))
    clean = densely(place, scene)
    rows = [scene.q.clone(), *(x.clone() for x in scene.fresh())]
    rows[which][-1, 0, 3] = float("inf")
    q, k, v = rows
    out = densely(place, scene, rows=(q, k, v))
    assert served
    assert not out[-1, 0].isfinite().all(), "heads 0 and 1 read KV head 0"
    assert torch.equal(out[:-1, 2:], clean[:-1, 2:])
    if which < 2:  # a probability of 0 times an infinite value is no number
        judge(out[:-1], clean[:-1].double(), out.dtype)


@each_codec(("q4_0",), TRITONS, on_gpu=["iso3", "bf16"])
def test_a_smaller_bound_takes_heads_and_parts_in_turn(
    codec: str, place: Place, monkeypatch: pytest.MonkeyPatch, served: list[int]
) -> None:
    plans: list[portions.Plan] = []
    planning = portions.Sizes.plan

    def noted(*given: Any) -> portions.Plan:
        plans.append(planning(*given))
        return plans[-1]

    monkeypatch.setattr(portions.Sizes, "plan", noted)
    scene, sinks = (
        built(place, codec, lengths=(40, 262), queries=(1, 17)),
        torch.linspace(-2, 3, 4, device=place.device),
    )
    # A past of 245 tokens: 5 before 17 own rows, padded to 32. Bytes of a head: of a decoded
    # token; of rows of two query heads: placed, of two results, and of what is kept.
    token, own = 2 * 128 * 2, 32 * (4 * 128 * 2 + 4 * (128 * 2 + 4) + 2 * (128 * 4 + 4))
    monkeypatch.setattr(portions, "ENOUGH", 64)
    calls = dense.CALLS
    monkeypatch.setattr(dense, "CALLS", 1000)
    for bound, heads, share in (
        (2 * (224 * token + own), 2, 224),
        (2 * (64 * token + own), 2, 64),
        (2 * (64 * token + own) - 1, 1, 224),
        (16 * token + own, 1, 16),
    ):
        plans.clear()
        served.clear()
        with monkeypatch.context() as patched:
            poison_new_tensors(patched)
            out = densely(place, scene, sinks=sinks, scratch_bytes=bound)
        check_output(scene, out, sinks=sinks)
        assert served == [1]
        assert (plans[-1].heads, plans[-1].share) == (heads, share), "of the one that is served"
        assert plans[-1].nbytes <= bound
    served.clear()
    check_output(scene, densely(place, scene, scratch_bytes=16 * token + own - 1))
    assert not served, "there is no room for results"
    monkeypatch.setattr(dense, "CALLS", calls)
    monkeypatch.setattr(dense, "FEWEST_PRODUCTS", 17 * (245 + 8) * 4 * 128)
    check_output(scene, densely(place, scene, scratch_bytes=16 * token + own))
    assert not served, "so little work is not worth 32 calls"
    densely(place, scene, scratch_bytes=2 * (224 * token + own))
    assert served == [1]


@each_place(TRITONS)
def test_p074_a_request_gets_the_same_bits_in_any_company(place: Place, served: list[int]) -> None:
    scene = built(place, "q4_0")
    together = densely(place, scene).split(QUERIES)
    for requests, spare_columns in (([3], 0), ([1], 9), ([4, 0], 0), ([0, 1, 3], 0)):
        batch, rows = company(scene, requests, spare_columns)
        outs = densely(place, scene, batch, rows=rows)
        for r, out in zip(requests, outs.split([QUERIES[r] for r in requests]), strict=True):
            assert torch.equal(out, together[r]), f"request {r} among {requests}"


@each_place([INTERPRETED])
def test_padding_gives_zero_and_bad_pages_nan(place: Place, served: list[int]) -> None:
    scene = built(place, "q8_0")
    clean, batch = densely(place, scene), scene.batch()
    for request, column in ((1, 1), (3, 8)):
        page_table = batch.tables[TIER].page_table.clone()
        page_table[request, column] = -1
        out = densely(place, scene, with_table(batch, page_table))
        rows = rows_of(scene, request)
        assert out[rows].isnan().all()
        out[rows] = clean[rows]
        assert torch.equal(out, clean)
    narrow = with_table(batch, batch.tables[TIER].page_table[:, :3].contiguous())
    assert densely(place, scene, narrow)[rows_of(scene, 3)].isnan().all()
    padded = replace(batch, seq_lens=batch.seq_lens * torch.tensor([1, 1, 1, 0, 1]).int())
    out = densely(place, scene, padded)
    assert torch.equal(out[:24], clean[:24]) and not out[24:94].any()
    fewer = replace(
        batch,
        query_offsets=batch.query_offsets[:-1],
        seq_lens=batch.seq_lens[:-1],
        tables={TIER: replace(batch.tables[TIER], page_table=batch.tables[TIER].page_table[:-1])},
    )
    out = densely(place, scene, fewer)
    assert torch.equal(out[:94], clean[:94]) and not out[94:].any()


@each_place([INTERPRETED])
def test_what_the_host_knows_must_be_what_the_device_has(place: Place) -> None:
    batch = built(place, "q8_0").batch()
    wrong = tuple(replace(r, length=r.length + 1) for r in batch.requests())
    with pytest.raises(BatchError, match="host must be what the tensors hold"):
        replace(batch, host=wrong)
