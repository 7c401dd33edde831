// A piece's result: what the block's warps summed up, joined in their order.
#pragma once

#include "queries.cuh"
#include "softmax.cuh"
#include "values.cuh"

// The sums of one warp; a row's padding spreads rows over banks.
template <int DIM, int ROWS>
struct Part {
  float sums[ROWS][DIM + 4];
};

// The weights of all warps.
template <int ROWS, int WARPS>
struct Weights {
  float top[WARPS][ROWS], weight[WARPS][ROWS];
  u32 lost[WARPS];
};

template <class Format, int DIM, int COLUMNS>
DEVICE void put_sums(Part<DIM, 8 * COLUMNS>& part, const Sums<DIM, COLUMNS>& sums) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = 8 * n + 2 * (lane() % 4) + i % 2;
        part.sums[row][value_index<Format>(step, i)] = sums[n][step][i];
      }
    }
  }
}

// One row of all warps: its reference and its weight (log2).
template <int ROWS, int WARPS>
DEVICE float join_weights(const Weights<ROWS, WARPS>& weights, int row, float (&share)[WARPS]) {
  float top = LOWEST, weight = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) top = greater(top, weights.top[w][row]);
  u32 lost = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    share[w] = exp2_fast(weights.top[w][row] - top);
    weight += weights.weight[w][row] * share[w];
    lost |= weights.lost[w];
  }
  // NaN where a page was needed that is not there: never the numbers of another request.
  if (lost) weight = not_a_number();
#pragma unroll
  for (int w = 0; w < WARPS; w++) share[w] = weight == 0.0f ? 0.0f : share[w] / weight;
  return weight == 0.0f ? -infinity() : top + log2_fast(weight);
}

// Stores a piece's rows, four values of a row a thread at a time: partial results, or, where every
// request is one chunk, results.
template <class Format, int DIM, int ROWS, int WARPS, class Parts>
DEVICE void store_piece(const Arguments& a, const Lines& lines, int piece, const Parts& parts,
                        const Weights<ROWS, WARPS>& weights) {
  constexpr int QUADS = DIM / 4;
  for (int unit = warp() * 32 + lane(); unit < ROWS * QUADS; unit += WARPS * 32) {
    const int row = unit / QUADS, value = unit % QUADS * 4;
    if (!lines.asked(a, row)) continue;
    float share[WARPS];
    const float lse = join_weights<ROWS, WARPS>(weights, row, share);
    float x[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] += parts(w).sums[row][value + j] * share[w];
    }
    if (Format::ROTATED) turn(x, a.turns, value / 4, true);
    const int q_head = lines.q_head(a, row);
    if (a.partial != nullptr) {
      const i64 slot = i64(piece) * ROWS + row;
#pragma unroll
      for (int j = 0; j < 4; j++) a.partial[slot * DIM + value + j] = x[j] * Format::FACTOR;
      if (value == 0) a.partial_lse[slot] = lse;
    } else {
      float kept = Format::FACTOR;
      if (a.sinks != nullptr) {
        const float sink = log2_sink(a.sinks[q_head]);
        const float top = greater(greater(lse, LOWEST), sink), seen = exp2_fast(lse - top);
        kept *= seen / (exp2_fast(sink - top) + seen);
        if (lse != lse) kept = lse;
      }
      const i64 at = (lines.request.start + lines.query(a, row)) * a.out_token +
                     q_head * a.out_head + value;
#pragma unroll
      for (int j = 0; j < 4; j++) store_number(a.out, at + j, x[j] * kept);
    }
  }
}

// Zeros the rows behind the last request's.
template <int DIM, int WARPS>
DEVICE void blank_padding(const Arguments& a) {
  const int used = a.query_offsets[a.num_requests];
  const int heads = a.kv_heads * a.group;
  for (int token = used + block(); token < a.num_tokens; token += blocks()) {
    for (int i = warp() * 32 + lane(); i < heads * DIM; i += WARPS * 32) {
      store_number(a.out, token * a.out_token + i / DIM * a.out_head + i % DIM, 0.0f);
    }
  }
}
