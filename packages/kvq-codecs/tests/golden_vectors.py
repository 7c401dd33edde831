"""The golden vectors against the codecs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from golden_files import arrays, checked

import kvq_codecs

from .backends import Backend
from .exact import assert_same

at_each_golden_dim = pytest.mark.parametrize("dim", [64, 128, 256])


@functools.cache
def iso_tables() -> Mapping[str, Any]:
    """iso_tables.json."""
    tables: dict[str, Any] = json.loads(checked("iso_tables.json").read_text())
    return tables


def planes(codec: kvq_codecs.Codec, dim: int, part: str) -> dict[str, np.ndarray]:
    """Golden planes in this package's shapes: a one-item plane keeps its last axis."""
    vectors = arrays(f"{codec.name}.npz")
    found = {p.name: vectors[f"d{dim}_{part}{p.name}"] for p in codec.spec.planes}
    return {n: a[:, None] if a.ndim == 1 else a for n, a in found.items()}


def check_encode(name: str, dim: int, backend: Backend) -> None:
    """Every golden row of a scaled format: planes and decoded values."""
    codec, vectors = kvq_codecs.get(name), arrays(f"{name}.npz")
    encoded = codec.encode(backend.array(vectors[f"d{dim}_input"]))
    for plane, want in planes(codec, dim, "").items():
        assert_same(backend.numpy(encoded.planes[plane]), want, f"{name} {plane}")
    got = backend.numpy(codec.decode(encoded))
    assert_same(got, vectors[f"d{dim}_decoded"], f"{name} decoded")


def check_payload(name: str, dim: int, backend: Backend) -> None:
    """Golden random planes through the decoder alone."""
    codec, vectors = kvq_codecs.get(name), arrays(f"{name}.npz")
    payload = {n: backend.array(a) for n, a in planes(codec, dim, "payload_").items()}
    got = backend.numpy(codec.decode(kvq_codecs.Encoded(codec.spec, dim, payload)))
    assert_same(got, vectors[f"d{dim}_payload_decoded"], f"{name} payload")


def check_non_finite_rows(name: str, dim: int, nan_scales: Mapping[str, int], unit: int) -> None:
    """Units of `unit` values with a NaN or infinity: codes 0, scales the quiet NaN, exactly."""
    codec, rows = kvq_codecs.get(name), arrays(f"{name}.npz")[f"d{dim}_input"]
    bad = ~np.isfinite(rows).reshape(len(rows), -1, unit).all(axis=-1)
    assert bad.any()
    encoded = codec.encode(rows)
    for plane in codec.spec.planes:
        items = np.ascontiguousarray(encoded.planes[plane.name])
        per_unit = items.view(f"u{items.dtype.itemsize}").reshape(*bad.shape, -1)[bad]
        assert np.all(per_unit == nan_scales.get(plane.name, 0)), f"{name} {plane.name}"
    decoded = codec.decode(encoded).reshape(*bad.shape, unit)
    np.testing.assert_array_equal(np.isnan(decoded), np.broadcast_to(bad[..., None], decoded.shape))


def check_iso(name: str, backend: Backend) -> None:
    """The C reference's bytes and values, rows that are not finite, and random bytes."""
    codec, vectors = kvq_codecs.get(name), arrays("iso.npz")
    for rows, part in (
        (vectors[f"{name}_input"], f"{name}_"),
        (vectors["special_input"], f"{name}_special_"),
    ):
        encoded = codec.encode(backend.array(rows))
        got = backend.numpy(codec.to_blocks(encoded))
        # The stored scale is compared as a number, because any NaN equals any other.
        assert_same(got[:, 2:], vectors[f"{part}packed"][:, 2:], f"{part}packed")
        assert_same(_scale(got), _scale(vectors[f"{part}packed"]), f"{part}scale")
        assert_same(
            backend.numpy(codec.decode(encoded)), vectors[f"{part}dequant"], f"{part}dequant"
        )
    encoded = codec.from_blocks(backend.array(vectors[f"{name}_decode_packed"]), 128)
    want = vectors[f"{name}_decode_dequant"]
    assert_same(backend.numpy(codec.decode(encoded)), want, f"{name} payload")


def _scale(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16)
