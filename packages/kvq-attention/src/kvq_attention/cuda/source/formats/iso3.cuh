// iso3: an index into 8 centroids, its low two bits in one plane and the top one in another.
#pragma once

#include "formats/bits.cuh"
#include "formats/constants.cuh"
#include "formats/operands.cuh"

struct Iso3 : Alike<Iso3> {
  static constexpr int SPLIT = 8;
  static constexpr int SECOND = 1;
  static constexpr int BLOCK = 128;
  static constexpr int SCALE_BYTES = 2;
  static constexpr float FACTOR = 1;
  static constexpr bool ROTATED = true;
  static constexpr bool BF16 = false;

  // A permutation looks four nibbles up in eight bytes, the low or the high bytes of the
  // centroids. So the bytes of both units lie side by side first, even and odd values become
  // nibbles, and a top bit joins each. 23 + 5
  //
  // Also tried: selectors shifted instead of multiplied, 25 + 3; top bits spread with low bits for
  // even and for odd values, which are paired after that, 41 + 6; magnitudes looked up as whole
  // halves, with a selector and a sign for each pair, 31 + 20.
  DEVICE static void unpack(u32 word, u32 second, u32 (&values)[SPLIT]) {
    const u32 low = permute(word, 0, 0x3120);
    // Byte k of the next is the nibble of top bits for byte k of `low`.
    const u32 bits = permute(second, 0, 0x4420);
    const u32 shifted = bits << 12;
    // Bits 0 and 2 go to 2 and 6, bits 1 and 3 there too. Between them sums are left that SELECT
    // drops: they end at bit 5.
    const u32 even_tops = logic<OR_AND>(bits, shifted, 0x05050505) * 20;
    const u32 odd_tops = logic<OR_AND>(bits, shifted, 0x0A0A0A0A) * 10;
    const u32 even = logic<SELECT>(low, even_tops, 0x33333333);
    const u32 odd = logic<SELECT>(low >> 2, odd_tops, 0x33333333);
    look_up(even, values[0], values[2]);
    look_up(multiply_high(even, 0x00010001), values[4], values[6]);  // >> 16
    look_up(odd, values[1], values[3]);
    look_up(multiply_high(odd, 0x00010001), values[5], values[7]);
  }

 private:
  // Two values of the low unit, then two of the high one.
  DEVICE static void look_up(u32 selector, u32& first, u32& second) {
    const u32 low = permute(in_register(ISO3_LOW_0), ISO3_LOW_4, selector);
    const u32 high = permute(in_register(ISO3_HIGH_0), ISO3_HIGH_4, selector);
    first = permute(low, high, 0x6240);
    second = permute(low, high, 0x7351);
  }
};
