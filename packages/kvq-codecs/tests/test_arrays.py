"""Arrays of every kind come in as their values, or are refused by name; none is shared."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import kvq_codecs
from kvq_codecs import Codec, Encoded, PlaneError, RowError

from .backends import Backend, on_each_backend
from .exact import assert_same

ROWS = np.random.default_rng(0).standard_normal((3, 256), np.float32)

each_codec = pytest.mark.parametrize(
    "codec", [kvq_codecs.get(n) for n in kvq_codecs.names()], ids=kvq_codecs.names()
)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Like `assert_same`, but a NaN equals only itself."""
    kind = f"u{want.dtype.itemsize}"
    assert_same(np.ascontiguousarray(got).view(kind), np.ascontiguousarray(want).view(kind), what)


def assert_same_rows(got: Encoded, want: Encoded) -> None:
    for name, items in want.planes.items():
        assert_same(np.asarray(got.planes[name]), items, f"{want.spec.name} {name}")


@pytest.mark.parametrize("count", [1, 2])
@each_codec
@on_each_backend
def test_blocks_may_lie_at_any_address_for_any_row(
    codec: Codec, count: int, backend: Backend
) -> None:
    for dim in (codec.spec.divisor * n for n in (1, 2, 3, 5, 33)):
        size = codec.spec.block_bytes(dim)
        file = np.random.default_rng(dim).integers(0, 256, count * size + 8, np.uint8)
        whole = backend.array(file)
        for offset in range(5):
            blocks = whole[offset : offset + count * size].reshape(count, size)
            for given, want in (
                (blocks, file[offset : offset + count * size].reshape(count, size)),
                (blocks[0], file[offset : offset + size]),
            ):
                encoded = codec.from_blocks(given, dim)
                what, start = f"{codec.name} at head_dim {dim}, offset {offset}", 0
                if codec.spec.interchange is None:
                    for plane in codec.spec.planes:
                        raw = want[..., start : start + plane.row_bytes(dim)]
                        items = backend.numpy(encoded.planes[plane.name])
                        assert_same_bits(items, raw.copy().view(plane.dtype), what)
                        start += plane.row_bytes(dim)
                again = codec.from_blocks(codec.to_blocks(encoded), dim)
                for name, items in encoded.planes.items():
                    assert_same_bits(backend.numpy(again.planes[name]), backend.numpy(items), what)
                assert codec.decode(encoded).shape == (*want.shape[:-1], dim)


@each_codec
def test_axes_of_length_1_may_have_any_stride(codec: Codec) -> None:
    want = codec.encode(ROWS[:1])

    def odd(items: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(items.copy())
        strides = tuple(
            3 if size == 1 else step
            for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return torch.as_strided(tensor, tensor.shape, strides)

    encoded = Encoded(codec.spec, 256, {n: odd(a) for n, a in want.planes.items()})
    assert_same(codec.to_blocks(encoded).numpy(), codec.to_blocks(want))
    assert_same(codec.decode(encoded).numpy(), codec.decode(want))


@each_codec
@on_each_backend
def test_no_result_shares_memory_with_what_was_given(codec: Codec, backend: Backend) -> None:
    rows = backend.array(ROWS)
    encoded = codec.encode(rows)
    blocks = codec.to_blocks(encoded)
    back, decoded = codec.from_blocks(blocks, 256), codec.decode(encoded)
    kept = {n: backend.numpy(a).copy() for n, a in encoded.planes.items()}
    kept_rows, kept_blocks = backend.numpy(decoded).copy(), backend.numpy(blocks).copy()
    rows[...] = 0
    for items in back.planes.values():
        items[...] = 0
    assert_same(backend.numpy(blocks), kept_blocks)
    for name, want in kept.items():
        assert_same(backend.numpy(encoded.planes[name]), want)
    for items in encoded.planes.values():
        items[...] = 0
    assert_same(backend.numpy(blocks), kept_blocks)
    assert_same(backend.numpy(decoded), kept_rows)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@each_codec
def test_numpy_subclasses_are_their_values(codec: Codec, tmp_path: Any) -> None:
    want = codec.encode(ROWS)
    blocks = codec.to_blocks(want)
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=ROWS.shape)
    mapped[:] = ROWS
    for rows in (np.matrix(ROWS), ROWS.view(np.recarray), mapped):
        encoded = codec.encode(rows)
        assert_same_rows(encoded, want)
        assert {type(a) for a in encoded.planes.values()} == {np.ndarray}
    encoded = Encoded(codec.spec, 256, {n: np.matrix(a) for n, a in want.planes.items()})
    assert_same(codec.decode(encoded), codec.decode(want))
    assert_same(codec.to_blocks(encoded), blocks)
    assert_same_rows(codec.from_blocks(np.matrix(blocks), 256), want)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@each_codec
def test_arrays_with_holes_are_refused(codec: Codec) -> None:
    want = codec.encode(ROWS)
    blocks, tensor = codec.to_blocks(want), torch.from_numpy(ROWS)
    masked = pytest.raises(RowError, match=rf"{codec.name}: rows .*masked.*\.filled\(value\)")
    for rows in (np.ma.masked_less(ROWS, 0), np.ma.array(ROWS), np.ma.masked):
        with masked:
            codec.encode(rows)
    sparse = pytest.raises(RowError, match=rf"{codec.name}: rows .*torch.sparse.*to_dense")
    for rows in (tensor.to_sparse(), tensor.to_sparse_csr()):
        with sparse:
            codec.encode(rows)
    with pytest.raises(PlaneError, match=r"plane .* must not be masked"):
        Encoded(codec.spec, 256, {n: np.ma.array(a) for n, a in want.planes.items()})
    with pytest.raises(PlaneError, match="blocks must not be masked"):
        codec.from_blocks(np.ma.array(blocks), 256)
    with pytest.raises(PlaneError, match="blocks must be dense"):
        codec.from_blocks(torch.from_numpy(blocks).to_sparse(), 256)


@each_codec
def test_a_pending_sign_is_applied(codec: Codec) -> None:
    tensor = torch.from_numpy(ROWS)
    negative = torch.complex(tensor, tensor).conj().imag
    assert negative.is_neg()
    assert_same_rows(codec.encode(negative), codec.encode(-ROWS))
    if codec.name == "fp32":
        encoded = Encoded(codec.spec, 256, {"values": negative})
        assert_same(codec.decode(encoded).numpy(), -ROWS)
        assert_same(codec.to_blocks(encoded).numpy(), codec.to_blocks(codec.encode(-ROWS)))


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", "<f2", "<f4", "<f8"])
@each_codec
def test_rows_of_either_byte_order_are_their_values(codec: Codec, dtype: str) -> None:
    given = ROWS.astype(dtype)
    assert_same_rows(codec.encode(given), codec.encode(given.astype(dtype[1:])))


@pytest.mark.parametrize(
    ("name", "plane"), [("fp32", "values"), ("bf16", "values"), ("q8_0", "scale")]
)
def test_planes_of_the_other_byte_order_are_refused(name: str, plane: str) -> None:
    encoded = kvq_codecs.get(name).encode(ROWS)
    swapped = encoded.planes[plane].astype(encoded.planes[plane].dtype.newbyteorder(">"))
    with pytest.raises(PlaneError, match=r"got >.* \(not in native byte order\)"):
        Encoded(encoded.spec, 256, {**encoded.planes, plane: swapped})


@each_codec
@on_each_backend
def test_nan_of_any_payload_and_sign_stays_nan_with_the_same_bytes(
    codec: Codec, backend: Backend
) -> None:
    words = np.array([0x7F800000 | 1 << bit for bit in range(23)] + [0x7FFFFFFF], np.uint32)
    words = np.concatenate([words, words | 0x80000000])
    rows = np.tile(ROWS[:1], (3 * len(words), 1))
    rows.view(np.uint32)[: len(words), 77] = words
    rows.view(np.uint32)[len(words) : 2 * len(words), 76:79] = words[:, None]
    rows.view(np.uint32)[2 * len(words) :, 77] = words
    rows[2 * len(words) :, 76] = np.inf
    encoded, want = codec.encode(backend.array(rows)), codec.encode(rows)
    for name, items in want.planes.items():
        assert_same_bits(backend.numpy(encoded.planes[name]), items, f"{codec.name} {name}")
    assert np.isnan(backend.numpy(codec.decode(encoded))[:, 77]).all()


def test_encoded_rows_keep_their_planes() -> None:
    codec = kvq_codecs.get("q4_0")
    given = dict(codec.encode(ROWS).planes)
    encoded = Encoded(codec.spec, 256, given)
    want = codec.decode(encoded)
    given["codes"] = np.zeros(1)
    given.pop("scale")
    assert_same(codec.decode(encoded), want)
    with pytest.raises(TypeError):
        encoded.planes["codes"] = np.zeros(1)  # type: ignore[index]


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
@each_codec
def test_encoded_rows_can_be_copied_and_pickled(codec: Codec, again: Any) -> None:
    want = codec.encode(ROWS)
    got = again(want)
    assert (got.spec, got.dim, got.spec.divisor) == (codec.spec, 256, codec.spec.divisor)
    assert_same_rows(got, want)
