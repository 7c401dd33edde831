// q4_0: a nibble a value, two's complement.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Q4_0 : Masked<Q4_0> {
  static constexpr int SPLIT = 4;
  static constexpr int SECOND = 0;
  static constexpr int BLOCK = 32;
  static constexpr int OFFSET = 8;
  DEVICE static constexpr int place(int i) { return i % 2 * 4; }

  // A nibble ^ 8 is value + 8; one shift serves four pairs. 5 + 0
  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) {
    const u32 upper = word >> 8;
    values[0] = logic<AND_XOR>(word, 0x000F000F, 0x00080008);
    values[1] = logic<AND_XOR>(word, 0x00F000F0, 0x00800080);
    values[2] = logic<AND_XOR>(upper, 0x000F000F, 0x00080008);
    values[3] = logic<AND_XOR>(upper, 0x00F000F0, 0x00800080);
  }
};
