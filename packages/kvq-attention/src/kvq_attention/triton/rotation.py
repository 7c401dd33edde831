"""iso's quaternions on split tiles: a group of four values is the same column of four tiles."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_codecs.rotation import QUATERNIONS

GROUPS = tl.constexpr(len(QUATERNIONS))


@jit
def fused(first, x, a, y, b, z, c):
    """first + x · a + y · b + z · c, from the left, each product rounded with its sum."""
    total = tl.fma(tl.broadcast_to(x, a.shape), a, first)
    total = tl.fma(tl.broadcast_to(y, b.shape), b, total)
    return tl.fma(tl.broadcast_to(z, c.shape), c, total)


@jit
def turn_quad(
    tiles,
    table,
    quad: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    BACK: tl.constexpr,
    FUSED: tl.constexpr = False,
):
    """What tiles 4 · quad … 4 · quad + 3 turn into.

    FUSED: which products and sums are rounded at once is said here, not left to the compiler, which
    decides it for each kernel anew: kernels that share bits need it.
    """
    group = (tl.arange(0, COLUMNS) * (SPLIT // 4) + quad) % GROUPS
    w = tl.load(table + group * 4)[None, :]
    x = tl.load(table + group * 4 + 1)[None, :]
    y = tl.load(table + group * 4 + 2)[None, :]
    z = tl.load(table + group * 4 + 3)[None, :]
    if BACK:
        x, y, z = -x, -y, -z
    a, b = tiles[4 * quad], tiles[4 * quad + 1]
    c, d = tiles[4 * quad + 2], tiles[4 * quad + 3]
    if FUSED:
        turned = (
            fused(w * a, -x, b, -y, c, -z, d),
            fused(w * b, x, a, y, d, -z, c),
            fused(w * c, -x, d, y, a, z, b),
            fused(w * d, x, c, -y, b, z, a),
        )
    else:
        turned = (
            w * a - x * b - y * c - z * d,
            w * b + x * a + y * d - z * c,
            w * c - x * d + y * a + z * b,
            w * d + x * c - y * b + z * a,
        )
    return turned


@jit
def turn(
    tiles,
    table,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    BACK: tl.constexpr,
    DTYPE: tl.constexpr,
    FUSED: tl.constexpr = False,
):
    """Left products of the groups in `tiles` ([rows, COLUMNS] each) with their quaternions.

    BACK = with the conjugates, which undoes it. The result is in DTYPE. FUSED: see `turn_quad`.
    """
    turned = ()
    for quad in tl.static_range(SPLIT // 4):
        a, b, c, d = turn_quad(tiles, table, quad, COLUMNS, SPLIT, BACK, FUSED)
        turned = turned + (a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE))
    return turned
