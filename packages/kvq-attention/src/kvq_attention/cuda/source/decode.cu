// Decode: attention of few query rows over a cache in the format it is stored in.
//
// A block takes pieces, runs of a request's tokens for one KV head; its warps take the piece's
// tokens in turns, a step of a few tiles at a time. A warp's steps are copied into shared memory as
// they are stored, ahead of use, and read in the layout of a tensor-core product's operand, where
// codes become numbers: nothing unpacked is ever written anywhere.
//
// Defined for a compilation: what becomes a constant below, the formats' headers, NUMBER, and the
// sizes of chunks.
#include K_HEADER
#include V_HEADER

#include "arguments.cuh"
#include "finish.cuh"
#include "items.cuh"
#include "keys.cuh"
#include "queries.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "values.cuh"

using K = SET_K;
using V = SET_V;
constexpr int DIM = SET_DIM;
constexpr int COLUMNS = SET_COLUMNS;  // groups of 8 query rows
constexpr int TILES = SET_TILES;      // a step
constexpr int STAGES = SET_STAGES;    // steps that a warp has under way
constexpr int WARPS = SET_WARPS;      // a block
constexpr int BLOCKS = SET_BLOCKS;    // that a multiprocessor's registers are to hold
constexpr bool SOFTCAP = SET_SOFTCAP;

constexpr int ROWS = 8 * COLUMNS;
constexpr int STEP = TILE * TILES;  // tokens a step

using KeyLayout = Layout<K, DIM>;
using ValueLayout = Layout<V, DIM>;

// What a warp has in flight, and in the end its sums.
constexpr int TILE_BYTES = KeyLayout::BYTES + ValueLayout::BYTES;
constexpr int RING_BYTES = STAGES * TILES * TILE_BYTES;
constexpr int PART_BYTES = int(sizeof(Part<DIM, ROWS>));
constexpr int WARP_BYTES = ((RING_BYTES > PART_BYTES ? RING_BYTES : PART_BYTES) + 127) / 128 * 128;

struct Shared {
  QueryRows<DIM, ROWS> queries;
  Weights<ROWS, WARPS> weights;
};
static_assert(WARPS * WARP_BYTES + int(sizeof(Shared)) == SET_SHARED_BYTES, "as shapes.py counts");

// One warp's walk over its steps of a piece.
struct Walk {
  const Arguments& a;
  const i32* table;
  u8* ring;
  Source k, v;
  int first, last, steps;
  bool lost;

  DEVICE int token_of(int step) const { return first + step * WARPS * STEP; }

  DEVICE void find_pages(int (&pages)[TILES], int step) const {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int token = token_of(step) + t * TILE;
      pages[t] = step < steps && token < last ? table[token >> a.page_shift] : 0;
    }
  }

  DEVICE u8* tile(int step, int t) const { return ring + (step % STAGES * TILES + t) * TILE_BYTES; }

  DEVICE void begin(const int (&pages)[TILES], int step) {
    if (step < steps) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int token = token_of(step) + t * TILE;
        const bool wanted = token < last;
        const bool live = wanted && u32(pages[t]) < u32(a.num_pages);
        lost |= wanted && !live;
        const u32 within = token & ((1 << a.page_shift) - 1);
        const u32 page = live ? pages[t] : 0;
        copy_tile<K, DIM>(tile(step, t), a.k, k, page, within, live);
        copy_tile<V, DIM>(tile(step, t) + KeyLayout::BYTES, a.v, v, page, within, live);
      }
    }
    copies_commit();
  }

  // The first steps, and the pages of the one behind them.
  DEVICE void start(int (&pages)[TILES]) {
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
      find_pages(pages, step);
      begin(pages, step);
    }
    find_pages(pages, STAGES - 1);
  }
};

// A warp's softmax and sums.
struct State {
  float top[COLUMNS][2], weight[COLUMNS][2];  // of rows 8n + 2 (l % 4) and the next
  Sums<DIM, COLUMNS> sums;
};

// What the rows of a lane see.
struct Sight {
  float power[COLUMNS][2];
  int position[COLUMNS][2];
};

DEVICE void mask(float (&scores)[TILES][COLUMNS][4], const Arguments& a, const Sight& sight,
                 int token, int last) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = token + t * TILE + lane() / 4 + i / 2 * 8;
        const int position = sight.position[n][i % 2];
        const bool near = a.window == 0 || at > position - a.window;
        if (!near || at > position || at >= last) scores[t][n][i] = -infinity();
      }
    }
  }
}

// Moves the reference of rows whose largest score, or score and scale of values, exceeds it.
DEVICE void follow(State& state, float (&highest)[COLUMNS][2]) {
  bool exceeds = false;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) exceeds |= highest[n][j] > state.top[n][j] + SLACK;
  }
  if (!any(exceeds)) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    float fade[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float high = highest[n][j];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) high = greater(high, shuffle_xor(high, mask));
      const float top = state.top[n][j];
      const float next = high > top + SLACK ? high : top;
      fade[j] = exp2_fast(top - next);
      state.top[n][j] = next;
      state.weight[n][j] *= fade[j];
    }
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
#pragma unroll
      for (int i = 0; i < 4; i++) state.sums[n][step][i] *= fade[i % 2];
    }
  }
}

// Adds one step to the state.
DEVICE void attend(State& state, const Walk& walk, int step, const Queries<DIM, COLUMNS>& queries,
                   const Sight& sight, bool masked) {
  float scores[TILES][COLUMNS][4];
  float highest[COLUMNS][2];
  float scale[TILES][2];  // of the values of tokens l / 4 and l / 4 + 8, where a row has one
  score_tiles<K, DIM, TILES, COLUMNS>(scores, walk.tile(step, 0), TILE_BYTES, queries);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[t][n][i] *= sight.power[n][i % 2];
        if (SOFTCAP) scores[t][n][i] = soft_cap(scores[t][n][i], walk.a.softcap);
      }
    }
  }
  if (masked) mask(scores, walk.a, sight, walk.token_of(step), walk.last);
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) highest[n][0] = highest[n][1] = -infinity();
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const u8* values = walk.tile(step, t) + KeyLayout::BYTES;
#pragma unroll
    for (int u = 0; u < 2; u++) {
      float bound = 0.0f;
      if constexpr (ValueLayout::SCALES > 0) {
        // The reference is near the largest probability x scale, so that f16 holds the product.
        Scales<V, DIM> scales;
        scales.load(values, lane() / 4 + 8 * u);
        const float top = scales.top();
        scale[t][u] = top;
        bound = log2_bound(top, ValueLayout::SCALES > 1 ? 0x1p-7f : 0x1p-60f);
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          highest[n][j] = greater(highest[n][j], scores[t][n][2 * u + j] + bound);
        }
      }
    }
  }
  follow(state, highest);
  u32 weights[TILES][COLUMNS][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int u = 0; u < 2; u++) {
        float p[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          p[j] = exp2_fast(scores[t][n][2 * u + j] - state.top[n][j]);
          state.weight[n][j] += p[j];
          if (ValueLayout::SCALES == 1) p[j] *= scale[t][u];
        }
        const u32 pair = V::BF16 ? pack_bf16(p[0], p[1]) : pack_halves(p[0], p[1]);
        weights[t][n][u] = transpose_matrix(pair);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    add_tile<V, DIM, COLUMNS>(state.sums, walk.tile(step, t) + KeyLayout::BYTES, weights[t]);
  }
}

// One warp's share of a piece.
DEVICE void walk_steps(State& state, Walk& walk, int (&pages)[TILES],
                       const Queries<DIM, COLUMNS>& queries, const Sight& sight,
                       const Request& request, int lowest) {
  const Arguments& a = walk.a;
  // Up to here every row sees all, and from here on in a window.
  const int whole = smaller(walk.last, request.length - request.queries + 1);
  const int inside = a.window > 0 ? request.length - a.window : 0;
  for (int step = 0; step < walk.steps; step++) {
    sync_warp();  // the stage that is overwritten has been read by all lanes
    walk.begin(pages, step + STAGES - 1);
    walk.find_pages(pages, step + STAGES);
    copies_wait<STAGES - 1>();
    sync_warp();
    const int token = walk.token_of(step);
    const bool masked = token + STEP > whole || token < inside;
    if (masked && (token < lowest || token + STEP > walk.last)) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int at = token + t * TILE;
        u8* values = walk.tile(step, t) + KeyLayout::BYTES;
        blank_rows<V, DIM>(values, lowest - at, walk.last - at);
      }
      sync_warp();
    }
    attend(state, walk, step, queries, sight, masked);
  }
}

extern "C" GLOBAL void LAUNCH_BOUNDS(32 * WARPS, BLOCKS) decode(Arguments a) {
  u8* memory = shared_memory();
  Shared& shared = *reinterpret_cast<Shared*>(memory + WARPS * WARP_BYTES);
  u8* ring = memory + warp() * WARP_BYTES;
  const auto part = [&](int w) -> Part<DIM, ROWS>& {
    return *reinterpret_cast<Part<DIM, ROWS>*>(memory + w * WARP_BYTES);
  };
  const int total = smaller(count_pieces<ROWS>(a) * a.kv_heads, a.capacity);
  // Every block takes an equal run of pieces, within one.
  const int begin = int(i64(total) * block() / blocks());
  const int end = int(i64(total) * (block() + 1) / blocks());
  Cursor<ROWS> cursor;
  if (begin < end) cursor = find<ROWS>(a, begin / a.kv_heads);
  for (int piece = begin; piece < end; piece++) {
    cursor.advance(a, piece / a.kv_heads);
    const Request& request = cursor.request;
    const int local = piece / a.kv_heads - cursor.before;
    const Lines lines{local % request.groups * ROWS, piece % a.kv_heads, request};
    const int chunk = request.chunks.first + local / request.groups * request.chunks.size;
    const int last = smaller(chunk + request.chunks.size, smaller(request.length, a.reach));
    const int first = chunk + warp() * STEP;
    const int steps = first < last ? (last - first - 1) / (WARPS * STEP) + 1 : 0;
    Walk walk{a, a.page_table + cursor.index * a.table_row, ring, source_of(a.k, lines.head),
              source_of(a.v, lines.head), first, last, steps, false};
    int pages[TILES];
    sync_block();  // the piece before is stored
    walk.start(pages);
    load_queries<K, DIM, ROWS, WARPS>(shared.queries, a, lines);
    sync_block();
    Queries<DIM, COLUMNS> queries;
    place_queries<K, DIM, COLUMNS>(queries, shared.queries);
    State state = {};
    Sight sight;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = 8 * n + 2 * (lane() % 4) + j;
        state.top[n][j] = LOWEST;
        sight.power[n][j] = shared.queries.power[row];
        sight.position[n][j] = request.length - request.queries + lines.query(a, row);
      }
    }
    int lowest = request.chunks.first;
    if (a.window > 0) lowest = larger(request.length - request.queries - a.window + 1, 0);
    walk_steps(state, walk, pages, queries, sight, request, lowest);

    copies_wait<0>();
    sync_warp();  // the ring becomes the place of the sums
    put_sums<V, DIM, COLUMNS>(part(warp()), state.sums);
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float weight = state.weight[n][j];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) weight += shuffle_xor(weight, mask);
        const int row = 8 * n + 2 * (lane() % 4) + j;
        if (lane() < 4) {
          shared.weights.top[warp()][row] = state.top[n][j];
          shared.weights.weight[warp()][row] = weight;
        }
      }
    }
    const bool lost = walk.lost || request.length > a.reach;
    if (lane() == 0) shared.weights.lost[warp()] = lost;
    sync_block();
    store_piece<V, DIM, ROWS, WARPS>(a, lines, piece, part, shared.weights);
  }
  if (a.partial == nullptr) blank_padding<DIM, WARPS>(a);
}
