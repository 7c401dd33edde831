// The merge: a row's partial results, weighted by what they saw.
//
// A block a query token and head. Every LANES-th chunk is summed up for itself, and then those sums
// in their order, by one warp or by more: the bits are the same. Defined for a compilation: what
// becomes a constant below, NUMBER, and the sizes of chunks.
#include "arguments.cuh"
#include "items.cuh"
#include "number.cuh"
#include "softmax.cuh"

constexpr int DIM = SET_DIM;
constexpr int ROWS = SET_ROWS;  // of a piece
constexpr int WARPS = SET_WARPS;
constexpr int QUADS = (DIM + 127) / 128;  // of values a lane
constexpr int LANES = 8;                  // sums of chunks
constexpr int OWN = LANES / WARPS;        // of those, a warp's
constexpr int AHEAD = LANES / OWN;        // chunks of each that are loaded at once

struct Shared {
  float sums[LANES][DIM], weights[LANES];
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

  wait_for_earlier();  // for the partial results: what was read so far is older
  float top = LOWEST;
  for (int i = lane(); i < chunks; i += 32) top = greater(a.partial_lse[slot(i)], top);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = greater(top, shuffle_xor(top, mask));
  float sink = -infinity();
  if (a.sinks != nullptr) {
    sink = log2_sink(a.sinks[q_head]);
    top = greater(top, sink);
  }
  float weights[OWN] = {}, sums[OWN][QUADS][4] = {};
  for (int begin = 0; begin < chunks; begin += LANES * AHEAD) {
    float share[AHEAD][OWN];
    Words<16> quads[AHEAD][OWN][QUADS] = {};
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
#pragma unroll
      for (int o = 0; o < OWN; o++) {
        const int chunk = begin + LANES * i + OWN * warp() + o;
        share[i][o] = chunk < chunks ? exp2_fast(a.partial_lse[slot(chunk)] - top) : 0.0f;
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
          const int value = 128 * j + 4 * lane();
          if (chunk >= chunks || value >= DIM) continue;
          const float* at = a.partial + slot(chunk) * DIM + value;
          quads[i][o][j] = *reinterpret_cast<const Words<16>*>(at);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
#pragma unroll
      for (int o = 0; o < OWN; o++) {
        weights[o] += share[i][o];
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
#pragma unroll
          for (int k = 0; k < 4; k++) {
            sums[o][j][k] += share[i][o] * as_float(quads[i][o][j].word[k]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int o = 0; o < OWN; o++) {
    const int own = OWN * warp() + o;
    if (lane() == 0) shared.weights[own] = weights[o];
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int value = 128 * j + 4 * lane() + k;
        if (value < DIM) shared.sums[own][value] = sums[o][j][k];
      }
    }
  }
  sync_block();
  float weight = exp2_fast(sink - top);
#pragma unroll
  for (int own = 0; own < LANES; own++) weight += shared.weights[own];
  const float share = weight == 0.0f ? 0.0f : reciprocal(weight);
  for (int i = thread; i < DIM; i += 32 * WARPS) {
    float sum = 0.0f;
#pragma unroll
    for (int own = 0; own < LANES; own++) sum += shared.sums[own][i];
    store_number(a.out, target + i, sum * share);
  }
}
