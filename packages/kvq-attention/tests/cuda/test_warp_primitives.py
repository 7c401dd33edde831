"""Instructions of a warp and a block do what their PTX descriptions say, emulated and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .primitive_kernels import RUNNERS, Run, halves_of, random_words, runner, words

LANES = np.arange(32)


@pytest.fixture(params=RUNNERS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


def warps(count: int, seed: int = 0) -> np.ndarray:
    """Random words [warp, lane]."""
    return random_words(32 * count, seed).reshape(count, 32)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("reversed", 31 - LANES),
        ("wrapped", (LANES + 1) % 32),
        ("crossed", LANES ^ 5),
        ("as_integer", LANES ^ 16),
    ],
)
def test_shuffles_bring_what_another_lane_gave(run: Run, name: str, source: np.ndarray) -> None:
    given = warps(12)
    got = words(run, name, given.ravel()).reshape(12, 32)
    np.testing.assert_array_equal(got, given[:, source])


def test_shuffles_move_floats_unconverted(run: Run) -> None:
    given = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    got = words(run, "as_fraction", given.view(np.uint32).ravel()).view(np.float32)
    np.testing.assert_array_equal(got.reshape(8, 32), np.repeat(given[:, 7:8], 32, 1))


def test_any_finds_one_lane_of_its_own_warp(run: Run) -> None:
    given = np.zeros((8, 32), np.uint32)
    given[1, 0] = given[2, 31] = given[5, 17] = 3
    got = words(run, "found", given.ravel()).reshape(8, 32)
    np.testing.assert_array_equal(got, np.repeat((given == 3).any(1, keepdims=True), 32, 1))


def test_a_warp_counts_and_sums_up_its_own_lanes(run: Run) -> None:
    given = warps(12)
    given[3], given[4] = 0, 1
    counted = (given % 2).sum(1, dtype=np.uint32, keepdims=True)
    summed = given.sum(1, dtype=np.uint32, keepdims=True)  # modulo 2^32
    for name, wanted in (("counted", counted), ("summed", summed)):
        got = words(run, name, given.ravel()).reshape(12, 32)
        np.testing.assert_array_equal(got, np.repeat(wanted, 32, 1))


def test_a_thread_knows_its_place(run: Run) -> None:
    thread = np.arange(5 * 128, dtype=np.uint32)
    wanted = thread % 32 | thread % 128 // 32 << 8 | thread // 128 << 16 | 5 << 24
    np.testing.assert_array_equal(words(run, "placed", 0 * thread), wanted)


def test_a_matrix_is_transposed_between_lanes(run: Run) -> None:
    matrices = np.random.default_rng(2).integers(0, 2**16, (8, 8, 8), np.uint16)
    held = matrices.view(np.uint32).ravel()  # lane l: columns 2 (l % 4), + 1 of row l / 4
    wanted = matrices.transpose(0, 2, 1).copy().view(np.uint32).ravel()
    np.testing.assert_array_equal(words(run, "moved", held), wanted)


def test_matrices_are_loaded_from_the_rows_that_lanes_name(run: Run) -> None:
    rows = np.random.default_rng(3).integers(0, 2**16, (32, 8), np.uint16)
    plain, transposed = np.zeros((2, 128, 4), np.uint32)
    run("loaded", [plain, transposed, rows.view(np.uint32)])
    named = rows[7 * LANES % 32].reshape(4, 8, 8)  # [matrix, row, column]
    for got, matrices in ((plain, named), (transposed, named.transpose(0, 2, 1))):
        wanted = matrices.copy().view(np.uint32).reshape(4, 32).T
        for warp in got.reshape(4, 32, 4):
            np.testing.assert_array_equal(warp, wanted)


def test_words_at_known_addresses_are_handed_over(run: Run) -> None:
    """Which shows on a GPU that shared memory begins where it must."""
    rng = np.random.default_rng(6)
    given, got = random_words(128, seed=6), np.zeros(128, np.uint32)
    source = rng.permutation(128).astype(np.uint32)
    run("handed_over", [got, given, source])
    np.testing.assert_array_equal(got, given[source])


# PTX, mma.m16n8k16 with 16-bit operands: where lane l keeps element i of a, b and c. What has k
# below 8 lies there in mma.m16n8k8, too.
GROUP, MEMBER = LANES // 4, LANES % 4


def a_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column; elements 2, 3, 6, 7 lie eight rows below, 4 to 7 eight columns on."""
    return GROUP + (8 if i in (2, 3, 6, 7) else 0), 2 * MEMBER + (i & 1) + (8 if i >= 4 else 0)


def b_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    return 2 * MEMBER + (i & 1) + (8 if i >= 2 else 0), GROUP


def c_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    return GROUP + (8 if i >= 2 else 0), 2 * MEMBER + (i & 1)


def bits_of(matrix: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(matrix).to(dtype).view(torch.int16).numpy().view(np.uint16)


each_product = pytest.mark.parametrize(
    ("name", "dtype"),
    [("product", torch.float16), ("product_bf16", torch.bfloat16), ("product_k8", torch.float16)],
)


@each_product
def test_products_of_matrices(run: Run, name: str, dtype: torch.dtype) -> None:
    """Of quarters, so that no order of summing rounds; each warp has matrices of its own."""
    rng = np.random.default_rng(4)
    a = rng.integers(-99, 100, (4, 16, 16)) / 4
    b = rng.integers(-99, 100, (4, 16, 8)) / 4
    c = rng.integers(-9999, 10000, (4, 16, 8)) / 16
    halves_a = [bits_of(a, dtype)[:, *a_place(i)] for i in range(8)]
    halves_b = [bits_of(b, dtype)[:, *b_place(i)] for i in range(4)]
    held_c = np.stack([c[:, *c_place(i)] for i in range(4)], -1).astype(np.float32, order="C")
    held_a = np.stack(halves_a, -1).copy().view(np.uint32)
    held_b = np.stack(halves_b, -1).copy().view(np.uint32)
    run(name, [held_c, held_a, held_b])
    depth = 8 if name == "product_k8" else 16
    wanted = c + a[..., :depth] @ b[:, :depth]
    for i in range(4):
        np.testing.assert_array_equal(held_c[..., i], wanted[:, *c_place(i)])


@each_product
def test_products_are_summed_in_f32(run: Run, name: str, dtype: torch.dtype) -> None:
    """2^-20 beside 1 is lost in either 16-bit type, and f16 does not reach 100000."""
    one, small = (bits_of(np.array([v]), dtype)[0] for v in (1.0, 2.0**-10))
    held_a = np.zeros((4, 32, 8), np.uint16)
    held_b = np.zeros((4, 32, 4), np.uint16)
    held_a[..., 0], held_b[..., 0] = small, small  # even k below 8
    held_a[..., 1], held_b[..., 1] = one, one  # odd k below 8
    held_c = np.full((4, 32, 4), 100000, np.float32)
    held_c[:, :, :2] = 0
    run(name, [held_c, held_a.view(np.uint32), held_b.view(np.uint32)])
    np.testing.assert_array_equal(held_c[:, :, :2], np.float32(4 + 4 * 2**-20))
    np.testing.assert_array_equal(held_c[:, :, 2:], np.float32(100000))


@pytest.mark.parametrize("name", ["product", "product_k8"])
def test_products_take_subnormals_as_they_are(run: Run, name: str) -> None:
    """Masked codes are read so: bits below an exponent of 0."""
    rng = np.random.default_rng(5)
    a = rng.integers(0, 1024, (4, 32, 8), np.uint16)
    held_b = np.broadcast_to(bits_of(np.array([2.0**14]), torch.float16), (4, 32, 4)).copy()
    held_c = np.zeros((4, 32, 4), np.float32)
    run(name, [held_c, a.view(np.uint32), held_b.view(np.uint32)])
    k = [0, 1, 4, 5] if name == "product" else [0, 1]
    above, below = (a.reshape(4, 8, 4, 8)[..., [i + u for i in k]] for u in (0, 2))
    for i, rows in ((0, above), (2, below)):
        wanted = rows.astype(np.float32).sum((2, 3), keepdims=True)[..., 0] * 2.0**-10
        np.testing.assert_array_equal(held_c.reshape(4, 8, 4, 4)[..., i], np.repeat(wanted, 4, -1))


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_copies_bring_16_bytes_from_and_to_where_offsets_say_or_zeros(
    run: Run, rounds: int
) -> None:
    given = random_words(rounds * 128 * 8).reshape(rounds, 128, 8)
    out = np.full((rounds, 128, 8), 0xDEADBEEF, np.uint32)
    run("copied", [out, given, rounds])
    dead = (np.arange(128) + np.arange(rounds)[:, None]) % 3 == 0
    np.testing.assert_array_equal(out, np.where(dead[..., None], 0, given))


def test_words_are_split_low_half_first() -> None:
    low, high = halves_of(np.array([0x00020001], np.uint32))
    assert (low[0], high[0]) == (1, 2)
