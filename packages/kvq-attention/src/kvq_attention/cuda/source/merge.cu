// The merge: a row's partial results, weighted by what they saw, in the order of their chunks.
//
// A block of DIM threads a query token and head. Defined for a compilation: what becomes a constant
// below, NUMBER, and the sizes of chunks.
#include "arguments.cuh"
#include "items.cuh"
#include "number.cuh"
#include "softmax.cuh"

constexpr int DIM = SET_DIM;
constexpr int ROWS = SET_ROWS;  // of a piece

extern "C" GLOBAL void LAUNCH_BOUNDS(DIM, 1) merge(Arguments a) {
  const int heads = a.kv_heads * a.group;
  const int token = block() / heads, q_head = block() % heads;
  const int value = warp() * 32 + lane();
  const i64 at = token * a.out_token + q_head * a.out_head + value;
  if (token >= a.query_offsets[a.num_requests]) {
    store_number(a.out, at, 0.0f);
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
  const int along = line / ROWS * a.kv_heads + q_head / a.group;
  const int first = before + along * request.chunks.count;
  const auto slot = [&](int chunk) { return i64(first + chunk) * ROWS + line % ROWS; };
  // A launch whose numbers contradict each other must not read beyond what was written.
  int chunks = request.chunks.count;
  while (chunks > 0 && slot(chunks - 1) >= i64(a.capacity) * ROWS) chunks--;

  float top = LOWEST;
  for (int i = lane(); i < chunks; i += 32) {
    const float lse = a.partial_lse[slot(i)];
    top = lse > top ? lse : top;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = greater(top, shuffle_xor(top, mask));
  float weight = 0.0f;
  if (a.sinks != nullptr) {
    const float sink = log2_sink(a.sinks[q_head]);
    top = greater(top, sink);
    weight = exp2_fast(sink - top);
  }
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < chunks; i++) {
    const float share = exp2_fast(a.partial_lse[slot(i)] - top);
    sum += a.partial[slot(i) * DIM + value] * share;
    weight += share;
  }
  store_number(a.out, at, weight == 0.0f ? 0.0f : sum / weight);
}
