// q6_0: the low four bits of a value in one plane, the high two in another, two's complement.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Q6_0 : Alike<Q6_0> {
  static constexpr int SPLIT = 4;
  static constexpr int SECOND = 1;
  static constexpr int BLOCK = 32;
  static constexpr int SCALE_BYTES = 2;
  static constexpr float FACTOR = 1;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;

  // Under the exponent of 1024 the six bits ^ 32 are the f16 number 1056 + value, or
  // 1536 + 16 * value four bits higher. 9 + 7
  DEVICE static void unpack(u32 word, u32 second, u32 (&values)[SPLIT]) {
    const u32 upper = word >> 8;
    const u32 top_0 = logic<AND_XOR>(second << 4, 0x00300030, 0x64206420);
    const u32 top_1 = logic<AND_XOR>(second << 6, 0x03000300, 0x66006600);
    const u32 top_2 = logic<AND_XOR>(second, 0x00300030, 0x64206420);
    const u32 top_3 = logic<AND_XOR>(second << 2, 0x03000300, 0x66006600);
    const u32 sum_0 = logic<AND_XOR>(word, 0x000F000F, top_0);
    const u32 sum_1 = logic<AND_XOR>(word, 0x00F000F0, top_1);
    const u32 sum_2 = logic<AND_XOR>(upper, 0x000F000F, top_2);
    const u32 sum_3 = logic<AND_XOR>(upper, 0x00F000F0, top_3);
    values[0] = sub_halves(sum_0, 0x64206420);              // 1056
    values[1] = fma_halves(sum_1, 0x2C002C00, 0xD600D600);  // * 1/16 - 96
    values[2] = sub_halves(sum_2, 0x64206420);
    values[3] = fma_halves(sum_3, 0x2C002C00, 0xD600D600);
  }
};
