// fp8_e4m3: e4m3 numbers under one fp16 scale per 32.
#pragma once

#include "formats/e4m3.cuh"

struct Fp8E4m3 : E4m3 {
  static constexpr int BLOCK = 32;
  static constexpr int SCALE_BYTES = 2;
};
