"""The laws that every registered codec keeps. A new codec inherits them by its name."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import kvq_codecs
from kvq_codecs import Codec, Encoded, RowError
from kvq_codecs.measure import gaussian_rows, measure

from . import invented, tolerances
from .backends import NUMPY, TORCH, Backend, on_each_backend
from .exact import assert_same

DIM = 256  # every codec's block divides it
ALIGNED_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)


@pytest.fixture(params=[*kvq_codecs.names(), invented.CODEC.name])
def codec(request: pytest.FixtureRequest) -> Iterator[Codec]:
    if request.param in kvq_codecs.names():
        yield kvq_codecs.get(request.param)
        return
    kvq_codecs.register(invented.CODEC)
    yield kvq_codecs.get(request.param)
    kvq_codecs.unregister(request.param)


def rows(*lead: int, dim: int = DIM, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((*lead, dim))
    return (values * np.exp2(np.arange(dim) % 7 - 3)).astype(np.float32)


def random_planes(codec: Codec, count: int, dim: int) -> dict[str, np.ndarray]:
    """Planes of random bytes: every code, every scale, NaN and infinities among them."""
    rng, planes = np.random.default_rng(1), {}
    for plane in codec.spec.planes:
        raw = rng.integers(0, 256, (count, plane.row_bytes(dim)), np.uint8)
        planes[plane.name] = raw.view(plane.dtype)
    return planes


def assert_same_planes(got: Encoded, want: Encoded) -> None:
    assert got.spec == want.spec
    for name, items in want.planes.items():
        assert_same(got.planes[name], items, f"{want.spec.name} {name}")


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (0,), (2, 0, 3)])
@on_each_backend
def test_shapes_and_dtypes_are_what_the_spec_declares(
    codec: Codec, lead: tuple[int, ...], backend: Backend
) -> None:
    encoded = codec.encode(backend.array(rows(*lead)))
    assert list(encoded.planes) == [p.name for p in codec.spec.planes]
    for plane in codec.spec.planes:
        items = backend.numpy(encoded.planes[plane.name])
        assert items.shape == (*lead, plane.row_items(DIM))
        assert items.dtype == plane.dtype
        assert items.nbytes == plane.row_bytes(DIM) * int(np.prod(lead))
    decoded = backend.numpy(codec.decode(encoded))
    assert decoded.shape == (*lead, DIM)
    assert decoded.dtype == np.float32


@on_each_backend
def test_every_library_gives_the_same_bytes_and_values(codec: Codec, backend: Backend) -> None:
    given = rows(64)
    given[:8] *= np.float32(1e-6)
    given[8:16] *= np.float32(1e6)
    given[16] = 0
    given[17, 5] = np.nan
    given[18, 200] = -np.inf
    want = codec.encode(given)
    encoded = codec.encode(backend.array(given))
    for name, items in want.planes.items():
        assert_same(backend.numpy(encoded.planes[name]), items, f"{codec.name} {name}")
    assert_same(backend.numpy(codec.decode(encoded)), codec.decode(want), codec.name)


@on_each_backend
def test_random_bytes_decode_to_the_same_values_in_every_library(
    codec: Codec, backend: Backend
) -> None:
    planes = random_planes(codec, 500, DIM)
    want = codec.decode(Encoded(codec.spec, DIM, planes))
    assert want.shape == (500, DIM)
    given = {n: backend.array(a) for n, a in planes.items()}
    got = backend.numpy(codec.decode(Encoded(codec.spec, DIM, given)))
    assert_same(got, want, codec.name)


def test_a_row_has_the_same_bytes_alone_and_in_a_batch(codec: Codec) -> None:
    given = rows(2100)  # more than one chunk
    together = codec.encode(given)
    for i in (0, 511, 512, 1023, 1024, 2099):
        alone = codec.encode(given[i])
        assert_same_planes(together.map(lambda a, i=i: a[i]), alone)
        assert_same(codec.decode(together)[i], codec.decode(alone))


@on_each_backend
def test_strides_do_not_change_bytes(codec: Codec, backend: Backend) -> None:
    wide = rows(6, 4, dim=2 * DIM)
    array = backend.array(wide)
    views = {
        "every second value": (array[..., ::2], wide[..., ::2]),
        "a column of a packed tensor": (array[:, 1, :DIM], wide[:, 1, :DIM]),
        "swapped axes": (array[..., DIM:].swapaxes(0, 1), wide[..., DIM:].swapaxes(0, 1)),
    }
    for what, (view, values) in views.items():
        want = codec.encode(np.ascontiguousarray(values))
        got = codec.encode(view)
        for name, items in want.planes.items():
            assert_same(backend.numpy(got.planes[name]), items, f"{codec.name} {name}: {what}")
    pitched = codec.encode(array[..., :DIM]).map(lambda a: a.swapaxes(0, 1))
    want_values = codec.decode(codec.encode(wide[..., :DIM])).swapaxes(0, 1)
    assert_same(backend.numpy(codec.decode(pitched)), want_values, codec.name)


def test_negative_strides_read_only_and_column_order_work(codec: Codec) -> None:
    given = rows(5, 3)
    want = codec.encode(given)
    read_only = given.copy()
    read_only.flags.writeable = False
    assert_same_planes(codec.encode(read_only), want)
    assert_same_planes(codec.encode(np.asfortranarray(given)), want)
    assert_same_planes(codec.encode(given[::-1, ::-1, ::-1][::-1, ::-1, ::-1]), want)
    backwards = codec.encode(np.ascontiguousarray(given[:, :, ::-1]))
    assert_same_planes(codec.encode(given[:, :, ::-1]), backwards)
    frozen = want.map(np.copy)
    for items in frozen.planes.values():
        items.flags.writeable = False
    flipped = frozen.map(lambda a: a[::-1])
    assert_same(codec.decode(flipped), codec.decode(want)[::-1])


@on_each_backend
def test_input_is_left_as_it_was(codec: Codec, backend: Backend) -> None:
    given = rows(9)
    array = backend.array(given)
    encoded = codec.encode(array)
    planes = {n: backend.numpy(a).copy() for n, a in encoded.planes.items()}
    decoded = codec.decode(encoded)
    decoded += 1
    assert_same(backend.numpy(array), given)
    for name, items in planes.items():
        assert_same(backend.numpy(encoded.planes[name]), items)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("backend", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_p034_p051_every_float_dtype_is_converted_never_reinterpreted(
    codec: Codec, dtype: str, backend: Backend
) -> None:
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    given = gaussian_rows()[:256].reshape(-1, DIM).astype(stored)
    want = codec.encode(given.astype(np.float32))
    got = codec.encode(backend.array(given))
    for name, items in want.planes.items():
        assert_same(backend.numpy(got.planes[name]), items, f"{codec.name} {name}")
    assert measure(codec, given.astype(np.float32)).relative_rms < tolerances.RELATIVE_RMS_MAX


def test_p049_a_row_carries_its_scale(codec: Codec) -> None:
    given = rows(32)
    given[np.abs(given) < 2**-10] = 2**-10  # away from fp16's subnormals, where steps are fixed
    once = codec.encode(given)
    assert_same(codec.decode(codec.encode(given * 4)), codec.decode(once) * 4, codec.name)
    shuffled = np.random.default_rng(2).permutation(32)
    elsewhere = once.map(lambda a: a[shuffled].copy())
    assert_same(codec.decode(elsewhere), codec.decode(once)[shuffled], codec.name)


def test_p054_a_head_dim_works_or_is_refused_by_name(codec: Codec) -> None:
    for dim in ALIGNED_DIMS:
        if dim % codec.spec.divisor == 0:
            error = measure(codec, gaussian_rows().reshape(-1)[: 256 * dim].reshape(-1, dim))
            assert error.relative_rms < tolerances.RELATIVE_RMS_MAX
        else:
            with pytest.raises(RowError, match=f"{codec.name}.*{dim}.*{codec.spec.divisor}"):
                codec.encode(rows(2, dim=dim))


def test_p138_zeros_constants_and_single_values_stay_finite(codec: Codec) -> None:
    given = np.zeros((5, DIM), np.float32)
    given[1] = 3
    given[2, 77] = -4
    given[3] = np.float32(1e-40)
    given[4, ::2] = -0.0
    decoded = codec.decode(codec.encode(given))
    assert np.isfinite(decoded).all()
    assert np.all(decoded[0] == 0)
    assert np.all(decoded[4] == 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(codec: Codec, value: float) -> None:
    given = rows(3)
    want = codec.decode(codec.encode(given))
    given[1, 130] = value
    decoded = codec.decode(codec.encode(given))
    assert_same(decoded[[0, 2]], want[[0, 2]], codec.name)
    assert not np.isfinite(decoded[1, 130])


@on_each_backend
def test_interchange_bytes_and_back(codec: Codec, backend: Backend) -> None:
    planes = random_planes(codec, 6, DIM)
    encoded = Encoded(codec.spec, DIM, planes).map(
        lambda a: backend.array(a.reshape(2, 3, a.shape[-1]))
    )
    blocks = codec.to_blocks(encoded)
    raw = backend.numpy(blocks)
    assert raw.shape == (2, 3, codec.spec.block_bytes(DIM))
    assert raw.dtype == np.uint8
    back = codec.from_blocks(blocks, DIM)
    for name, items in planes.items():
        got = backend.numpy(back.planes[name]).reshape(items.shape)
        kind = f"u{items.dtype.itemsize}"  # NaN payloads survive too
        assert_same(np.ascontiguousarray(got).view(kind), items.view(kind), name)
    one_row = codec.to_blocks(encoded.map(lambda a: a[1, 2]))
    assert_same(backend.numpy(one_row), raw[1, 2])
    assert codec.to_blocks(encoded.map(lambda a: a[:0])).shape == (0, 3, raw.shape[-1])


def test_error_on_gaussian_rows_is_bounded(codec: Codec) -> None:
    assert measure(codec, gaussian_rows()).relative_rms < tolerances.RELATIVE_RMS_MAX
