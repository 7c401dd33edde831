"""Requests of one batch do not touch each other: same bits in any company, padding, bad pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import Batch, Table

from ..scene import TIER, Scene
from .cases import check_output, ieee, judge, rows_of, with_table
from .places import KINDS, ON_CPU, Place, each_codec, each_place

pytestmark = ieee

LENGTHS, QUERIES = (1, 70, 17), (1, 2, 1)


def scene_of(codec: str, place: Place, **shape: Any) -> Scene:
    wanted = {"heads": 2, "kv_heads": 1, "dim": 128, "lengths": LENGTHS, "queries": QUERIES}
    return place.scene(codec, **{**wanted, **shape}, seed=3)


def company(scene: Scene, requests: list[int], spare_columns: int = 0) -> tuple[Any, Batch]:
    """The queries and the batch of some of a scene's requests, in this order."""
    whole = scene.batch()
    table = whole.tables[TIER]
    counts = [scene.geometry.counts[r] for r in requests]
    device = scene.q.device
    wide = torch.full((len(requests), spare_columns), -1, dtype=torch.int32, device=device)
    q = torch.cat([scene.qs[r] for r in requests])
    slots = torch.cat([table.slot_mapping[rows_of(scene, r)] for r in requests])
    batch = Batch(
        torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
        whole.seq_lens[requests],
        {TIER: Table(torch.cat([table.page_table[requests], wide], dim=1), slots)},
        whole.page_tokens,
    )
    return q, batch


@pytest.mark.parametrize("scoring", [{}, {"window": 50, "softcap": 3.0}], ids=["plain", "window"])
@each_codec(KINDS, ON_CPU)
def test_p074_a_request_gets_the_same_bits_in_any_company(
    codec: str, scoring: dict[str, Any], place: Place
) -> None:
    scene = scene_of(codec, place)
    together = place.attend(scene, **scoring).split(QUERIES)
    for requests, spare_columns in (([1], 70), ([2, 1, 1, 0], 0)):
        q, batch = company(scene, requests, spare_columns)
        outs = place.attend(scene, batch=batch, q=q, **scoring).split(
            [QUERIES[r] for r in requests]
        )
        for r, out in zip(requests, outs, strict=True):
            assert torch.equal(out, together[r]), f"request {r} among {requests}"


@pytest.mark.parametrize("group", [5, 20])
@each_place(ON_CPU)
def test_p074_of_any_group_size(group: int, place: Place) -> None:
    scene = scene_of("q4_0", place, heads=group, lengths=(20, 70), queries=1)
    together = place.attend(scene)
    q, batch = company(scene, [1])
    assert torch.equal(place.attend(scene, batch=batch, q=q), together[1:2])


@each_place(ON_CPU)
def test_p074_beside_a_request_of_many_query_tokens(place: Place) -> None:
    """A request of several chunks."""
    scene = scene_of("q8_0", place, lengths=(1, 2 * place.chunk - 9, 40), queries=(1, 1, 20))
    q, batch = company(scene, [1])
    assert torch.equal(
        place.attend(scene, batch=batch, q=q), place.attend(scene)[rows_of(scene, 1)]
    )


@each_place()
def test_changed_tables_and_lengths_are_obeyed(place: Place) -> None:
    """Two requests of one shape swap their pages in place; one of them loses tokens."""
    scene = scene_of("q8_0", place, lengths=(70, 70), queries=1)
    batch = scene.batch()
    first = place.attend(scene, batch=batch)
    check_output(scene, first)
    table = batch.tables[TIER].page_table
    table.copy_(table.flip(0))
    swapped = place.attend(scene, batch=batch, q=scene.q.flip(0))
    assert torch.equal(swapped, first.flip(0))
    batch.seq_lens[0] = 33
    shorter = place.attend(scene, batch=batch, q=scene.q.flip(0))
    assert torch.equal(shorter[1], swapped[1])
    scene.ks[1], scene.vs[1] = scene.ks[1][:33], scene.vs[1][:33]
    judge(shorter[:1], scene.expected(fresh=False)[1:], scene.geometry.dtype)


@pytest.mark.parametrize("sinks", [False, True])
@each_codec(KINDS, ON_CPU)
def test_padding_gives_zero(codec: str, sinks: bool, place: Place) -> None:
    scene = scene_of(codec, place)
    batch, real = scene.batch(), sum(QUERIES)
    table = batch.tables[TIER]
    more = [
        torch.tensor([real + 2, real + 2], device=place.device),  # two rows, then none
        torch.zeros(2, device=place.device),
        torch.full_like(table.page_table[:2], -1),
        torch.full((5,), -1, device=place.device),  # three rows beyond all requests
    ]
    padded = Batch(
        torch.cat([batch.query_offsets, more[0]]).to(torch.int32),
        torch.cat([batch.seq_lens, more[1]]).to(torch.int32),
        {
            TIER: Table(
                torch.cat([table.page_table, more[2]]), torch.cat([table.slot_mapping, more[3]])
            )
        },
        batch.page_tokens,
    )
    scoring = {"sinks": torch.linspace(-1, 1, 2, device=place.device)} if sinks else {}
    q = torch.cat([scene.q, torch.full_like(scene.q[:1].expand(5, -1, -1), torch.nan)])
    out = place.attend(scene, batch=padded, q=q, **scoring)
    assert torch.equal(out[:real], place.attend(scene, **scoring))
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))


@each_place()
def test_a_batch_of_padding_alone_gives_zero(place: Place) -> None:
    scene = scene_of("q8_0", place, lengths=(20, 30), queries=2)
    batch = scene.batch()
    batch.seq_lens.zero_()
    batch.tables[TIER].page_table.fill_(-1)
    out = place.attend(scene, batch=batch)
    assert torch.equal(out, torch.zeros_like(out))


BAD_PAGES = {"-1": -1, "-2": -2, "P": None, "2**31-1": 2**31 - 1, "-2**31": -(2**31)}


@pytest.mark.parametrize("bad", BAD_PAGES)
@each_place(ON_CPU)  # on CUDA in a process of its own: exercise.py
def test_a_page_that_the_cache_does_not_have_makes_its_readers_nan(bad: str, place: Place) -> None:
    scene = scene_of("q8_0", place, queries=1)
    for cache in scene.caches:  # what is read instead, if something is, must not be NaN by itself
        for plane in cache.planes.values():
            plane[0].zero_()
    clean, batch = place.attend(scene), scene.batch()
    num_pages = scene.k_cache.lead[0]
    for request, column in ((1, 0), (1, 4), (2, 1)):
        page_table = batch.tables[TIER].page_table.clone()
        wrong = BAD_PAGES[bad]
        page_table[request, column] = num_pages if wrong is None else wrong
        out = place.attend(scene, batch=with_table(batch, page_table))
        rows = rows_of(scene, request)
        assert out[rows].isnan().all()
        out[rows] = clean[rows]
        assert torch.equal(out, clean)


@pytest.mark.parametrize("scoring", [{}, {"window": 16}], ids=["plain", "window"])
@each_place(ON_CPU)
def test_a_length_beyond_the_table_reads_no_other_requests_pages(
    scoring: dict[str, Any], place: Place
) -> None:
    scene = scene_of("q8_0", place, heads=1, lengths=(64, 64, 64), queries=1)
    clean = place.attend(scene, **scoring)
    assert scene.batch().tables[TIER].page_table.shape[1] == 4
    for cache in scene.caches:
        for plane in cache.planes.values():
            plane[0].zero_()
    for request, length in ((1, 65), (0, 3000), (1, 2**31 - 1)):
        batch = scene.batch()
        batch.seq_lens[request] = length
        out = place.attend(scene, batch=batch, **scoring)
        assert out[request].isnan().all(), "it would have to read a page that no table names"
        out[request] = clean[request]
        assert torch.equal(out, clean)


@each_codec(KINDS, ON_CPU)
def test_pages_that_a_window_left_behind_are_not_needed(codec: str, place: Place) -> None:
    scene = scene_of(codec, place, lengths=(70, 64, 97), queries=2)
    window = 16  # the first query of the shortest sees positions from 47 on: pages 0 and 1 are gone
    assert torch.equal(
        place.attend(scene, released=2, window=window), place.attend(scene, window=window)
    )


@each_place(ON_CPU)
def test_a_page_that_left_too_early_is_missed(place: Place) -> None:
    scene = scene_of("q8_0", place, lengths=(70, 64, 97), queries=2)
    early = place.attend(scene, released=4, window=16)  # the first query at 68 sees 53 … 68: page 3
    assert early[rows_of(scene, 0)].isnan().all()
    assert torch.equal(early[rows_of(scene, 2)], place.attend(scene, window=16)[rows_of(scene, 2)])
