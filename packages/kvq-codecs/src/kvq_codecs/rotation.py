"""iso3 and iso4: blocks of 128 turned by fixed quaternions, then nearest centroids.

Bit-exact with the ggml ISO3_0/ISO4_0 reference: sums run in the order written here, each product
and each sum rounded to float32. Arrays run [128, blocks], so that an ordered sum over the values
of a block is a loop over whole rows. Tables are float32 bit patterns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvq_codecs.bits import contiguous, half, lookup, place, scalar

Array = Any

BLOCK = 128
SMALLEST_NORM = 1e-10


def float_table(*patterns: int) -> Any:
    """Float32 bit patterns → NumPy float32."""
    return np.array(patterns, np.uint32).view(np.float32)


def to_columns(xp: Any, rows: Array) -> Array:
    """Rows [n, dim] → [128, blocks], contiguous."""
    return contiguous(xp.permute_dims(xp.reshape(rows, (-1, BLOCK)), (1, 0)))


def from_columns(xp: Any, columns: Array, dim: int) -> Array:
    """[128, blocks] → rows [n, dim]."""
    return xp.reshape(xp.permute_dims(columns, (1, 0)), (-1, dim))


def hamilton(xp: Any, quaternions: Any, columns: Array) -> Array:
    """Left product of each group of four values with its quaternion, [128, blocks]."""
    factors = xp.asarray(quaternions, device=place(columns))
    w, x, y, z = (factors[:, i, None] for i in range(4))
    groups = xp.reshape(columns, (BLOCK // 4, 4, -1))
    a, b, c, d = (groups[:, i, :] for i in range(4))
    turned = xp.stack(
        [
            w * a - x * b - y * c - z * d,
            w * b + x * a + y * d - z * c,
            w * c - x * d + y * a + z * b,
            w * d + x * c - y * b + z * a,
        ],
        axis=1,
    )
    return xp.reshape(turned, columns.shape)


def ordered_sum(values: Array) -> Array:
    """Sum over the first axis, one addition after the other."""
    total = values[0, :] + values[1, :]
    for row in range(2, values.shape[0]):
        total += values[row, :]
    return total


def root(xp: Any, values: Array) -> Array:
    """Square roots, rounded once.

    A library's float32 root may be an ulp off (torch's on some processors is); a float64 one,
    rounded to float32, cannot be.
    """
    return xp.astype(xp.sqrt(xp.astype(values, xp.float64)), xp.float32)


def quantize(xp: Any, rows: Array, centroids: Any, thresholds: Any) -> tuple[Array, Array]:
    """Rows [n, dim] → indices uint8 [n, dim] and scales float16 [n, dim / 128]."""
    columns = to_columns(xp, rows)
    norm = root(xp, ordered_sum(columns * columns))
    one, zero = scalar(xp, rows, 1.0), scalar(xp, rows, 0.0)
    inverse = xp.where(norm > scalar(xp, rows, SMALLEST_NORM), one / norm, zero)
    turned = hamilton(xp, QUATERNIONS, columns * inverse)
    indices = xp.zeros_like(turned, dtype=xp.uint8)
    for threshold in thresholds:
        indices += xp.astype(turned > scalar(xp, rows, threshold), xp.uint8)
    length = root(xp, ordered_sum(lookup(xp, centroids * centroids, indices)))
    scale = half(xp, norm / length)
    dim = rows.shape[-1]
    return from_columns(xp, indices, dim), xp.reshape(scale, (-1, dim // BLOCK))


def dequantize(xp: Any, indices: Array, scale: Array, centroids: Any) -> Array:
    """Indices [n, dim] and scales [n, dim / 128] → float32 [n, dim]."""
    columns = lookup(xp, centroids, to_columns(xp, indices))
    turned = hamilton(xp, CONJUGATES, columns)
    scales = xp.astype(xp.reshape(scale, (-1,)), xp.float32)
    return from_columns(xp, turned * scales, indices.shape[-1])


# (w, x, y, z) of the 32 groups
QUATERNIONS = float_table(
    *(0x3F139980, 0x3EE3D943, 0x3E89FCE8, 0xBF2147D6),
    *(0x3EA2A413, 0xBF13FB67, 0xBCA53260, 0xBF405904),
    *(0xBEA597C7, 0x3F357E95, 0xBE2CD1B0, 0xBF1A82FC),
    *(0xBF03432F, 0xBEC9C506, 0xBF0AA605, 0x3F097EDC),
    *(0x3F6C6353, 0xBDB7C62F, 0xBE8F2FBE, 0x3E7D171E),
    *(0xBEAA2AB6, 0x3EF208D5, 0x3EB3BE86, 0x3F3C9CC7),
    *(0x3F0BFF12, 0x3F0DE3BF, 0x3E85A0A3, 0x3F121545),
    *(0xBE8006CF, 0x3D38A7B3, 0xBE8B0DDF, 0x3F6DA2EF),
    *(0xBF14CAF0, 0xBEBB3D9A, 0xBDC00484, 0x3F388AD5),
    *(0x3EA550EE, 0xBEDC1502, 0x3E9E7E74, 0xBF48C8E9),
    *(0xBF3AE02F, 0x3EEEE916, 0xBED31C80, 0xBE903FA6),
    *(0xBEE8379E, 0x3F417103, 0xBEE104C5, 0xBE31D8D9),
    *(0xBF3BDB59, 0xBF074B7D, 0x3D805104, 0x3ED82EFE),
    *(0xBE93B1B9, 0x3F3449CA, 0xBEF65D85, 0xBEDEC0E9),
    *(0xBF6667B4, 0x3CBD2BC2, 0xBD26C2F5, 0x3EDDDD31),
    *(0xBD1A6EDC, 0x3F36089A, 0xBEE9CABD, 0x3F088913),
    *(0x3F02AC39, 0x3E9AE0C9, 0x3F48906C, 0x3E3D3953),
    *(0x3E5047D3, 0xBDED217D, 0xBF1E692D, 0x3F3FF80F),
    *(0xBE7C29B5, 0x3F3FC3CA, 0x3DA5D6CC, 0x3F1C1260),
    *(0x3E6CF5F1, 0xBE843A56, 0xBF6350B6, 0xBE9AB426),
    *(0x3BED2864, 0xBE66FE92, 0xBF648EEC, 0xBEC79658),
    *(0x3EC8E06F, 0x3EC48B37, 0x3F55C4DE, 0x3D1AC80B),
    *(0x3EFDDA6B, 0xBEA453D4, 0xBF330CFF, 0x3ECE105C),
    *(0xBF39378A, 0xBEB209AE, 0x3F0F88F5, 0x3E500031),
    *(0xBF70387C, 0x3E3AD9F1, 0x3E9634AA, 0x3C2F8007),
    *(0x3EE2D5DE, 0x3ECE7A16, 0x3F3CDA4C, 0xBE9F5C25),
    *(0xBE548D5E, 0x3F57E7A2, 0x3EE82F05, 0x3E4CBFC3),
    *(0x3E4B2275, 0x3F74119A, 0xBA80A9BD, 0xBE68CE3E),
    *(0xBF622A4C, 0xBD7E284D, 0xBEBA015D, 0x3E9419CD),
    *(0x3F3D2C4F, 0x3DBDF6E4, 0xBECAB509, 0x3F09866D),
    *(0xBC7FDF4A, 0x3E97CE47, 0x3E2714D6, 0x3F70DC68),
    *(0x3F461C24, 0x3E75F926, 0x3F0241CC, 0x3E94DD43),
).reshape(-1, 4)
CONJUGATES = QUATERNIONS * np.array([1, -1, -1, -1], np.float32)
