// iso4: a nibble a value, an index into 16 centroids; index 15 - n has the negative of n's.
#pragma once

#include "formats/bits.cuh"
#include "formats/constants.cuh"
#include "formats/operands.cuh"
#include "formats/table.cuh"

struct Iso4 : Alike<Iso4> {
  static constexpr int SPLIT = 4;
  static constexpr int SECOND = 0;
  static constexpr int BLOCK = 128;
  static constexpr int SCALE_BYTES = 2;
  static constexpr float FACTOR = 1;
  static constexpr bool ROTATED = true;
  static constexpr bool BF16 = false;

  // A permutation looks four nibbles up in eight bytes: in the low bytes of the first eight
  // centroids, which are negative, and in their high ones. From 8 on indices run backwards and the
  // sign, of four values at once, is flipped. Even and odd values are looked up apart. 14 + 5
  //
  // Also tried: nibbles paired by a permutation and signs flipped pair by pair, 15 + 5, and with
  // shifts in place of products 17 + 4; indices turned round by shifts, 25 + 5; two lookups, of
  // which one gives 0 by selecting a sign, 24 + 3.
  DEVICE static void unpack(u32 word, u32, u32 (&values)[SPLIT]) {
    const u32 flip = multiply_high(word & 0x88888888, 0xE0000000);  // bit 3 to bits 0-2
    const u32 even = logic<XOR_AND>(word, flip, 0x07070707);
    const u32 odd = logic<XOR_AND>(word, flip, 0x70707070);
    // Selectors: nibbles of bytes 0, 2, 1, 3.
    const u32 evens = multiply_high(even, 0x00100001) + even;
    const u32 odds = multiply_high(odd, 0x10010000);
    const u32 signs = permute(word, 0, 0x3120);
    look_up(evens, signs << 4, values[0], values[2]);
    look_up(odds, signs, values[1], values[3]);
  }

  // A key's pairs are of one unit, whose nibbles are selectors as they lie. 14 + 3; signs that are
  // added make it 13 + 6.
  static constexpr bool NEIGHBOURS = true;
  DEVICE static void unpack_key(u32 word, u32, SharedAddress, u32 (&values)[SPLIT]) {
    const u32 flip = multiply_high(word & 0x88888888, 0xE0000000);
    const u32 selectors = logic<XOR_AND>(word, flip, 0x77777777);
    const u32 even_signs = word << 4;
    const u32 low_signs = permute(even_signs, word, 0x5140);
    const u32 high_signs = permute(even_signs, word, 0x7362);
    look_up(selectors, low_signs, values[0], values[1]);
    look_up(multiply_high(selectors, 0x00010001), high_signs, values[2], values[3]);  // >> 16
  }

 private:
  // Selects four values: two of each unit for `unpack`, those of a unit for `unpack_key`. Signs in
  // bits 7, 15, 23, 31 are set where positive.
  DEVICE static void look_up(u32 selector, u32 signs, u32& first, u32& second) {
    const u32 low = permute(in_register(ISO4_LOW_0), ISO4_LOW_4, selector);
    const u32 negative = permute(in_register(ISO4_HIGH_0), ISO4_HIGH_4, selector);
    const u32 high = logic<AND_XOR>(signs, 0x80808080, negative);
    first = permute(low, high, 0x5140);
    second = permute(low, high, 0x7362);
  }
};

// The same, two codes at a time in a table.
struct Iso4Tabled : Iso4 {
  static constexpr bool SEPARATE = true;
  static constexpr int TABLE_BYTES = 32768;

  // An index is a byte of codes; its upper bit chooses a row's half. 6 + 4
  //
  // Also tried: rows of 128 bytes, to whose addresses a shift and an AND_OR lead, 8 + 4; rows of
  // 256 bytes, half of them free, 4 + 4 in 64 KiB; a part of the words by Iso4, which reads less of
  // shared memory: slower the larger the part.
  DEVICE static void unpack_key(u32 word, u32, SharedAddress table, u32 (&values)[SPLIT]) {
    const u32 rows = word & 0x7F7F7F7F;
    const u32 columns = logic<AND_OR>(word, 0x80808080, columns_of_lane());
    values[0] = look_up_pair<0>(table, rows, columns);
    values[1] = look_up_pair<1>(table, rows, columns);
    values[2] = look_up_pair<2>(table, rows, columns);
    values[3] = look_up_pair<3>(table, rows, columns);
  }

  DEVICE static void fill_table(SharedAddress table, int thread, int threads) {
    const auto pair = [](u32 index) {
      u32 values[SPLIT];
      unpack((index & 15) | index >> 4 << 16, 0, values);
      return values[0];
    };
    const auto at = [](u32 index) { return (index & 127) * 256 + (index >> 7) * 128; };
    fill_rows<256>(table, thread, threads, pair, at);
  }
};
