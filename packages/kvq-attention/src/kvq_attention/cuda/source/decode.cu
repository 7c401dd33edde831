// Decode: attention of few query rows over a cache in the format it is stored in.
//
// A block is one warp, which takes a run of pieces: tokens of one KV head that follow each other,
// and others. It goes through them in steps of a few tiles. Steps are copied into shared memory as
// they are stored, ahead of use and across the ends of chunks, and read in the layout of a
// tensor-core product's operand, where codes become numbers: nothing unpacked is ever written
// anywhere.
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
constexpr int ROWS = SET_ROWS;      // query rows a piece
constexpr int TILES = SET_TILES;    // a step
constexpr int STAGES = SET_STAGES;  // steps under way
constexpr int BLOCKS = SET_BLOCKS;  // that a multiprocessor's registers are to hold
constexpr bool SOFTCAP = SET_SOFTCAP;

constexpr int COLUMNS = (ROWS + 7) / 8;  // groups of 8 query rows
constexpr int STEP = TILE * TILES;       // tokens a step
static_assert(CHUNK_STEP % STEP == 0, "chunks are whole steps");

using KeyLayout = Layout<K, DIM>;
using ValueLayout = Layout<V, DIM>;
constexpr int TILE_BYTES = KeyLayout::BYTES + ValueLayout::BYTES;

// The planes of a tile, in pairs that are read at once.
enum { K_CODES, V_CODES, K_SCALE, V_SCALE, K_SECOND, V_SECOND, PLANES = 8 };
static_assert(TILES * PLANES <= 32, "a lane a tile and plane");

// Where the rows of a step's tiles begin, in each plane; 0 where nothing is to be read.
using Addresses = u64[TILES][PLANES];

struct Shared {
  u8 ring[STAGES * TILES * TILE_BYTES];
  Addresses addresses;
  QueryRows<DIM, ROWS> queries;
  Means<DIM, ROWS> means;
};
static_assert(sizeof(Shared) == SET_SHARED_BYTES, "as shapes.py counts");

// The steps of chunks that follow each other, for one KV head. Lane l finds the rows of plane
// l % PLANES of tile l / PLANES of each step.
struct Walk {
  const Arguments& a;
  const i32* table;
  const u8* rows;              // of page 0
  u32 page_bytes, token_bytes;  // strides
  int first, last, steps;

  DEVICE int token_of(int step) const { return first + step * STEP; }

  DEVICE void choose_plane(int head) {
    const Cache& cache = lane() % 2 ? a.v : a.k;
    const int pair = lane() % PLANES / 2;
    const Plane& plane = pair == 0 ? cache.codes : pair == 1 ? cache.scale : cache.second;
    const u32 k_bytes = pair == 0   ? KeyLayout::CODES
                        : pair == 1 ? KeyLayout::SCALE
                                    : KeyLayout::SECOND;
    const u32 v_bytes = pair == 0   ? ValueLayout::CODES
                        : pair == 1 ? ValueLayout::SCALE
                                    : ValueLayout::SECOND;
    token_bytes = lane() % 2 ? v_bytes : k_bytes;
    page_bytes = plane.page;
    rows = plane.data + u64(plane.head) * u32(head);
  }

  // This lane's token of a step, and its page; -1 behind the last token.
  DEVICE int find_page(int step) const {
    const int token = token_of(step) + lane() / PLANES * TILE;
    return token < last ? table[token >> a.page_shift] : -1;
  }

  // This lane's address; whether its page is missing.
  DEVICE bool find_rows(Addresses& addresses, int step, int page) const {
    const int token = token_of(step) + lane() / PLANES * TILE;
    const bool live = token < last && u32(page) < u32(a.num_pages);
    const u32 within = token & ((1 << a.page_shift) - 1);
    const u8* address = rows + u64(u32(page)) * page_bytes + within * token_bytes;
    if (lane() < TILES * PLANES) {
      addresses[lane() / PLANES][lane() % PLANES] = live ? reinterpret_cast<u64>(address) : 0;
    }
    return token < last && !live;
  }
};

DEVICE u8* tile_of(Shared& shared, int step, int t) {
  return shared.ring + (step % STAGES * TILES + t) * TILE_BYTES;
}

// Begins to copy a step.
DEVICE void copy_step(Shared& shared, int step) {
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
    u8* tile = tile_of(shared, step, t);
    copy_tile<K, DIM>(tile, rows(K_CODES), rows(K_SECOND), rows(K_SCALE), live);
    copy_tile<V, DIM>(tile + KeyLayout::BYTES, rows(V_CODES), rows(V_SECOND), rows(V_SCALE), live);
  }
}

// A warp's softmax and sums.
struct State {
  float top[COLUMNS][2], weight[COLUMNS][2];  // of rows 8n + 2 (l % 4) and the next
  Sums<DIM, COLUMNS> sums;

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        top[n][j] = LOWEST;
        weight[n][j] = 0.0f;
      }
#pragma unroll
      for (int step = 0; step < DIM / 16; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][step][i] = 0.0f;
      }
    }
  }
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
DEVICE void attend(State& state, Shared& shared, const Walk& walk, int step,
                   const Queries<DIM, COLUMNS>& queries, const Sight& sight, bool masked) {
  float scores[TILES][COLUMNS][4];
  float highest[COLUMNS][2];
  float scale[TILES][2];  // of the values of tokens l / 4 and l / 4 + 8, where a row has one
  score_tiles<K, DIM, TILES, COLUMNS>(scores, tile_of(shared, step, 0), TILE_BYTES, queries);
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
    const u8* values = tile_of(shared, step, t) + KeyLayout::BYTES;
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
    add_tile<V, DIM, COLUMNS>(state.sums, tile_of(shared, step, t) + KeyLayout::BYTES, weights[t]);
  }
}

// Goes through `count` pieces of one KV head and group, from piece `piece` on, which is chunk
// `chunk` of its request.
DEVICE void walk_pieces(Shared& shared, const Arguments& a, const Request& request, int index,
                        int piece, int chunk, int count, int row, int head) {
  const Line line = line_of<ROWS>(a, request, row, head);
  const Cut& cut = request.chunks;
  const int end = smaller(request.length, a.reach);
  Walk walk{a, a.page_table + index * a.table_row};
  walk.choose_plane(head);
  walk.first = cut.first + chunk * cut.size;
  walk.last = smaller(walk.first + count * cut.size, end);
  walk.steps = walk.first < walk.last ? divided_up(walk.last - walk.first, STEP) : 0;
  int pages[STAGES + 1];
#pragma unroll
  for (int step = 0; step <= STAGES; step++) pages[step] = walk.find_page(step);
  // Steps of which a page is missing, as bits: the next one's is the lowest.
  u32 missing = 0;
#pragma unroll
  for (int step = 0; step < STAGES; step++) {
    missing |= u32(walk.find_rows(shared.addresses, step, pages[step])) << step;
    sync_warp();
    if (step < STAGES - 1) {
      if (step < walk.steps) copy_step(shared, step);
      copies_commit();
      sync_warp();
    }
  }
  int page = pages[STAGES];  // of step + STAGES, one step behind that whose addresses are known

  load_queries<K, DIM, ROWS>(shared.queries, a, request.start, line);
  sync_warp();
  Queries<DIM, COLUMNS> queries;
  place_queries<K, DIM, ROWS, COLUMNS>(queries, shared.queries);
  Sight sight;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int mine = (8 * n + 2 * (lane() % 4) + j) % ROWS;
      sight.power[n][j] = shared.queries.power[mine];
      sight.position[n][j] = request.length - request.queries + shuffle(line.query, mine);
    }
  }
  // Up to `whole` every row sees all, and from `inside` on in a window; before `lowest` none does.
  const int whole = smaller(walk.last, request.length - request.queries + 1);
  const int inside = a.window > 0 ? request.length - a.window : 0;
  const int lowest = a.window > 0 ? larger(inside - request.queries + 1, 0) : 0;

  int boundary = walk.first + cut.size;
  bool lost = request.length > a.reach;
  State state;
  state.clear();
  for (int step = 0; step < walk.steps; step++) {
    sync_warp();  // the stage that is overwritten has been read, and addresses are written
    if (step + STAGES - 1 < walk.steps) copy_step(shared, step + STAGES - 1);
    copies_commit();
    copies_wait<STAGES - 1>();
    sync_warp();
    lost |= missing & 1;
    missing = missing >> 1 | u32(walk.find_rows(shared.addresses, step + STAGES, page)) << (STAGES - 1);
    page = walk.find_page(step + STAGES + 1);
    const int token = walk.token_of(step);
    const bool masked = token + STEP > whole || token < inside;
    if (masked && (token < lowest || token + STEP > walk.last)) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int at = token + t * TILE;
        blank_rows<V, DIM>(tile_of(shared, step, t) + KeyLayout::BYTES, lowest - at, walk.last - at);
      }
      sync_warp();
    }
    attend(state, shared, walk, step, queries, sight, masked);
    if (token + STEP >= boundary || step == walk.steps - 1) {
      store_piece<V, DIM, ROWS, COLUMNS>(shared.means, a, piece++, request.start, line, any(lost),
                                         state.sums, state.top, state.weight);
      boundary += cut.size;
      lost = request.length > a.reach;
      state.clear();
    }
  }
  if (walk.steps == 0) {  // a request without tokens
    store_piece<V, DIM, ROWS, COLUMNS>(shared.means, a, piece, request.start, line, lost,
                                       state.sums, state.top, state.weight);
  }
  copies_wait<0>();
  sync_warp();  // the ring and the queries are free
}

extern "C" GLOBAL void LAUNCH_BOUNDS(32, BLOCKS) decode(Arguments a) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int total = smaller(count_pieces<ROWS>(a), a.capacity);
  // Every block takes an equal run of pieces, within one.
  int piece = int(i64(total) * block() / blocks());
  const int end = int(i64(total) * (block() + 1) / blocks());
  if (piece < end) {
    Cursor<ROWS> cursor = find<ROWS>(a, piece);
    while (piece < end) {
      cursor.advance(a, piece);
      const Request& request = cursor.request;
      const int chunks = request.chunks.count;
      const int local = piece - cursor.before;
      const int along = local / chunks, chunk = local % chunks;
      const int count = smaller(end - piece, chunks - chunk);
      walk_pieces(shared, a, request, cursor.index, piece, chunk, count,
                  along / a.kv_heads * ROWS, along % a.kv_heads);
      piece += count;
    }
  }
  if (a.partial == nullptr) blank_padding<DIM>(a);
}
