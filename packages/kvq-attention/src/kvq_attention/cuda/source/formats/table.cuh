// Tables of a block: f16 pairs for pairs of codes, looked up in shared memory.
//
// A row of a table holds a pair once for each lane: lanes never meet in a bank. Addresses are made
// by one permutation each, of an index and a lane's column, as rows begin at multiples of 256
// bytes; a row's other 128 bytes are another index' row, or free.
#pragma once

#include "primitives.cuh"

// Where this lane's column lies within a row, in each byte.
DEVICE u32 columns_of_lane() { return u32(lane()) * 0x04040404; }

// The pair of byte I of `rows`, which is below 128. Bit 7 of that byte of `columns` chooses the
// upper half of the row's 256 bytes. The permutation repeats the sign of `rows` for zeros.
template <int I>
DEVICE u32 look_up_pair(SharedAddress table, u32 rows, u32 columns) {
  return load_shared(table + permute(rows, columns, 0x8804 + 0x1111 * I));
}

// Writes a table's pairs, by all threads of a block: pair(index) of `at(index)`.
template <int ENTRIES, class Pair, class At>
DEVICE void fill_rows(SharedAddress table, int thread, int threads, Pair pair, At at) {
  for (int i = thread; i < ENTRIES * 32; i += threads) {
    const u32 index = i / 32, column = i % 32;
    store_shared(table + at(index) + 4 * column, pair(index));
  }
}
