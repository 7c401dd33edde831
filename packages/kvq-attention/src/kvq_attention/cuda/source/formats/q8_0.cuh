// q8_0: a byte a value, two's complement.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Q8_0 : Alike<Q8_0> {
  static constexpr int SPLIT = 2;
  static constexpr int SECOND = 0;
  static constexpr int BLOCK = 32;
  static constexpr int SCALE_BYTES = 2;
  static constexpr float FACTOR = 1;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;

  // Under the exponent of 1024 a byte ^ 128 is the f16 number 1152 + value. 3 + 2
  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) {
    const u32 even = logic<AND_XOR>(word, 0x00FF00FF, 0x64806480);
    const u32 odd = logic<AND_XOR>(word >> 8, 0x00FF00FF, 0x64806480);
    values[0] = sub_halves(even, 0x64806480);
    values[1] = sub_halves(odd, 0x64806480);
  }
};
