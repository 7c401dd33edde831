// A piece's query rows: scaled, turned, narrowed and laid out as the products take them.
#pragma once

#include "keys.cuh"
#include "number.cuh"
#include "rotation.cuh"

// Chunks of a request have these query rows of a KV head in common: row r is query line / group of
// the request and head line % group of the KV head, where line = first + r.
struct Piece {
  Request request;
  int first, head;
};

// A query row: of which query of the request, -1 where nothing is asked, and head. Lane l knows row
// l % ROWS.
struct alignas(8) Line {
  int query, q_head;
};

template <int ROWS>
DEVICE Line line_of(const Arguments& a, const Piece& piece) {
  const int line = piece.first + lane() % ROWS;
  const int query = line / a.group;
  const bool asked =
      query < piece.request.queries && piece.request.start + query < a.num_tokens;
  const int q_head = piece.head * a.group + line - query * a.group;
  return {asked ? query : -1, q_head};
}

// Queries on their way to their operands; a row's padding spreads rows over banks.
template <int DIM, int ROWS>
struct alignas(16) QueryRows {
  u16 values[ROWS][DIM + 8];
  float power[ROWS];  // what a product is to be multiplied by
};

// Puts down a row as f16 or bf16 times a power of two that brings its largest value into [1, 2):
// exact, and it keeps what f32 and bf16 hold within f16's range. Where keys are subnormals it goes
// up to f16's end, so that what their offset adds to a sum is not one, and places are made up for.
template <class Format, int DIM, int ROWS, int QUADS>
DEVICE void put_row(QueryRows<DIM, ROWS>& shared, const Arguments& a, int row,
                    float (&x)[QUADS][4]) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 magnitude = as_bits(x[i][j]) & 0x7FFFFFFF;
      top = magnitude > top ? magnitude : top;
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const u32 other = shuffle_xor(top, mask);
    top = other > top ? other : top;
  }
  constexpr int LIFT = Format::OFFSET > 0 ? 14 : 0;
  const int exponent = smaller(larger(int(top >> 23), LIFT + 1), LIFT > 0 ? 254 : 253);
  const float inverse = as_float(u32(254 + LIFT - exponent) << 23);
  const float power = as_float(u32(exponent) << 23);
  if (lane() == 0) shared.power[row] = power * a.score_scale * (Format::FACTOR / (1 << LIFT));
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const int first = 128 * i + 4 * lane();
    if (first >= DIM) continue;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      x[i][j] *= inverse / float(1 << Format::place(j % Format::SPLIT));
    }
    if (Format::ROTATED) turn(x[i], a.turns, first / 4, false);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const u32 pair =
          Format::BF16 ? pack_bf16(x[i][j], x[i][j + 1]) : pack_halves(x[i][j], x[i][j + 1]);
      *reinterpret_cast<u32*>(&shared.values[row][first + j]) = pair;
    }
  }
}

// Puts down a piece's rows.
template <class Format, int DIM, int ROWS>
DEVICE void load_queries(QueryRows<DIM, ROWS>& shared, const Arguments& a, const Piece& piece,
                         const Line& line) {
  constexpr int QUADS = (DIM + 127) / 128;  // of values a lane
  const i64 mine = (piece.request.start + line.query) * a.q_token + line.q_head * a.q_head;
  constexpr int GROUP = 4;  // rows that are loaded at once
#pragma unroll 1
  for (int begin = 0; begin < ROWS; begin += GROUP) {
    float x[GROUP][QUADS][4];
#pragma unroll
    for (int row = 0; row < GROUP; row++) {
      const bool asked = shuffle(line.query, begin + row) >= 0;
      const u64 low = shuffle(u32(mine), begin + row);
      const u64 high = shuffle(u32(u64(mine) >> 32), begin + row);
      const i64 at = i64(high << 32 | low) + 4 * lane();
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const bool inside = 128 * i + 4 * lane() < DIM;
          x[row][i][j] = asked && inside ? load_number(a.q, at + 128 * i + j) : 0.0f;
        }
      }
    }
#pragma unroll
    for (int row = 0; row < GROUP; row++) {
      put_row<Format, DIM, ROWS>(shared, a, begin + row, x[row]);
    }
  }
}

// Queries::offsets of a row, of which sums see what f16 left.
template <class Format, int DIM>
DEVICE u32 offsets_of(const u16* row, int i) {
  const int first = 2 * (2 * i + lane() % 2) * Format::BLOCK;
  if (first >= DIM) return 0;
  float offset[2];
#pragma unroll
  for (int block = 0; block < 2; block++) {
    float sum = 0.0f;
#pragma unroll
    for (int at = 0; at < Format::BLOCK; at += 8) {
      const u16* values = &row[first + block * Format::BLOCK + at];
      const auto eight = *reinterpret_cast<const Words<16>*>(values);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const u32 pair = eight.word[j / 2];
        sum += low_half(pair) * float(1 << Format::place(j % Format::SPLIT));
        sum += high_half(pair) * float(1 << Format::place((j + 1) % Format::SPLIT));
      }
    }
    offset[block] = sum * (-Format::OFFSET / Format::FACTOR);
  }
  const u32 rounded = pack_halves(offset[0], offset[1]);
  if (lane() % 4 < 2) return rounded;
  return pack_halves(offset[0] - low_half(rounded), offset[1] - high_half(rounded));
}

// The rows as operands: the order of values is that in which the format's keys are unpacked. Words
// in shared memory may take the rows' place.
template <class Format, int DIM, int ROWS, int COLUMNS, bool SHARED>
DEVICE void place_queries(Queries<DIM, COLUMNS, SHARED>& queries,
                          const QueryRows<DIM, ROWS>& shared, u8* words) {
  u32 all[COLUMNS][DIM / 16][2];
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    const u16* row = shared.values[(8 * n + lane() / 4) % ROWS];
#pragma unroll
    for (int part = 0; part < DIM / 8; part++) {
      const int segment = part / Format::SPLIT, j = part % Format::SPLIT;
      const int first = Format::SPLIT * (8 * segment + 2 * (lane() % 4));
      const int at = first + (Format::NEIGHBOURS ? 2 * j : j);
      const int next = at + (Format::NEIGHBOURS ? 1 : Format::SPLIT);
      all[n][part / 2][part % 2] = row[at] | u32(row[next]) << 16;
    }
    if constexpr (Format::OFFSET > 0) {
#pragma unroll
      for (int i = 0; i < Queries<DIM, COLUMNS, SHARED>::OFFSETS; i++) {
        queries.offsets[n][i] = offsets_of<Format, DIM>(row, i);
      }
    }
  }
  sync_warp();  // the rows have been read
  queries.write(words, all);
}
