// q6_0: the low four bits of a value in one plane, the high two in another, two's complement.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Q6_0 : Masked<Q6_0> {
  static constexpr int SPLIT = 4;
  static constexpr int SECOND = 1;
  static constexpr int BLOCK = 32;
  static constexpr int OFFSET = 32;
  DEVICE static constexpr int place(int i) { return i % 2 * 4; }

  // The six bits ^ 32 are value + 32. 9 + 3
  DEVICE static void unpack(u32 word, u32 second, u32 (&values)[SPLIT]) {
    const u32 upper = word >> 8;
    const u32 top_0 = logic<AND_XOR>(second << 4, 0x00300030, 0x00200020);
    const u32 top_1 = logic<AND_XOR>(second << 6, 0x03000300, 0x02000200);
    const u32 top_2 = logic<AND_XOR>(second, 0x00300030, 0x00200020);
    const u32 top_3 = logic<AND_XOR>(second << 2, 0x03000300, 0x02000200);
    values[0] = logic<AND_OR>(word, 0x000F000F, top_0);
    values[1] = logic<AND_OR>(word, 0x00F000F0, top_1);
    values[2] = logic<AND_OR>(upper, 0x000F000F, top_2);
    values[3] = logic<AND_OR>(upper, 0x00F000F0, top_3);
  }
};
