// A warp's walk over tokens of one KV head: where their rows lie, and their way to shared memory.
//
// What changes rarely lies in shared memory: registers are what limits how many warps there are.
#pragma once

#include "queries.cuh"
#include "settings.cuh"
#include "store.cuh"

// The planes of a tile, in pairs that are read at once.
enum { K_CODES, V_CODES, K_SCALE, V_SCALE, K_SECOND, V_SECOND, PLANES = 8 };
static_assert(TILES * PLANES <= 32, "a lane a tile and plane");

// A plane's rows in page 0 for one KV head, and strides.
struct alignas(16) Rows {
  const u8* data;
  u32 page_bytes, token_bytes;
};

// Positions: behind the last token of the walk and of its chunk; up to `whole` every row sees all,
// and from `inside` on in a window.
struct alignas(16) Limits {
  int last, boundary, whole, inside;
};

struct Shared {
  u8 ring[STAGES * STAGE_BYTES];
  u64 addresses[TILES][PLANES];  // of a step's rows; 0 where nothing is to be read
  Rows rows[PLANES];
  Limits limits;
  Piece piece;
  const i32* table;  // the request's pages
  union {  // of the walk's beginning, and of the ends of chunks
    QueryRows<DIM, ROWS> queries;
    Means<DIM> means;
  };
};
static_assert(sizeof(Shared) == SET_SHARED_BYTES, "as shapes.py counts");

// Lane l < PLANES writes down plane l.
DEVICE void choose_rows(Shared& shared, const Arguments& a, int head) {
  if (lane() >= PLANES) return;
  const Cache& cache = lane() % 2 ? a.v : a.k;
  const int pair = lane() / 2;
  const Plane& plane = pair == 0 ? cache.codes : pair == 1 ? cache.scale : cache.second;
  const u32 k_bytes =
      pair == 0 ? KeyLayout::CODES : pair == 1 ? KeyLayout::SCALE : KeyLayout::SECOND;
  const u32 v_bytes =
      pair == 0 ? ValueLayout::CODES : pair == 1 ? ValueLayout::SCALE : ValueLayout::SECOND;
  shared.rows[lane()] = {plane.data + u64(plane.head) * u32(head), plane.page,
                         lane() % 2 ? v_bytes : k_bytes};
}

// The token that lane l finds of the step from `token` on: of tile l / PLANES, whose plane
// l % PLANES is its own.
DEVICE int token_of_lane(int token) { return token + lane() / PLANES * TILE; }

// The page of this lane's token; -1 behind the last one.
DEVICE int find_page(const Shared& shared, const Arguments& a, int token, int last) {
  const int mine = token_of_lane(token);
  return mine < last ? read_only(shared.table + (mine >> a.page_shift)) : -1;
}

// Writes down where this lane's rows begin; whether their page is missing.
DEVICE bool find_rows(Shared& shared, const Arguments& a, int token, int last, int page) {
  const int mine = token_of_lane(token);
  const bool live = mine < last && u32(page) < u32(a.num_pages);
  if (lane() < TILES * PLANES) {
    const Rows rows = shared.rows[lane() % PLANES];
    const u32 within = mine & ((1 << a.page_shift) - 1);
    const u64 address = reinterpret_cast<u64>(rows.data) + u64(u32(page)) * rows.page_bytes +
                        within * rows.token_bytes;
    shared.addresses[lane() / PLANES][lane() % PLANES] = live ? address : 0;
  }
  return mine < last && !live;
}

DEVICE u8* tile_of(Shared& shared, int stage, int t) {
  return shared.ring + stage * STAGE_BYTES + t * TILE_BYTES;
}

// Begins to copy the step whose addresses are written down.
DEVICE void copy_step(Shared& shared, int stage) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    u64 at[PLANES] = {};
    const auto read = [&](int plane) {
      const auto pair = *reinterpret_cast<const Words<16>*>(&shared.addresses[t][plane]);
      at[plane] = u64(pair.word[1]) << 32 | pair.word[0];
      at[plane + 1] = u64(pair.word[3]) << 32 | pair.word[2];
    };
    read(K_CODES);
    if (KeyLayout::SCALE + ValueLayout::SCALE > 0) read(K_SCALE);
    if (KeyLayout::SECOND + ValueLayout::SECOND > 0) read(K_SECOND);
    const auto rows = [&](int plane) { return reinterpret_cast<const u8*>(at[plane]); };
    const bool live = at[K_CODES] != 0;
    u8* tile = tile_of(shared, stage, t);
    copy_tile<K, DIM>(tile, rows(K_CODES), rows(K_SECOND), rows(K_SCALE), live);
    copy_tile<V, DIM>(tile + KeyLayout::BYTES, rows(V_CODES), rows(V_SECOND), rows(V_SCALE), live);
  }
}
