// What a compilation of decode is for: the formats, sizes, and the shape of its launch.
#pragma once

#include K_HEADER
#include V_HEADER

#include "keys.cuh"
#include "tile.cuh"

using K = SET_K;
using V = SET_V;
constexpr int DIM = SET_DIM;
constexpr int ROWS = SET_ROWS;      // query rows a piece
constexpr int TILES = SET_TILES;    // a step
constexpr int STAGES = SET_STAGES;  // steps under way
constexpr int BLOCKS = SET_BLOCKS;  // that a multiprocessor's registers are to hold
constexpr int WARPS = SET_WARPS;    // a block
constexpr bool SOFTCAP = SET_SOFTCAP;
constexpr bool ONE_TILE = SET_ONE_TILE;  // a page

constexpr int COLUMNS = (ROWS + 7) / 8;  // groups of 8 query rows
constexpr int STEP = TILE * TILES;       // tokens a step
static_assert(CHUNK_STEP % STEP == 0, "chunks are whole steps");

// Registers hold the queries of a tile at a time, unless there are many.
constexpr bool SHARED_QUERIES = TILES > 1 || COLUMNS > 1;
using OurQueries = Queries<DIM, COLUMNS, SHARED_QUERIES>;

using KeyLayout = Layout<K, DIM>;
using ValueLayout = Layout<V, DIM>;
// A stage: code rows of keys and values of each tile, then the rest of each.
constexpr int CODES_BYTES = TILE * (KeyLayout::CODES + ValueLayout::CODES);
constexpr int REST_BYTES = KeyLayout::REST + ValueLayout::REST;
constexpr int STAGE_BYTES = TILES * (CODES_BYTES + REST_BYTES);

// Where keys or values of tile t lie in a stage.
template <bool VALUES>
DEVICE constexpr int codes_at(int t) {
  return t * CODES_BYTES + (VALUES ? TILE * KeyLayout::CODES : 0);
}
template <bool VALUES>
DEVICE constexpr int rest_at(int t) {
  return TILES * CODES_BYTES + t * REST_BYTES + (VALUES ? KeyLayout::REST : 0);
}
template <bool VALUES>
DEVICE Tile tile_of(u8* stage, int t) {
  return {stage + codes_at<VALUES>(t), stage + rest_at<VALUES>(t)};
}

template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};

template <bool FIRST, class A, class B>
struct Picked {
  using type = A;
};
template <class A, class B>
struct Picked<false, A, B> {
  using type = B;
};
template <bool FIRST, class A, class B>
using Pick = typename Picked<FIRST, A, B>::type;

// The format that looks values up in the block's table, if one does; the table, and what it takes
// with what may lie before it.
using Tabled = Pick<(K::TABLE_BYTES > 0), K, V>;
constexpr int TABLE_BYTES = Tabled::TABLE_BYTES > 0 ? KNOWN_FROM + Tabled::TABLE_BYTES : 0;
