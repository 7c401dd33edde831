// A warp's walk over tokens of one KV head: where their rows lie, and their way to shared memory.
//
// What changes rarely lies in shared memory: registers are what limits how many warps there are.
#pragma once

#include "queries.cuh"
#include "settings.cuh"
#include "store.cuh"

// The planes of a tile, in pairs; formats without scales and second rows lack the latter.
enum { K_CODES, V_CODES, K_SCALE, V_SCALE, K_SECOND, V_SECOND };
constexpr bool SCALED = KeyLayout::SCALE + ValueLayout::SCALE > 0;
constexpr bool SECONDS = KeyLayout::SECOND + ValueLayout::SECOND > 0;
constexpr int PLANES = SECONDS ? 6 : SCALED ? 4 : 2;
static_assert(SCALED || !SECONDS, "planes are counted in this order");

// Positions: behind the last token of the walk; up to `whole` every row sees all, and from `inside`
// on in a window.
struct alignas(16) Limits {
  int last, whole, inside;
};

struct Shared {
  u8 ring[STAGES * STAGE_BYTES];
  u64 from[PLANES][32];           // where a lane's bytes of page 0's first tile begin
  alignas(16) u32 page_bytes[8];  // that pages of a plane are apart
  Words<16> value_offsets;        // offsets_operand
  Limits limits;
  Piece piece;
  union {
    QueryRows<DIM, ROWS> rows;
    u8 words[SHARED_QUERIES ? OurQueries::BYTES : 16];
  } queries;
};
static_assert(TABLE_BYTES + WARPS * sizeof(Shared) == SET_SHARED_BYTES, "as shapes.py counts");

// What a lane keeps at hand: where its words lie in a stage, of which most are the same for K and V.
struct Lane {
  u8* ring;
  int copied_key, copied_value;  // copied_segment
  int key, value;                // loaded_segment
  int sixteen;                   // 16 * l
};

DEVICE Lane lane_of(Shared& shared) {
  using KL = KeyLayout;
  using VL = ValueLayout;
  constexpr bool SAME = KL::SEGMENTS == VL::SEGMENTS;
  const int copied_key = kept(copied_segment<KL::SEGMENTS>());
  const int copied_value = SAME ? copied_key : kept(copied_segment<VL::SEGMENTS>());
  const int key = kept(loaded_segment<KL::SEGMENTS>());
  const int value = SAME ? key : kept(loaded_segment<VL::SEGMENTS>());
  return {shared.ring, copied_key, copied_value, key, value, kept(lane() * 16)};
}

DEVICE const Plane& plane_of(const Arguments& a, int plane) {
  const Cache& cache = plane % 2 ? a.v : a.k;
  return plane / 2 == 0 ? cache.codes : plane / 2 == 1 ? cache.scale : cache.second;
}

// Writes down where each lane's bytes begin.
DEVICE void choose_rows(Shared& shared, const Arguments& a, int head) {
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
    const Plane& rows = plane_of(a, plane);
    const u8* begin = rows.data + u64(rows.head) * u32(head) + lane() * 16;
    shared.from[plane][lane()] = reinterpret_cast<u64>(begin);
    if (lane() == plane) shared.page_bytes[plane] = rows.page;
  }
}

// The tiles of a step: pages that they are of; behind the walk's end the last one, which is not read.
using Pages = u32[TILES];

// A walk over tokens of one KV head, up to `last`, along the pages of one request.
struct Walk {
  const i32* table;
  int last;

  DEVICE void find(Pages& pages, const Arguments& a, int token) const {
    const int shift = ONE_TILE ? 4 : a.page_shift;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      // Always a load, into where the page stays: nothing waits for it until it is used.
      const int at = smaller(token + t * TILE, last - 1);
      pages[t] = read_only(table + (at >> shift));
    }
  }

  // Begins to copy the step from `token` on to a stage. A page that does not exist raises
  // `highest_page`, and another one is copied.
  DEVICE void copy(Shared& shared, const Lane& mine, const Arguments& a, u8* stage, int token,
                   const Pages& pages, u32& highest_page) const {
    // Strides come from memory with what they are added to: were they at hand before, the compiler
    // would multiply first and take three instructions for each sum.
    u64 from[PLANES];
    u32 page_bytes[8];
#pragma unroll
    for (int i = 0; i < PLANES; i += 4) {
      const auto four = *reinterpret_cast<const Words<16>*>(&shared.page_bytes[i]);
#pragma unroll
      for (int j = 0; j < 4; j++) page_bytes[i + j] = four.word[j];
    }
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++) from[plane] = shared.from[plane][lane()];
    u8* linear = pinned_shared(stage + mine.sixteen);
    copy_tiles<0>(mine, a, stage, token, pages, from, page_bytes, highest_page, linear);
  }

  // Begins to copy tile T of a step and those behind it.
  template <int T>
  DEVICE void copy_tiles(const Lane& mine, const Arguments& a, u8* stage, int token,
                         const Pages& pages, const u64 (&from)[PLANES],
                         const u32 (&page_bytes)[8], u32& highest_page, u8* linear) const {
    if constexpr (T < TILES) {
      const int at = token + T * TILE;
      const bool live = at < last;
      const u32 last_page = a.num_pages - 1;
      highest_page = larger(highest_page, pages[T]);
      const u32 page = smaller(pages[T], last_page);
      const u32 within = u32(at) / TILE & ((1u << a.page_shift) / TILE - 1);  // tiles of the page
      const auto rows = [&](int plane, int tile_bytes) {
        u64 begin = from[plane] + multiply_wide(page, page_bytes[plane]);
        if (!ONE_TILE) begin += multiply_wide(within, tile_bytes);
        return reinterpret_cast<const u8*>(begin);
      };
      constexpr int KEYS = T * TILE_BYTES, VALUES = KEYS + KeyLayout::BYTES;
      using KL = KeyLayout;
      using VL = ValueLayout;
      copy_codes<KL::SEGMENTS, KEYS>(stage, mine.copied_key, rows(K_CODES, KL::CODES * TILE), live);
      copy_codes<VL::SEGMENTS, VALUES>(stage, mine.copied_value, rows(V_CODES, VL::CODES * TILE),
                                       live);
      if constexpr (KL::SCALE > 0) {
        copy_run<KL::SCALE, KEYS + KL::SCALE_AT>(linear, rows(K_SCALE, KL::SCALE * TILE), live);
      }
      if constexpr (VL::SCALE > 0) {
        copy_run<VL::SCALE, VALUES + VL::SCALE_AT>(linear, rows(V_SCALE, VL::SCALE * TILE), live);
      }
      if constexpr (KL::SECOND > 0) {
        copy_run<KL::SECOND, KEYS + KL::SECOND_AT>(linear, rows(K_SECOND, KL::SECOND * TILE), live);
      }
      if constexpr (VL::SECOND > 0) {
        copy_run<VL::SECOND, VALUES + VL::SECOND_AT>(linear, rows(V_SECOND, VL::SECOND * TILE),
                                                     live);
      }
      copy_tiles<T + 1>(mine, a, stage, token, pages, from, page_bytes, highest_page, linear);
    }
  }
};
