"""e4m3 and e2m1 against ml_dtypes and torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from array_api_compat import array_namespace

from kvq_codecs.minifloat import E2M1, E4M3, Minifloat

from .backends import Backend, on_each_backend
from .exact import assert_same

each_format = pytest.mark.parametrize(
    ("fmt", "theirs"),
    [
        pytest.param(E4M3, ml_dtypes.float8_e4m3fn, id="e4m3"),
        pytest.param(E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
    ],
)


def dense(fmt: Minifloat) -> np.ndarray:
    """Floats of every exponent, every boundary between two codes, and the floats beside it."""
    spread = np.arange(0, 0x7F800000, 4099, np.uint32).view(np.float32)
    grid = np.sort(fmt.values()[: 1 << fmt.sign_shift])
    grid = grid[np.isfinite(grid)].astype(np.float64)
    ties = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    up, down = np.float32(np.inf), np.float32(-np.inf)
    beside = np.concatenate([ties, np.nextafter(ties, up), np.nextafter(ties, down)])
    positive = np.concatenate([spread, beside, np.array([np.inf], np.float32)])
    return np.concatenate([positive, -positive])


@each_format
def test_every_code_has_their_value(fmt: Minifloat, theirs: type) -> None:
    codes = np.arange(2 << fmt.sign_shift, dtype=np.uint8)
    assert_same(fmt.values(), codes.view(theirs).astype(np.float32))


def test_every_e4m3_code_has_the_value_torch_gives_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert_same(E4M3.values(), codes.view(torch.float8_e4m3fn).to(torch.float32).numpy())


@each_format
@on_each_backend
def test_encoding_rounds_to_nearest_even_as_theirs_does(
    fmt: Minifloat, theirs: type, backend: Backend
) -> None:
    given = dense(fmt)
    want = np.clip(given, -fmt.largest, fmt.largest).astype(theirs).view(np.uint8)
    array = backend.array(given)
    assert_same(backend.numpy(fmt.encode(array_namespace(array), array)), want)


def test_e4m3_encoding_rounds_as_torch_does() -> None:
    given = dense(E4M3)
    clamped = torch.from_numpy(np.clip(given, -448, 448)).to(torch.float8_e4m3fn)
    want = clamped.view(torch.uint8).numpy()
    assert_same(E4M3.encode(array_namespace(given), given), want)


@each_format
def test_every_finite_code_encodes_to_itself(fmt: Minifloat, theirs: type) -> None:
    values = fmt.values()
    codes = np.arange(len(values), dtype=np.uint8)[np.isfinite(values)]
    assert_same(fmt.encode(array_namespace(values), values[codes]), codes)
