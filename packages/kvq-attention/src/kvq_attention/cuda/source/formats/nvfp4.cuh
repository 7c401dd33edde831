// nvfp4: e2m1 numbers under one e4m3 scale per 16 and one float32 scale a row.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Nvfp4 : Alike<Nvfp4> {
  static constexpr int SPLIT = 4;
  static constexpr int SECOND = 4;
  static constexpr int BLOCK = 0;
  static constexpr int SCALE_BYTES = 4;
  static constexpr float FACTOR = 0x1p14f;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;

  // A code's sign goes to bit 7 of a byte, exponent and mantissa to bits 3-1, for even and for odd
  // codes of both units at once: that is the upper byte of the f16 number code * 2^-14, once a mask
  // has taken what else lies around it. Values are code * block scale, of which `scales` is a pair:
  // with two significant bits of one and four of the other, and none below 2^-24, products are
  // exact. 7 + 8
  //
  // Also tried: bytes of e4m3 numbers and their conversion, 10 + 6.
  DEVICE static void unpack(u32 word, u32 scales, u32 (&values)[SPLIT]) {
    const u32 even = logic<SELECT>(word << 4, word << 1, 0x80808080);
    const u32 odd = logic<SELECT>(word, word >> 3, 0x80808080);
    values[0] = mul_halves((even << 8) & 0x8E008E00, scales);
    values[1] = mul_halves((odd << 8) & 0x8E008E00, scales);
    values[2] = mul_halves(even & 0x8E008E00, scales);
    values[3] = mul_halves(odd & 0x8E008E00, scales);
  }
};
