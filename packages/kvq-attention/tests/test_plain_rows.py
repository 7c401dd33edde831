"""P138: rows without spread (zeros, constants, one-hot, subnormal) through store and attention."""

from __future__ import annotations

from typing import Any

import torch

import kvq_codecs
from kvq_attention import ops

from .decode.cases import ieee
from .decode.places import EVERYWHERE, TRITONS, Place, each_codec
from .oracle import relative_error
from .scene import TIER, Scene, assert_same_bytes, put, through
from .tolerances import KERNEL

pytestmark = ieee

# What every request's rows are, and how many it has
KINDS = {"zeros": 17, "one constant": 1, "constants": 20, "one-hot": 19, "subnormal": 18, "all": 21}
CONSTANT = 1.5
HALF_STEP = 2.0**-24  # the smallest float16, in which kernels may decode
REFERENCE = Place("reference", "cpu", kvq_codecs.names(), (64, 128), 0, marks=())


def rows_of(kind: str, rows: torch.Tensor, sign: float) -> torch.Tensor:
    """Rows [L, Hkv, D] of a kind, of the shape and type of random ones."""
    length, _, dim = rows.shape
    if kind == "zeros":
        return torch.zeros_like(rows)
    if kind.endswith("constant") or kind == "constants":
        return torch.full_like(rows, sign * CONSTANT)
    if kind == "one-hot":
        hot = torch.zeros_like(rows)
        for token in range(length):
            hot[token, :, 7 * token % dim] = 3 * sign
        return hot
    if kind == "subnormal":  # of float16; beyond it, of float32
        return rows.sign() * torch.where(rows.abs() > 0.7, 3e-7, 1e-39).to(rows.dtype)
    mixed = rows.clone()
    for start, other in enumerate(("zeros", "constants", "one-hot", "subnormal")):
        mixed[start::5] = rows_of(other, rows[start::5], sign)
    return mixed


def scene_of(place: Place, codec: str, queries: int) -> Scene:
    """A request of each kind, its rows written by the backend's own store."""
    lengths = tuple(KINDS.values())
    counts = tuple(min(queries, length) for length in lengths)
    shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 128}
    scene = place.scene(codec, lengths=lengths, queries=counts, **shape)
    for r, kind in enumerate(KINDS):
        scene.ks[r], scene.vs[r] = (
            rows_of(kind, rows, sign) for rows, sign in ((scene.ks[r], 1.0), (scene.vs[r], -1.0))
        )
    oracle = [cache.map(torch.clone) for cache in scene.caches]
    slots: list[int] = []
    for r, length in enumerate(lengths):
        own = scene.slots(r, 0, length)
        slots += own
        for cache, rows in zip(oracle, (scene.ks[r], scene.vs[r]), strict=True):
            put(cache, rows, own)
    backend = "reference" if place.device == "cpu" and place.backend == "cuda" else place.backend
    ops.store(
        torch.cat(scene.ks),
        torch.cat(scene.vs),
        *scene.caches,
        torch.tensor(slots, device=place.device),
        backend="triton" if backend == "cuda" else backend,
    )
    for cache, wanted in zip(scene.caches, oracle, strict=True):
        assert_same_bytes(cache, wanted)
    return scene


def check(place: Place, scene: Scene, out: torch.Tensor, *, fresh: bool) -> None:
    """Finite everywhere, zero for zeros, constant where the codec is, and near float64."""
    assert out.isfinite().all()
    geometry = scene.geometry
    outs = dict(zip(KINDS, out.cpu().split(geometry.counts), strict=True))
    wanted = dict(zip(KINDS, scene.expected(fresh=fresh).split(geometry.counts), strict=True))
    assert not outs["zeros"].any()
    stored = through(geometry.codecs[1], scene.vs[1])
    if fresh or bool((stored == -CONSTANT).all()):
        alone = outs["one constant"]
        assert (alone == alone[..., :1]).all()
        # kernels may weigh a lone token with a probability that was rounded to 16 bits
        assert place.backend != "reference" or (alone == -CONSTANT).all()
    for kind in ("one constant", "constants", "one-hot", "all"):
        error = relative_error(outs[kind], wanted[kind])
        assert error <= KERNEL[geometry.dtype], f"{kind}: relative error {error:.3g}"
    # whatever float16 makes of them, they do not grow
    assert (outs["subnormal"].double() - wanted["subnormal"]).abs().max() <= HALF_STEP


@each_codec(places=(REFERENCE, *EVERYWHERE))
def test_p138_rows_without_spread_are_decoded(codec: str, place: Place) -> None:
    scene = scene_of(place, codec, queries=2)
    check(place, scene, place.attend(scene), fresh=False)


@each_codec(places=(REFERENCE, *TRITONS))
def test_p138_rows_without_spread_are_extended_over(codec: str, place: Place) -> None:
    scene = scene_of(place, codec, queries=2)
    given = scene.q, *scene.fresh(), *scene.caches, scene.batch(), TIER
    check(place, scene, ops.extend(*given, scale=scene.scale, backend=place.backend), fresh=True)
