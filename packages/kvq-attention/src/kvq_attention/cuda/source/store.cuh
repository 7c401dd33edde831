// A piece's result: what a warp summed up, on its way to memory.
#pragma once

#include "queries.cuh"
#include "softmax.cuh"
#include "values.cuh"

constexpr int MEAN_ROWS = 4;  // that are on their way at once

// Means on their way to memory; a row's padding spreads rows over banks.
template <int DIM>
struct alignas(16) Means {
  float values[MEAN_ROWS][DIM + 4];
};

// Stores row `row` of a piece, of which each lane has four values at a time. A result, which is
// weighed with the sink's weight in `all` and without it in `seen`, has the bits of a merge.
template <class Format, int DIM, int ROWS>
DEVICE void store_row(const float (&means)[DIM + 4], const Arguments& a, i64 slot, int row,
                      i64 target, float seen, float all) {
#pragma unroll
  for (int first = 0; first < DIM; first += 128) {
    const int value = first + 4 * lane();
    if (value >= DIM) continue;
    Words<16> quad = *reinterpret_cast<const Words<16>*>(&means[value]);
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = as_float(quad.word[j]);
    if (Format::ROTATED) turn(x, a.turns, value / 4, true);
    if (a.partial != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; j++) quad.word[j] = as_bits(x[j]);
      float* at = a.partial + (slot * ROWS + row) * DIM + value;
      *reinterpret_cast<Words<16>*>(at) = quad;
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) store_number(a.out, target + value + j, x[j] * seen / all);
    }
  }
}

// Stores the rows of piece `number`: partial results, or, where every request is one chunk,
// results. tops, weights: references and weights of rows 8n + 2 (l % 4) and the next; a lane's
// weights are of its own tokens.
template <class Format, int DIM, int ROWS, int COLUMNS>
DEVICE void store_piece(Means<DIM>& shared, const Arguments& a, const Piece& piece, int number,
                        bool lost, const Sums<DIM, COLUMNS>& sums,
                        const float (&tops)[COLUMNS][2], const float (&weights)[COLUMNS][2]) {
  const Line line = line_of<ROWS>(a, piece);
  const i64 slot = i64(number) * a.kv_heads + piece.head;
  float share[COLUMNS][2];
  float mine = -infinity();  // log2 of the weight of row l % ROWS
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float weight = weights[n][j];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) weight += shuffle_xor(weight, mask);
      // NaN where a page was needed that is not there: never the numbers of another request.
      if (lost) weight = not_a_number();
      share[n][j] = weight == 0.0f ? 0.0f : Format::FACTOR / weight;
      const float lse = weight == 0.0f ? -infinity() : tops[n][j] + log2_fast(weight);
      const float found = shuffle(lse, lane() % 8 / 2);
      if (lane() % ROWS / 8 == n && lane() % 2 == j) mine = found;
    }
  }
  float seen = 1.0f, all = 1.0f;
  if (a.partial != nullptr) {
    if (line.asked && lane() < ROWS) a.partial_lse[slot * ROWS + lane()] = mine;
  } else if (a.sinks != nullptr && line.asked) {
    const float sink = log2_sink(a.sinks[line.q_head]);
    const float top = greater(greater(mine, LOWEST), sink);
    seen = exp2_fast(mine - top);
    all = exp2_fast(sink - top) + seen;
    if (all == 0.0f) all = 1.0f;  // nothing is seen, and the sink is nothing
  }
  const i64 target = (piece.request.start + line.query) * a.out_token + line.q_head * a.out_head;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll 1
    for (int begin = 8 * n; begin < smaller(8 * n + 8, ROWS); begin += MEAN_ROWS) {
      sync_warp();  // what was there has been read
      const int row = 8 * n + 2 * (lane() % 4) - begin;
      if (row >= 0 && row < MEAN_ROWS) {
#pragma unroll
        for (int step = 0; step < DIM / 16; step++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int value = value_index<Format>(step, i);
            const float place = 1 << Format::place((2 * step + i / 2) % Format::SPLIT);
            shared.values[row + i % 2][value] = sums[n][step][i] * (share[n][i % 2] / place);
          }
        }
      }
      sync_warp();
#pragma unroll 1
      for (int i = begin; i < begin + MEAN_ROWS; i++) {
        if (!shuffle(int(line.asked), i)) continue;
        const u64 low = shuffle(u32(target), i), high = shuffle(u32(u64(target) >> 32), i);
        store_row<Format, DIM, ROWS>(shared.values[i - begin], a, slot, i, i64(high << 32 | low),
                                     shuffle(seen, i), shuffle(all, i));
      }
    }
  }
  sync_warp();  // the rows have been read
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
