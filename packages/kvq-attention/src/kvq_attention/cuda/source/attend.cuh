// A step of tiles: its scores, probabilities and what they add to a warp's sums.
#pragma once

#include "keys.cuh"
#include "softmax.cuh"
#include "values.cuh"
#include "walk.cuh"

// A warp's softmax and sums.
struct State {
  float top[COLUMNS][2], weight[COLUMNS][2];  // of rows 8n + 2 (l % 4) and the next
  Sums<DIM, COLUMNS> sums;

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        top[n][j] = LOWEST;
        weight[n][j] = 0.0f;
      }
#pragma unroll
      for (int step = 0; step < DIM / 16; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][step][i] = 0.0f;
      }
    }
  }
};

// What products with the rows of a lane are multiplied by.
using Powers = float[COLUMNS][2];

// Leaves of a step's scores, from `token` on, what their rows see.
DEVICE void mask(float (&scores)[TILES][COLUMNS][4], const Shared& shared, const Arguments& a,
                 int token) {
  const Piece& piece = shared.piece;
  const int earliest = piece.request.length - piece.request.queries;  // position of query 0
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = (8 * n + 2 * (lane() % 4) + j) % ROWS;
      const int seen = earliest + larger(shared.lines[row].query, 0);
      const int position = smaller(seen, shared.limits.last - 1);
      const int hidden = a.window > 0 ? seen - a.window : -1;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const int at = token + t * TILE + lane() / 4 + u * 8;
          if (at > position || at <= hidden) scores[t][n][2 * u + j] = -infinity();
        }
      }
    }
  }
}

// Moves the reference of rows whose largest score, or score and scale of values, exceeds it.
DEVICE void follow(State& state, float (&highest)[COLUMNS][2]) {
  bool exceeds = false;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) exceeds |= highest[n][j] > state.top[n][j] + SLACK;
  }
  if (!any(exceeds)) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    float fade[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float high = highest[n][j];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) high = greater(high, shuffle_xor(high, mask));
      const float top = state.top[n][j];
      const float next = high > top + SLACK ? high : top;
      fade[j] = exp2_fast(top - next);
      state.top[n][j] = next;
      state.weight[n][j] *= fade[j];
    }
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
#pragma unroll
      for (int i = 0; i < 4; i++) state.sums[n][step][i] *= fade[i % 2];
    }
  }
}

// Zeros what rows that do not see a token must not read: a weight of 0 does not outweigh a NaN.
DEVICE void blank_unseen(Shared& shared, const Arguments& a, u8* stage, int token) {
  const Request& request = shared.piece.request;
  const int lowest = a.window > 0 ? request.length - request.queries - a.window + 1 : 0;
  const int last = shared.limits.last;
  if (token < lowest || token + STEP > last) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int at = token + t * TILE;
      blank_rows<V, DIM>(tile_of<true>(stage, t), lowest - at, last - at);
    }
    sync_warp();
  }
  if (request.queries > 1) {
#pragma unroll
    for (int t = 0; t < TILES; t++) tame_rows<V, DIM>(tile_of<true>(stage, t));
    sync_warp();
  }
}

// Adds the step from `token` on, which lies at `stage`, to the state. MASKED: there are rows that
// do not see all of it.
template <bool MASKED>
DEVICE void attend(State& state, Shared& shared, const Arguments& a, const Lane& mine, u8* stage,
                   int token, const OurQueries& queries, const Powers& powers) {
  const SharedAddress table = known_address(0);
  if (MASKED) blank_unseen(shared, a, stage, token);
  float scores[TILES][COLUMNS][4];
  float highest[COLUMNS][2];
  float scale[TILES][2];  // of the values of tokens l / 4 and l / 4 + 8, where a row has one
  Tile keys[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) keys[t] = tile_of<false>(stage, t);
  score_tiles<K, DIM, TILES, COLUMNS, SHARED_QUERIES>(scores, keys, mine.key, table,
                                      queries);
  // What scores are still to be multiplied by, which costs nothing where they are added to.
  Powers left;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) left[n][j] = powers[n][j];
  }
  if (SOFTCAP || MASKED) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          scores[t][n][i] *= powers[n][i % 2];
          if (SOFTCAP) scores[t][n][i] = soft_cap(scores[t][n][i], a.softcap);
        }
        left[n][i % 2] = 1.0f;
      }
    }
  }
  if (MASKED) mask(scores, shared, a, token);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const Tile values = tile_of<true>(stage, t);
#pragma unroll
    for (int u = 0; u < 2; u++) {
      float bound = 0.0f;
      if constexpr (ValueLayout::SCALES > 0) {
        // The reference is near the largest probability x scale, so that f16 holds the product.
        Scales<V, DIM> scales;
        scales.load(values, lane() / 4 + 8 * u);
        const float top = scales.top();
        scale[t][u] = top;
        bound = log2_bound(top, ValueLayout::SCALES > 1 ? 0x1p-7f : 0x1p-60f);
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float high = fused(scores[t][n][2 * u + j], left[n][j], bound);
          highest[n][j] = t + u == 0 ? high : greater(highest[n][j], high);
        }
      }
    }
  }
  follow(state, highest);
  u32 weights[TILES][COLUMNS][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int u = 0; u < 2; u++) {
        float p[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          p[j] = exp2_fast(fused(scores[t][n][2 * u + j], left[n][j], -state.top[n][j]));
          if (!V::BF16) state.weight[n][j] += p[j];
          if (ValueLayout::SCALES == 1 && !(MASKED && p[j] == 0.0f)) p[j] *= scale[t][u];
        }
        const u32 pair = V::BF16 ? pack_bf16(p[0], p[1]) : pack_halves(p[0], p[1]);
        if (V::BF16) {  // so coarse that the weights are to be those that values are multiplied by
          state.weight[n][0] += low_bf16(pair);
          state.weight[n][1] += high_bf16(pair);
        }
        weights[t][n][u] = transpose_matrix(pair);
      }
    }
  }
  // From memory, where it is an operand as it lies: constants would be moved together each time.
  Words<16> offsets{};
  if constexpr (V::OFFSET > 0) offsets = shared.value_offsets;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const Tile values = tile_of<true>(stage, t);
    add_tile<V, DIM, MASKED, COLUMNS>(state.sums, values, mine.value, table, offsets,
                                         weights[t]);
  }
}
