// q4_0: a nibble a value, two's complement.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Q4_0 : Alike<Q4_0> {
  static constexpr int SPLIT = 4;
  static constexpr int SECOND = 0;
  static constexpr int BLOCK = 32;
  static constexpr int SCALE_BYTES = 2;
  static constexpr float FACTOR = 1;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;

  // Under the exponent of 1024 a nibble ^ 8 is the f16 number 1032 + value, or 1152 + 16 * value
  // four bits higher: one shift serves four pairs. 5 + 4
  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) {
    const u32 upper = word >> 8;
    const u32 low_0 = logic<AND_XOR>(word, 0x000F000F, 0x64086408);
    const u32 high_0 = logic<AND_XOR>(word, 0x00F000F0, 0x64806480);
    const u32 low_1 = logic<AND_XOR>(upper, 0x000F000F, 0x64086408);
    const u32 high_1 = logic<AND_XOR>(upper, 0x00F000F0, 0x64806480);
    values[0] = sub_halves(low_0, 0x64086408);               // 1032
    values[1] = fma_halves(high_0, 0x2C002C00, 0xD480D480);  // * 1/16 - 72
    values[2] = sub_halves(low_1, 0x64086408);
    values[3] = fma_halves(high_1, 0x2C002C00, 0xD480D480);
  }
};
