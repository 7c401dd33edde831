// iso3: an index into 8 centroids, its low two bits in one plane and the top one in another.
#pragma once

#include "formats/bits.cuh"
#include "formats/constants.cuh"
#include "formats/operands.cuh"
#include "formats/table.cuh"

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

// The same, two codes at a time in a table.
struct Iso3Tabled : Iso3 {
  static constexpr bool NEIGHBOURS = true;
  static constexpr bool SEPARATE = true;
  static constexpr int TABLE_BYTES = 16384;

  // An index is a nibble of low bits, of two codes, below their top bits. 13 + 10
  DEVICE static void unpack_key(u32 word, u32 second, SharedAddress table, u32 (&values)[SPLIT]) {
    look_up(word, second & 0x00330033, second & 0x00CC00CC, table, values);
  }

  DEVICE static void fill_table(SharedAddress table, int thread, int threads) {
    const auto pair = [](u32 index) {
      u32 values[SPLIT];
      unpack((index & 3) | (index >> 2 & 3) << 16, (index >> 4 & 1) | index >> 5 << 16, values);
      return values[0];
    };
    fill_rows<64>(table, thread, threads, pair, [](u32 index) { return index * 256; });
  }

 private:
  // Pairs of neighbours by their low bits and by top bits of even pairs and of odd ones: two bits
  // go to bits 4 and 5 of their pair's byte. Between them sums are left, which end at bit 10 of
  // each half.
  DEVICE static void look_up(u32 word, u32 even_tops, u32 odd_tops, SharedAddress table,
                             u32 (&values)[SPLIT]) {
    const u32 even = logic<SELECT>(word, even_tops * 0x110, 0x0F0F0F0F);
    const u32 odd = logic<SELECT>(word >> 4, odd_tops * 0x44, 0x0F0F0F0F);
    const u32 columns = columns_of_lane();
    values[0] = look_up_pair<0>(table, even, columns);
    values[1] = look_up_pair<0>(table, odd, columns);
    values[2] = look_up_pair<1>(table, even, columns);
    values[3] = look_up_pair<1>(table, odd, columns);
    values[4] = look_up_pair<2>(table, even, columns);
    values[5] = look_up_pair<2>(table, odd, columns);
    values[6] = look_up_pair<3>(table, even, columns);
    values[7] = look_up_pair<3>(table, odd, columns);
  }
};
