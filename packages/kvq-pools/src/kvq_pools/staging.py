"""Pages of a tier copied to the host and back, a run of neighbours at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Array = Any  # NumPy, torch or CuPy: whatever the pool's `empty` returns

# A slice over all layers is not contiguous, and libraries copy it through as much temporary
# memory of the device as it has bytes; longer pieces copy no faster.
PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages [start, stop) on the host: of each buffer of a tier, [layers, stop - start, …]."""

    start: int
    stop: int
    copies: tuple[Array, ...]


def stage(
    buffers: Sequence[Array], pages: Collection[int], to_host: Callable[[Array], Array]
) -> list[Piece]:
    """Copies of some pages of a tier's buffers [layers, pages + 1, …].

    That they can be copied back is tried on the last page, the padding page, whose bytes nobody
    reads: what is wrong with `to_host` shows here, where nothing is lost.
    """
    if not pages:
        return []
    page_bytes = max(int(buffer.nbytes) // buffer.shape[1] for buffer in buffers)
    same = [(page, page) for page in sorted(pages)]
    pieces = [
        Piece(start, start + length, tuple(to_host(b[:, start : start + length]) for b in buffers))
        for start, _, length in _runs(same, longest=max(1, PIECE_BYTES // page_bytes))
    ]
    for buffer, copy in zip(buffers, pieces[0].copies, strict=True):
        buffer[:, -1:] = copy[:, :1]
    return pieces


def put(buffers: Sequence[Array], pieces: Sequence[Piece], places: Mapping[int, int]) -> None:
    """Copy staged pages back, each to its place: page → page; those without one are left out."""
    for piece in pieces:
        held = range(piece.start, piece.stop)
        placed = [(page - piece.start, places[page]) for page in held if page in places]
        for offset, place, length in _runs(placed, longest=len(held)):
            for buffer, copy in zip(buffers, piece.copies, strict=True):
                buffer[:, place : place + length] = copy[:, offset : offset + length]


def _runs(pairs: Sequence[tuple[int, int]], longest: int) -> Iterator[tuple[int, int, int]]:
    """(first of one, first of the other, length) where both numbers of the pairs count up."""
    begin = 0
    for i in range(1, len(pairs) + 1):
        counts_up = i < len(pairs) and pairs[i] == (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1)
        if not counts_up or i - begin == longest:
            yield (*pairs[begin], i - begin)
            begin = i
