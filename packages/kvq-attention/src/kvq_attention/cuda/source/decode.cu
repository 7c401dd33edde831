// Decode: attention of few query rows over a cache in the format it is stored in.
//
// A warp takes a run of pieces of one KV head: tokens that follow each other, and others; warps of
// a block have a table in common, at most. It goes through them in steps of a few tiles. Steps are copied into shared memory as
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
DEVICE void blank_unseen(Shared& shared, const Arguments& a, u8* stage, int token) {
  const Request& request = shared.piece.request;
  const int lowest = a.window > 0 ? request.length - request.queries - a.window + 1 : 0;
  const int last = shared.limits.last;
  const auto values = [&](int t) { return stage + t * TILE_BYTES + KeyLayout::BYTES; };
  if (token < lowest || token + STEP > last) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int at = token + t * TILE;
      blank_rows<V, DIM>(values(t), lowest - at, last - at);
    }
    sync_warp();
  }
  if (request.queries > 1) {
#pragma unroll
    for (int t = 0; t < TILES; t++) tame_rows<V, DIM>(values(t));
    sync_warp();
  }
}

// Goes through `count` pieces of one KV head and group, of chunks that follow each other from
// `chunk` on.
DEVICE void walk_pieces(Shared& shared, const Arguments& a, const Piece& piece, int index,
                        int number, int chunk, int count) {
  const Request& request = piece.request;
  const Cut& cut = request.chunks;
  int first = cut.first + chunk * cut.size;
  int last = smaller(request.length, a.reach);
  // A chunk whose page is missing spoils all rows of its request: which one it is does not matter.
  bool lost = request.length > a.reach;
  if (first < last && a.num_pages > 0) {
    last = first + smaller(last - first, count * cut.size);
  } else {
    lost |= first < last;
    first = last = 0;  // no tokens: none, or all beyond the page table
  }
  State state;
  state.clear();
  if (first == last) {
    store_piece<V, DIM, ROWS, COLUMNS>(a, piece, number, lost, state.sums, state.top, state.weight);
    return;
  }
  const u64 table = kept(reinterpret_cast<u64>(a.page_table + index * a.table_row));
  const Walk walk{reinterpret_cast<const i32*>(table), last};
  Pages ahead[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) walk.find(ahead[i], a, first + i * STEP);
  choose_rows(shared, a, piece.head);
  const Lane mine = lane_of(shared);
  u32 highest_page = 0;
  sync_warp();
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    walk.copy(shared, mine, a, mine.ring + i * STAGE_BYTES, first + i * STEP, ahead[i],
              highest_page);
    copies_commit();
  }
  Pages pages;  // of the step that is to be copied next
#pragma unroll
  for (int t = 0; t < TILES; t++) pages[t] = ahead[STAGES - 1][t];
  if (lane() == 0) {
    shared.piece = piece;
    shared.value_offsets = offsets_operand<V>();
    shared.limits = {last, smaller(last, request.length - request.queries + 1),
                     a.window > 0 ? request.length - a.window : 0};
  }
  load_queries<K, DIM, ROWS>(shared.queries.rows, a, piece);
  sync_warp();
  Powers powers;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      powers[n][j] = shared.queries.rows.power[(8 * n + 2 * (lane() % 4) + j) % ROWS];
    }
  }
  OurQueries queries;
  place_queries<K, DIM, ROWS, COLUMNS>(queries, shared.queries.rows, shared.queries.words);
  constexpr int LAST_STAGE = (STAGES - 1) * STAGE_BYTES;
  int at = 0;                                   // of this step's stage in the ring
  int stop = smaller(first + cut.size, last);  // where this chunk ends
  int calm = first;                             // up to which every row sees all
  for (int token = first; token < last;) {
    sync_warp();  // the stage that is overwritten has been read
    walk.copy(shared, mine, a, mine.ring + (at == 0 ? LAST_STAGE : at - STAGE_BYTES),
              token + (STAGES - 1) * STEP, pages, highest_page);
    copies_commit();
    walk.find(pages, a, token + STAGES * STEP);
    copies_wait<STAGES - 1>();
    sync_warp();
    u8* stage = mine.ring + at;
    if (token + STEP > calm) {
      const Limits limits = shared.limits;
      if (token + STEP <= limits.whole && token >= limits.inside) calm = limits.whole;
    }
    if (token + STEP > calm) {
      blank_unseen(shared, a, stage, token);
      attend<true>(state, shared, a, mine, stage, token, queries, powers);
    } else {
      attend<false>(state, shared, a, mine, stage, token, queries, powers);
    }
    token += STEP;
    if (token >= stop) {
      lost |= highest_page >= u32(a.num_pages);
      store_piece<V, DIM, ROWS, COLUMNS>(a, shared.piece, number++, lost,
                                         state.sums, state.top, state.weight);
      stop = smaller(stop + shared.piece.request.chunks.size, last);
      state.clear();
    }
    at = at == LAST_STAGE ? 0 : at + STAGE_BYTES;
  }
  copies_wait<0>();
  sync_warp();  // all that is shared is free
}

extern "C" GLOBAL void LAUNCH_BOUNDS(32 * WARPS, BLOCKS) decode(Arguments a) {
  if constexpr (TABLE_BYTES > 0) {
    check_known_addresses();
    Tabled::fill_table(known_address(0), 32 * warp() + lane(), 32 * WARPS);
    sync_block();
  }
  wait_for_earlier();
  launch_dependents();
  const int mine = WARPS > 1 ? warp() : 0;
  u8* memory = kept_shared(shared_memory() + TABLE_BYTES + mine * sizeof(Shared));
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  // Neighbours go through the same tokens of neighbouring KV heads, whose rows share memory pages.
  const int index = block() * WARPS + mine;
  const int head = index % a.kv_heads, run = index / a.kv_heads;
  const int runs = blocks() * WARPS / a.kv_heads;
  const int total = smaller(count_pieces<ROWS>(a), a.capacity);
  // Every run has an equal number of pieces, within one.
  int number = int(i64(total) * run / runs);
  const int end = int(i64(total) * (run + 1) / runs);
  if (run < runs && number < end) {
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
