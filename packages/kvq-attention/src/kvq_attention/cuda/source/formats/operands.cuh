// What formats say of the operands they unpack: words of two units, of a key's row or of a value's.
#pragma once

#include "primitives.cuh"

// Keys and values of one kind, made by Format::unpack: values[i] holds value i of the low unit and
// value i of the high one. `table` is the block's, for formats that look values up.
template <class Format>
struct Alike {
  // Whether a key's values[i] are neighbours instead: 2i and 2i + 1 of the low unit, for i below
  // SPLIT / 2, then those of the high unit. A value's two units are of different tokens.
  static constexpr bool NEIGHBOURS = false;

  // Of the block's table, which Format::fill_table writes; 0 where there is none.
  static constexpr int TABLE_BYTES = 0;

  template <int SPLIT>
  DEVICE static void unpack_key(u32 word, u32 second, const u8*, u32 (&values)[SPLIT]) {
    Format::unpack(word, second, values);
  }

  template <int SPLIT>
  DEVICE static void unpack_value(u32 word, u32 second, const u8*, u32 (&values)[SPLIT]) {
    Format::unpack(word, second, values);
  }
};
