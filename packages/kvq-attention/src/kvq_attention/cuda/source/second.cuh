// What a format's second plane says of a tile's words. Scales of blocks are read for all segments
// of a row at once: a lane keeps those of its own units.
#pragma once

#include "tile.cuh"

// Of a key's row: words of units 8 * segment + 2p and the next, p = l % 4.
template <class Format, int DIM>
struct KeySeconds {
  static constexpr int BYTES = Layout<Format, DIM>::SECOND;
  static constexpr int WORDS = Format::SECOND > 1 ? BYTES / 4 : 0;
  const u8* bytes;
  u32 scales[WORDS / 2 > 0 ? WORDS / 2 : 1];  // of this lane's units in four segments each

  DEVICE void load(const Tile& tile, int row) {
    bytes = tile.rest + row * BYTES;
    if constexpr (Format::SECOND > 1) {
      static_assert(Format::SECOND == 4, "two scales a segment");
      const Words<BYTES> all = *reinterpret_cast<const Words<BYTES>*>(bytes);
      const u32 selector = 0x6420 + (lane() % 4 / 2) * 0x1111;
#pragma unroll
      for (int i = 0; i < WORDS; i += 2) {
        scales[i / 2] = permute(all.word[i], all.word[smaller(i + 1, WORDS - 1)], selector);
      }
    }
  }

  // `second` of Format::unpack.
  DEVICE u32 get(int segment) const {
    if constexpr (Format::SECOND == 0) return 0;
    if constexpr (Format::SECOND == 1) {
      const u8* at = bytes + 8 * segment + 2 * (lane() % 4);
      return permute(*reinterpret_cast<const u16*>(at), 0, 0x4140);
    }
    const u32 four = scales[segment / 4];
    const u32 two = segment % 4 < 2 ? halves_of_e4m3(four) : upper_halves_of_e4m3(four);
    return segment % 2 ? twice_high_half(two) : twice_low_half(two);
  }
};

// Of the values' rows of two tokens: words of unit 8 * segment + l / 4 of each.
template <class Format, int DIM>
struct ValueSeconds {
  static constexpr int BYTES = Layout<Format, DIM>::SECOND;
  static constexpr int WORDS = Format::SECOND > 1 ? BYTES / 4 : 0;
  const u8* bytes;
  u32 scales[WORDS > 0 ? WORDS : 1];  // of this lane's units in two segments each

  DEVICE void load(const Tile& tile, int row) {
    bytes = tile.rest + row * BYTES;
    if constexpr (Format::SECOND > 1) {
      static_assert(Format::SECOND == 4, "two scales a segment");
      const Words<BYTES> low = *reinterpret_cast<const Words<BYTES>*>(bytes);
      const Words<BYTES> high = *reinterpret_cast<const Words<BYTES>*>(bytes + BYTES);
      const u32 selector = 0x6240 + lane() / 16 * 0x1111;
#pragma unroll
      for (int i = 0; i < WORDS; i++) scales[i] = permute(low.word[i], high.word[i], selector);
    }
  }

  DEVICE u32 get(int segment) const {
    if constexpr (Format::SECOND == 0) return 0;
    if constexpr (Format::SECOND == 1) {
      const u8* at = bytes + 8 * segment + lane() / 4;
      return at[0] | u32(at[BYTES]) << 16;
    }
    const u32 four = scales[segment / 2];
    return segment % 2 ? upper_halves_of_e4m3(four) : halves_of_e4m3(four);
  }
};
