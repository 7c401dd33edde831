// Decode: attention of few query rows over a cache in the format it is stored in.
//
// A block is one warp, which takes a run of pieces of one KV head: tokens that follow each other,
// and others. It goes through them in steps of a few tiles. Steps are copied into shared memory as
// they are stored, ahead of use and across the ends of chunks, and read in the layout of a
// tensor-core product's operand, where codes become numbers: nothing unpacked is ever written
// anywhere.
//
// Defined for a compilation: what settings.cuh names, NUMBER, and the sizes of chunks.
#include "attend.cuh"
#include "items.cuh"
#include "settings.cuh"
#include "walk.cuh"

// Zeros what rows that do not see a token must not read: a weight of 0 does not outweigh a NaN.
DEVICE void blank_unseen(Shared& shared, const Arguments& a, int stage, int token) {
  const Request& request = shared.piece.request;
  const int lowest = a.window > 0 ? request.length - request.queries - a.window + 1 : 0;
  const int last = shared.limits.last;
  const bool edge = token < lowest || token + STEP > last;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    u8* values = tile_of(shared, stage, t) + KeyLayout::BYTES;
    const int at = token + t * TILE;
    if (edge) blank_rows<V, DIM>(values, lowest - at, last - at);
    if (request.queries > 1) tame_rows<V, DIM>(values);
  }
  sync_warp();
}

// Goes through `count` pieces of one KV head and group, of chunks that follow each other from
// `chunk` on.
DEVICE void walk_pieces(Shared& shared, const Arguments& a, const Piece& piece, int index,
                        int number, int chunk, int count) {
  const Request& request = piece.request;
  const Cut& cut = request.chunks;
  int first = cut.first + chunk * cut.size;
  int last = smaller(request.length, a.reach);
  if (first < last) {
    last = first + smaller(last - first, count * cut.size);
  } else {
    first = last = 0;  // no tokens: none, or all beyond the page table
  }
  if (lane() == 0) {
    shared.piece = piece;
    shared.table = a.page_table + index * a.table_row;
    shared.limits = {last, first + cut.size, smaller(last, request.length - request.queries + 1),
                     a.window > 0 ? request.length - a.window : 0};
  }
  choose_rows(shared, a, piece.head);
  sync_warp();
  // A chunk whose page is missing spoils all rows of its request: which one it is does not matter.
  bool lost = request.length > a.reach;
  int pages[STAGES + 1];
#pragma unroll
  for (int i = 0; i <= STAGES; i++) pages[i] = find_page(shared, a, first + i * STEP, last);
#pragma unroll
  for (int i = 0; i < STAGES; i++) {
    lost |= find_rows(shared, a, first + i * STEP, last, pages[i]);
    sync_warp();
    if (i < STAGES - 1) {
      if (first + i * STEP < last) copy_step(shared, i);
      copies_commit();
      sync_warp();
    }
  }
  int page = pages[STAGES];  // one step behind that whose addresses are written down

  load_queries<K, DIM, ROWS>(shared.queries, a, piece);
  sync_warp();
  Queries<DIM, COLUMNS> queries;
  place_queries<K, DIM, ROWS, COLUMNS>(queries, shared.queries);
  Powers powers;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      powers[n][j] = shared.queries.power[(8 * n + 2 * (lane() % 4) + j) % ROWS];
    }
  }
  State state;
  state.clear();
  if (first == last) {
    store_piece<V, DIM, ROWS, COLUMNS>(shared.means, a, piece, number, any(lost), state.sums,
                                       state.top, state.weight);
  }
  int stage = 0;
  for (int token = first; token < shared.limits.last; token += STEP) {
    sync_warp();  // the stage that is overwritten has been read, and addresses are written
    const Limits limits = shared.limits;
    if (token + (STAGES - 1) * STEP < limits.last) {
      copy_step(shared, stage == 0 ? STAGES - 1 : stage - 1);
    }
    copies_commit();
    copies_wait<STAGES - 1>();
    sync_warp();
    lost |= find_rows(shared, a, token + STAGES * STEP, limits.last, page);
    page = find_page(shared, a, token + (STAGES + 1) * STEP, limits.last);
    const bool masked = token + STEP > limits.whole || token < limits.inside;
    if (masked) blank_unseen(shared, a, stage, token);
    attend(state, shared, a, stage, token, queries, powers, masked);
    if (token + STEP >= smaller(shared.limits.boundary, shared.limits.last)) {
      store_piece<V, DIM, ROWS, COLUMNS>(shared.means, a, shared.piece, number++, any(lost),
                                         state.sums, state.top, state.weight);
      if (lane() == 0) shared.limits.boundary += shared.piece.request.chunks.size;
      state.clear();
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  copies_wait<0>();
  sync_warp();  // all that is shared is free
}

extern "C" GLOBAL void LAUNCH_BOUNDS(32, BLOCKS) decode(Arguments a) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  // Neighbours go through the same tokens of neighbouring KV heads, whose rows share memory pages.
  const int head = block() % a.kv_heads, run = block() / a.kv_heads;
  const int runs = blocks() / a.kv_heads;
  const int total = smaller(count_pieces<ROWS>(a), a.capacity);
  // Every run has an equal number of pieces, within one.
  int number = int(i64(total) * run / runs);
  const int end = int(i64(total) * (run + 1) / runs);
  if (number < end) {
    Cursor<ROWS> cursor = find<ROWS>(a, number);
    while (number < end) {
      cursor.advance(a, number);
      const int chunks = cursor.request.chunks.count;
      const int local = number - cursor.before;
      const int chunk = local % chunks;
      const int count = smaller(end - number, chunks - chunk);
      const Piece piece{cursor.request, local / chunks * ROWS, head};
      walk_pieces(shared, a, piece, cursor.index, number, chunk, count);
      number += count;
    }
  }
  if (a.partial == nullptr) blank_padding<DIM>(a);
}
