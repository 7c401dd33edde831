// What a tile adds to the sums: values, unpacked in the registers of a product's operand, times
// probabilities.
#pragma once

#include "second.cuh"
#include "tile.cuh"

// Sums [8 rows at a time][16 values at a time]: what lane l holds, see first_value.
template <int DIM, int COLUMNS>
using Sums = float[COLUMNS][DIM / 16][4];

// A step's sums 0 and 1 are of rows 2 (l % 4) and the next, so are 2 and 3, of another value. Lane
// l's values of a segment, which are next to each other, lie in parts: two in a step.
//
// The value of a row that lane l's part 0 of a segment is.
template <class Format>
DEVICE int first_value(int segment) {
  return Format::SPLIT * (8 * segment + lane() / 4);
}

// The part where value j of a segment lies.
template <class Format>
DEVICE constexpr int part_of(int j) {
  // Of products with one of two neighbours each: 0 and 2, 1 and 3.
  return Format::SEPARATE ? j / 4 * 4 + j % 2 * 2 + j / 2 % 2 : j;
}

// A bit for each bit of a pair's halves that are not 0.
DEVICE u32 where_not_zero(u32 pair) {
  return (pair & 0xFFFF ? 0xFFFF : 0) | (pair >> 16 ? 0xFFFF0000 : 0);
}

// What the format's offset adds to operands of a part, see first_value, negated.
template <class Format>
DEVICE u32 offset_of(int part) {
  return (0x8000 | Format::OFFSET << Format::place(part % Format::SPLIT)) * 0x00010001;
}

// What offsets add to operands of a step, as one operand: of parts 2i and 2i + 1 and again.
template <class Format>
DEVICE Words<16> offsets_operand() {
  const u32 even = offset_of<Format>(0), odd = offset_of<Format>(1);
  return {{even, odd, even, odd}};
}

// first: loaded_segment. offsets: offsets_operand. weights[n][i]: pairs of probabilities of tokens
// 2p and 2p + 1 (i = 0) or 2p + 8 and 2p + 9 for row 8n + l / 4, p = l % 4. Where a row has one
// scale they are scaled by it already. MASKED: some are 0 because their rows do not see the token,
// whose scales may be NaN.
template <class Format, int DIM, bool MASKED, int COLUMNS>
DEVICE void add_tile(Sums<DIM, COLUMNS>& sums, const Tile& tile, int first, SharedAddress table,
                     const Words<16>& offsets, const u32 (&weights)[COLUMNS][2]) {
  using L = Layout<Format, DIM>;
  constexpr int PARTS = L::SCALES > 1 ? L::SCALES : 1;
  constexpr int SEGMENTS = L::SEGMENTS / PARTS;
  const int token = 2 * (lane() % 4);
  Scales<Format, DIM> scales[4];
  if constexpr (PARTS > 1) {
#pragma unroll
    for (int i = 0; i < 4; i++) scales[i].load(tile, token + i % 2 + i / 2 * 8);
  }
  ValueSeconds<Format, DIM> seconds[2];
  seconds[0].load(tile, token);
  seconds[1].load(tile, token + 8);
  u32 r[4];
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    u32 scaled[COLUMNS][2];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        scaled[n][i] = weights[n][i];
        if constexpr (PARTS > 1) {
          const u32 pair = permute(scales[2 * i].word[part / 2], scales[2 * i + 1].word[part / 2],
                                   part % 2 ? 0x7632 : 0x5410);
          scaled[n][i] = mul_halves(weights[n][i], pair);
          if (MASKED) scaled[n][i] &= where_not_zero(weights[n][i]);
        }
      }
    }
    // Weights of tokens 2p and 2p + 1 as operands of their own, for a pair's low and high value.
    u32 separate[COLUMNS][2][2][2];
    if constexpr (Format::SEPARATE) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          separate[n][i][0][0] = scaled[n][i] & 0xFFFF;
          separate[n][i][0][1] = scaled[n][i] >> 16;
          separate[n][i][1][0] = scaled[n][i] << 16;
          separate[n][i][1][1] = scaled[n][i] & 0xFFFF0000;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++) {
      const int segment = part * SEGMENTS + i;
      if (segment % 2 == 0) {
        load_matrices_transposed(r, tile.codes + (first ^ segment * 16));
      }
      const auto add = [&](int step, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          if constexpr (Format::OFFSET > 0) {
            // First, so that a tile's own product leaves a sum near what it was: taken out of the
            // sum of all tiles an offset would leave that sum's rounding.
            static_assert(Format::place(0) == Format::place(2 % Format::SPLIT), "as offsets are");
            const u32 (&o)[4] = offsets.word;
            mma(sums[n][step], o[0], o[1], o[2], o[3], scaled[n][0], scaled[n][1]);
          }
          if (Format::BF16) {
            mma_bf16(sums[n][step], a0, a1, a2, a3, scaled[n][0], scaled[n][1]);
          } else {
            mma(sums[n][step], a0, a1, a2, a3, scaled[n][0], scaled[n][1]);
          }
        }
      };
      if constexpr (Format::SPLIT == 1) {
        if (segment % 2 == 0) add(segment / 2, r[0], r[2], r[1], r[3]);
      } else {
        u32 low[Format::SPLIT], high[Format::SPLIT];
        const int at = segment % 2 * 2;
        const u32 one = seconds[0].get(segment), other = seconds[1].get(segment);
        if constexpr (Format::SEPARATE) {
          // Pairs are neighbours of one token, where a product takes two tokens' values: it takes
          // one neighbour and a weight of 0 for the other, then the other.
          Format::unpack_key(r[at], one, table, low);
          Format::unpack_key(r[at + 1], other, table, high);
          constexpr int HALF = Format::SPLIT / 2;
#pragma unroll
          for (int j = 0; j < HALF; j += 2) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
              const int step = segment * HALF + j + k;
#pragma unroll
              for (int n = 0; n < COLUMNS; n++) {
                const u32 (&w)[2][2][2] = separate[n];
                mma(sums[n][step], low[j], low[j + 1], low[HALF + j], low[HALF + j + 1],
                    w[0][k][0], w[0][k][1]);
                mma(sums[n][step], high[j], high[j + 1], high[HALF + j], high[HALF + j + 1],
                    w[1][k][0], w[1][k][1]);
              }
            }
          }
        } else {
          Format::unpack_value(r[at], one, table, low);
          Format::unpack_value(r[at + 1], other, table, high);
#pragma unroll
          for (int j = 0; j < Format::SPLIT; j += 2) {
            add((segment * Format::SPLIT + j) / 2, low[j], low[j + 1], high[j], high[j + 1]);
          }
        }
      }
    }
  }
}
