"""Runs of pages to the host and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_pools import staging
from kvq_pools.staging import put, stage

PAGES = 12


def buffers() -> list[np.ndarray]:
    """Two planes of 3 layers, 12 pages and one of padding; every item is unlike all others."""
    return [
        np.arange(3 * (PAGES + 1) * 4, dtype=dtype).reshape(3, PAGES + 1, 1, 2, 2)
        for dtype in ("uint16", "float32")
    ]


@given(
    pages=st.sets(st.integers(0, PAGES - 1)),
    longest=st.integers(1, 5),
    places=st.dictionaries(st.integers(0, PAGES - 1), st.integers(0, PAGES - 1)),
)
def test_pages_arrive_where_they_are_sent(
    pages: set[int], longest: int, places: Mapping[int, int]
) -> None:
    sources, targets = buffers(), [buffer * 0 for buffer in buffers()]
    places = {page: place for place, page in {b: a for a, b in places.items()}.items()}  # 1 to 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "PIECE_BYTES", longest * 3 * 4 * 4)  # of the wider plane
        pieces = stage(sources, pages, np.array)
    assert sorted(page for p in pieces for page in range(p.start, p.stop)) == sorted(pages)
    assert all(p.stop - p.start <= longest for p in pieces)
    put(targets, pieces, places)
    for source, target in zip(buffers(), targets, strict=True):
        wanted = np.zeros_like(source)
        for page in pages & places.keys():
            wanted[:, places[page]] = source[:, page]
        assert np.array_equal(target, wanted)


def test_neighbours_are_copied_as_one() -> None:
    copied: list[tuple[int, ...]] = []

    def to_host(pages: np.ndarray) -> np.ndarray:
        copied.append(pages.shape)
        return np.array(pages)

    pieces = stage(buffers()[:1], [5, 3, 4, 9, 0, 10], to_host)
    assert [(p.start, p.stop) for p in pieces] == [(0, 1), (3, 6), (9, 11)]
    assert [shape[1] for shape in copied] == [1, 3, 2]


def test_staging_changes_nothing_but_the_padding_page() -> None:
    staged = buffers()
    stage(staged, [2, 3], np.array)
    for now, before in zip(staged, buffers(), strict=True):
        assert np.array_equal(now[:, :PAGES], before[:, :PAGES])


def test_a_copy_that_cannot_come_back_is_found_while_staging() -> None:
    with pytest.raises(ValueError, match="could not broadcast"):
        stage(buffers(), [1, 2], lambda pages: np.array(pages)[..., :-1, :, 1:].T)


def test_nothing_is_staged_of_no_pages() -> None:
    assert stage(buffers(), [], np.array) == []
