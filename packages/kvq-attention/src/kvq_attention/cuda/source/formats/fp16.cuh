// fp16: values as they are.
#pragma once

#include "formats/operands.cuh"

struct Fp16 : Alike<Fp16> {
  static constexpr int SPLIT = 1;
  static constexpr int SECOND = 0;
  static constexpr int BLOCK = -1;
  static constexpr int SCALE_BYTES = 0;
  static constexpr float FACTOR = 1;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;

  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) { values[0] = word; }
};
