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
constexpr int TILE_BYTES = KeyLayout::BYTES + ValueLayout::BYTES;
constexpr int STAGE_BYTES = TILES * TILE_BYTES;

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
