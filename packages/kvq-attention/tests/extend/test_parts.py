"""Requests of few rows and a long past: it is cut into parts, whose results are merged."""

from __future__ import annotations

import pytest
import torch

from kvq_attention.triton.extending import shapes

from ..decode.cases import ieee, scoring_of
from ..decode.places import INTERPRETED, TRITONS, Place, each_codec, each_place
from .cases import check, check_output, company, extend, scene_of

pytestmark = ieee

QUERIES = (7, 30, 1, 1)


@pytest.fixture(autouse=True)
def least(place: Place, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of a part at least: in the interpreter fewer, as each tile costs it milliseconds."""
    if place != INTERPRETED:
        return shapes.LEAST_PART
    monkeypatch.setattr(shapes, "LEAST_PART", 40)
    return 40


def lengths(least: int) -> tuple[int, ...]:
    """Several parts; nothing but one part; two, the second of which is short; just one."""
    return 5 * least + 9, 60, least + 7, least


@pytest.mark.parametrize("scoring", ["plain", "all"])
@each_codec(("q4_0",), TRITONS, on_gpu=["iso3"])
def test_parts_are_merged(codec: str, scoring: str, place: Place, least: int) -> None:
    given = scoring_of(scoring, 6, 128, place.device)
    if "window" in given:
        given["window"] = 3 * least
    shape = {"heads": 6, "kv_heads": 2, "dim": 128}
    check(place, codec, **shape, lengths=lengths(least), queries=QUERIES, **given)


@each_place(TRITONS)
def test_p074_parts_do_not_depend_on_company(place: Place, least: int) -> None:
    shape = {"heads": 4, "dim": 128, "lengths": lengths(least), "queries": QUERIES}
    scene = scene_of(place, "q4_0", **shape)
    together = extend(place, scene).split(QUERIES)
    for requests, spare_columns in (([0], 0), ([2], 300), ([1, 3, 0], 0)):
        batch, rows = company(scene, requests, spare_columns)
        outs = extend(place, scene, batch=batch, rows=rows)
        for r, out in zip(requests, outs.split([QUERIES[r] for r in requests]), strict=True):
            assert torch.equal(out, together[r]), f"request {r} among {requests}"


@each_place([INTERPRETED])
def test_sinks_count_once_however_many_parts_there_are(place: Place, least: int) -> None:
    scene = scene_of(place, "q8_0", heads=4, dim=128, lengths=(3 * least + 5,), queries=(2,))
    sinks = torch.tensor([0.0, 6.0, -torch.inf, 9.0], device=place.device)
    check_output(scene, extend(place, scene, sinks=sinks), sinks=sinks)


@each_place(TRITONS)
def test_a_request_of_many_rows_is_not_cut(place: Place, least: int) -> None:
    """The kernel writes no partial result for it, and the merge leaves it alone."""
    shape = {"heads": 32, "kv_heads": 1, "lengths": (3 * least, 20), "queries": (36, 1)}
    check(place, "q8_0", **shape)
