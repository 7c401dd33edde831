// Scores of a tile: keys, unpacked in the registers of a product's operand, times queries.
#pragma once

#include "second.cuh"
#include "tile.cuh"

// Queries as the second operand of products, 8 rows and 16 values at a time: in registers, or in
// shared memory, which leaves registers to two tiles at once.
template <int DIM, int COLUMNS, bool SHARED>
struct Queries {
  static constexpr int STEPS = DIM / 16;
  static constexpr int OFFSETS = (DIM + 127) / 128;
  static constexpr int BYTES = COLUMNS * STEPS / 2 * 32 * 16;  // in shared memory
  static_assert(STEPS % 2 == 0, "two steps' words are read at once");

  u32 values[SHARED ? 1 : COLUMNS][SHARED ? 1 : STEPS][2];
  const u8* lane_words;
  // What a format's OFFSET adds to a block's sum, negated: lane l has blocks 2w and 2w + 1 for
  // w = 2i + l % 2, rounded to f16 where l % 4 < 2, and what rounding left of them elsewhere.
  u32 offsets[COLUMNS][OFFSETS];

  // The words of COUNT steps from `step` on.
  template <int COUNT>
  DEVICE void read(u32 (&words)[COLUMNS][COUNT][2], int step) const {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        if constexpr (!SHARED) {
          words[n][i][0] = values[n][step + i][0];
          words[n][i][1] = values[n][step + i][1];
        } else if constexpr (COUNT == 1) {
          const u8* at = lane_words + (n * STEPS + step) / 2 * 512 + step % 2 * 8;
          const auto pair = *reinterpret_cast<const Words<8>*>(at);
          words[n][i][0] = pair.word[0];
          words[n][i][1] = pair.word[1];
        } else if (i % 2 == 0) {
          const u8* at = lane_words + (n * STEPS + step + i) / 2 * 512;
          const auto quad = *reinterpret_cast<const Words<16>*>(at);
#pragma unroll
          for (int j = 0; j < 4; j++) words[n][i + j / 2][j % 2] = quad.word[j];
        }
      }
    }
  }

  // Puts all steps' words where this lane reads them.
  DEVICE void write(u8* words, const u32 (&all)[COLUMNS][STEPS][2]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int step = 0; step < STEPS; step += 2) {
        if constexpr (SHARED) {
          const Words<16> quad{{all[n][step][0], all[n][step][1], all[n][step + 1][0],
                                all[n][step + 1][1]}};
          u8* at = words + (n * STEPS + step) / 2 * 512 + lane() * 16;
          *reinterpret_cast<Words<16>*>(at) = quad;
        } else {
#pragma unroll
          for (int j = 0; j < 4; j++) values[n][step + j / 2][j % 2] = all[n][step + j / 2][j % 2];
        }
      }
    }
    lane_words = words + lane() * 16;
  }
};

template <bool BF16, int COLUMNS, int COUNT>
DEVICE void multiply(float (&c)[COLUMNS][4], u32 a0, u32 a1, u32 a2, u32 a3,
                     const u32 (&queries)[COLUMNS][COUNT][2], int step) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    const u32 (&b)[2] = queries[n][step];
    if (BF16) {
      mma_bf16(c[n], a0, a1, a2, a3, b[0], b[1]);
    } else {
      mma(c[n], a0, a1, a2, a3, b[0], b[1]);
    }
  }
}

// What the scaled sums of a token's blocks are added to: what the format's offset adds to them,
// negated, for all blocks by one product. It is NaN where a scale is not finite.
template <class Format, int DIM, int COLUMNS, bool SHARED>
DEVICE void begin_scores(float (&scores)[COLUMNS][4], const Scales<Format, DIM> (&scales)[2],
                         const Queries<DIM, COLUMNS, SHARED>& queries) {
  constexpr int WORDS = Layout<Format, DIM>::SCALE / 4;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
  }
  if constexpr (Format::OFFSET > 0) {
#pragma unroll
    for (int i = 0; i < Queries<DIM, COLUMNS, SHARED>::OFFSETS; i++) {
      const int odd = smaller(2 * i + 1, WORDS - 1);
      u32 a[2];
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const u32 one = scales[u].word[2 * i], other = scales[u].word[odd];
        a[u] = lane() % 2 ? other : one;
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) mma_k8(scores[n], a[0], a[1], queries.offsets[n][i]);
    }
  }
}

// first: loaded_segment. scores[t][n][i]: products of token l / 4 (i < 2) or l / 4 + 8 of tile t
// with rows 8n + 2 (l % 4) + i % 2 of the queries, scaled by the tokens' scales. The tiles, whose
// work is independent, take turns.
template <class Format, int DIM, int TILES, int COLUMNS, bool SHARED>
DEVICE void score_tiles(float (&scores)[TILES][COLUMNS][4], const Tile (&tiles)[TILES],
                        int first, SharedAddress table,
                        const Queries<DIM, COLUMNS, SHARED>& queries) {
  using L = Layout<Format, DIM>;
  constexpr int PARTS = L::SCALES > 1 ? L::SCALES : 1;
  constexpr int SEGMENTS = L::SEGMENTS / PARTS;  // under one scale
  const int group = lane() / 4;
  Scales<Format, DIM> scales[TILES][2];
  if constexpr (L::SCALES > 0) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      scales[t][0].load(tiles[t], group);
      scales[t][1].load(tiles[t], group + 8);
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) begin_scores<Format, DIM>(scores[t], scales[t], queries);
  KeySeconds<Format, DIM> seconds[TILES][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    seconds[t][0].load(tiles[t], group);
    seconds[t][1].load(tiles[t], group + 8);
  }
  u32 r[TILES][4];
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    // Two sums where there would be one, as each product waits for the one before.
    constexpr int CHAINS = PARTS == 1 ? 2 : 1;
    float sums[TILES][CHAINS][COLUMNS][4] = {};
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++) {
      const int segment = part * SEGMENTS + i;
      constexpr int STEPS = Format::SPLIT < 4 ? 1 : Format::SPLIT / 2;  // of a segment
      u32 words[COLUMNS][STEPS][2];
      queries.read(words, segment * Format::SPLIT / 2);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        if (segment % 2 == 0) {
          load_matrices(r[t], tiles[t].codes + (first ^ segment * 16));
        }
        if constexpr (Format::SPLIT == 1) {
          if (segment % 2 == 0) {
            multiply<Format::BF16>(sums[t][segment / 2 % CHAINS], r[t][0], r[t][1], r[t][2],
                                   r[t][3], words, 0);
          }
        } else {
          u32 low[Format::SPLIT], high[Format::SPLIT];
          const int at = segment % 2 * 2;
          const u32 one = seconds[t][0].get(segment), other = seconds[t][1].get(segment);
          Format::unpack_key(r[t][at], one, table, low);
          Format::unpack_key(r[t][at + 1], other, table, high);
#pragma unroll
          for (int j = 0; j < Format::SPLIT; j += 2) {
            const int step = (segment * Format::SPLIT + j) / 2;
            multiply<Format::BF16>(sums[t][step % CHAINS], low[j], high[j], low[j + 1],
                                   high[j + 1], words, j / 2);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float share = sums[t][0][n][i];
          if (CHAINS == 2) share += sums[t][CHAINS - 1][n][i];
          float& score = scores[t][n][i];
          if constexpr (L::SCALES == 0) {
            score = share;
          } else {
            const float scale = scales[t][i / 2].get(part);
            score += share * scale;
          }
        }
      }
    }
  }
}
