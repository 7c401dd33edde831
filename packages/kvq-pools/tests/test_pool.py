"""Memory: its size, its first contents, and what the views show of it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from device import Device, planes, scribble
from family_cases import FAMILIES
from pool_cases import FIVE, Recorder, spec

import kvq_codecs
from kvq_codecs import PlaneError, Spec
from kvq_pools import CacheSpace, PageError, PlanError, Pool, PoolPlan, Slab, Tier, mha


def as_mha(k: Spec, v: Spec, dim: int, page_tokens: int) -> PoolPlan:
    return mha(layers=(1, 4, 6), kv_heads=2, head_dim=dim, k=k, v=v, page_tokens=page_tokens)


def test_planned_bytes_where_codecs_and_rows_differ_within_a_tier() -> None:
    slabs = (
        Slab("k", spec("bf16"), (0, 1), 2, 80),
        Slab("k", spec("q4_0"), (2,), 4, 256),
        Slab("index_k", spec("bf16"), (2,), 1, 128, slots_per_row=4),
    )
    plan = PoolPlan(16, (Tier("full", slabs),))
    memory = Recorder()
    pool = Pool(plan, 5, memory)
    wanted = 6 * (2 * 2 * 16 * 160 + 4 * 16 * 144 + 4 * 256)
    assert wanted == memory.nbytes == pool.nbytes == plan.nbytes(5)
    assert pool.view("k", 2).shape == (6, 4, 16, 256)
    assert pool.view("index_k", 2).shape == (6, 1, 4, 128)


@pytest.mark.parametrize("codec", kvq_codecs.names())
def test_memory_starts_zeroed_whatever_it_held(codec: str) -> None:
    memory = Recorder()
    pool = Pool(as_mha(spec(codec), spec("fp32"), 128, 16), 2, memory)
    assert all(not buffer.view(np.uint8).any() for buffer in memory.buffers)
    fresh = kvq_codecs.get(codec).decode(pool.view("k", 4))
    assert np.all(fresh == 0)


def test_views_are_all_of_the_memory_and_never_overlap() -> None:
    memory = Recorder()
    pool = Pool(FAMILIES["hybrid_swa"].make(spec("five"), 96, 16), 3, memory)
    layers = {"full": (2,), "window": (0, 1)}
    planes = [
        array
        for tier, slab in [("full", "k"), ("full", "v"), ("window", "k"), ("window", "v")]
        for layer in layers[tier]
        for array in pool.view(slab, layer).planes.values()
    ]
    for number, array in enumerate(planes, 1):
        array[...] = number
    for number, array in enumerate(planes, 1):
        assert np.all(array == number)
    assert sum(array.nbytes for array in planes) == memory.nbytes
    assert all(buffer.all() for buffer in memory.buffers)


@pytest.mark.parametrize("codec", kvq_codecs.names())
def test_rows_written_at_slots_are_read_back_beside_poison(codec: str) -> None:
    pool = Pool(as_mha(spec(codec), spec(codec), 128, 4), 6)
    space = CacheSpace(pool.plan, 6)
    other, mine = space.open(), space.open()
    for tokens in (3, 5, 9):  # interleaved, so that mine has no pages side by side
        other.grow(tokens)
        mine.grow(tokens)
    rows = np.random.default_rng(0).standard_normal((9, 2, 128)).astype(np.float32)
    encoded = kvq_codecs.get(codec).encode(rows)
    view = pool.view("v", 6)
    for array in view.planes.values():
        array.view(np.uint8)[...] = 0xFF
    pages, offsets = np.divmod(mine.slots("full", 0, 9), 4)
    for name, array in view.planes.items():
        array[pages, :, offsets] = encoded.planes[name]
    back = kvq_codecs.get(codec).decode(view.map(lambda array: array[pages, :, offsets]))
    assert np.array_equal(back, kvq_codecs.get(codec).decode(encoded))


def test_a_codec_that_nobody_knows_is_held_without_an_edit() -> None:
    pool = Pool(as_mha(FIVE, FIVE, 96, 32), 4)
    view = pool.view("k", 4)
    assert view.spec is FIVE
    assert view.shape == (5, 2, 32, 96)
    assert {n: (a.shape[-1], str(a.dtype)) for n, a in view.planes.items()} == {
        "words": (30, "uint16"),
        "scale": (2, "float16"),
        "offset": (1, "float32"),
    }


def test_pages_of_a_tier_and_the_one_that_is_padding() -> None:
    pool = Pool(FAMILIES["hybrid_swa"].make(spec("q8_0"), 64, 16), 9)
    assert (pool.pages("full"), pool.padding_page("full")) == (9, 9)
    assert (pool.pages("window"), pool.padding_page("window")) == (2, 2)
    assert pool.view("k", 2).lead[0] == 10
    assert pool.view("k", 0).lead[0] == 3
    with pytest.raises(KeyError, match="ring"):
        pool.pages("ring")


def test_a_page_is_copied_in_every_slab_plane_and_layer() -> None:
    plan = FAMILIES["qsa"].make(spec("five"), 96, 8)
    pool = Pool(plan, 5)
    scribble(pool)
    for tier, source, target in (("full", 1, 4), ("full", 4, 0), ("ring", 2, 0), ("full", 2, 2)):
        pages = range(pool.pages(tier) + 1)
        before = {t.name: planes(pool, t.name) for t in plan.tiers}
        before = {name: [plane.copy() for plane in all_] for name, all_ in before.items()}
        pool.copy_page(tier, source, target)
        for plane, old in zip(planes(pool, tier), before.pop(tier), strict=True):
            for page in pages:
                assert np.array_equal(plane[page], old[source if page == target else page])
        for other, all_ in before.items():
            assert all(map(np.array_equal, planes(pool, other), all_))


@pytest.mark.parametrize("bad", [5, -1, 2**40, 1.0, True])
def test_only_pages_of_the_tier_are_copied(bad: Any) -> None:
    pool = Pool(FAMILIES["qsa"].make(spec("q8_0"), 64, 8), 5)
    for pages in ((bad, 0), (0, bad)):
        with pytest.raises(PageError):
            pool.copy_page("full", *pages)
    with pytest.raises(PageError, match=r"tier 'ring' has pages 0 … 2, got 3"):
        pool.copy_page("ring", 0, 3)
    with pytest.raises(KeyError, match="window"):
        pool.copy_page("window", 0, 1)


def test_views_that_are_not_stored() -> None:
    pool = Pool(as_mha(spec("q8_0"), spec("q8_0"), 64, 16), 1)
    with pytest.raises(KeyError, match=r"layer 2\b.*\[1, 4, 6\]"):
        pool.view("k", 2)
    with pytest.raises(KeyError, match=r"latent.*\['k', 'v'\]"):
        pool.view("latent", 1)


def test_an_allocator_that_returns_something_else_is_refused() -> None:
    plan = as_mha(spec("q8_0"), spec("q8_0"), 64, 16)
    with pytest.raises(PlanError, match="returned shape"):
        Pool(plan, 1, lambda shape, dtype: np.empty(shape[1:], dtype))
    with pytest.raises(PlaneError, match="uint8"):
        Pool(plan, 1, lambda shape, _: np.empty(shape, "float32"))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_pool_that_could_not_be_made_holds_no_memory(error: type[BaseException]) -> None:
    """Not even while somebody handles or keeps the error, who may want to make a smaller one."""
    plan = as_mha(spec("q8_0"), spec("q4_0"), 64, 16)
    whole = Device()
    whole.pool(plan, 3)
    Pool(plan, 3, whole.empty)
    kept = []
    for step in range(len(whole.steps)):
        device = Device()
        device.fail_at, device.error = [step], error
        with pytest.raises(error) as caught:
            Pool(plan, 3, device.empty)
        kept.append(caught.value)
        gc.collect()
        assert device.live_bytes == 0, step
    assert len(kept) >= 8


@pytest.mark.parametrize("pages", [0, -1, 2.0])
def test_a_pool_needs_pages(pages: Any) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        Pool(as_mha(spec("q8_0"), spec("q8_0"), 64, 16), pages)


@pytest.mark.parametrize(
    "library",
    [
        "torch:cpu",
        pytest.param("torch:cuda", marks=pytest.mark.gpu),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ],
)
def test_memory_of_other_libraries_is_zeroed(library: str) -> None:
    name, _, device = library.partition(":")
    xp = pytest.importorskip(name)
    buffers: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        raw = np.full((*shape[:-1], shape[-1] * np.dtype(dtype).itemsize), 0xFF, np.uint8)
        if name == "torch":
            buffers.append(xp.from_numpy(raw).to(device).view(getattr(xp, dtype)))
        else:
            buffers.append(xp.asarray(raw).view(dtype))
        return buffers[-1]

    plan = as_mha(spec("bf16"), spec("nvfp4"), 64, 16)
    pool = Pool(plan, 2, empty)
    assert {str(b.dtype).removeprefix("torch.") for b in buffers} == {"uint8", "uint16", "float32"}
    for buffer in buffers:
        host = buffer.cpu().numpy() if name == "torch" else buffer.get()
        assert not host.any()
    assert pool.nbytes == plan.nbytes(2)
    assert pool.view("k", 4).shape == (3, 2, 16, 64)
