"""What `store` writes: the codec's bytes, in the slots named, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import SlotError, ops
from kvq_codecs import Codec, Encoded, Plane, PlaneError, Spec

from .scene import V_GAIN, assert_same_bytes, dims_of, poisoned, put

PAGES, HEADS, PAGE_TOKENS = 6, 2, 16
SLOTS = [37, 94, 21, 20, 80, 33, 32, 47]  # no order, several pages, none at 0
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

every_codec = pytest.mark.parametrize("codec", kvq_codecs.names())


def cache(codec: str, dim: int | None = None, device: str = "cpu", pad: int = 0) -> Encoded:
    return poisoned(codec, PAGES, HEADS, PAGE_TOKENS, dim or dims_of(codec)[0], device, pad)


def rows(dim: int, seed: int, gain: float = 1.0, count: int = len(SLOTS)) -> torch.Tensor:
    return gain * torch.randn(count, HEADS, dim, generator=torch.Generator().manual_seed(seed))


def store_and_check(
    k: torch.Tensor,
    v: torch.Tensor,
    codecs: tuple[str, str],
    slots: list[int] = SLOTS,
    device: str = "cpu",
    pads: tuple[int, int] = (0, 0),
) -> None:
    """Store on the device; compare the whole caches with the codec's bytes by NumPy."""
    caches = [
        cache(c, x.shape[-1], device, p) for c, x, p in zip(codecs, (k, v), pads, strict=True)
    ]
    ops.store(
        k.to(device),
        v.to(device),
        *caches,
        torch.tensor(slots, dtype=torch.int64, device=device),
        backend="reference",
    )
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    for got, given in zip(caches, (k, v), strict=True):
        wanted = cache(got.spec.name, got.dim)
        put(wanted, given[kept], [slots[i] for i in kept])
        assert_same_bytes(got, wanted)


@pytest.mark.proves("reference.store.plain")
@every_codec
def test_store_writes_the_bytes_of_every_codec(codec: str, device: str) -> None:
    for dim in dims_of(codec):
        store_and_check(rows(dim, 0), rows(dim, 1, V_GAIN), (codec, codec), device=device)


@pytest.mark.proves("reference.store.mixed_codecs")
@pytest.mark.parametrize("codecs", [("q8_0", "q4_0"), ("iso3", "fp8"), ("nvfp4", "bf16")])
def test_store_takes_two_codecs(codecs: tuple[str, str], device: str) -> None:
    store_and_check(rows(128, 0), rows(128, 1, V_GAIN), codecs, device=device)


@pytest.mark.proves("reference.store.value_dim")
@pytest.mark.parametrize("codecs", [("fp8", "fp8"), ("q6_0", "iso4")])
def test_store_takes_two_head_dims(codecs: tuple[str, str], device: str) -> None:
    store_and_check(rows(64, 0), rows(256, 1, V_GAIN), codecs, device=device)


@every_codec
def test_p001_store_obeys_each_sources_own_pitch(codec: str) -> None:
    dim = dims_of(codec)[0]
    width = HEADS * dim
    qkv = torch.randn(len(SLOTS), 3 * width, generator=torch.Generator().manual_seed(2))
    packed_k = qkv[:, width : 2 * width].unflatten(1, (HEADS, dim))
    packed_v = qkv[:, 2 * width :].unflatten(1, (HEADS, dim))
    assert packed_k.stride(0) == 3 * width
    store_and_check(packed_k, packed_v.contiguous(), (codec, codec))
    store_and_check(packed_k.contiguous(), packed_v, (codec, codec))
    by_head = packed_k.transpose(0, 1).contiguous().transpose(0, 1)  # as transformers hands them
    store_and_check(by_head, packed_v, (codec, codec))


@pytest.mark.parametrize(
    ("dtype", "codec"), [(torch.bfloat16, "fp16"), (torch.float16, "bf16")], ids=str
)
def test_p034_store_converts_between_sixteen_bit_types(dtype: torch.dtype, codec: str) -> None:
    k, v = rows(64, 0).to(dtype), rows(64, 1, V_GAIN).to(dtype)
    caches = cache(codec, 64), cache(codec, 64)
    ops.store(k, v, *caches, torch.tensor(SLOTS), backend="reference")
    wanted_type = torch.float16 if codec == "fp16" else torch.bfloat16
    for got, given in zip(caches, (k, v), strict=True):
        plane = got.planes["values"].view(torch.int16)
        held = torch.stack([plane[s // PAGE_TOKENS, :, s % PAGE_TOKENS] for s in SLOTS])
        assert torch.equal(held.view(wanted_type), given.to(wanted_type))
        assert not torch.equal(held, given.view(torch.int16)), "reinterpreted, not converted"


@pytest.mark.proves("reference.store.float64")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_codec
def test_p051_store_takes_every_float_dtype(codec: str, dtype: torch.dtype) -> None:
    dim = dims_of(codec)[0]
    store_and_check(rows(dim, 0).to(dtype), rows(dim, 1, V_GAIN).to(dtype), (codec, codec))


def test_k_and_v_may_differ_in_dtype() -> None:
    store_and_check(rows(64, 0).bfloat16(), rows(64, 1, V_GAIN), ("q8_0", "q4_0"))


@every_codec
def test_store_skips_padding(codec: str) -> None:
    dim = dims_of(codec)[0]
    slots = [-1, 37, -1, 21, -1, -1, 95, -1]
    store_and_check(rows(dim, 0), rows(dim, 1, V_GAIN), (codec, codec), slots)


def test_nothing_is_stored_when_all_is_padding_or_empty() -> None:
    store_and_check(rows(64, 0), rows(64, 1), ("q4_0", "bf16"), [-1] * len(SLOTS))
    store_and_check(rows(64, 0, count=0), rows(64, 1, count=0), ("q4_0", "bf16"), [])


@pytest.mark.parametrize("codec", ["bf16", "q4_0", "q6_0", "nvfp4"])
def test_f03_store_obeys_each_caches_own_strides(codec: str) -> None:
    for pads in ((0, 3), (1, 0), (2, 5)):
        store_and_check(rows(64, 0), rows(64, 1, V_GAIN), (codec, codec), pads=pads)


@every_codec
def test_p074_bytes_are_the_same_in_a_batch_alone_and_token_by_token(codec: str) -> None:
    dim = dims_of(codec)[0]
    k, v, slots = rows(dim, 0), rows(dim, 1, V_GAIN), torch.tensor(SLOTS)
    together = cache(codec), cache(codec)
    ops.store(k, v, *together, slots, backend="reference")
    for size in (1, 3):
        apart = cache(codec), cache(codec)
        for part in torch.arange(len(SLOTS)).split(size):
            ops.store(k[part], v[part], *apart, slots[part], backend="reference")
        for got, wanted in zip(apart, together, strict=True):
            assert_same_bytes(got, wanted)


def test_rows_that_are_not_finite_stay_in_their_slots() -> None:
    k, v = rows(64, 0), rows(64, 1, V_GAIN)
    k[2, 1, 5], v[4, 0, 63] = torch.nan, torch.inf
    store_and_check(k, v, ("q8_0", "fp8"))


@pytest.mark.parametrize("slot", [-2, PAGES * PAGE_TOKENS, 2**40])
def test_slots_outside_the_cache_are_refused_before_anything_is_written(slot: int) -> None:
    caches = cache("q8_0"), cache("q8_0")
    slots = torch.tensor([*SLOTS[:-1], slot])
    with pytest.raises(SlotError, match=r"\[0, 96\).*6 pages of 16 tokens"):
        ops.store(rows(64, 0), rows(64, 1), *caches, slots, backend="reference")
    for got in caches:
        assert_same_bytes(got, cache("q8_0"))


@pytest.mark.parametrize("failing", ["k", "v"])
def test_a_codec_that_fails_leaves_both_caches_as_they_were(failing: str) -> None:
    """Whatever the codec of K or of V raises while it encodes, and whichever comes second."""
    spec = Spec("fails", (Plane("values", "float32"),), source="this test")

    def fail(_xp: Any, _rows: Any) -> dict[str, Any]:
        raise ZeroDivisionError("this codec cannot")

    for encode_rows, error in ((fail, ZeroDivisionError), (lambda *_: {}, PlaneError)):
        kvq_codecs.register(Codec(spec, encode_rows, lambda _xp, planes, _dim: planes["values"]))
        try:
            codecs = ("fails", "q8_0") if failing == "k" else ("q8_0", "fails")
            caches = cache(codecs[0], 64), cache(codecs[1], 64)
            before = [got.map(torch.clone) for got in caches]
            with pytest.raises(error):
                ops.store(
                    rows(64, 0), rows(64, 1), *caches, torch.tensor(SLOTS), backend="reference"
                )
        finally:
            kvq_codecs.unregister("fails")
        for got, wanted in zip(caches, before, strict=True):
            assert_same_bytes(got, wanted)
