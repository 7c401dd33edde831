"""F15: values exactly between two steps of an integer format."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

import kvq_codecs

from .backends import Backend


def check(name: str, largest: int, low: int, high: int, backend: Backend) -> None:
    """(k + 1/2) · scale for every k of both signs, under scales of many mantissas."""
    codec = kvq_codecs.get(name)
    # Eleven bits of mantissa times nine of k + 1/2: every product is exact in float32.
    scales = np.float16([1, 0.3, 7.77e-3, 1.9990, 123.4, 2.0**-14, 2.0**-24, 0.09998])
    halves = [k + 0.5 for k in range(-largest, largest)]
    per_block = [halves[i : i + 31] for i in range(0, len(halves), 31)]
    blocks, codes = [], []
    for scale in scales.astype(np.float64):
        for part in per_block:
            quotients = [-largest, *part, *[0] * (31 - len(part))]
            blocks.append([q * scale for q in quotients])
            # Python rounds fractions to nearest, ties to even.
            codes.append([min(max(round(Fraction(q)), low), high) for q in quotients])
    rows = np.array(blocks)
    assert np.array_equal(rows, rows.astype(np.float32))
    encoded = codec.encode(backend.array(rows.astype(np.float32)))
    assert np.array_equal(
        backend.numpy(encoded.planes["scale"])[:, 0], np.repeat(scales, len(per_block))
    )
    decoded = backend.numpy(codec.decode(encoded)).astype(np.float64)
    want = np.array(codes) * np.repeat(scales.astype(np.float64), len(per_block))[:, None]
    np.testing.assert_array_equal(decoded, want)
