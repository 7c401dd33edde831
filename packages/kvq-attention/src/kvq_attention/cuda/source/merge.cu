// The merge: a row's partial results, weighted by what they saw.
//
// A block up to 128 values of a query token and head. The row's chunks are cut into runs; each is
// summed up for itself, and then those sums in their order, by one warp or by more: the bits are
// the same. Defined for a compilation: what becomes a constant below, NUMBER, and the sizes of
// chunks.
#include "arguments.cuh"
#include "items.cuh"
#include "number.cuh"
#include "rotation.cuh"
#include "softmax.cuh"

constexpr int DIM = SET_DIM;
constexpr int ROWS = SET_ROWS;  // of a piece
constexpr int WARPS = SET_WARPS;
constexpr int RUN = SET_RUN;  // chunks
constexpr bool ROTATED = SET_ROTATED;
constexpr int WIDTH = DIM < 128 ? DIM : 128;  // values of a block, four a lane
constexpr int PARTS = DIM / WIDTH;
constexpr int MOST_RUNS = (MOST_CHUNKS + RUN - 1) / RUN;
constexpr int AT_ONCE = 8;  // weights a lane: of MOST_CHUNKS
// Threads of a multiprocessor: each may have 64 registers.
constexpr int RESIDENT = 1024;

// Of chunks: their weights and a lane's values, weighted.
struct Sum {
  float weight, values[4];

  DEVICE void add(float share, const float (&x)[4]) {
    weight += share;
#pragma unroll
    for (int k = 0; k < 4; k++) values[k] = fused(share, x[k], values[k]);
  }

  DEVICE void add(const Sum& other) {
    weight += other.weight;
#pragma unroll
    for (int k = 0; k < 4; k++) values[k] += other.values[k];
  }
};

struct alignas(16) Shared {
  float values[MOST_RUNS][WIDTH], weights[MOST_RUNS];
};

extern "C" GLOBAL void LAUNCH_BOUNDS(32 * WARPS, RESIDENT / (32 * WARPS)) merge(Arguments a) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int heads = a.kv_heads * a.group;
  const int index = block() / PARTS, part = block() % PARTS;
  const int token = u32(index) / u32(heads), q_head = index - token * heads;
  const int value = part * WIDTH + 4 * lane();  // the first of this lane's
  const bool has_values = 4 * lane() < WIDTH;
  const i64 target = token * a.out_token + q_head * a.out_head + value;
  const int tokens = a.query_offsets[a.num_requests];
  // The token's request, looked for among 32 at a time, and the pieces of those before it.
  int before = 0, passed = 0;
  Request request;
#pragma unroll 1
  for (int i = lane();; i += 32) {
    request = i < a.num_requests ? request_at<ROWS>(a, i) : Request{};
    const bool earlier = i < a.num_requests && request.start + request.queries <= token;
    before += sum_lanes(earlier ? request.pieces : 0);
    passed = sum_lanes(earlier);
    if (passed < 32) break;
  }
  request = shuffle(request, passed);
  if (token >= tokens) {
    const float zeros[4] = {};
    if (warp() == 0 && has_values) store_numbers(a.out, target, zeros);
    return;
  }
  const int kv_head = u32(q_head) / u32(a.group);
  const int line = (token - request.start) * a.group + q_head - kv_head * a.group;
  const int row = kv_head * ROWS + line % ROWS;
  const int first = before + line / ROWS * request.chunks.count;
  // A launch whose numbers contradict each other must not read beyond what was written.
  const int chunks = smaller(request.chunks.count, a.capacity - first);
  const float* lses = a.partial_lse + (row * a.capacity + first);
  const u32 stride = a.kv_heads * ROWS * DIM * 4;  // bytes from chunk to chunk
  const u8* partial =
      reinterpret_cast<const u8*>(a.partial + row * DIM + value) + multiply_wide(first, stride);
  // What is needed of this warp's runs: of chunk l % RUN the weight, of all the values.
  float lse;
  Words<16> values[RUN];
  const auto load = [&](int run) {
    const int mine = run * RUN + lane() % RUN;
    lse = mine < chunks ? lses[mine] : -infinity();
    const u8* at = partial + multiply_wide(run * RUN, stride);
#pragma unroll
    for (int i = 0; i < RUN; i++, at += stride) {
      values[i] = {};
      if (run * RUN + i >= chunks || !has_values) continue;
      values[i] = *reinterpret_cast<const Words<16>*>(at);
    }
  };
  float sink = -infinity();
  if (a.sinks != nullptr) sink = log2_sink(a.sinks[q_head]);

  wait_for_earlier();  // for the partial results: what was read so far is older
  load(warp());
  float top = greater(LOWEST, sink);
  // A loop, so that what it waits for is not waited for before the loads above have begun.
#pragma unroll 1
  for (int begin = 0; begin < chunks; begin += 32 * AT_ONCE) {
    float found[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int chunk = begin + 32 * i + lane();
      found[i] = chunk < chunks ? lses[chunk] : LOWEST;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) top = greater(found[i], top);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = greater(top, shuffle_xor(top, mask));

  const int runs = (chunks + RUN - 1) / RUN;
  Sum total{exp2_fast(sink - top)};
#pragma unroll 1
  for (int run = warp(); run < runs; run += WARPS) {
    const float shares = exp2_fast(lse - top);
    Sum sum{};
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      float x[4];
#pragma unroll
      for (int k = 0; k < 4; k++) x[k] = as_float(values[i].word[k]);
      sum.add(shuffle(shares, i), x);
    }
    if constexpr (WARPS == 1) {
      total.add(sum);
    } else {
      if (lane() == 0) shared.weights[run] = sum.weight;
      if (has_values) store_floats(&shared.values[run][4 * lane()], sum.values);
    }
    if (run + WARPS < runs) load(run + WARPS);
  }
  Quaternion back{};  // loaded while others are waited for
  if constexpr (ROTATED) back = conjugate(quaternion_of(a.turns, value / 4));
  if constexpr (WARPS > 1) {
    sync_block();
    if (warp() > 0) return;
#pragma unroll 1
    for (int begin = 0; begin < runs; begin += 4) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        Sum sum{};
        if (begin + i < runs) {
          sum.weight = shared.weights[begin + i];
          if (has_values) load_floats(&shared.values[begin + i][4 * lane()], sum.values);
        }
        total.add(sum);
      }
    }
  }
  const float share = total.weight == 0.0f ? 0.0f : reciprocal(total.weight);
#pragma unroll
  for (int k = 0; k < 4; k++) total.values[k] *= share;
  if constexpr (ROTATED) turn(total.values, back);
  if (has_values) store_numbers(a.out, target, total.values);
}
