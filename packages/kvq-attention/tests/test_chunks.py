"""Into how many chunks a request is cut, in numbers."""

from __future__ import annotations

import pytest

from kvq_attention import chunks

SIZES = {"alone": 256, "smallest": 128, "largest": 1024, "most": 256}


@pytest.mark.parametrize(
    ("visible", "wanted", "found"),
    [
        (1, 132, 1),
        (256, 132, 1),
        (257, 132, 2),
        (1000, 132, 7),
        (1000, 2, 2),
        (1024, 1, 1),
        (1025, 1, 2),
        (8192, 132, 64),
        (8192, 33, 33),
        (8192, 1, 8),
        (32768, 132, 132),
        (32768, 16, 32),
        (10**6, 1, 256),
        (10**6, 1056, 256),
    ],
)
def test_chunks_are_as_many_as_wanted_unless_they_were_too_small_or_large(
    visible: int, wanted: int, found: int
) -> None:
    assert chunks.count(visible, wanted, **SIZES) == found


@pytest.mark.parametrize("wanted", [1, 2, 7, 33, 132, 10**6])
def test_a_longer_request_never_has_fewer(wanted: int) -> None:
    """So that the longest of a batch bounds all."""
    counts = [chunks.count(visible, wanted, **SIZES) for visible in range(1, 300_000, 61)]
    assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("requests", "pieces", "found"),
    [(1, 8, 132), (4, 8, 33), (16, 8, 8), (128, 8, 1), (10**6, 8, 1), (1, 1, 1056), (None, 8, 16)],
)
def test_a_device_is_filled_by_the_pieces_of_all_requests(
    requests: int | None, pieces: int, found: int
) -> None:
    assert chunks.wanted(requests, pieces, at_once=1056) == found
