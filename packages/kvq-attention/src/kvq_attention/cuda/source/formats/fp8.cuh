// fp8: e4m3 numbers under one float32 scale a row.
#pragma once

#include "formats/e4m3.cuh"

struct Fp8 : E4m3 {
  static constexpr int BLOCK = 0;
  static constexpr int SCALE_BYTES = 4;
};
