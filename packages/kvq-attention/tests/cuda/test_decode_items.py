"""How a batch is cut: what the device cuts, and what the launcher has made room for."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvq_attention import Batch, Scoring, Table
from kvq_attention.chunks import USUAL_REQUESTS
from kvq_attention.cuda import decode, items
from kvq_attention.cuda.decode import Kernels, Merge

from ..scene import TIER, poisoned
from . import emulated
from .emulator.program import Program, build, needs_compiler

pytestmark = needs_compiler

LONGEST = 2**31 - 1
WINDOWS = (None, 1, 100, 5000)
BASES = ("ALONE", "SMALLEST_CHUNK", "LARGEST_CHUNK")  # of what decides
# Sizes of chunks: those of the package, and others whose edges lie close together.
SIZES = (
    {"wanted": 1, **items.constants()},
    {"wanted": 6, **items.constants()},
    {"wanted": 10**6, **items.constants()},
    {
        **{"wanted": 3, "ALONE": 64, "CHUNK_STEP": 32},
        **{"SMALLEST_CHUNK": 32, "LARGEST_CHUNK": 96, "MOST_CHUNKS": 8},
    },
    {
        **{"wanted": 40, "ALONE": 1024, "CHUNK_STEP": 128},
        **{"SMALLEST_CHUNK": 256, "LARGEST_CHUNK": 1024, "MOST_CHUNKS": 128},
    },
)

KERNELS = """
#include "items.cuh"
extern "C" GLOBAL void cut_all(const i32* given, i32* out, int count, int reach, int wanted,
                               int window) {
  for (int i = lane(); i < count; i += 32) {
    const Cut c = cut(given[2 * i], given[2 * i + 1], reach, wanted, window);
    out[3 * i] = c.first;
    out[3 * i + 1] = c.size;
    out[3 * i + 2] = c.count;
  }
}
extern "C" GLOBAL void count_all(Arguments a, i32* out) {
  const int pieces = count_pieces<SET_ROWS>(a, pieces_of<SET_ROWS>(a, 0));
  if (lane() == 0) out[0] = pieces;
}
// For each piece: its request, those before, its chunks.
extern "C" GLOBAL void find_all(Arguments a, i32* out, int total) {
  for (int begin = 0; begin < total; begin += 5) {
    const Pieces first = pieces_of<SET_ROWS>(a, 0);
    Cursor<SET_ROWS> cursor = find<SET_ROWS>(a, begin, first);
    for (int piece = begin; piece < total && piece < begin + 5; piece++) {
      cursor.advance(a, piece);
      if (lane() == 0) {
        out[2 * piece] = cursor.index;
        out[2 * piece + 1] = piece - cursor.before;
      }
    }
  }
}
"""


@pytest.fixture(params=SIZES, ids=["ours of many", "ours of some", "ours of one", "small", "large"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    given: dict[str, int] = request.param
    for name in items.constants():
        monkeypatch.setattr(items, name, given[name])
    assert {"wanted": given["wanted"], **items.constants()} == given
    return given


def program(rows: int = 4) -> Program:
    return build(
        KERNELS,
        ["cut_all", "count_all", "find_all"],
        defines={**items.constants(), "SET_ROWS": rows},
    )


def cuts(
    sizes: dict[str, int], given: list[tuple[int, int]], reach: int, window: int | None
) -> list[list[int]]:
    """First position, tokens a chunk and chunks, by the device: of queries and length."""
    out = np.zeros((len(given), 3), np.int32)
    args = [np.array(given, np.int32), out, len(given), reach, sizes["wanted"], window or 0]
    program().launch("cut_all", grid=1, threads=32, args=args)
    return out.tolist()


def lengths_of_interest(sizes: dict[str, int]) -> list[int]:
    """All short ones, the neighbours of what decides, and large ones."""
    random = np.random.default_rng(3)
    edges = {
        base * factor + d
        for base in (sizes[name] for name in BASES)
        for factor in (1, 2, min(sizes["wanted"], 1000), sizes["MOST_CHUNKS"])
        for d in (-1, 0, 1)
    }
    large = (2.0 ** random.uniform(10, 31, 500)).astype(np.int64).clip(1, LONGEST - 10**5)
    return [*range(1, 2500), *sorted(edge for edge in edges if edge > 0), *map(int, large)]


@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_cover_what_is_seen_and_their_number_is_bounded(
    sizes: dict[str, int], window: int | None
) -> None:
    lengths = lengths_of_interest(sizes)
    given = [(min(i % 9, length), length) for i, length in enumerate(lengths)]
    for reach in (700, 3000, LONGEST):
        found = cuts(sizes, given, reach, window)
        for (asked, length), (first, size, chunks) in zip(given, found, strict=True):
            what = asked, length, reach
            assert first % items.TILE == 0 and size > 0, what
            assert size % sizes["CHUNK_STEP"] == 0, what
            bound = items.most_chunks(reach, window, max(asked, 1), sizes["wanted"])
            assert chunks <= bound <= sizes["MOST_CHUNKS"], what
            assert (chunks > 0) == (asked > 0), what
            if asked and length <= reach:
                seen = 0 if window is None else max(length - asked - window + 1, 0)
                assert first <= seen < first + items.TILE, what
                assert first + (chunks - 1) * size < length <= first + chunks * size, what


def test_the_bound_of_chunks_is_reached(sizes: dict[str, int]) -> None:
    """A looser one would cost memory: partial results have room for it."""
    for reach in [1, *(sizes[name] for name in BASES), 5 * sizes["LARGEST_CHUNK"], 10**5]:
        given = [(1, length) for length in range(1, min(reach, 20000) + 1)]
        given += [(1, reach - i) for i in range(min(reach, 1000))]
        most = max(chunks for _, _, chunks in cuts(sizes, given, reach, None))
        assert most <= items.most_chunks(reach, None, 1, sizes["wanted"]) <= 2 * most, reach


def test_the_cut_knows_nothing_of_a_requests_company(sizes: dict[str, int]) -> None:
    """Not even how wide the page table is that others made so."""
    given = [(1, length) for length in range(1, 3000, 11)]
    for window in (None, 500):
        whole = cuts(sizes, given, LONGEST, window)
        for reach in (2999, 3000, 10**6):
            assert cuts(sizes, given, reach, window) == whole


class Launched:
    """What a kernel was given, instead of a launch."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.given: Any = None

    def launch_beside(
        self, grid: tuple[int, ...], threads: int, shared_bytes: int, args: Any
    ) -> None:
        self.grid, (self.given,) = grid, args


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_there_is_room_for_every_piece(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever requests are asked for beside each other, and however many rows a block takes."""
    sizes = SIZES[3]
    for name in items.constants():
        monkeypatch.setattr(items, name, sizes[name])
    monkeypatch.setattr(items, "wanted", lambda *_, **__: sizes["wanted"])
    step, others = Launched(), Launched()
    monkeypatch.setattr(decode, "load", lambda *_: Kernels(step, (Merge(others, 32, 0, 1),), 0, 8))
    shape = emulated.picked("q8_0", "q8_0", 64, rows, torch.device("cpu"))
    assert shape.rows == rows
    monkeypatch.setattr(decode, "picked", lambda *_: shape)
    random = np.random.default_rng(rows)
    fullest = 0.0
    for group, requests, most, window in product(
        (1, 2, 3, 5, 8, 16, 20), (1, 2, 3, 40), (1, 4, 9), (None, 60)
    ):
        queries = random.integers(0, most + 1, requests)
        if not queries.sum():
            queries[0] = 1
        reach = int(random.choice([16, 64, 80, 400, 4000]))
        lengths = random.integers(most, max(reach, most) + 1, requests)
        batch = Batch(
            torch.tensor([0, *queries.cumsum()], dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            {
                TIER: Table(
                    torch.zeros(requests, -(-reach // 16), dtype=torch.int32),
                    torch.full((int(queries.sum()),), -1),
                )
            },
            16,
        )
        cache = poisoned("q8_0", 1, 2, 16, 64, "cpu")
        q = torch.zeros(int(queries.sum()), 2 * group, 64)
        decode.decode(q, cache, cache, batch, TIER, Scoring(1.0, window))
        out = np.zeros(1, np.int32)
        compiled = program(rows)
        compiled.launch("count_all", grid=1, threads=32, args=[step.given, out])
        total = int(out[0])
        assert 0 < total <= step.given.capacity
        fullest = max(fullest, total / step.given.capacity)
        found = np.zeros((total, 2), np.int32)
        compiled.launch("find_all", grid=1, threads=32, args=[step.given, found, total])
        counts = [int((found[:, 0] == r).sum()) for r in range(requests)]
        assert [bool(n) for n in counts] == [bool(n) for n in queries]
        assert found[:, 1].tolist() == [i for n in counts for i in range(n)]
    assert fullest == 1.0, "the bound is reached"


@pytest.mark.parametrize("wide", [False, True])
def test_as_many_chunks_are_wanted_as_fill_a_device(wide: bool) -> None:
    """By all requests that calls usually have, and all KV heads."""
    full = items.FULL_WIDE if wide else items.FULL_PACKED
    numbers = product((1, 24, 132), (1, 2, 8), (1, 16, 17), (1, 3, 16, 500))
    for processors, kv_heads, group, requests in numbers:
        found = items.wanted(requests, kv_heads, group, processors, wide=wide)
        each = requests * kv_heads * (1 + (group > 16))
        assert found * each <= max(full * processors, each) < (found + 1) * each
    assert items.wanted(None, 8, 4, 132, wide=wide) == full * 132 // (USUAL_REQUESTS * 8)
