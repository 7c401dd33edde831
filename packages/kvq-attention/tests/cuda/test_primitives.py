"""Instructions of a thread do what their PTX descriptions say, emulated and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvq_attention.cuda.compile import compile, resources

from .emulator.program import needs_compiler
from .halves import FLOATS, HALVES, pairs
from .primitive_kernels import (
    KERNELS,
    RUNNERS,
    Run,
    device_text,
    emulated,
    halves_of,
    random_words,
    runner,
    words,
)

ARCHS = (80, 86, 89, 90, 100, 120)


@pytest.fixture(params=RUNNERS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_instruction_compiles(arch: int) -> None:
    found = resources(compile(device_text(), arch))
    assert found.keys() == set(KERNELS)
    assert not {name: kernel for name, kernel in found.items() if kernel.stack_bytes}


def assert_same(got: np.ndarray, wanted: np.ndarray, dtype: Any) -> None:
    """Equal bits, or NaN for NaN."""
    nan = np.isnan(wanted.view(dtype))
    np.testing.assert_array_equal(np.isnan(got.view(dtype)), nan)
    np.testing.assert_array_equal(got[~nan], wanted[~nan])


def test_permute_takes_any_bytes_or_their_signs(run: Run) -> None:
    selectors = np.arange(2**16, dtype=np.uint32)
    a, b = random_words(2**16, 1), random_words(2**16, 2)
    both = np.stack([a, b], 1).view(np.uint8)  # byte n of (b, a)
    wanted = np.empty((2**16, 4), np.uint8)
    for i in range(4):
        nibble = selectors >> 4 * i & 15
        byte = both[selectors, nibble & 7]
        wanted[:, i] = np.where(nibble & 8, np.where(byte >= 128, 255, 0), byte)
    np.testing.assert_array_equal(words(run, "permuted", a, b, selectors), wanted.view("<u4")[:, 0])


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("ternary", lambda a, b, c: (a & b) | (~a & c)),
        ("odd", lambda a, b, c: a ^ b ^ c),
        ("masked", lambda a, b, c: (a & b) | c),
        ("flipped", lambda a, b, c: (a & b) ^ c),
        ("none", lambda a, b, c: ~(a | b | c)),
        ("without", lambda a, b, c: a & ~b),
    ],
)
def test_logic_is_the_function_of_its_table(
    run: Run, name: str, formula: Callable[..., np.ndarray]
) -> None:
    given = [random_words(512, seed) for seed in range(3)]
    np.testing.assert_array_equal(words(run, name, *given), formula(*given))


def test_arithmetic_of_halves_rounds_once(run: Run) -> None:
    a, b = pairs()
    with np.errstate(all="ignore"):
        wanted = [x.view(np.float16) * y.view(np.float16) for x, y in ((a, b), (b, a))]
    both = a | b.astype(np.uint32) << 16, b | a.astype(np.uint32) << 16
    for mine, exact in zip(halves_of(words(run, "multiplied", *both)), wanted, strict=True):
        assert_same(mine, exact.view(np.uint16), np.float16)


def test_max_prefers_numbers_to_nan(run: Run) -> None:
    a, b = pairs()
    x, y = a.view(np.float16), b.view(np.float16)
    below = (x < y) | np.isnan(x) | ((x == y) & np.signbit(x))
    got, high = halves_of(words(run, "larger", a.astype(np.uint32), b.astype(np.uint32)))
    assert_same(got, np.where(below, b, a), np.float16)
    assert not high.any()


def test_a_fused_sum_rounds_once(run: Run) -> None:
    """What a product that is rounded first would lose is there."""
    near_one = (1 + np.arange(1, 4096) * 2.0**-23).astype(np.float32)
    least = (1 + 2 * (near_one.astype(np.float64) - 1)).astype(np.float32)
    got = words(run, "fused", *(x.view(np.uint32) for x in (near_one, near_one, -least)))
    wanted = (near_one.astype(np.float64) - 1) ** 2
    np.testing.assert_array_equal(got.view(np.float32), wanted.astype(np.float32))


def test_floats_are_packed_to_the_nearest_half(run: Run) -> None:
    bits, other = FLOATS, FLOATS[::-1].copy()
    with np.errstate(over="ignore"):
        wanted = bits.view(np.float32).astype(np.float16).view(np.uint16)
    low, high = halves_of(words(run, "packed", bits, other))
    assert_same(low, wanted, np.float16)
    assert_same(high, wanted[::-1].copy(), np.float16)


def test_floats_are_packed_to_the_nearest_bf16(run: Run) -> None:
    floats = torch.from_numpy(FLOATS.view(np.float32))
    wanted = floats.to(torch.bfloat16).to(torch.float32).numpy().view(np.uint32)
    for name in ("low_bf16_bits", "high_bf16_bits"):
        both = words(run, "packed_bf16", FLOATS, FLOATS[::-1].copy())
        got = words(run, name, both)
        assert_same(got, wanted if name[0] == "l" else wanted[::-1].copy(), np.float32)


def test_halves_are_widened_exactly(run: Run) -> None:
    word = HALVES | HALVES[::-1].astype(np.uint32) << 16
    for name, halves in (("low", HALVES), ("high", HALVES[::-1].copy())):
        wanted = halves.view(np.float16).astype(np.float32).view(np.uint32)
        assert_same(words(run, name, word), wanted, np.float32)


def test_a_half_is_doubled(run: Run) -> None:
    given = random_words(1 << 12)
    low, high = given & 0xFFFF, given >> 16
    np.testing.assert_array_equal(words(run, "twice_low", given), low * 0x10001)
    np.testing.assert_array_equal(words(run, "twice_high", given), high * 0x10001)


def e4m3_values() -> np.ndarray:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float16).numpy().view(np.uint16)


def assert_e4m3(got: np.ndarray, values: np.ndarray) -> None:
    codes = np.arange(2**16)
    low, high = halves_of(got)
    assert_same(low, values[codes & 255], np.float16)
    assert_same(high, values[codes >> 8], np.float16)


def test_e4m3_codes_are_widened_exactly(run: Run, request: pytest.FixtureRequest) -> None:
    if "gpu" in request.node.name and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no conversion of e4m3")
    codes, others = np.arange(2**16, dtype=np.uint32), random_words(2**16) >> 16
    assert_e4m3(words(run, "e4m3", codes | others << 16), e4m3_values())
    assert_e4m3(words(run, "upper_e4m3", codes << 16 | others), e4m3_values())


@needs_compiler
@pytest.mark.parametrize("arch", [80, 86])
def test_old_architectures_read_the_nan_codes_of_e4m3_as_480(arch: int) -> None:
    values = e4m3_values()
    values[[0x7F, 0xFF]] = np.array([480, -480], np.float16).view(np.uint16)
    run = emulated(late=False, backward=False, arch=arch)
    assert_e4m3(words(run, "e4m3", np.arange(2**16, dtype=np.uint32)), values)


def test_powers_of_two(run: Run) -> None:
    x = np.concatenate([np.linspace(-126, 127.99, 4096), [-np.inf, -200, -127, 0, 1, 300, np.nan]])
    x = x.astype(np.float32)
    got = words(run, "power", x.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(got[-7:], [0, 0, 0, 1, 2, np.inf, np.nan])
    # ex2.approx is within 2^-22 of the value.
    np.testing.assert_allclose(got[:-7], np.exp2(x[:-7].astype(np.float64)), rtol=2**-22)


def test_logarithms_of_two(run: Run) -> None:
    x = np.concatenate(
        [np.exp2(np.linspace(-126, 127, 4096)), [0, 1, 2, np.inf, -1, np.nan, 1e-39]]
    )
    x = x.astype(np.float32)
    got = words(run, "logarithm", x.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(got[-7:], [-np.inf, 0, 1, np.inf, np.nan, np.nan, -np.inf])
    # lg2.approx is within 2^-22 of the value, absolutely from 0.5 to 2.
    np.testing.assert_allclose(
        got[:-7], np.log2(x[:-7].astype(np.float64)), rtol=2**-22, atol=2**-22
    )


def test_reciprocals(run: Run) -> None:
    x = np.concatenate(
        [np.exp2(np.linspace(-126, 126, 4096)), [1, 4, np.inf, 0, -0.0, 1e-39, np.nan]]
    )
    x = x.astype(np.float32)
    got = words(run, "reciprocal", x.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(got[-7:], [1, 0.25, 0, np.inf, -np.inf, np.inf, np.nan])
    # rcp.approx is within one unit in the last place.
    np.testing.assert_allclose(got[:-7], 1 / x[:-7].astype(np.float64), rtol=2**-23)
