// A piece's result: what a warp summed up, from its registers to memory.
#pragma once

#include "number.cuh"
#include "queries.cuh"
#include "softmax.cuh"
#include "values.cuh"

// Values of a row that a lane has next to each other, and that are stored at once.
template <class Format>
constexpr int RUN = Format::SPLIT < 4 ? Format::SPLIT : 4;

// Calls store(value, x) for all that a lane has of one of its two rows, times `share`.
template <class Format, int DIM, class Store>
DEVICE void each_run(const float (&sums)[DIM / 16][4], int row, float share, Store store) {
#pragma unroll
  for (int at = 0; at < DIM / 8; at += RUN<Format>) {
    const int segment = at / Format::SPLIT;
    const int value = first_value<Format>(segment) + at % Format::SPLIT;
    float x[RUN<Format>];
#pragma unroll
    for (int i = 0; i < RUN<Format>; i++) {
      const int j = at % Format::SPLIT + i;
      const int part = segment * Format::SPLIT + part_of<Format>(j);
      const float place = 1 << Format::place(j);
      x[i] = sums[part / 2][part % 2 * 2 + row] * (share / place);
    }
    store(value, x);
  }
}

// Stores the rows of piece `number`: partial results, which are as rotated as values are, or, where
// every request is one chunk, results. tops, weights: references and weights of rows
// 8n + 2 (l % 4) and the next; a lane's weights are of its own tokens.
template <class Format, int DIM, int ROWS, int COLUMNS>
DEVICE void store_piece(const Line (&lines)[ROWS], const Arguments& a, const Piece& piece,
                        int number, bool lost, const Sums<DIM, COLUMNS>& sums,
                        const float (&tops)[COLUMNS][2], const float (&weights)[COLUMNS][2]) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    float shares[2], lses[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float weight = weights[n][j];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) weight += shuffle_xor(weight, mask);
      // NaN where a page was needed that is not there: never the numbers of another request.
      if (lost) weight = not_a_number();
      shares[j] = weight == 0.0f ? 0.0f : Format::FACTOR * reciprocal(weight);
      lses[j] = weight == 0.0f ? -infinity() : tops[n][j] + log2_fast(weight);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = 8 * n + 2 * (lane() % 4) + j;
      if (row >= ROWS) continue;
      const auto [query, q_head] = lines[row];
      if (query < 0) continue;
      const float lse = lses[j];
      if (a.partial != nullptr) {
        if (lane() < 4) a.partial_lse[(piece.head * ROWS + row) * a.capacity + number] = lse;
        float* at = a.partial + ((i64(number) * a.kv_heads + piece.head) * ROWS + row) * DIM;
        each_run<Format, DIM>(sums[n], j, shares[j], [&](int value, const auto& x) {
          store_floats(at + value, x);
        });
        continue;
      }
      // The bits of a merge: weighed with the sink's weight in `all` and without it in `seen`.
      float seen = 1.0f, all = 1.0f;
      if (a.sinks != nullptr) {
        const float sink = log2_sink(a.sinks[q_head]);
        const float top = greater(greater(lse, LOWEST), sink);
        seen = exp2_fast(lse - top);
        all = exp2_fast(sink - top) + seen;
        if (all == 0.0f) all = 1.0f;  // nothing is seen, and the sink is nothing
      }
      const float part = reciprocal(all);
      const i64 target = (piece.request.start + query) * a.out_token + q_head * a.out_head;
      each_run<Format, DIM>(sums[n], j, shares[j], [&](int value, auto& x) {
#pragma unroll
        for (int i = 0; i < RUN<Format>; i++) x[i] = x[i] * seen * part;
        if constexpr (Format::ROTATED) turn(x, conjugate(quaternion_of(a.turns, value / 4)));
        store_numbers(a.out, target + value, x);
      });
    }
  }
}

// Zeros the rows behind the last request's.
template <int DIM>
DEVICE void blank_padding(const Arguments& a) {
  const int heads = a.kv_heads * a.group;
  for (int token = a.query_offsets[a.num_requests] + block(); token < a.num_tokens;
       token += blocks()) {
    for (int i = lane(); i < heads * DIM; i += 32) {
      store_number(a.out, token * a.out_token + i / DIM * a.out_head + i % DIM, 0.0f);
    }
  }
}
