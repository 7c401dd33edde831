// nvfp4: e2m1 numbers under one e4m3 scale per 16 and one float32 scale a row.
#pragma once

#include "formats/bits.cuh"
#include "formats/operands.cuh"

struct Nvfp4 : Alike<Nvfp4> {
  static constexpr int SPLIT = 4;
  static constexpr int SECOND = 4;
  static constexpr int BLOCK = 0;
  static constexpr int SCALE_BYTES = 4;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;

  // Values are code * block scale. With two significant bits of one and four of the other the
  // product is exact.
#if KVQ_ARCH >= 89
  static constexpr float FACTOR = 64;

  // Block scales, from bits 0-7 and 16-23.
  DEVICE static u32 widen(u32 two_bytes) { return halves_of_e4m3(permute(two_bytes, 0, 0x4420)); }

  // A code's sign goes to bit 7 of a byte, exponent and mantissa to bits 4-2: e4m3 * 2^-6. 10 + 6
  DEVICE static void unpack(u32 word, u32 scale, u32 (&values)[SPLIT]) {
    const u32 codes = permute(word, 0, 0x3120);
    const u32 even_digits = (codes << 2) & 0x1C1C1C1C;
    const u32 odd_digits = (codes >> 2) & 0x1C1C1C1C;
    const u32 even = logic<AND_OR>(codes << 4, 0x80808080, even_digits);
    const u32 odd = logic<AND_OR>(codes, 0x80808080, odd_digits);
    values[0] = mul_halves(halves_of_e4m3(even), scale);
    values[1] = mul_halves(halves_of_e4m3(odd), scale);
    values[2] = mul_halves(upper_halves_of_e4m3(even), scale);
    values[3] = mul_halves(upper_halves_of_e4m3(odd), scale);
  }
#else
  static constexpr float FACTOR = 256;

  // Block scales * 2^6: moved as fp8 is, which divides them by 2^8, then scaled. NaN reads as 480.
  DEVICE static u32 widen(u32 two_bytes) {
    const u32 digits = (two_bytes << 7) & 0x3F803F80;
    const u32 small = logic<AND_OR>(two_bytes << 8, 0x80008000, digits);
    return mul_halves(small, 0x74007400);  // 2^14
  }

  // A code's sign goes to bit 15 of its half, exponent and mantissa to bits 11-9: f16 * 2^-14.
  // 9 + 10
  DEVICE static void unpack(u32 word, u32 scale, u32 (&values)[SPLIT]) {
    const u32 digits_0 = (word << 9) & 0x0E000E00;
    const u32 digits_1 = (word << 5) & 0x0E000E00;
    const u32 digits_2 = (word << 1) & 0x0E000E00;
    const u32 digits_3 = (word >> 3) & 0x0E000E00;
    values[0] = mul_halves(logic<AND_OR>(word << 12, 0x80008000, digits_0), scale);
    values[1] = mul_halves(logic<AND_OR>(word << 8, 0x80008000, digits_1), scale);
    values[2] = mul_halves(logic<AND_OR>(word << 4, 0x80008000, digits_2), scale);
    values[3] = mul_halves(logic<AND_OR>(word, 0x80008000, digits_3), scale);
  }
#endif
};
