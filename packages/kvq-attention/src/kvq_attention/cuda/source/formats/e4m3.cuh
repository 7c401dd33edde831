// Bytes of e4m3 numbers: what fp8 and fp8_e4m3 share.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct E4m3 : Alike<E4m3> {
  static constexpr int SPLIT = 2;
  static constexpr int SECOND = 0;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;

#if KVQ_ARCH >= 89
  static constexpr float FACTOR = 1;

  // The conversion takes two neighbouring bytes. 3 + 0
  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) {
    const u32 pairs = permute(word, 0, 0x3120);
    values[0] = halves_of_e4m3(pairs);
    values[1] = upper_halves_of_e4m3(pairs);
  }
#else
  static constexpr float FACTOR = 256;

  // Exponent and mantissa go to bits 7-13 of a half, whose bias is larger by 8; NaN reads as 480.
  // 5 + 2
  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) {
    const u32 even = word << 8, even_digits = (word << 7) & 0x3F803F80;
    const u32 odd_digits = (word >> 1) & 0x3F803F80;
    values[0] = logic<AND_OR>(even, 0x80008000, even_digits);
    values[1] = logic<AND_OR>(word, 0x80008000, odd_digits);
  }
#endif
};
