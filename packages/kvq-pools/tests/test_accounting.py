"""Planned bytes are the bytes that are alive: every family, codec, width and size of page."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from device import Device, lazily_zeroed
from family_cases import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import HEAD_DIMS, PAGE_TOKENS, PRICES, spec

from kvq_codecs import RowError
from kvq_pools import PlanError, Pool, PoolPlan, hybrid_swa, mha, window_pages_per_request

GIB = 2**30


def other_codec(codec: str, dim: int) -> str:
    """The codec after that one, in PRICES, that stores rows of that width."""
    names = list(PRICES)
    after = names[names.index(codec) + 1 :] + names
    return next(name for name in after if dim % PRICES[name][0] == 0)


@pytest.mark.parametrize("codec", PRICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_bytes_are_the_live_buffers_bytes(family: str, codec: str) -> None:
    case = FAMILIES[family]

    def check(device: Device, pool: Pool, name: str, pages: int) -> None:
        wanted = case.nbytes(PRICES[name][1](dim), 2 * dim, pages, page_tokens)
        assert wanted == device.live_bytes == pool.nbytes == pool.plan.nbytes(pages)
        tiers = [pool.plan.tier_bytes(tier.name, pages) for tier in pool.plan.tiers]
        assert sum(tiers) == wanted

    for dim in (d for d in HEAD_DIMS if d % PRICES[codec][0] == 0):
        for page_tokens in PAGE_TOKENS:
            if page_tokens % case.needs_groups_of:
                with pytest.raises(PlanError, match=f"page_tokens {page_tokens} is not a multiple"):
                    case.make(spec(codec), dim, page_tokens)
                continue
            device = Device()
            pool = device.pool(case.make(spec(codec), dim, page_tokens), 2)
            check(device, pool, codec, 2)
            pool.rebuild(3)
            check(device, pool, codec, 3)
            pool.rebuild(1)
            check(device, pool, codec, 1)
            other = other_codec(codec, dim)
            pool.rebuild(2, plan=case.make(spec(other), dim, page_tokens))
            check(device, pool, other, 2)


@pytest.mark.parametrize("codec", [name for name, (divisor, _) in PRICES.items() if divisor > 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_widths_that_a_codec_does_not_store_are_refused_by_name(family: str, codec: str) -> None:
    divisor = PRICES[codec][0]
    for dim in (d for d in (*HEAD_DIMS, 100) if d % divisor):
        with pytest.raises(RowError, match=rf"{codec}\b.*\b{dim}\b.*\b{divisor}\b"):
            FAMILIES[family].make(spec(codec), dim, 16)


def test_qsa_refuses_pages_that_no_whole_group_fits() -> None:
    said = "page_tokens 1 is not a multiple of the 4 slots that share a row of slab 'index_k'"
    with pytest.raises(PlanError, match=said):
        FAMILIES["qsa"].make(spec("q8_0"), 64, 1)


# name → heads, width, codecs: what a tier may hold
TIERS = st.tuples(
    st.integers(1, 3),
    st.sampled_from([64, 96, 128, 256, 512]),
    st.sampled_from(["bf16", "q8_0", "fp8", "nvfp4", "q4_0"]),
    st.sampled_from(["fp16", "q6_0", "fp8", "fp8_e4m3"]),
)


@settings(max_examples=150, deadline=None)
@given(
    full=TIERS,
    sliding=TIERS,
    layers=st.lists(st.booleans(), min_size=2, max_size=9).filter(lambda a: {*a} == {True, False}),
    window=st.integers(1, 300),
    step=st.integers(1, 300),
    requests=st.integers(1, 5),
    page_tokens=st.sampled_from(PAGE_TOKENS),
    pages=st.integers(1, 6),
)
def test_p113_capacity_hybrid_models_are_planned_as_they_are_allocated(
    full: tuple[int, int, str, str],
    sliding: tuple[int, int, str, str],
    layers: list[bool],
    window: int,
    step: int,
    requests: int,
    page_tokens: int,
    pages: int,
) -> None:
    codecs_of = {True: full[2:], False: sliding[2:]}
    k, v = ({n: spec(codecs_of[is_full][i]) for n, is_full in enumerate(layers)} for i in (0, 1))
    window_pages = requests * window_pages_per_request(window, step, page_tokens)
    plan = hybrid_swa(
        full_layers=[n for n, is_full in enumerate(layers) if is_full],
        window_layers=[n for n, is_full in enumerate(layers) if not is_full],
        window=window,
        kv_heads=full[0],
        head_dim=full[1],
        window_kv_heads=sliding[0],
        window_head_dim=sliding[1],
        k=k,
        v=v,
        page_tokens=page_tokens,
        window_pages=window_pages,
    )
    taken = {True: pages + 1, False: window_pages + 1}
    wanted = sum(
        taken[is_full] * page_tokens * heads * (PRICES[k_codec][1](dim) + PRICES[v_codec][1](dim))
        for is_full in layers
        for heads, dim, k_codec, v_codec in [full if is_full else sliding]
    )
    pool = Pool(plan, pages, lazily_zeroed)
    assert wanted == plan.nbytes(pages) == pool.nbytes
    assert plan.token_bytes_by_tier["window"] * page_tokens == plan.tier("window").page_bytes(
        page_tokens
    )


def test_p113_capacity_a_window_tier_does_not_reserve_whole_sequences() -> None:
    """24 layers of 8 KV heads × 64, every second one slides 128; 32 requests of 8,192 tokens."""
    s = spec("bf16")
    per_request = window_pages_per_request(128, 512, 16)
    plan = hybrid_swa(
        full_layers=range(1, 24, 2),
        window_layers=range(0, 24, 2),
        window=128,
        kv_heads=8,
        head_dim=64,
        k=s,
        v=s,
        page_tokens=16,
        window_pages=32 * per_request,
    )
    page = 12 * 2 * 8 * 64 * 2 * 16  # bytes of a page of either tier
    pages = 32 * 8192 // 16
    assert per_request == 41  # 639 positions from the last of a page on
    assert plan.nbytes(pages) == (pages + 1 + 32 * 41 + 1) * page
    assert 6.4 < plan.nbytes(pages) / GIB < 6.5 < 12
    assert Pool(plan, pages, lazily_zeroed).nbytes == plan.nbytes(pages)


@pytest.mark.parametrize("codec", ["iso4", "iso3", "q4_0", "nvfp4", "q6_0", "fp8", "q8_0"])
def test_p108_capacity_what_is_allocated_is_what_the_format_says_and_less_than_bf16(
    codec: str,
) -> None:
    def a_vector(name: str) -> float:
        s, device = spec(name), Device()
        plan = mha(layers=(0,), kv_heads=1, head_dim=128, k=s, v=s, page_tokens=16)
        pool = device.pool(plan, 3)
        assert device.live_bytes == pool.nbytes
        return device.live_bytes / (2 * 4 * 16)

    assert a_vector("bf16") == 256
    assert a_vector(codec) == PRICES[codec][1](128) < 256 * 0.54


def test_p126_layout_each_layer_has_the_shape_of_its_own_codec() -> None:
    layouts = {0: spec("bf16"), 1: spec("fp8"), 2: spec("q4_0")}
    plan = mha(layers=range(3), kv_heads=2, head_dim=512, k=layouts, v=layouts, page_tokens=16)
    pool = Pool(plan, 2)
    row_bytes = {
        layer: sum(a.shape[-1] * a.dtype.itemsize for a in pool.view("k", layer).planes.values())
        for layer in layouts
    }
    assert row_bytes == {0: 1024, 1: 516, 2: 288}
    assert plan.token_bytes == 2 * 2 * (1024 + 516 + 288)
    for layer, layout in layouts.items():
        assert pool.view("v", layer).spec is layout


def test_f27_capacity_the_padding_page_is_in_the_plan_where_a_page_is_large() -> None:
    """60 layers and pages of 128 tokens: a page that nobody counted would be a GB."""
    s = spec("bf16")
    plan = mha(layers=range(60), kv_heads=64, head_dim=512, k=s, v=s, page_tokens=128)
    page = 60 * 2 * 64 * 512 * 2 * 128
    assert plan.page_bytes == page > 10**9
    budget = 4 * page + page // 2
    pages = plan.pages_for(budget)
    assert pages == 3  # and the fourth is padding
    pool = Pool(plan, pages, lazily_zeroed)
    assert pool.nbytes == plan.nbytes(pages) == 4 * page <= budget
    assert pool.view("k", 59).lead[0] == pages + 1


def test_p024_capacity_quantizing_one_tier_inflates_no_page_of_another() -> None:
    def prices(codec: str) -> dict[str, float]:
        plan = hybrid_swa(
            full_layers=(3,),
            window_layers=(0, 1, 2),
            window=64,
            kv_heads=2,
            head_dim=128,
            k={3: spec(codec), **dict.fromkeys(range(3), spec("bf16"))},
            v={3: spec(codec), **dict.fromkeys(range(3), spec("bf16"))},
            page_tokens=16,
            window_pages=5,
        )
        return plan.token_bytes_by_tier

    assert prices("bf16") == {"full": 2 * 2 * 256, "window": 3 * 2 * 2 * 256}
    assert prices("q4_0") == {"full": 2 * 2 * 72, "window": 3 * 2 * 2 * 256}


def byte_ranges(pool: Pool) -> list[tuple[int, int]]:
    """[first, last) addresses of every page of every plane, layer and slab."""
    ranges = []
    for tier in pool.plan.tiers:
        for slab in tier.slabs:
            for layer in slab.layers:
                for plane in pool.view(slab.name, layer).planes.values():
                    begin = plane.__array_interface__["data"][0]
                    step = plane.strides[0]
                    ranges += [
                        (begin + p * step, begin + (p + 1) * step) for p in range(len(plane))
                    ]
    return ranges


@settings(max_examples=100, deadline=None)
@given(
    codecs=st.tuples(*[st.sampled_from(["fp8", "q8_0", "nvfp4", "iso4", "q4_0"])] * 4),
    page_tokens=st.sampled_from(PAGE_TOKENS),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pages=st.integers(1, 5),
    window_pages=st.integers(1, 5),
)
def test_p020_hybrid_pool_groups_of_two_widths_with_scales_never_overlap(
    codecs: tuple[str, str, str, str],
    page_tokens: int,
    heads: tuple[int, int],
    pages: int,
    window_pages: int,
) -> None:
    """Layers of head_dim 512 beside sliding ones of 256; codes and scales, in bytes."""
    plan: PoolPlan = hybrid_swa(
        full_layers=(1, 4),
        window_layers=(0, 2, 3),
        window=33,
        kv_heads=heads[0],
        head_dim=512,
        window_kv_heads=heads[1],
        window_head_dim=256,
        k={n: spec(codecs[0] if n in (1, 4) else codecs[1]) for n in range(5)},
        v={n: spec(codecs[2] if n in (1, 4) else codecs[3]) for n in range(5)},
        page_tokens=page_tokens,
        window_pages=window_pages,
    )
    pool = Pool(plan, pages)
    ranges = sorted(byte_ranges(pool))
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
    assert sum(stop - start for start, stop in ranges) == plan.nbytes(pages)


def test_p118_int32_overflow_pages_beyond_2_31_elements_are_where_they_should_be() -> None:
    """One plane of 2³² + 2¹⁷ bytes; a 32-bit offset would land 4 GiB below, or 2 GiB, or fault."""
    s = spec("q4_0")
    plan = mha(layers=(0,), kv_heads=8, head_dim=128, k=s, v=spec("iso3"), page_tokens=16)
    page_codes = 16 * 8 * 64
    pages = 2**32 // page_codes + 16
    try:
        pool = Pool(plan, pages, lazily_zeroed)
    except MemoryError:
        pytest.skip("the system does not promise 10 GiB of memory that is never written to")
    codes = pool.view("k", 0).planes["codes"]
    assert codes.size > 2**32
    assert pool.nbytes == plan.nbytes(pages)
    last = pages - 1
    codes[last] = 7
    pool.copy_page("full", last, last - 1)
    first = codes.__array_interface__["data"][0]
    assert codes[last].__array_interface__["data"][0] == first + last * page_codes
    assert np.all(codes[last - 1] == 7)
    for page in (last, last - 1):
        for wrapped in (page - 2**32 // page_codes, page - 2**31 // page_codes):
            assert not codes[wrapped].any()
