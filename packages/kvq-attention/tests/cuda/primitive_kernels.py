"""Small kernels around each instruction, and ways to run them: emulated, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvq_attention.cuda.compile import source

from .emulator.program import build, needs_compiler

# out[i] = value of a[i], b[i], c[i]
WORDS = {
    "permuted": "permute(a, b, c)",
    "ternary": "logic<0xCA>(a, b, c)",
    "odd": "logic<0x96>(a, b, c)",
    "masked": "logic<0xEA>(a, b, c)",
    "flipped": "logic<0x6A>(a, b, c)",
    "none": "logic<0x01>(a, b, c)",
    "without": "logic<0x30>(a, b, c)",
    "multiplied": "mul_halves(a, b)",
    "fused": "as_bits(fused(as_float(a), as_float(b), as_float(c)))",
    "larger": "max_halves(a, b)",
    "twice_low": "twice_low_half(a)",
    "twice_high": "twice_high_half(a)",
    "packed": "pack_halves(as_float(a), as_float(b))",
    "packed_bf16": "pack_bf16(as_float(a), as_float(b))",
    "low": "as_bits(low_half(a))",
    "high": "as_bits(high_half(a))",
    "low_bf16_bits": "as_bits(low_bf16(a))",
    "high_bf16_bits": "as_bits(high_bf16(a))",
    "e4m3": "halves_of_e4m3(a)",
    "upper_e4m3": "upper_halves_of_e4m3(a)",
    "power": "as_bits(exp2_fast(as_float(a)))",
    "reciprocal": "as_bits(reciprocal(as_float(a)))",
    "logarithm": "as_bits(log2_fast(as_float(a)))",
    "moved": "transpose_matrix(a)",
    "reversed": "shuffle(a, 31 - lane())",
    "wrapped": "shuffle(a, lane() + 33)",
    "crossed": "shuffle_xor(a, 5)",
    "as_integer": "u32(shuffle_xor(i32(a), 16))",
    "as_fraction": "as_bits(shuffle(as_float(a), 7))",
    "found": "u32(any(a == 3))",
    "counted": "u32(count_lanes(a % 2 == 1))",
    "summed": "u32(sum_lanes(i32(a)))",
    "placed": "u32(lane() | warp() << 8 | block() << 16 | blocks() << 24)",
}

TEXT = '#include "primitives.cuh"\n' + "".join(
    f'extern "C" GLOBAL void {name}(u32* out, const u32* as, const u32* bs, const u32* cs) {{\n'
    "  const int i = 128 * block() + 32 * warp() + lane();\n"
    "  const u32 a = as[i], b = bs[i], c = cs[i];\n"
    f"  out[i] = {value} + 0 * (a + b + c);\n}}\n"
    for name, value in WORDS.items()
)

PRODUCT = """
extern "C" GLOBAL void NAME(float* cs, const u32* as, const u32* bs) {
  const int i = 32 * warp() + lane();
  float c[4];
  for (int k = 0; k < 4; k++) c[k] = cs[4 * i + k];
  PRODUCT;
  for (int k = 0; k < 4; k++) cs[4 * i + k] = c[k];
}
"""
PRODUCTS = ("product", "product_bf16", "product_k8")
K16 = "(c, as[4 * i], as[4 * i + 1], as[4 * i + 2], as[4 * i + 3], bs[2 * i], bs[2 * i + 1])"
TEXT += PRODUCT.replace("NAME", "product").replace("PRODUCT", "mma" + K16)
TEXT += PRODUCT.replace("NAME", "product_bf16").replace("PRODUCT", "mma_bf16" + K16)
TEXT += PRODUCT.replace("NAME", "product_k8").replace(
    "PRODUCT", "mma_k8(c, as[4 * i], as[4 * i + 1], bs[2 * i])"
)

TEXT += """
// Rows of 16 bytes; lane l loads row 7 l % 32.
extern "C" GLOBAL void loaded(u32* out, u32* transposed, const u32* rows) {
  u32* shared = reinterpret_cast<u32*>(shared_memory());
  for (int i = lane(); i < 128; i += 32) shared[i] = rows[i];
  sync_block();
  u32 r[4], t[4];
  load_matrices(r, shared + 4 * (7 * lane() % 32));
  load_matrices_transposed(t, shared + 4 * (7 * lane() % 32));
  for (int m = 0; m < 4; m++) {
    out[4 * (32 * warp() + lane()) + m] = r[m];
    transposed[4 * (32 * warp() + lane()) + m] = t[m];
  }
}

// Two groups in flight: rows of 32 bytes a lane, the second half by its offsets; every third is not
// live.
extern "C" GLOBAL void copied(u32* out, const u8* from, int rounds) {
  u8* stages = shared_memory();
  const int i = 32 * warp() + lane();
  const auto begin = [&](int round) {
    const u8* row = from + 128 * 32 * round + 32 * i;
    const bool live = (i + round) % 3 != 0;
    u8* stage = stages + 128 * 32 * (round % 2);
    copy_async(stage + 16 * i, live ? row : nullptr, live);
    copy_async<128 * 16, 16>(stage + 16 * i, row, live);
    copies_commit();
  };
  begin(0);
  for (int round = 0; round < rounds; round++) {
    if (round + 1 < rounds) {
      begin(round + 1);
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    sync_block();
    const int j = 127 - i;  // what another warp brought
    const u32* stage = reinterpret_cast<const u32*>(stages + 128 * 32 * (round % 2));
    u32* row = out + 8 * (128 * round + j);
    for (int k = 0; k < 4; k++) row[k] = stage[4 * j + k];
    for (int k = 0; k < 4; k++) row[4 + k] = stage[128 * 4 + 4 * j + k];
    sync_block();
  }
}

// Thread i writes a word at a known address and reads that of thread from[i].
extern "C" GLOBAL void handed_over(u32* out, const u32* words, const u32* from) {
  const int i = 32 * warp() + lane();
  check_known_addresses();
  store_shared(known_address(64) + 4 * i, words[i]);
  sync_block();
  out[i] = load_shared(known_address(64) + 4 * from[i]);
}
"""
KERNELS = (*WORDS, *PRODUCTS, "loaded", "copied", "handed_over")

THREADS = 128
SHARED_BYTES = 2 * 128 * 32

Run = Callable[..., None]


def emulated(late: bool, backward: bool, arch: int = 90) -> Run:
    """Runs kernels on the CPU."""
    program = build(TEXT, KERNELS, arch=arch)

    def run(name: str, args: Sequence[Any], grid: int = 1) -> None:
        kernel = program.function(name, late=late, backward=backward)
        kernel.launch((grid,), THREADS, SHARED_BYTES, args)

    return run


def device_text() -> str:
    """The kernels for NVRTC."""
    return source("primitives.cuh", {}) + TEXT.replace('#include "primitives.cuh"', "")


def on_gpu() -> Run:
    """Runs kernels on the first GPU."""
    from kvq_attention.cuda.module import function

    def run(name: str, args: Sequence[Any], grid: int = 1) -> None:
        device = torch.device("cuda", 0)
        there = [torch.from_numpy(a).to(device) if isinstance(a, np.ndarray) else a for a in args]
        kernel = function(device_text(), name, device)
        kernel.launch((grid,), THREADS, SHARED_BYTES, there)
        for mine, result in zip(args, there, strict=True):
            if isinstance(mine, np.ndarray):
                mine[...] = result.cpu().numpy()

    return run


RUNNERS = [
    pytest.param("forward", marks=needs_compiler),
    pytest.param("backward", marks=needs_compiler),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


def runner(name: str) -> Run:
    """One of RUNNERS: run(name, args, grid) runs a kernel in blocks of THREADS."""
    if name == "gpu":
        return on_gpu()
    return emulated(late=name == "backward", backward=name == "backward")


def words(run: Run, name: str, *operands: np.ndarray) -> np.ndarray:
    """out of a kernel of WORDS, for operands of any equal length."""
    size = operands[0].size
    blocks = -(-size // 128)
    given = [np.zeros(128 * blocks, np.uint32) for _ in range(3)]
    for mine, operand in zip(given, operands, strict=False):
        mine[:size] = operand
    out = np.full(128 * blocks, 0xDEADBEEF, np.uint32)
    run(name, [out, *given], blocks)
    return out[:size]


def random_words(count: int, seed: int = 0) -> np.ndarray:
    """Words of any bits."""
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)


def halves_of(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high halves of words."""
    both = word.view(np.uint16).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()
