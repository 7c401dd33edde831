"""Requests of one batch do not touch each other: same bits in any company, padding, bad pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import Batch, Table
from kvq_attention.triton import tiles

from ..scene import TIER, Geometry, Scene, build
from .cases import (
    attend,
    each_device,
    each_kind,
    ieee,
    in_interpreter,
    judge,
    rows_of,
    with_table,
)

pytestmark = ieee

LENGTHS, QUERIES = (1, 70, 17), (1, 2, 1)


def scene_of(codec: str, device: str, **shape: Any) -> Scene:
    wanted = {
        "heads": 2,
        "kv_heads": 1,
        "dim": 128,
        "lengths": LENGTHS,
        "queries": QUERIES,
        **shape,
    }
    return build(Geometry(codec, **wanted), device, stored_queries=True, seed=3)


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
@each_kind
@in_interpreter
def test_p074_a_request_gets_the_same_bits_in_any_company(
    codec: str, scoring: dict[str, Any], device: str
) -> None:
    scene = scene_of(codec, device)
    together = attend(scene, **scoring).split(QUERIES)
    for requests, spare_columns in (([1], 70), ([2, 1, 1, 0], 0)):
        q, batch = company(scene, requests, spare_columns)
        outs = attend(scene, batch=batch, q=q, **scoring).split([QUERIES[r] for r in requests])
        for r, out in zip(requests, outs, strict=True):
            assert torch.equal(out, together[r]), f"request {r} among {requests}"


@pytest.mark.parametrize("group", [5, 20])
@in_interpreter
def test_p074_of_any_group_size(group: int, device: str) -> None:
    scene = scene_of("q4_0", device, heads=group, lengths=(20, 70), queries=1)
    together = attend(scene)
    q, batch = company(scene, [1])
    assert torch.equal(attend(scene, batch=batch, q=q), together[1:2])


@in_interpreter
def test_p074_beside_a_request_of_many_query_tokens(device: str) -> None:
    """A request of several chunks."""
    scene = scene_of("q8_0", device, lengths=(1, 2 * tiles.CHUNK - 9, 40), queries=(1, 1, 20))
    q, batch = company(scene, [1])
    assert torch.equal(attend(scene, batch=batch, q=q), attend(scene)[rows_of(scene, 1)])


@each_device
def test_changed_tables_and_lengths_are_obeyed(device: str) -> None:
    """Two requests of one shape swap their pages in place; one of them loses tokens."""
    scene = scene_of("q8_0", device, lengths=(70, 70), queries=1)
    batch = scene.batch()
    first = attend(scene, batch=batch)
    judge(first, scene.expected(fresh=False), torch.float32)
    table = batch.tables[TIER].page_table
    table.copy_(table.flip(0))
    swapped = attend(scene, batch=batch, q=scene.q.flip(0))
    assert torch.equal(swapped, first.flip(0))
    batch.seq_lens[0] = 33
    shorter = attend(scene, batch=batch, q=scene.q.flip(0))
    assert torch.equal(shorter[1], swapped[1])
    scene.ks[1], scene.vs[1] = scene.ks[1][:33], scene.vs[1][:33]
    judge(shorter[:1], scene.expected(fresh=False)[1:], torch.float32)


@pytest.mark.parametrize("sinks", [False, True])
@each_kind
@in_interpreter
def test_padding_gives_zero(codec: str, sinks: bool, device: str) -> None:
    scene = scene_of(codec, device)
    batch, real = scene.batch(), sum(QUERIES)
    table = batch.tables[TIER]
    more = [
        torch.tensor([real + 2, real + 2], device=device),  # two rows, then none
        torch.zeros(2, device=device),
        torch.full_like(table.page_table[:2], -1),
        torch.full((5,), -1, device=device),  # three rows beyond all requests
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
    scoring = {"sinks": torch.linspace(-1, 1, 2, device=device)} if sinks else {}
    q = torch.cat([scene.q, torch.full((5, 2, 128), torch.nan, device=device)])
    out = attend(scene, batch=padded, q=q, **scoring)
    assert torch.equal(out[:real], attend(scene, **scoring))
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))


@each_device
def test_a_batch_of_padding_alone_gives_zero(device: str) -> None:
    scene = scene_of("q8_0", device, lengths=(20, 30), queries=2)
    batch = scene.batch()
    batch.seq_lens.zero_()
    batch.tables[TIER].page_table.fill_(-1)
    out = attend(scene, batch=batch)
    assert torch.equal(out, torch.zeros_like(out))


BAD_PAGES = {"-1": -1, "-2": -2, "P": None, "2**31-1": 2**31 - 1, "-2**31": -(2**31)}


@pytest.mark.parametrize("bad", BAD_PAGES)
@in_interpreter  # on CUDA in a process of its own: exercise.py
def test_a_page_that_the_cache_does_not_have_makes_its_readers_nan(bad: str, device: str) -> None:
    scene = scene_of("q8_0", device, queries=1)
    for cache in scene.caches:  # what is read instead, if something is, must not be NaN by itself
        for plane in cache.planes.values():
            plane[0].zero_()
    clean, batch = attend(scene), scene.batch()
    num_pages = scene.k_cache.lead[0]
    for request, column in ((1, 0), (1, 4), (2, 1)):
        page_table = batch.tables[TIER].page_table.clone()
        wrong = BAD_PAGES[bad]
        page_table[request, column] = num_pages if wrong is None else wrong
        out = attend(scene, batch=with_table(batch, page_table))
        rows = rows_of(scene, request)
        assert out[rows].isnan().all()
        out[rows] = clean[rows]
        assert torch.equal(out, clean)


@in_interpreter
def test_a_length_beyond_the_table_reads_no_other_requests_pages(device: str) -> None:
    scene = scene_of("q8_0", device, heads=1, lengths=(64, 64, 64), queries=1)
    clean, batch = attend(scene), scene.batch()
    assert batch.tables[TIER].page_table.shape[1] == 4
    for cache in scene.caches:
        for plane in cache.planes.values():
            plane[0].zero_()
    for request, length in ((1, 65), (0, 3000)):
        batch = scene.batch()
        batch.seq_lens[request] = length
        out = attend(scene, batch=batch)
        assert out[request].isnan().all(), "it would have to read a page that no table names"
        out[request] = clean[request]
        assert torch.equal(out, clean)


@each_kind
@in_interpreter
def test_pages_that_a_window_left_behind_are_not_needed(codec: str, device: str) -> None:
    scene = scene_of(codec, device, lengths=(70, 64, 97), queries=2)
    window = 16  # the first query of the shortest sees positions from 47 on: pages 0 and 1 are gone
    assert torch.equal(attend(scene, released=2, window=window), attend(scene, window=window))


@in_interpreter
def test_a_page_that_left_too_early_is_missed(device: str) -> None:
    scene = scene_of("q8_0", device, lengths=(70, 64, 97), queries=2)
    early = attend(scene, released=4, window=16)  # the first query at 68 sees 53 … 68: page 3
    assert early[rows_of(scene, 0)].isnan().all()
    assert torch.equal(early[rows_of(scene, 2)], attend(scene, window=16)[rows_of(scene, 2)])
