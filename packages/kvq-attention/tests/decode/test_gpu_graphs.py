"""Captured graphs: replays with other tables, lengths and slots give the bits of eager calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvq_attention import Batch, Table, launches, ops
from kvq_codecs import Encoded

from .. import big
from ..scene import TIER, assert_same_bytes
from .places import ON_GPU, Place, each_codec

# The shape of test_gpu.py, compiled there already
REQUESTS, HEADS, KV_HEADS, DIM, PAGE_TOKENS = 6, 32, 8, 128, 16
TOKENS, PAGES, COLUMNS = 16, 400, 64


@dataclass(frozen=True)
class Step:
    """The tensors of one step, of the sizes that a graph was captured for; unused ones padded."""

    batch: Batch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.q, self.k, self.v, *self.batch.tensors().values()]

    def write(self, other: Step) -> None:
        for own, given in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(given)


def step(lengths: list[int], queries: list[int], seed: int) -> Step:
    """Requests of these lengths on pages of their own; what is left is padding."""
    random = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randperm(PAGES, generator=random, device="cuda")
    table = torch.full((REQUESTS, COLUMNS), -1, dtype=torch.int32, device="cuda")
    slots = torch.full((TOKENS,), -1, dtype=torch.int64, device="cuda")
    row = 0
    for r, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        size = -(-length // PAGE_TOKENS)
        pages, ids = ids[:size], ids[size:]
        table[r, :size] = pages
        position = torch.arange(length - count, length, device="cuda")
        page = pages[position // PAGE_TOKENS]
        slots[row : row + count] = page * PAGE_TOKENS + position % PAGE_TOKENS
        row += count
    spare = REQUESTS - len(lengths)
    offsets = torch.tensor([0, *queries, *[0] * spare]).cumsum(0)
    batch = Batch(
        offsets.to("cuda", torch.int32),
        torch.tensor([*lengths, *[0] * spare], dtype=torch.int32, device="cuda"),
        {TIER: Table(table, slots)},
        PAGE_TOKENS,
    )
    q = big.normal(random, torch.bfloat16, TOKENS, HEADS, DIM)
    k, v = (big.normal(random, torch.bfloat16, TOKENS, KV_HEADS, DIM) for _ in range(2))
    return Step(batch, q, k, v)


def run(
    place: Place, given: Step, caches: tuple[Encoded, Encoded], sinks: torch.Tensor
) -> torch.Tensor:
    """A layer of a step: store, then decode."""
    slots = given.batch.tables[TIER].slot_mapping
    ops.store(given.k, given.v, *caches, slots, backend="triton")
    return ops.decode(
        given.q,
        *caches,
        given.batch,
        TIER,
        scale=DIM**-0.5,
        window=300,
        softcap=20.0,
        sinks=sinks,
        backend=place.backend,
    )


STEPS = [
    ([1, 700, 33, 16, 512, 90], [1, 1, 1, 1, 1, 1]),
    ([1000, 17], [8, 7]),
    ([], []),
    ([513, 2, 300, 41], [1, 2, 3, 4]),
    ([700], [16]),
]


VERIFIED = 3  # query tokens of a request: drafts and the token before them
VERIFY = [  # lengths; none = padding alone
    [1000, 700, 33, 16, 512],
    [3, 4, 17, 18, 900],
    [640, 15, 16, 19],
    [],
    [31, 1023, 32, 5, 256],
]


@each_codec(places=ON_GPU)
def test_a_replay_gives_the_bits_of_an_eager_call(codec: str, place: Place) -> None:
    check_replays(codec, place, STEPS)


@each_codec(places=ON_GPU)
def test_p018_a_captured_verify_step_obeys_new_lengths_slots_and_tables(
    codec: str, place: Place
) -> None:
    """Speculative decoding: the graph was captured for other requests on other pages."""
    check_replays(codec, place, [(lengths, [VERIFIED] * len(lengths)) for lengths in VERIFY])


def check_replays(codec: str, place: Place, steps: list[tuple[list[int], list[int]]]) -> None:
    """A graph of the first step, replayed for all, beside eager calls on a cache of their own."""
    caches = [big.empty(codec, PAGES, KV_HEADS, PAGE_TOKENS, DIM) for _ in range(2)]
    random = torch.Generator("cuda").manual_seed(len(codec))
    for cache in caches:  # every slot holds a row: lengths count tokens that other steps stored
        rows = big.normal(random, torch.float32, PAGES * PAGE_TOKENS, KV_HEADS, DIM)
        big.put(cache, rows, list(range(PAGES)))
    eager, replayed = ((caches[0].map(torch.clone), caches[1].map(torch.clone)) for _ in range(2))
    sinks = torch.linspace(-2, 2, HEADS, device="cuda")
    static = step(*steps[0], seed=100)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # compiles, and writes to none that is compared
        run(place, static, (caches[0], caches[1]), sinks)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with launches.counting() as counted, torch.cuda.graph(graph):
        out = run(place, static, replayed, sinks)
    assert counted[place.backend]["decode"] > 0 and counted["triton"]["store"] > 0

    for seed, (lengths, queries) in enumerate([*steps, *steps[::-1]]):
        given = step(lengths, queries, seed)
        static.write(given)
        graph.replay()
        expected = run(place, given, eager, sinks)
        assert torch.equal(out, expected)
        padding = slice(sum(queries), None)
        assert torch.equal(out[padding], torch.zeros_like(out[padding]))
        if lengths:
            assert torch.isfinite(out).all() and bool(out.any())
        for got, wanted in zip(replayed, eager, strict=True):
            assert_same_bytes(got, wanted)
