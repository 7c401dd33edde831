"""The emulator finds what a GPU would answer with wrong numbers or a hang."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from .emulator.program import EmulationError, Program, build, needs_compiler

pytestmark = needs_compiler

TEXT = """
#include "primitives.cuh"

struct Pair {
  i32 first;
  float second;
};

#define KERNEL(name, ...) extern "C" GLOBAL void LAUNCH_BOUNDS(64, 1) name(__VA_ARGS__)

DEVICE int thread() { return 32 * warp() + lane(); }
DEVICE u32* numbers() { return reinterpret_cast<u32*>(shared_memory()); }

KERNEL(nothing) {}

KERNEL(some_lanes) { if (lane() < 7) shuffle(1, 0); }

KERNEL(two_instructions) {
  if (lane() % 2) {
    shuffle(1, 0);
  } else {
    any(true);
  }
}

KERNEL(some_warps) { if (warp() == 1) sync_block(); }

KERNEL(barriers_mixed) {
  if (lane() < 16) {
    sync_block();
  } else {
    sync_warp();
  }
}

KERNEL(initial, u32* out) { out[thread()] = numbers()[thread()]; }

// With a barrier or without: each thread hands a number to another.
KERNEL(hand_over, u32* out, int barrier, int distance) {
  numbers()[thread()] = thread();
  if (barrier == 1) sync_warp();
  if (barrier == 2) sync_block();
  out[thread()] = numbers()[(thread() + distance) % 64];
}

// Two copies over older numbers, each a group unless the second stays open; all but the latest
// `left` are awaited.
KERNEL(copy_two, u32* first, u32* second, const u8* from, int left, bool open) {
  u8* row = shared_memory() + 16 * thread();
  numbers()[4 * thread()] = numbers()[4 * thread() + 256] = 1;
  copy_async(row, from + 16 * thread(), true);
  copies_commit();
  copy_async(row + 1024, from, thread() % 2);
  if (!open) copies_commit();
  if (left == 0) copies_wait<0>();
  if (left == 1) copies_wait<1>();
  if (left == 2) copies_wait<2>();
  first[thread()] = *reinterpret_cast<u32*>(row);
  second[thread()] = *reinterpret_cast<u32*>(row + 1024);
}

KERNEL(copy_unaligned, const u8* from) { copy_async(shared_memory(), from + 8, true); }
KERNEL(copy_dead, const u8* from) { copy_async(shared_memory(), from + 8, false); }
KERNEL(copy_to, int offset) { copy_async<32>(shared_memory() + offset, nullptr, false); }

KERNEL(load_at, int offset) {
  u32 r[4];
  load_matrices(r, shared_memory() + offset);
}

KERNEL(store_at, int offset) {
  if (thread() == 5) shared_memory()[offset] = 1;
}

// More than is left of 256 KiB once the last strip is not to be written.
KERNEL(deep, int value) {
  volatile u8 frame[255 * 1024];
  frame[0] = value;
}

KERNEL(parameters, i64* out, Pair pair, i32 small, i64 large, float real, const u8* null) {
  if (thread()) return;
  out[0] = pair.first;
  out[1] = i64(pair.second);
  out[2] = small;
  out[3] = large;
  out[4] = i64(real);
  out[5] = null == nullptr;
}

KERNEL(count_blocks, i32* count) {
  if (thread() == 0) *count += block() + 100 * blocks();
}

KERNEL(many, float* out, int rounds) {
  float c[4] = {};
  u32 x = lane();
  for (int i = 0; i < rounds; i++) {
    mma(c, x, x, x, x, x, x);
    x = shuffle_xor(x, 1 + i % 31);
  }
  out[thread()] = c[0];
}
"""
KERNELS = (
    *("nothing", "some_lanes", "two_instructions", "some_warps", "barriers_mixed", "initial"),
    *("hand_over", "copy_two", "copy_unaligned", "copy_dead", "copy_to", "load_at", "store_at"),
    *("deep", "parameters", "count_blocks", "many"),
)


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int32), ("second", ctypes.c_float))


@pytest.fixture(scope="module")
def program() -> Program:
    return build(TEXT, KERNELS)


def launch(program: Program, kernel: str, *args: Any, **options: Any) -> None:
    options = {"grid": 1, "threads": 64, "shared_bytes": 4096, **options}
    program.launch(kernel, args=args, **options)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("some_lanes", "same instruction: threads 0-6 at shuffle, 7-31 at the end"),
        ("two_instructions", "threads 0-0 at any, 1-1 at shuffle, 2-2 at any"),
        ("some_warps", "sync_block: threads 0-31 at the end, 32-63 at sync_block"),
        ("barriers_mixed", "threads 0-15 at sync_block, 16-31 at sync_warp"),
    ],
)
def test_a_rendezvous_that_some_miss_is_an_error(
    program: Program, kernel: str, message: str, backward: bool
) -> None:
    if backward and kernel != "some_warps":
        message = message[: message.index("threads")]  # warp 1 is met first
    with pytest.raises(EmulationError, match=f"{kernel}: not all .*{message}"):
        launch(program, kernel, backward=backward)
    launch(program, "nothing")  # and the next launch begins anew


def test_shared_memory_begins_as_nan_in_every_block(program: Program) -> None:
    out = np.zeros(64, np.uint32)
    launch(program, "hand_over", out, 2, 1)
    launch(program, "initial", out)
    assert (out == 0xFFFFFFFF).all()
    assert np.isnan(out.view(np.float16)).all() and np.isnan(out.view(np.float32)).all()


@pytest.mark.parametrize(("barrier", "distance"), [(1, 1), (2, 1), (2, 32)])
@pytest.mark.parametrize("backward", [False, True])
def test_with_a_barrier_every_order_gives_the_same(
    program: Program, barrier: int, distance: int, backward: bool
) -> None:
    out = np.zeros(64, np.uint32)
    launch(program, "hand_over", out, barrier, distance, backward=backward)
    kept = (np.arange(64) + distance) % 64
    same_warp = kept // 32 == np.arange(64) // 32
    known = same_warp if barrier == 1 else np.full(64, True)
    np.testing.assert_array_equal(out[known], kept[known])


@pytest.mark.parametrize(("barrier", "distance"), [(0, 1), (0, 63), (1, 32)])
def test_a_missing_barrier_shows_in_one_order(
    program: Program, barrier: int, distance: int
) -> None:
    kept = (np.arange(64) + distance) % 64
    wrong = np.full(64, False)
    for backward in (False, True):
        out = np.zeros(64, np.uint32)
        launch(program, "hand_over", out, barrier, distance, backward=backward)
        assert set(out[out != kept]) <= {0xFFFFFFFF}
        wrong |= out != kept
    assert wrong.all()


@pytest.mark.parametrize(
    ("left", "unfinished", "arrived"), [(0, False, 2), (1, False, 1), (2, False, 0), (0, True, 1)]
)
def test_late_copies_arrive_when_they_are_waited_for(
    program: Program, left: int, unfinished: bool, arrived: int
) -> None:
    given = np.arange(7, 7 + 4 * 64, dtype=np.uint32)
    wanted = given[::4], np.where(np.arange(64) % 2, 7, 0)
    for late in (False, True):
        got = np.zeros((2, 64), np.uint32)
        args = (got[0], got[1], given, left, np.bool_(unfinished))
        launch(program, "copy_two", *args, late=late)
        for i in range(2):
            there = wanted[i] if i < arrived or not late else np.full(64, 0xFFFFFFFF)
            np.testing.assert_array_equal(got[i], there)


@pytest.mark.parametrize(
    ("kernel", "argument", "message"),
    [
        ("copy_unaligned", np.zeros(16, np.uint64), "thread 0: a copy of 16 bytes begins between"),
        ("copy_to", 4096 - 32, "copy_async of 16 bytes at byte 4096 of 4096"),
        ("copy_to", -48, "copy_async of 16 bytes at byte -16 of 4096"),
        ("copy_to", 8, "copy_async of 16 bytes at byte 40 of 4096"),
        ("load_at", 24, "load_matrices of 16 bytes at byte 24 of 4096"),
        ("load_at", 4096, "load_matrices of 16 bytes at byte 4096 of 4096"),
        ("store_at", 4096, "wrote beyond shared memory"),
        ("store_at", -1, "wrote beyond shared memory"),
        ("deep", 1, "thread 0 needs more stack than there is"),
    ],
)
def test_memory_that_is_not_the_kernels_is_refused(
    program: Program, kernel: str, argument: Any, message: str
) -> None:
    with pytest.raises(EmulationError, match=message):
        launch(program, kernel, argument)


def test_what_lies_within_shared_memory_is_allowed(program: Program) -> None:
    launch(program, "copy_dead", np.zeros(16, np.uint64))  # whose source is not read
    for kernel, last in (("copy_to", 4080 - 32), ("load_at", 4080), ("store_at", 4095)):
        launch(program, kernel, 0)
        launch(program, kernel, last)


def test_arguments_are_passed_as_what_they_are(program: Program) -> None:
    out = torch.zeros(6, dtype=torch.int64)
    args = (out, Pair(-3, 4.0), -5, 2**40, 6.0, None)
    launch(program, "parameters", *args)
    assert out.tolist() == [-3, 4, -5, 2**40, 6, 1]
    launch(
        program, "parameters", out, Pair(1, 2.0), np.int32(3), ctypes.c_int64(4), np.float32(5), out
    )
    assert out.tolist() == [1, 2, 3, 4, 5, 0]
    for i, wrong, message in (
        (0, 5, "parameter 0 is p64, given was i0"),
        (1, out, "parameter 1 is s64, given was p64"),
        (2, np.int64(5), "parameter 2 is i32, given was i64"),
        (3, ctypes.c_int32(5), "parameter 3 is i64, given was i32"),
        (4, np.float64(5), "parameter 4 is f32, given was f64"),
        (5, 6.0, "parameter 5 is p64, given was f32"),
    ):
        with pytest.raises(EmulationError, match=message):
            launch(program, "parameters", *args[:i], wrong, *args[i + 1 :])
    with pytest.raises(EmulationError, match="has 6 parameters, given were 5"):
        launch(program, "parameters", *args[:5])
    with pytest.raises(ValueError, match="not contiguous"):
        launch(program, "initial", np.zeros((64, 2), np.uint32)[:, 0])


def test_blocks_run_one_after_another(program: Program) -> None:
    count = np.zeros(1, np.int32)
    launch(program, "count_blocks", count, grid=(5,))
    assert count[0] == 0 + 1 + 2 + 3 + 4 + 5 * 500
    launch(program, "count_blocks", count, grid=0)
    assert count[0] == 10 + 2500
    with pytest.raises(ValueError, match="along x"):
        launch(program, "count_blocks", count, grid=(1, 2))
    with pytest.raises(ValueError, match="threads is 48"):
        launch(program, "count_blocks", count, threads=48)


def test_many_rendezvous_of_many_warps(program: Program) -> None:
    """Words are f16 subnormals, whose squares are multiples of 2^-48: f32 holds their sums."""
    out = np.zeros(1024, np.float32)
    launch(program, "many", out, 50, threads=1024)
    assert (out > 0).all()
    np.testing.assert_array_equal(out, np.tile(out[:32], 32))


def test_a_text_that_does_not_compile_is_quoted_with_its_line() -> None:
    with pytest.raises(RuntimeError, match=r"kernel.cu:3:.*missing"):
        build('#include "primitives.cuh"\n\nint x = missing;\n', [])


def test_defines_and_architecture_reach_the_text() -> None:
    text = """
#include "primitives.cuh"
extern "C" GLOBAL void seen(i32* out) { out[lane()] = KVQ_ARCH + OFFSET; }
"""
    out = np.zeros(32, np.int32)
    for arch in (80, 120):
        program = build(text, ["seen"], arch=arch, defines={"OFFSET": 1000})
        program.function("seen", backward=True).launch((1, 1, 1), 32, 0, [out])
        assert (out == arch + 1000).all()
