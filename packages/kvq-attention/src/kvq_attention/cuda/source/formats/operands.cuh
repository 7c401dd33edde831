// What formats say of the operands they unpack: words of two units, of a key's row or of a value's.
#pragma once

#include "primitives.cuh"

// Keys and values of one kind, made by Format::unpack: values[i] holds value i of the low unit and
// value i of the high one. `second` is what second.cuh gives: a byte for each unit, or a pair of
// the scales of their blocks. `table` is the block's, for formats that look values up.
template <class Format>
struct Alike {
  // An operand is (value + OFFSET) * 2^place(i) / FACTOR / scale, for value i of a unit.
  static constexpr int OFFSET = 0;
  DEVICE static constexpr int place(int) { return 0; }

  // Whether a key's values[i] are neighbours instead: 2i and 2i + 1 of the low unit, for i below
  // SPLIT / 2, then those of the high unit. A value's two units are of different tokens.
  static constexpr bool NEIGHBOURS = false;

  // Whether a value's are, too: as unpack_key makes them, of one token each.
  static constexpr bool SEPARATE = false;

  // Of the block's table, which all its threads write; 0 where there is none.
  static constexpr int TABLE_BYTES = 0;
  DEVICE static void fill_table(SharedAddress, int, int) {}

  template <int SPLIT>
  DEVICE static void unpack_key(u32 word, u32 second, SharedAddress, u32 (&values)[SPLIT]) {
    Format::unpack(word, second, values);
  }

  template <int SPLIT>
  DEVICE static void unpack_value(u32 word, u32 second, SharedAddress, u32 (&values)[SPLIT]) {
    Format::unpack(word, second, values);
  }
};

// Operands that are a code's bits where they lie: f16 subnormals, which products take exactly, so
// that a mask is all that a code needs. Near 1024, where bits under a larger exponent would lie, an
// offset is a hundred times a code, and f32 sums, in which the two cancel, keep less of it.
// Codes are in two's complement; OFFSET makes them positive. keys.cuh takes it out by one product a
// tile, values.cuh by one for each sum.
template <class Format>
struct Masked : Alike<Format> {
  static constexpr int SCALE_BYTES = 2;
  static constexpr float FACTOR = 0x1p24f;
  static constexpr bool ROTATED = false;
  static constexpr bool BF16 = false;
};
