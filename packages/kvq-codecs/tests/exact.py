"""Bit-for-bit comparison; a failure shows the first row that differs, in hex."""

from __future__ import annotations

import numpy as np


def assert_same(got: np.ndarray, want: np.ndarray, what: str = "array") -> None:
    """Same shape, dtype and bits; NaN equals NaN, +0 does not equal −0."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, wanted {want.dtype}"
    differ = _bits(got) != _bits(want)
    if got.dtype.kind == "f":
        differ &= ~(np.isnan(got) & np.isnan(want))
    if not differ.any():
        return
    at = tuple(int(i) for i in np.argwhere(differ)[0])
    raise AssertionError(
        f"{what}: {differ.sum()} of {differ.size} items differ, the first at {at}\n"
        f"got    {_hex(got[at[:-1]])}\nwanted {_hex(want[at[:-1]])}"
    )


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _hex(row: np.ndarray) -> str:
    digits = 2 * row.dtype.itemsize
    return " ".join(f"{int(v):0{digits}x}" for v in _bits(row).ravel())
