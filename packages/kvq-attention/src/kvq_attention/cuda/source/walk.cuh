// A warp's walk over tokens of one KV head: where their rows lie, and their way to shared memory.
//
// What changes rarely lies in shared memory: registers are what limits how many warps there are.
#pragma once

#include "queries.cuh"
#include "settings.cuh"
#include "store.cuh"

// The planes of K or of V.
enum { CODES, SCALE, SECOND, PLANES };

// Lanes that copy a tile's bytes of a plane: each knows where its own begin.
template <bool VALUES, int PLANE, class L = Pick<VALUES, ValueLayout, KeyLayout>>
constexpr int LANES = PLANE == CODES ? 32 : smaller(32, PLANE == SCALE ? L::SCALE : L::SECOND);

// Where those of a plane are written down: behind those of the planes before, and values' behind
// all keys'.
template <bool VALUES, int PLANE>
constexpr int FROM_AT = FROM_AT<VALUES, PLANE - 1> + LANES<VALUES, PLANE - 1>;
template <>
constexpr int FROM_AT<false, CODES> = 0;
template <>
constexpr int FROM_AT<true, CODES> = FROM_AT<false, PLANES>;

constexpr int FROM = FROM_AT<true, PLANES> + 32;  // lanes that copy nothing read on

// Positions: behind the last token of the walk; up to `whole` every row sees all, and from `inside`
// on in a window.
struct alignas(16) Limits {
  int last, whole, inside;
};

// Of a warp; tiles begin at multiples of 128 bytes, so that warps do.
struct alignas(WARPS > 1 ? 128 : 16) Shared {
  u8 ring[STAGES * STAGE_BYTES];
  u64 from[FROM];                 // where a lane's bytes of page 0's first tile begin, of K and V
  Words<16> page_bytes[2];        // that pages of a plane are apart
  Words<16> value_offsets;        // offsets_operand
  Limits limits;
  Piece piece;
  Line lines[ROWS];
  union {
    QueryRows<DIM, ROWS> rows;
    u8 words[SHARED_QUERIES ? OurQueries::BYTES : 16];
  } queries;
};
static_assert(TABLE_BYTES + WARPS * sizeof(Shared) == SET_SHARED_BYTES, "as shapes.py counts");

// What a lane keeps at hand: where its words lie in a stage, which mostly is the same for K and V.
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

// Writes down where each lane's bytes of keys or of values begin, of a plane and those behind it.
template <bool VALUES, int PLANE = CODES>
DEVICE void choose_rows(Shared& shared, const Cache& cache, int head) {
  if constexpr (PLANE < PLANES) {
    const Plane& rows = PLANE == CODES ? cache.codes : PLANE == SCALE ? cache.scale : cache.second;
    if (lane() < LANES<VALUES, PLANE>) {
      const u8* begin = rows.data + u64(rows.head) * u32(head) + lane() * 16;
      shared.from[FROM_AT<VALUES, PLANE> + lane()] = reinterpret_cast<u64>(begin);
      if (lane() == 0) shared.page_bytes[VALUES].word[PLANE] = rows.page;
    }
    choose_rows<VALUES, PLANE + 1>(shared, cache, head);
  }
}

// A walk over tiles of one KV head, from the token `first` to `last`, along the pages of one
// request. Tiles are counted from the first. Lane l knows the pages of tile l of 32 from where
// copies are, and of the 32 behind them.
struct Walk {
  const i32* table;
  int first, last, tiles;
  u32 pages, next_pages;
  u32 highest_page;

  // Turns to the first pages, which have been looked for.
  DEVICE void begin(const Arguments& a) {
    highest_page = 0;
    take(a);
    find(a, 32);
  }

  // Finds the next page of this lane.
  DEVICE void find(const Arguments& a, int tile) {
    const int at = smaller(first + (tile + lane()) * TILE, last - 1);
    next_pages = read_only(table + (ONE_TILE ? u32(at) / TILE : at >> a.page_shift));
  }

  // Turns to the next pages. One that does not exist raises `highest_page`, and another is read.
  DEVICE void take(const Arguments& a) {
    highest_page = larger(highest_page, next_pages);
    pages = smaller(next_pages, u32(a.num_pages) - 1);
  }

  // Turns to the pages of the step from `tile` on. Those behind them are not waited for.
  DEVICE void turn_to(const Arguments& a, int tile) {
    if (tile % 32 == 0) {
      sync_warp();  // makes a branch of it: what is under a condition waits for the load even so
      take(a);
      find(a, tile + 32);
    }
  }

  // Begins to copy the step from `tile` on.
  DEVICE void copy(Shared& shared, const Lane& mine, u8* stage, int tile,
                   const Arguments& a) const {
    u8* linear = pinned_shared(stage + mine.sixteen);
    copy_each<false>(shared, mine, stage, linear, tile, a);
    copy_each<true>(shared, mine, stage, linear, tile, a);
  }

  template <bool VALUES>
  DEVICE void copy_each(Shared& shared, const Lane& mine, u8* stage, u8* linear, int tile,
                        const Arguments& a) const {
    // Strides come from memory with what they are added to: were they at hand before, the compiler
    // would multiply first and take three instructions for each sum.
    const Words<16> page_bytes = shared.page_bytes[VALUES];
    u64 from[PLANES] = {shared.from[FROM_AT<VALUES, CODES> + lane()]};
    if (LANES<VALUES, SCALE> > 0) from[SCALE] = shared.from[FROM_AT<VALUES, SCALE> + lane()];
    if (LANES<VALUES, SECOND> > 0) from[SECOND] = shared.from[FROM_AT<VALUES, SECOND> + lane()];
    copy_tiles<VALUES, 0>(mine, stage, linear, tile, from, page_bytes.word, a);
  }

  // Begins to copy tile T of a step and those behind it.
  template <bool VALUES, int T>
  DEVICE void copy_tiles(const Lane& mine, u8* stage, u8* linear, int tile,
                         const u64 (&from)[PLANES], const u32 (&page_bytes)[4],
                         const Arguments& a) const {
    using L = Pick<VALUES, ValueLayout, KeyLayout>;
    if constexpr (T < TILES) {
      const bool live = tile + T < tiles;
      const u32 page = shuffle(pages, tile + T);  // modulo 32
      // Tiles of the page before this one.
      const u32 within = u32(first / TILE + tile + T) & ((1u << a.page_shift) / TILE - 1);
      const auto rows = [&](int plane, int row_bytes) {
        u64 begin = from[plane] + multiply_wide(page, page_bytes[plane]);
        if (!ONE_TILE) begin += multiply_wide(within, row_bytes * TILE);
        return reinterpret_cast<const u8*>(begin);
      };
      constexpr int REST = rest_at<VALUES>(T);
      constexpr int CODES_TO = codes_at<VALUES>(T);
      const int first_segment = VALUES ? mine.copied_value : mine.copied_key;
      copy_codes<L::SEGMENTS, CODES_TO>(stage, first_segment, rows(CODES, L::CODES), live);
      if constexpr (L::SCALE > 0) {
        copy_run<L::SCALE, REST + L::SCALE_AT>(linear, rows(SCALE, L::SCALE), live);
      }
      if constexpr (L::SECOND > 0) {
        copy_run<L::SECOND, REST>(linear, rows(SECOND, L::SECOND), live);
      }
      copy_tiles<VALUES, T + 1>(mine, stage, linear, tile, from, page_bytes, a);
    }
  }
};
