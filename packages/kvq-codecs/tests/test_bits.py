"""Packing and its neighbours."""

from __future__ import annotations

import itertools

import array_api_compat.numpy as xp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_codecs
from kvq_codecs import Encoded
from kvq_codecs.bits import as_bytes, from_bytes, lookup, pack, unpack

from .backends import Backend, on_each_backend


@settings(deadline=None)
@given(bits=st.sampled_from([1, 2, 4]), data=st.data())
def test_unpack_reads_what_pack_wrote(bits: int, data: st.DataObject) -> None:
    per_byte = 8 // bits
    shape = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 9)))
    size = shape[0] * shape[1] * per_byte
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=size, max_size=size))
    array = np.array(codes, np.uint8).reshape(shape[0], shape[1] * per_byte)
    packed = pack(xp, array, bits)
    assert packed.shape == shape
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack(xp, packed, bits), array)


@settings(deadline=None)
@given(bits=st.sampled_from([1, 2, 4]), raw=st.binary(min_size=1, max_size=40))
def test_pack_reads_what_unpack_wrote(bits: int, raw: bytes) -> None:
    packed = np.frombuffer(raw, np.uint8)
    codes = unpack(xp, packed, bits)
    as_number = int.from_bytes(raw, "little")
    assert codes.tolist() == [
        (as_number >> (bits * i)) % 2**bits for i in range(len(raw) * 8 // bits)
    ]
    np.testing.assert_array_equal(pack(xp, codes, bits), packed)


@pytest.mark.parametrize(("name", "plane", "bits"), [("q4_0", "codes", 4), ("q6_0", "low", 4)])
@on_each_backend
def test_f19_no_nibble_borrows_from_its_neighbour(
    name: str, plane: str, bits: int, backend: Backend
) -> None:
    """Every pair of nibbles beside every pair: 65,536 words of two bytes."""
    codec, dim = kvq_codecs.get(name), 32
    words = np.array(list(itertools.product(range(256), repeat=2)), np.uint8)
    planes = {
        p.name: np.zeros((len(words) * 4 // dim, p.row_items(dim)), p.dtype)
        for p in codec.spec.planes
    }
    planes[plane] = words.reshape(-1, codec.spec.plane(plane).row_items(dim))
    planes["scale"][:] = 1
    got = codec.decode(Encoded(codec.spec, dim, {n: backend.array(a) for n, a in planes.items()}))
    nibbles = [n for byte in words.ravel().tolist() for n in (byte & 15, byte >> 4)]
    signed = name == "q4_0"
    want = [n - 16 if signed and n >= 8 else n for n in nibbles]
    assert backend.numpy(got).ravel().tolist() == want


@on_each_backend
def test_lookup_reads_any_shape(backend: Backend) -> None:
    table = np.arange(256, dtype=np.float32) / 3
    indices = np.arange(256, dtype=np.uint8).reshape(2, 32, 4)[:, ::-1]
    array = backend.array(indices)
    space = kvq_codecs.codec.array_namespace(array)
    np.testing.assert_array_equal(backend.numpy(lookup(space, table, array)), table[indices])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
@on_each_backend
def test_bytes_are_little_endian_and_come_back(dtype: str, backend: Backend) -> None:
    items = np.arange(1, 25).astype(dtype).reshape(2, 3, 4)
    raw = as_bytes(backend.array(items)[:, ::2])
    assert backend.numpy(raw).tobytes() == items[:, ::2].astype(f"<{items.dtype.str[1:]}").tobytes()
    np.testing.assert_array_equal(backend.numpy(from_bytes(raw, dtype)), items[:, ::2])
