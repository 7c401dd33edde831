// Work items: how a batch is cut into pieces of a size that each request's own length decides.
//
// A request's visible positions are cut into chunks, its query rows (query token x head of a KV
// head's group) into groups of up to ROWS. A piece is a chunk, a group and a KV head. Partial
// results are merged in the order of chunks, so the bits that a request gets do not depend on its
// company.
#pragma once

#include "arguments.cuh"
#include "warp.cuh"

constexpr int TILE = 16;  // tokens a tensor-core product takes

template <class T>
DEVICE constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
DEVICE T larger(T a, T b) {
  return a > b ? a : b;
}
DEVICE int divided_up(int a, int b) { return (a - 1) / b + 1; }  // of positive numbers

struct Cut {
  int first, size, count;  // where chunks begin, tokens a chunk, chunks
};

// A request's chunks; `most_chunks` in items.py bounds their number.
DEVICE Cut cut(int queries, int length, int reach, int wanted, int window) {
  int first = 0;
  if (window > 0) first = smaller(larger(length - queries - window + 1, 0), reach) / TILE * TILE;
  const int visible = larger(smaller(length, reach) - first, 1);
  int size = ALONE;
  if (visible > ALONE) {
    int chunks = smaller(wanted, visible / SMALLEST_CHUNK);
    chunks = smaller(larger(chunks, divided_up(visible, LARGEST_CHUNK)), MOST_CHUNKS);
    size = divided_up(visible, chunks * CHUNK_STEP) * CHUNK_STEP;
  }
  return {first, size, queries > 0 ? divided_up(visible, size) : 0};
}

// One request of the batch and the pieces of a KV head that it is cut into: chunks that follow each
// other, then groups.
struct Request {
  int start, queries, length, pieces;
  Cut chunks;
};

template <int ROWS>
DEVICE Request request_at(const Arguments& a, int index) {
  Request r;
  r.start = a.query_offsets[index];
  r.queries = a.query_offsets[index + 1] - r.start;
  r.length = a.seq_lens[index];
  r.chunks = cut(r.queries, r.length, a.reach, a.wanted, a.window);
  r.pieces = r.chunks.count * ((r.queries * a.group + ROWS - 1) / ROWS);
  return r;
}

// Request index + l of each lane l; one without pieces behind the last.
template <int ROWS>
DEVICE Request request_of_lane(const Arguments& a, int index) {
  return index + lane() < a.num_requests ? request_at<ROWS>(a, index + lane()) : Request{};
}

// Another lane's.
DEVICE Request shuffle(const Request& r, int source) {
  return {shuffle(r.start, source), shuffle(r.queries, source), shuffle(r.length, source),
          shuffle(r.pieces, source),
          {shuffle(r.chunks.first, source), shuffle(r.chunks.size, source),
           shuffle(r.chunks.count, source)}};
}

// Of 32 requests of the batch lane l's, and the pieces of a KV head of those up to it.
struct Pieces {
  Request mine;
  int up_to;

  DEVICE int all() const { return shuffle(up_to, 31); }
};

// Of requests from `index` on.
template <int ROWS>
DEVICE Pieces pieces_of(const Arguments& a, int index) {
  const Request mine = request_of_lane<ROWS>(a, index);
  int up_to = mine.pieces;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = shuffle(up_to, lane() - step);
    if (lane() >= step) up_to += other;
  }
  return {mine, up_to};
}

// Pieces of one KV head, of all requests; `first` are of the first ones.
template <int ROWS>
DEVICE int count_pieces(const Arguments& a, const Pieces& first) {
  int pieces = 0;
  if (a.num_requests > 32) {
    for (int i = lane() + 32; i < a.num_requests; i += 32) pieces += request_at<ROWS>(a, i).pieces;
    pieces = sum_lanes(pieces);
  }
  return pieces + first.all();
}

// Where a walk over the pieces stands: a request and the pieces of those before it.
template <int ROWS>
struct Cursor {
  int index, before;
  Request request;

  // To the request that a piece is of, from any earlier one; `piece` must exist.
  DEVICE void advance(const Arguments& a, int piece) {
    while (piece >= before + request.pieces) {
      before += request.pieces;
      request = request_at<ROWS>(a, ++index);
    }
  }
};

// The walk's beginning, among 32 requests at a time; `pieces` are of the first ones.
template <int ROWS>
DEVICE Cursor<ROWS> find(const Arguments& a, int piece, Pieces pieces) {
  int index = 0, before = 0;
  for (;;) {
    const int here = pieces.all();
    if (piece < before + here || index + 32 >= a.num_requests) {
      const int passed = count_lanes(pieces.up_to <= piece - before) % 32;
      const Request found = shuffle(pieces.mine, passed);
      return {index + passed, before + shuffle(pieces.up_to, passed) - found.pieces, found};
    }
    before += here;
    index += 32;
    pieces = pieces_of<ROWS>(a, index);
  }
}
