"""Requests of one batch do not touch each other: same bits in any company, padding, bad pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import Batch, Table

from ..decode.cases import ieee, poison_new_tensors, rows_of, with_table
from ..decode.places import INTERPRETED, TRITONS, Place, each_codec, each_place
from ..scene import TIER
from .cases import QUERIES, check, check_output, company, extend, scene_of

pytestmark = ieee


@pytest.mark.parametrize("given", [{}, {"window": 50, "softcap": 3.0}], ids=["plain", "window"])
@each_codec(("q4_0",), TRITONS, on_gpu=["iso3"])
def test_p074_a_request_gets_the_same_bits_in_any_company(
    codec: str, given: dict[str, Any], place: Place
) -> None:
    scene = scene_of(place, codec, heads=6, dim=128)
    together = extend(place, scene, **given).split(QUERIES)
    for requests, spare_columns in (([4], 70), ([2, 1, 1, 0], 0), ([3], 0)):
        batch, rows = company(scene, requests, spare_columns)
        outs = extend(place, scene, batch=batch, rows=rows, **given)
        for r, out in zip(requests, outs.split([QUERIES[r] for r in requests]), strict=True):
            assert torch.equal(out, together[r]), f"request {r} among {requests}"


@pytest.mark.parametrize("sinks", [False, True])
@each_place(TRITONS)
def test_padding_gives_zero(sinks: bool, place: Place) -> None:
    scene = scene_of(place, "q8_0", heads=4, dim=128)
    batch, real = scene.batch(), sum(QUERIES)
    table = batch.tables[TIER]
    padded = Batch(
        torch.cat([batch.query_offsets, batch.query_offsets.new_tensor([real + 2, real + 2])]),
        torch.cat([batch.seq_lens, batch.seq_lens.new_zeros(2)]),
        {
            TIER: Table(
                torch.cat([table.page_table, torch.full_like(table.page_table[:2], -1)]),
                torch.cat([table.slot_mapping, table.slot_mapping.new_full((5,), -1)]),
            )
        },
        batch.page_tokens,
    )
    scoring = {"sinks": torch.linspace(-1, 1, 4, device=place.device)} if sinks else {}
    plain = (scene.q, *scene.fresh())
    q, k, v = (torch.cat([x, torch.full_like(x[:1].expand(5, -1, -1), torch.nan)]) for x in plain)
    out = extend(place, scene, batch=padded, rows=(q, k, v), **scoring)
    assert torch.equal(out[:real], extend(place, scene, **scoring))
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))


@each_place(TRITONS)
def test_requests_may_have_no_query_tokens(place: Place) -> None:
    check(place, "q8_0", queries=(0, 2, 0, 1, 0))


@each_place(TRITONS)
def test_a_step_without_tokens_gives_none(place: Place) -> None:
    scene = scene_of(place, "q8_0", lengths=(20, 9), queries=(0, 0))
    assert extend(place, scene).shape == (0, 2, 64)


@pytest.mark.parametrize("columns", [1, 100], ids=["one part", "parts"])
@each_place(TRITONS)
def test_rows_of_no_request_at_all_give_0(
    columns: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(place, "q8_0", dim=128)
    nobody = Batch(
        torch.zeros(1, dtype=torch.int32, device=place.device),
        torch.zeros(0, dtype=torch.int32, device=place.device),
        {
            TIER: Table(
                torch.zeros(0, columns, dtype=torch.int32, device=place.device),
                torch.full((3,), -1, device=place.device),
            )
        },
        scene.batch().page_tokens,
    )
    q, k, v = torch.randn(3, 3, 2, 128, device=place.device)
    with monkeypatch.context() as patched:
        assert poison_new_tensors(patched) == []
        out = extend(place, scene, batch=nobody, rows=(q, k, v))
    assert not out.any()


@each_place(TRITONS)
def test_changed_tables_and_lengths_are_obeyed(place: Place) -> None:
    """Two requests of one shape swap their pages in place; one of them loses tokens of its past."""
    scene = scene_of(place, "q8_0", dim=128, lengths=(70, 70), queries=(9, 9))
    batch, (q, k, v) = scene.batch(), (scene.q, *scene.fresh())
    first = extend(place, scene, batch=batch)
    check_output(scene, first)
    table = batch.tables[TIER].page_table
    table.copy_(table.flip(0))
    rows = tuple(torch.cat([x[9:], x[:9]]) for x in (q, k, v))
    swapped = extend(place, scene, batch=batch, rows=(rows[0], rows[1], rows[2]))
    assert torch.equal(swapped, torch.cat([first[9:], first[:9]]))
    batch.seq_lens[0] = 33
    shorter = extend(place, scene, batch=batch, rows=(rows[0], rows[1], rows[2]))
    assert torch.equal(shorter[9:], swapped[9:])
    assert not torch.equal(shorter[:9], swapped[:9])


@each_place([INTERPRETED])
def test_a_page_that_the_cache_does_not_have_makes_its_readers_nan(place: Place) -> None:
    scene = scene_of(place, "q8_0", lengths=(5, 90, 40), queries=(5, 4, 3))
    for cache in scene.caches:  # what is read instead, if something is, must not be NaN by itself
        for plane in cache.planes.values():
            plane[0].zero_()
    clean, batch = extend(place, scene), scene.batch()
    num_pages = scene.k_cache.lead[0]
    for request, column, bad in (
        *((1, 0, num_pages), (1, 4, -1), (2, 1, -2)),
        *((1, 4, 2**31 - 1), (2, 1, -(2**31))),
    ):
        page_table = batch.tables[TIER].page_table.clone()
        page_table[request, column] = bad
        out = extend(place, scene, batch=with_table(batch, page_table))
        rows = rows_of(scene, request)
        assert out[rows].isnan().all()
        out[rows] = clean[rows]
        assert torch.equal(out, clean)


@pytest.mark.parametrize("scoring", [{}, {"window": 16}], ids=["plain", "window"])
@each_place([INTERPRETED])
def test_a_length_beyond_the_table_reads_no_other_requests_pages(
    scoring: dict[str, Any], place: Place
) -> None:
    scene = scene_of(place, "q8_0", heads=1, kv_heads=1, lengths=(64, 64, 64), queries=1)
    clean = extend(place, scene, **scoring)
    for cache in scene.caches:
        for plane in cache.planes.values():
            plane[0].zero_()
    for request, length in ((1, 66), (0, 3000), (1, 2**31 - 1)):
        batch = scene.batch()
        batch.seq_lens[request] = length
        out = extend(place, scene, batch=batch, **scoring)
        assert out[request].isnan().all(), "it would have to read a page that no table names"
        out[request] = clean[request]
        assert torch.equal(out, clean)


@each_codec(("q4_0",), [INTERPRETED])
def test_pages_that_a_window_left_behind_are_not_needed(codec: str, place: Place) -> None:
    scene = scene_of(place, codec, dim=128, lengths=(70, 64, 97), queries=(4, 6, 30))
    window = 16  # the earliest query, at 58, sees positions from 43 on: pages 0 and 1 are gone
    released = extend(place, scene, batch=scene.batch(released=2), window=window)
    assert torch.equal(released, extend(place, scene, window=window))
    early = extend(place, scene, batch=scene.batch(released=4), window=window)
    assert early[rows_of(scene, 0)].isnan().all()
