"""Values that break kernels: scales far apart, random bytes, zeros, thousands of like ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import kvq_codecs

from ..scene import V_GAIN, Scene, put
from ..tolerances import KERNEL
from .cases import DTYPES, PACKED, check_output, expected_of_cache, held, ieee, judge, refill
from .places import EMULATED, INTERPRETED, Place, each_codec

pytestmark = ieee

# Codecs with an fp16 scale per block of 32
BLOCK_SCALES = ("q8_0", "q6_0", "q4_0", "fp8_e4m3")


def scene_of(codec: str, place: Place, **shape: Any) -> Scene:
    """Few rows, as each costs the interpreter milliseconds; one shape, as a GPU compiles each."""
    wanted = {"heads": 1, "kv_heads": 1, "dim": 128, "lengths": (70,), **shape}
    return place.scene(codec, **wanted, seed=7)


def factors(rows: torch.Tensor, low: float, high: float, seed: int) -> torch.Tensor:
    """A power of ten per token, its exponent uniform in [low, high]: [L, 1, 1]."""
    random = torch.Generator().manual_seed(seed)
    exponents = low + (high - low) * torch.rand(len(rows), 1, 1, generator=random)
    return (10.0**exponents).to(rows)


@each_codec()
def test_scales_of_k_and_v_are_not_swapped(codec: str, place: Place) -> None:
    """The codes of V = 37 · K are K's own: nothing but the scales differs."""
    scene = scene_of(codec, place)
    for k, v in zip(scene.ks, scene.vs, strict=True):
        v.copy_(V_GAIN * k)
    refill(scene)
    check_output(scene, place.attend(scene))


@pytest.mark.parametrize(("k_gain", "v_gain"), [(1e-4, 1e4), (1e4, 1e-4)])
@each_codec()
def test_magnitudes_of_any_size(codec: str, k_gain: float, v_gain: float, place: Place) -> None:
    """Logits stay near 1; values of a block must not overflow or vanish in 16 bits on the way."""
    scene = scene_of(codec, place)
    if codec in ("iso3", "iso4"):  # the scale is the row's norm: 1e4 would be infinite
        k_gain, v_gain = min(k_gain, 3e3), min(v_gain, 3e3)
    for k, v in zip(scene.ks, scene.vs, strict=True):
        k.mul_(k_gain)
        v.mul_(v_gain / V_GAIN)
    refill(scene)
    scoring = {"scale": scene.scale / k_gain}
    check_output(scene, place.attend(scene, **scoring), **scoring)


@each_codec()
def test_magnitudes_differ_from_token_to_token(codec: str, place: Place) -> None:
    scene = scene_of(codec, place)
    for r, (k, v) in enumerate(zip(scene.ks, scene.vs, strict=True)):
        k.mul_(factors(k, -3, 3, seed=r))
        v.mul_(factors(v, -3, 3, seed=100 + r) / V_GAIN)
    refill(scene)
    scoring = {"scale": 3e-3 * scene.scale}
    check_output(scene, place.attend(scene, **scoring), **scoring)


@pytest.mark.parametrize("tail", [1e-2, 1e-3])
@each_codec()
def test_a_heavy_token_of_small_values_hides_no_others(
    codec: str, tail: float, place: Place
) -> None:
    """The first token takes all but `tail` of the weight; the others' values outweigh its own."""
    scene = scene_of(codec, place)
    q = scene.qs[0][0]
    scene.ks[0].mul_(0.05)
    scene.ks[0][0] = q / q.norm() ** 2 * 128**0.5 * math.log(70 / tail)
    scene.vs[0][0] *= tail
    refill(scene)
    check_output(scene, place.attend(scene))


def opposed(scene: Scene, ratio: float) -> None:
    """Every second token's values are larger by a ratio, and its weight is smaller by it."""
    q, size = scene.qs[0][0], len(scene.ks[0])
    large = (torch.arange(size, device=q.device) % 2 == 0)[:, None, None]
    away = q / q.norm() ** 2 * 128**0.5 * -math.log(ratio)
    scene.ks[0].mul_(0.05).add_(torch.where(large, away, 0.0).to(q))
    # the largest that the norms of iso hold
    scene.vs[0].mul_(torch.where(large, 3e3, 3e3 / ratio).to(q) / V_GAIN)
    refill(scene)


@pytest.mark.parametrize("ratio", [1e2, 1e4])
@each_codec()
def test_small_values_may_weigh_as_much_as_large_ones(
    codec: str, ratio: float, place: Place
) -> None:
    scene = scene_of(codec, place)
    opposed(scene, ratio)
    check_output(scene, place.attend(scene))


@pytest.mark.parametrize("ratio", [1e6, 1e10])
@each_codec(PACKED)
def test_tiny_values_may_weigh_as_much_as_huge_ones(codec: str, ratio: float, place: Place) -> None:
    """A probability is scaled before it is narrowed to 16 bits, by cuda where a row has one scale.

    Of several scales it is so up to the largest that differ by 2^20 or so.
    """
    if place.backend == "cuda" and codec in BLOCK_SCALES:
        ratio = min(ratio, 1e6)
    scene = scene_of(codec, place)
    opposed(scene, ratio)
    check_output(scene, place.attend(scene))


@each_codec(places=[EMULATED])
def test_nearly_uniform_attention_over_thousands_of_tokens(codec: str, place: Place) -> None:
    """The output is a small rest of large terms: every bias of a tile shows."""
    scene = scene_of(codec, place, lengths=(3001,))
    check_output(scene, place.attend(scene))
    scene.qs[0].zero_()
    check_output(scene, place.attend(scene))


@each_codec()
def test_zero_rows(codec: str, place: Place) -> None:
    """Zero keys weigh all tokens alike; zero values give exactly 0."""
    scene = scene_of(codec, place)
    scene.ks[0].zero_()
    refill(scene)
    check_output(scene, place.attend(scene))
    scene.vs[0].zero_()
    refill(scene)
    out, expected = place.attend(scene), scene.expected(fresh=False)
    assert torch.equal(expected, torch.zeros_like(expected)), "every codec has a zero"
    assert torch.equal(out, torch.zeros_like(out))


def random_bytes(scene: Scene) -> None:
    """Fill whole caches with bytes that decode finitely; scales keep a sane size."""
    random = np.random.default_rng(11)
    for cache in scene.caches:
        for name, plane in cache.planes.items():
            shape = tuple(plane.shape)
            if name in ("scale", "row_scale"):
                values = 10.0 ** random.uniform(-4, -2, shape)
            elif name == "block_scale":
                values = random.integers(0, 0x7F, shape)
            else:
                values = random.integers(0, 256, shape)
                if cache.spec.name in ("fp8", "fp8_e4m3"):  # kernels may read NaN codes as ±480
                    values[values & 0x7F == 0x7F] = 0x7E
            plane.copy_(torch.from_numpy(values.astype(plane.cpu().numpy().dtype)))


@each_codec(PACKED)
def test_every_byte_is_read_as_the_codec_reads_it(codec: str, place: Place) -> None:
    scene = scene_of(codec, place)
    random_bytes(scene)
    keys, _ = (torch.cat(rows) for rows in zip(*held(scene), strict=True))
    scale = 4 / float(keys.norm(dim=-1).max())
    assert 0 < scale < 1e4
    expected = expected_of_cache(scene, scale=scale)
    judge(place.attend(scene, scale=scale), expected, scene.geometry.dtype)


@each_codec()
def test_logits_of_thousands_neither_overflow_nor_vanish(codec: str, place: Place) -> None:
    """A ramp of logits from −9,000 to 9,000, one down again, and all of them at −9,000."""
    scene = scene_of(codec, place)
    scene.qs[0].div_(scene.qs[0].norm())
    for ramp in (torch.linspace(-1, 1, 70), torch.linspace(1, -1, 70), torch.full((70,), -1.0)):
        scene.ks[0].copy_(ramp.to(place.device)[:, None, None] * scene.qs[0])
        refill(scene)
        scoring = {"scale": 9000.0}
        check_output(scene, place.attend(scene, **scoring), **scoring)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_codec(["fp8", "q8_0"])
def test_f07_scales_far_from_a_power_of_two_are_not_rounded_into_the_tile(
    codec: str, dtype: torch.dtype, place: Place
) -> None:
    scene = scene_of(codec, place, dim=256, dtype=dtype)
    for k, v in zip(scene.ks, scene.vs, strict=True):
        for x, gain in ((k, 1.0), (v, 1 / 37)):
            # a largest magnitude whose scale lies halfway between two powers of two
            x.mul_(gain)
            x[..., 0] = 448 * 1.4142 * 2.0**-7
    refill(scene)
    out, expected = place.attend(scene), scene.expected(fresh=False)
    judge(out, expected, dtype)
    assert float((out.cpu().double() - expected).abs().max()) < 0.1


@each_codec(PACKED, [INTERPRETED])
def test_f09_a_packed_cache_attends_like_an_fp32_one_of_the_same_values(
    codec: str, place: Place
) -> None:
    """Other tiles, other splits: outputs may differ by what the kernels promise, no more."""
    scene = scene_of(codec, place, dtype=torch.bfloat16)
    plain = scene_of("fp32", place, dtype=torch.bfloat16)
    for r, length in enumerate(scene.geometry.lengths):
        for cache, wide, rows in zip(
            scene.caches, plain.caches, (scene.ks[r], scene.vs[r]), strict=True
        ):
            codec_of = kvq_codecs.get(cache.spec.name)
            decoded = codec_of.decode(codec_of.encode(rows.cpu().float().numpy()))
            put(wide, torch.from_numpy(decoded), scene.slots(r, 0, length))
    packed, unpacked = place.attend(scene).float(), place.attend(plain).float()
    # one step of bfloat16, at the size of the row's largest value
    step = 2.0**-7 * unpacked.abs().amax(dim=-1, keepdim=True)
    assert bool(((packed - unpacked).abs() <= step).all())
    error = (packed - unpacked).norm(dim=-1) / unpacked.norm(dim=-1)
    assert float(error.max()) <= 2 * KERNEL[torch.bfloat16]
