// A piece's query rows: scaled, turned, narrowed and laid out as the products take them.
#pragma once

#include "keys.cuh"
#include "number.cuh"
#include "rotation.cuh"

// The query rows of a piece: row r is query `line / group` of the request, head `line % group` of
// the KV head, where line = first + r.
struct Lines {
  int first, head;
  Request request;

  DEVICE int query(const Arguments& a, int row) const { return (first + row) / a.group; }
  DEVICE int q_head(const Arguments& a, int row) const {
    return head * a.group + (first + row) % a.group;
  }
  DEVICE bool asked(const Arguments& a, int row) const {
    const int index = query(a, row);
    return index < request.queries && request.start + index < a.num_tokens;
  }
};

// What a block's warps share of the queries; a row's padding spreads rows over banks.
template <int DIM, int ROWS>
struct QueryRows {
  u16 values[ROWS][DIM + 8];
  float power[ROWS];  // times score_scale, what a product is to be multiplied by
};

// Rows of the block's warps in turn, as f16 or bf16 times a power of two that brings the largest
// into [1, 2): exact, and it keeps what f32 and bf16 hold within f16's range.
template <class Format, int DIM, int ROWS, int WARPS>
DEVICE void load_queries(QueryRows<DIM, ROWS>& shared, const Arguments& a, const Lines& lines) {
  constexpr int QUADS = (DIM + 127) / 128;  // of values a lane
#pragma unroll
  for (int first_row = 0; first_row < ROWS; first_row += WARPS) {
    const int row = first_row + warp();
    const bool asked = lines.asked(a, row);
    const i64 at = (lines.request.start + lines.query(a, row)) * a.q_token +
                   lines.q_head(a, row) * a.q_head;
    float x[QUADS][4];
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int value = 128 * i + 4 * lane() + j;
        x[i][j] = asked && value < DIM ? load_number(a.q, at + value) : 0.0f;
        const u32 magnitude = as_bits(x[i][j]) & 0x7FFFFFFF;
        top = magnitude > top ? magnitude : top;
      }
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const u32 other = shuffle_xor(top, mask);
      top = other > top ? other : top;
    }
    const int exponent = smaller(larger(int(top >> 23), 1), 253);
    const float inverse = as_float(u32(254 - exponent) << 23);
    const float power = as_float(u32(exponent) << 23);
    if (lane() == 0) shared.power[row] = power * a.score_scale * Format::FACTOR;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      const int first = 128 * i + 4 * lane();
      if (first >= DIM) continue;
#pragma unroll
      for (int j = 0; j < 4; j++) x[i][j] *= inverse;
      if (Format::ROTATED) turn(x[i], a.turns, first / 4, false);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const u32 pair = Format::BF16 ? pack_bf16(x[i][j], x[i][j + 1])
                                      : pack_halves(x[i][j], x[i][j + 1]);
        *reinterpret_cast<u32*>(&shared.values[row][first + j]) = pair;
      }
    }
  }
}

// The rows as operands: the order of values is that in which the format's keys are unpacked.
template <class Format, int DIM, int COLUMNS>
DEVICE void place_queries(Queries<DIM, COLUMNS>& queries,
                          const QueryRows<DIM, 8 * COLUMNS>& shared) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    const u16* row = shared.values[8 * n + lane() / 4];
#pragma unroll
    for (int part = 0; part < DIM / 8; part++) {
      const int segment = part / Format::SPLIT, j = part % Format::SPLIT;
      const int at = Format::SPLIT * (8 * segment + 2 * (lane() % 4)) + j;
      queries[n][part / 2][part % 2] = row[at] | u32(row[at + Format::SPLIT]) << 16;
    }
  }
}
