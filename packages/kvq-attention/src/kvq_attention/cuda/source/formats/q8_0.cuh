// q8_0: a byte a value, two's complement.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Q8_0 : Masked<Q8_0> {
  static constexpr int SPLIT = 2;
  static constexpr int SECOND = 0;
  static constexpr int BLOCK = 32;
  static constexpr int OFFSET = 128;

  // A byte ^ 128 is value + 128. 3 + 0
  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) {
    values[0] = logic<AND_XOR>(word, 0x00FF00FF, 0x00800080);
    values[1] = logic<AND_XOR>(word >> 8, 0x00FF00FF, 0x00800080);
  }
};
