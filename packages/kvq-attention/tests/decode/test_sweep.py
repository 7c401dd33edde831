"""Decode kernels against float64 attention over the decoded cache: pairs of everything."""

from __future__ import annotations

import pytest
import torch

from .cases import DTYPES, PACKED, PAGE_TOKENS, SCORINGS, ieee, name_of, scoring_of
from .places import EMULATED, INTERPRETED, ON_CPU, Place, each_codec
from .sweeps import GROUPS, QUERIES, SWEEPS, Case

pytestmark = ieee


@pytest.mark.parametrize(
    ("place", "case"),
    [
        pytest.param(place, case, marks=place.marks, id=f"{place}-{name_of(case)}")
        for place, cases in SWEEPS.items()
        for case in cases
    ],
)
def test_decode_sweeps_pairs_of_everything(place: Place, case: Case) -> None:
    n, group, queries = case["page_tokens"], case["group"], case["queries"]
    kv_heads = 2 if group == 1 else 1
    long = n + n // 2 + 1
    place.check(
        case["codec"],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=case["dim"],
        page_tokens=n,
        lengths=(long,) if isinstance(queries, int) else (long, 5, n),
        queries=queries,
        dtype=case["dtype"],
        seed=SWEEPS[place].index(case),
        **scoring_of(case["scoring"], group * kv_heads, case["dim"], place.device),
    )


@pytest.mark.parametrize("place", SWEEPS, ids=str)
def test_the_sweep_has_every_pair(place: Place) -> None:
    cases = SWEEPS[place]
    pairs = {(case["codec"], case["dim"]) for case in cases}
    assert pairs == {(codec, dim) for codec in place.codecs for dim in place.dims_of(codec)}
    pairs = {(case["codec"], case["dtype"]) for case in cases}
    assert pairs == {(codec, dtype) for codec in place.codecs for dtype in place.dtypes(codec)}
    for axis, values in (("group", GROUPS), ("queries", QUERIES), ("page_tokens", PAGE_TOKENS)):
        for other, others in (("codec", place.codecs), ("scoring", SCORINGS), ("dtype", DTYPES)):
            pairs = {(case[other], case[axis]) for case in cases}
            assert len(pairs) == len(others) * len(values), (axis, other)


@pytest.mark.parametrize(
    ("place", "codec", "dim"),
    [
        pytest.param(place, codec, dim, marks=place.marks, id=f"{place}-{codec}-{dim}")
        for place in [INTERPRETED]  # of the emulator the sweep has all, which it compiles once
        for codec in PACKED
        for dim in place.dims_of(codec)
    ],
)
def test_p054_every_head_dim_of_every_packed_codec(place: Place, codec: str, dim: int) -> None:
    place.check(codec, heads=2, kv_heads=1, dim=dim, lengths=(37,), dtype=torch.bfloat16)


@each_codec(places=ON_CPU)
@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
def test_p057_every_page_size_at_its_edges(codec: str, page_tokens: int, place: Place) -> None:
    lengths = (page_tokens - 1, page_tokens, page_tokens + 1)
    shape = {"heads": 1, "kv_heads": 1, "dim": 128, "page_tokens": page_tokens, "lengths": lengths}
    place.check(codec, **shape)


@pytest.mark.parametrize("scoring", ["plain", "all"])
@each_codec(places=[EMULATED])
def test_keys_and_values_of_two_codecs(codec: str, scoring: str, place: Place) -> None:
    """Each codec for keys, with another one's values: their sizes and scales differ."""
    other = place.codecs[(place.codecs.index(codec) + 4) % len(place.codecs)]
    shape = {"heads": 6, "kv_heads": 2, "dim": 128, "lengths": (40, 333), "queries": (2, 1)}
    place.check(codec, other, **shape, **scoring_of(scoring, 6, 128))
