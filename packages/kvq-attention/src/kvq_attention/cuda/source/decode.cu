// Decode: attention of few query rows over a cache in the format it is stored in.
//
// A warp takes a run of pieces of one KV head: tokens that follow each other, and others; warps of a
// block have a table in common, at most. It goes through them in steps of a few tiles. Steps are
// copied into shared memory as they are stored, ahead of use and across the ends of chunks, and read
// in the layout of a tensor-core product's operand, where codes become numbers: nothing unpacked is
// ever written anywhere.
//
// Defined for a compilation: what settings.cuh names, NUMBER, and the sizes of chunks.
#include "attend.cuh"
#include "items.cuh"
#include "settings.cuh"
#include "walk.cuh"

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
  const u64 table = kept(reinterpret_cast<u64>(a.page_table + index * a.table_row));
  Walk walk{reinterpret_cast<const i32*>(table), first, last, (last - first - 1) / TILE + 1};
  // What comes before the first pages are needed takes the time until they are known.
  if (first < last) walk.find(a, 0);
  const Line line = line_of<ROWS>(a, piece);
  if (lane() < ROWS) shared.lines[lane()] = line;
  sync_warp();
  State state;
  state.clear();
  if (first == last) {
    store_piece<V, DIM, ROWS, COLUMNS>(shared.lines, a, piece, number, lost, state.sums, state.top,
                                       state.weight);
    sync_warp();  // the lines have been read
    return;
  }
  QueryValues<DIM, ROWS> values;
  values.load(a, piece, line);
  choose_rows<false>(shared, a.k, piece.head);
  choose_rows<true>(shared, a.v, piece.head);
  const Lane mine = lane_of(shared);
  sync_warp();
  walk.begin(a);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    walk.copy(shared, mine, mine.ring + i * STAGE_BYTES, i * TILES, a);
    copies_commit();
  }
  if (lane() == 0) {
    shared.piece = piece;
    shared.value_offsets = offsets_operand<V>();
    shared.limits = {last, smaller(last, request.length - request.queries + 1),
                     a.window > 0 ? request.length - a.window : 0};
  }
  put_queries<K, DIM, ROWS>(shared.queries.rows, a, values);
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
  const int chunk_tiles = kept(cut.size / TILE);
  int at = 0;              // of this step's stage in the ring
  int stop = chunk_tiles;  // behind this chunk
  int calm = 0;            // up to where every row sees all
  for (int tile = 0; tile < walk.tiles;) {
    sync_warp();  // the stage that is overwritten has been read
    const int coming = tile + (STAGES - 1) * TILES;
    walk.turn_to(a, coming);
    walk.copy(shared, mine, mine.ring + (at == 0 ? LAST_STAGE : at - STAGE_BYTES), coming, a);
    copies_commit();
    copies_wait<STAGES - 1>();
    sync_warp();
    u8* stage = mine.ring + at;
    const auto attend_step = [&](auto masked) {
      attend<decltype(masked)::value>(state, shared, a, mine, stage, walk.first + tile * TILE,
                                      queries, powers);
    };
    if (tile + TILES > calm) {
      const Limits limits = shared.limits;
      const int token = walk.first + tile * TILE;
      if (token + STEP <= limits.whole && token >= limits.inside) {
        calm = (limits.whole - walk.first) / TILE;
      }
    }
    if (tile + TILES > calm) {
      attend_step(Flag<true>());
    } else {
      attend_step(Flag<false>());
    }
    tile += TILES;
    if (tile >= smaller(stop, walk.tiles)) {
      const bool missing = any(walk.highest_page >= u32(a.num_pages));
      store_piece<V, DIM, ROWS, COLUMNS>(shared.lines, a, shared.piece, number++, lost || missing,
                                         state.sums, state.top, state.weight);
      stop += chunk_tiles;
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
  const int mine = WARPS > 1 ? warp() : 0;
  u8* memory = kept_shared(shared_memory() + TABLE_BYTES + mine * int(sizeof(Shared)));
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  // Neighbours go through the same tokens of neighbouring KV heads, whose rows share memory pages.
  const u32 index = mine * blocks() + block(), heads = a.kv_heads;
  const int run = kept(index / heads), most_runs = kept(u32(blocks() * WARPS) / heads);
  const int head = index - run * heads;
  wait_for_earlier();
  launch_dependents();
  const Pieces first = pieces_of<ROWS>(a, 0);
  const int total = smaller(count_pieces<ROWS>(a, first), a.capacity);
  const int runs = smaller(most_runs, larger(total, 1));
  // Every run has an equal number of pieces, within one.
  const int each = u32(total) / u32(runs), more = total - each * runs;
  int number = run * each + smaller(run, more);
  const int end = number + each + (run < more);
  if (run < runs && number < end) {
    Cursor<ROWS> cursor = find<ROWS>(a, number, first);
    while (number < end) {
      cursor.advance(a, number);
      const int chunks = cursor.request.chunks.count;
      const int local = number - cursor.before;
      // Mostly there is one group; a division would take longer than to ask.
      const int group = local < chunks ? 0 : u32(local) / u32(chunks);
      const int chunk = local - group * chunks;
      const int count = smaller(end - number, chunks - chunk);
      const Piece piece{cursor.request, group * ROWS, head};
      walk_pieces(shared, a, piece, cursor.index, number, chunk, count);
      number += count;
    }
  }
  if (a.partial == nullptr) blank_padding<DIM>(a);
}
