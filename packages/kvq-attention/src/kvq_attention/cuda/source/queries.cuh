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

// A piece's rows as numbers: what lane l has of row l / LANES, eight values at a time; and the
// quaternion of groups l and again TURNS behind, which only some formats turn rows by.
template <int DIM, int ROWS>
struct QueryValues {
  static constexpr int LANES = 32 / ROWS;
  static constexpr int PARTS = DIM / LANES / 8;
  float values[PARTS][8];
  Quaternion quaternion;

  // Which value of the row a part begins with.
  DEVICE static int first_value(int part) { return (part * LANES + lane() % LANES) * 8; }

  DEVICE void load(const Arguments& a, const Piece& piece, const Line& line) {
    quaternion = quaternion_of(a.turns, lane());
    const int query = shuffle(line.query, lane() / LANES);
    const int q_head = shuffle(line.q_head, lane() / LANES);
    const i64 begin = (piece.request.start + query) * a.q_token + q_head * a.q_head;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
      for (int j = 0; j < 8; j++) values[part][j] = 0.0f;
      if (query >= 0) load_numbers(a.q, begin + first_value(part), values[part]);
    }
  }
};

// Puts down a piece's rows as f16 or bf16 times a power of two that brings a row's largest value
// into [1, 2): exact, and it keeps what f32 and bf16 hold within f16's range. Where keys are
// subnormals it goes up to f16's end, so that what their offset adds to a sum is not one, and
// places are made up for.
template <class Format, int DIM, int ROWS>
DEVICE void put_queries(QueryRows<DIM, ROWS>& shared, const Arguments& a,
                        const QueryValues<DIM, ROWS>& rows) {
  using Rows = QueryValues<DIM, ROWS>;
  constexpr int LANES = Rows::LANES, PARTS = Rows::PARTS;
  constexpr int LIFT = Format::OFFSET > 0 ? 14 : 0;
  const int row = lane() / LANES;
  u32 top = 0;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
#pragma unroll
    for (int j = 0; j < 8; j++) top = larger(top, as_bits(rows.values[part][j]) & 0x7FFFFFFF);
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) top = larger(top, shuffle_xor(top, mask));
  const int exponent = smaller(larger(int(top >> 23), LIFT + 1), LIFT > 0 ? 254 : 253);
  const float inverse = as_float(u32(254 + LIFT - exponent) << 23);
  const float power = as_float(u32(exponent) << 23);
  if (lane() % LANES == 0) {
    shared.power[row] = power * a.score_scale * (Format::FACTOR / (1 << LIFT));
  }
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const int value = Rows::first_value(part);
    Words<16> words;
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float place = 1 << Format::place(j % Format::SPLIT);
        y[j] = rows.values[part][4 * quad + j] * (inverse / place);
      }
      if constexpr (Format::ROTATED) {
        turn(y, shuffle(rows.quaternion, (value / 4 + quad) % TURNS));
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        words.word[2 * quad + j / 2] =
            Format::BF16 ? pack_bf16(y[j], y[j + 1]) : pack_halves(y[j], y[j + 1]);
      }
    }
    *reinterpret_cast<Words<16>*>(&shared.values[row][value]) = words;
  }
}

// Queries::offsets of eight rows: products with a key that is nothing but the offset.
template <class Format, int DIM, int OFFSETS>
DEVICE void place_offsets(u32 (&offsets)[OFFSETS], const u32 (&rows)[DIM / 16][2]) {
  constexpr int BLOCKS_A_ROW = DIM / Format::BLOCK;
  constexpr int STEPS = Format::BLOCK / 16;
  const auto key = [](int part) {
    return (0x8000 | Format::OFFSET << Format::place(part % Format::SPLIT)) * 0x00010001u;
  };
  float found[2 * OFFSETS * 2] = {};  // of this lane's row, for all blocks
#pragma unroll
  for (int block = 0; block < BLOCKS_A_ROW; block++) {
    float sums[4] = {};  // of rows 2 (l % 4) and the next
#pragma unroll
    for (int step = block * STEPS; step < (block + 1) * STEPS; step++) {
      const u32 even = key(2 * step), odd = key(2 * step + 1);
      mma(sums, even, even, odd, odd, rows[step][0], rows[step][1]);
    }
    const float one = shuffle(sums[0], lane() / 8), other = shuffle(sums[1], lane() / 8);
    found[block] = lane() / 4 % 2 ? other : one;
  }
#pragma unroll
  for (int i = 0; i < OFFSETS; i++) {
    const bool second = lane() % 2;
    const float low = second ? found[4 * i + 2] : found[4 * i];
    const float high = second ? found[4 * i + 3] : found[4 * i + 1];
    const u32 rounded = pack_halves(low, high);
    offsets[i] = lane() % 4 < 2
                     ? rounded
                     : pack_halves(low - low_half(rounded), high - high_half(rounded));
  }
}

// The rows as operands: the order of values is that in which the format's keys are unpacked. Words
// in shared memory may take the rows' place.
template <class Format, int DIM, int ROWS, int COLUMNS, bool SHARED>
DEVICE void place_queries(Queries<DIM, COLUMNS, SHARED>& queries,
                          const QueryRows<DIM, ROWS>& shared, u8* words) {
  constexpr int SPLIT = Format::SPLIT;
  u32 all[COLUMNS][DIM / 16][2];
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    const u16* row = shared.values[(8 * n + lane() / 4) % ROWS];
#pragma unroll
    for (int segment = 0; segment < DIM / 8 / SPLIT; segment++) {
      // Two neighbouring units.
      const auto units = *reinterpret_cast<const Words<4 * SPLIT>*>(
          row + SPLIT * (8 * segment + 2 * (lane() % 4)));
#pragma unroll
      for (int j = 0; j < SPLIT; j++) {
        const int part = segment * SPLIT + j;
        const u32 one = units.word[j / 2], other = units.word[SPLIT / 2 + j / 2];
        all[n][part / 2][part % 2] =
            Format::NEIGHBOURS || SPLIT == 1 ? units.word[j]
                                             : permute(one, other, j % 2 ? 0x7632 : 0x5410);
      }
    }
    if constexpr (Format::OFFSET > 0) place_offsets<Format, DIM>(queries.offsets[n], all[n]);
  }
  sync_warp();  // the rows have been read
  queries.write(words, all);
}
