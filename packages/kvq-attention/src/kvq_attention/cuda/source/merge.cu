// The merge: a row's partial results, weighted by what they saw, in an order that its chunks decide.
//
// A block a query token and head; its warps take chunks in turns. Defined for a compilation: what
// becomes a constant below, NUMBER, and the sizes of chunks.
#include "arguments.cuh"
#include "items.cuh"
#include "number.cuh"
#include "softmax.cuh"

constexpr int DIM = SET_DIM;
constexpr int ROWS = SET_ROWS;  // of a piece
constexpr int WARPS = SET_WARPS;
constexpr int QUADS = (DIM + 127) / 128;  // of values a lane
constexpr int AHEAD = 8;                  // chunks that a warp loads at once

struct Shared {
  float sums[WARPS][DIM], weights[WARPS];
};

extern "C" GLOBAL void LAUNCH_BOUNDS(32 * WARPS, 1) merge(Arguments a) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int heads = a.kv_heads * a.group;
  const int token = block() / heads, q_head = block() % heads;
  const int thread = 32 * warp() + lane();
  const i64 target = token * a.out_token + q_head * a.out_head;
  if (token >= a.query_offsets[a.num_requests]) {
    for (int i = thread; i < DIM; i += 32 * WARPS) store_number(a.out, target + i, 0.0f);
    return;
  }
  // The request: how many end before the token, and the pieces of those.
  int index = 0, before = 0;
  for (int i = lane(); i < a.num_requests; i += 32) {
    const bool earlier = a.query_offsets[i + 1] <= token;
    index += earlier;
    if (earlier) before += request_at<ROWS>(a, i).pieces;
  }
  index = sum_lanes(index);
  before = sum_lanes(before);
  const Request request = request_at<ROWS>(a, index);
  const int line = (token - request.start) * a.group + q_head % a.group;
  const int first = before + line / ROWS * request.chunks.count;
  // A launch whose numbers contradict each other must not read beyond what was written.
  const int chunks = smaller(request.chunks.count, a.capacity - first);
  const auto slot = [&](int chunk) {
    return (i64(first + chunk) * a.kv_heads + q_head / a.group) * ROWS + line % ROWS;
  };

  float top = LOWEST;
  for (int i = lane(); i < chunks; i += 32) top = greater(a.partial_lse[slot(i)], top);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = greater(top, shuffle_xor(top, mask));
  float sink = -infinity();
  if (a.sinks != nullptr) {
    sink = log2_sink(a.sinks[q_head]);
    top = greater(top, sink);
  }
  float weight = 0.0f;
  float sums[QUADS][4] = {};
  for (int begin = warp(); begin < chunks; begin += WARPS * AHEAD) {
    float share[AHEAD], part[AHEAD][QUADS][4];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int chunk = begin + i * WARPS;
      share[i] = chunk < chunks ? exp2_fast(a.partial_lse[slot(chunk)] - top) : 0.0f;
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
        const int value = 128 * j + 4 * lane();
        Words<16> quad = {};
        if (chunk < chunks && value < DIM) {
          quad = *reinterpret_cast<const Words<16>*>(a.partial + slot(chunk) * DIM + value);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) part[i][j][k] = as_float(quad.word[k]);
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      weight += share[i];
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
#pragma unroll
        for (int k = 0; k < 4; k++) sums[j][k] += share[i] * part[i][j][k];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < QUADS; j++) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int value = 128 * j + 4 * lane() + k;
      if (value < DIM) shared.sums[warp()][value] = sums[j][k];
    }
  }
  if (lane() == 0) shared.weights[warp()] = weight;
  sync_block();
  weight = exp2_fast(sink - top);
#pragma unroll
  for (int w = 0; w < WARPS; w++) weight += shared.weights[w];
  for (int i = thread; i < DIM; i += 32 * WARPS) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared.sums[w][i];
    store_number(a.out, target + i, weight == 0.0f ? 0.0f : sum / weight);
  }
}
