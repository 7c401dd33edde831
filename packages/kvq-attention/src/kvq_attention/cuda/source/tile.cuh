// A tile, 16 tokens of one KV head, in shared memory: code rows, second code rows, scales.
#pragma once

#include "items.cuh"
#include "shared.cuh"
#include "warp.cuh"

// Where a format's rows of DIM values lie within a tile.
template <class Format, int DIM>
struct Layout {
  static constexpr int CODES = DIM * 2 / Format::SPLIT;  // bytes a row
  static constexpr int SECOND = Format::SECOND ? DIM / Format::SPLIT / Format::SECOND : 0;
  static constexpr int SCALES =
      Format::BLOCK < 0 ? 0 : Format::BLOCK == 0 || Format::BLOCK > DIM ? 1 : DIM / Format::BLOCK;
  static constexpr int SCALE = SCALES * Format::SCALE_BYTES;
  static constexpr int SCALE_AT = TILE * SECOND;
  static constexpr int REST = SCALE_AT + TILE * SCALE;
  static constexpr int BYTES = TILE * CODES + REST;
  static constexpr int SEGMENTS = CODES / 16;  // of 8 units a row
  static_assert(SEGMENTS >= 2, "load_matrices takes two segments of a row");
};

// A tile of one format: its code rows, which begin at a multiple of 128 bytes, and the rest of it:
// second code rows, then scales.
struct Tile {
  u8 *codes, *rest;
};

// Offset of a row's segment: the same segment of 8 neighbouring rows lies in different banks.
template <int SEGMENTS>
DEVICE int segment_at(int row, int segment) {
  if (SEGMENTS >= 8) return (row * SEGMENTS + (segment ^ (row & 7))) * 16;
  if (SEGMENTS == 4) return (row * 4 + (segment ^ (row >> 1 & 3))) * 16;
  return (row * 2 + (segment ^ (row >> 2 & 1))) * 16;
}

// Where the words that this lane is given of the tile's first two segments lie, for load_matrices:
// row l % 16, segment l / 16. Those of segments 2i and 2i + 1 lie at `first ^ 32 i`.
template <int SEGMENTS>
DEVICE int loaded_segment() {
  return segment_at<SEGMENTS>(lane() % 16, lane() / 16);
}

// Where this lane's 16 bytes of a tile's code rows go, of the first that the lanes copy at once.
template <int SEGMENTS>
DEVICE int copied_segment() {
  return segment_at<SEGMENTS>(lane() / SEGMENTS, lane() % SEGMENTS);
}

// Begins to copy CHUNKS * 16 bytes to `shared` + TO, of which lane l copies those at l * 16: its
// own are `shared` and `from`. They are few, and others' lie next to them: memory reads them
// together.
template <int CHUNKS, int TO, int DONE = 0>
DEVICE void copy_run(u8* shared, const u8* from, bool live) {
  if constexpr (DONE < CHUNKS) {
    if (CHUNKS - DONE >= 32 || lane() < CHUNKS - DONE) {
      copy_async<TO + DONE * 16, DONE * 16, true>(shared, from, live);
    }
    copy_run<CHUNKS, TO, DONE + 32>(shared, from, live);
  }
}

// Begins to copy a tile's code rows to `shared` + TO, of which a lane's bytes begin at `from` and
// go to copied_segment, `first`. Where it is not live the tile becomes zeros and nothing is read.
template <int SEGMENTS, int TO, int DONE = 0>
DEVICE void copy_codes(u8* shared, int first, const u8* from, bool live) {
  if constexpr (DONE < TILE * SEGMENTS) {
    // What segment_at makes of as many rows more.
    constexpr int TURN = SEGMENTS >= 8 ? (DONE / SEGMENTS & 7) * 16 : 0;
    copy_async<TO + DONE * 16, DONE * 16>(shared + (first ^ TURN), from, live);
    copy_codes<SEGMENTS, TO, DONE + 32>(shared, first, from, live);
  }
}

// The scales of one row.
template <class Format, int DIM>
struct Scales {
  static constexpr int COUNT = Layout<Format, DIM>::SCALES;
  static constexpr int BYTES = Layout<Format, DIM>::SCALE;
  u32 word[BYTES > 4 ? BYTES / 4 : 1];

  DEVICE void load(const Tile& tile, int row) {
    const u8* at = tile.rest + Layout<Format, DIM>::SCALE_AT + row * BYTES;
    if constexpr (BYTES == 2) {
      word[0] = *reinterpret_cast<const u16*>(at);
    } else {
      const Words<BYTES> all = *reinterpret_cast<const Words<BYTES>*>(at);
#pragma unroll
      for (int i = 0; i < BYTES / 4; i++) word[i] = all.word[i];
    }
  }

  DEVICE float get(int block) const {
    if (Format::SCALE_BYTES == 4) return as_float(word[block]);
    return block % 2 ? high_half(word[block / 2]) : low_half(word[block / 2]);
  }

  // The largest.
  DEVICE float top() const {
    if constexpr (COUNT == 1) {
      return get(0);
    } else {
      u32 most = word[0];
#pragma unroll
      for (int i = 1; i < BYTES / 4; i++) most = max_halves(most, word[i]);
      return low_half(max_halves(most, permute(most, 0, 0x1032)));
    }
  }
};

// Zeros a tile's rows outside [from, to): a weight of 0 does not outweigh a NaN.
template <class Format, int DIM>
DEVICE void blank_rows(const Tile& tile, int from, int to) {
  using L = Layout<Format, DIM>;
  const auto blank = [&](u8* at, int row_bytes) {
    u16* half = reinterpret_cast<u16*>(at);
    for (int i = lane(); i < TILE * row_bytes / 2; i += 32) {
      const int row = i / (row_bytes / 2);
      if (row < from || row >= to) half[i] = 0;
    }
  };
  blank(tile.codes, L::CODES);  // segments move within their row
  if (L::SECOND > 0) blank(tile.rest, L::SECOND);
  if (L::SCALE > 0) blank(tile.rest + L::SCALE_AT, L::SCALE);
}

// Zeros the block scales of rows whose scale is NaN: that alone says so, to those who see them.
template <class Format, int DIM>
DEVICE void tame_rows(const Tile& tile) {
  using L = Layout<Format, DIM>;
  if constexpr (Format::SECOND > 1) {
    for (int i = lane(); i < TILE * L::SECOND; i += 32) {
      Scales<Format, DIM> scale;
      scale.load(tile, i / L::SECOND);
      if (scale.get(0) != scale.get(0)) tile.rest[i] = 0;
    }
  }
}
