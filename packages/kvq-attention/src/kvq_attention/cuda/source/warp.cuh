// Instructions of a warp or a block, and what a thread knows of its place.
// On a host tests run the threads of a block in turns: `emulator` below is what they offer.
#pragma once

#include "scalar.cuh"
#include "types.cuh"

#ifndef __CUDACC__
namespace emulator {

struct Place {
  int lane, warp, block, blocks;
};

// What a lane brings to an instruction of its warp.
struct Operands {
  u32 words[12];
};

const Place& place();
u8* shared_memory();
// Waits until all lanes of the warp, or threads of the block, are at the same instruction; an
// array of what each lane brought, which stays as it is until the lane's next instruction.
const Operands* meet_warp(const char* instruction, const Operands& mine);
void meet_block();
// Refuses what does not lie in the block's shared memory, or not at a multiple of its size.
void check_shared(const char* instruction, const void* address, int bytes);
void copy(void* shared, const void* global, int bytes, bool live);
void commit_copies();
void wait_copies(int left);

}  // namespace emulator
#endif

// Lane of the warp, warp of the block, block of the grid, blocks of the grid.
#ifdef __CUDACC__
DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int warp() { return threadIdx.x / 32; }
DEVICE int block() { return blockIdx.x; }
DEVICE int blocks() { return gridDim.x; }
#else
DEVICE int lane() { return emulator::place().lane; }
DEVICE int warp() { return emulator::place().warp; }
DEVICE int block() { return emulator::place().block; }
DEVICE int blocks() { return emulator::place().blocks; }
#endif

// A word of global memory that nobody writes while the kernel runs; the compiler does not know of a
// pointer that was in memory where it points to.
DEVICE u32 read_only(const i32* address) {
#ifdef __CUDACC__
  u32 word;
  asm("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
#else
  return u32(*address);
#endif
}

// The block's dynamic shared memory.
DEVICE u8* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) u8 memory[];
  return memory;
#else
  return emulator::shared_memory();
#endif
}

DEVICE void sync_warp() {
#ifdef __CUDACC__
  __syncwarp();
#else
  emulator::meet_warp("sync_warp", {});
#endif
}

DEVICE void sync_block() {
#ifdef __CUDACC__
  __syncthreads();
#else
  emulator::meet_block();
#endif
}

// Whether the condition holds in any lane.
DEVICE bool any(bool condition) {
#ifdef __CUDACC__
  return __any_sync(~0u, condition);
#else
  const emulator::Operands* lanes = emulator::meet_warp("any", {{condition}});
  bool found = false;
  for (int i = 0; i < 32; i++) found |= lanes[i].words[0] != 0;
  return found;
#endif
}

// In how many lanes the condition holds.
DEVICE int count_lanes(bool condition) {
#ifdef __CUDACC__
  return __popc(__ballot_sync(~0u, condition));
#else
  const emulator::Operands* lanes = emulator::meet_warp("count_lanes", {{condition}});
  int found = 0;
  for (int i = 0; i < 32; i++) found += lanes[i].words[0];
  return found;
#endif
}

// The sum over a warp's lanes.
DEVICE int sum_lanes(int value) {
#ifdef __CUDACC__
  return __reduce_add_sync(~0u, value);
#else
  const emulator::Operands* lanes = emulator::meet_warp("sum_lanes", {{u32(value)}});
  u32 sum = 0;
  for (int i = 0; i < 32; i++) sum += lanes[i].words[0];
  return sum;
#endif
}

// What another lane gave.
template <class T>
DEVICE T shuffle(T value, int source) {
  static_assert(sizeof(T) == 4, "a shuffle moves one word");
#ifdef __CUDACC__
  return __shfl_sync(~0u, value, source);
#else
  emulator::Operands mine{};
  std::memcpy(mine.words, &value, 4);
  std::memcpy(&value, emulator::meet_warp("shuffle", mine)[source & 31].words, 4);
  return value;
#endif
}

template <class T>
DEVICE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4, "a shuffle moves one word");
#ifdef __CUDACC__
  return __shfl_xor_sync(~0u, value, mask);
#else
  emulator::Operands mine{};
  std::memcpy(mine.words, &value, 4);
  std::memcpy(&value, emulator::meet_warp("shuffle_xor", mine)[(lane() ^ mask) & 31].words, 4);
  return value;
#endif
}

// A word that stays in a register: the compiler, which cannot know that a lane is given what is its
// own, cannot make it again wherever it is used.
template <class T>
DEVICE T kept(T value) {
  if constexpr (sizeof(T) == 4) {
    return shuffle(value, lane());
  } else {
    return T(u64(kept(u32(u64(value) >> 32))) << 32 | kept(u32(u64(value))));
  }
}

#ifdef __CUDACC__
// Where an address lies within shared memory.
DEVICE u32 shared_address(const void* shared) {
  return static_cast<u32>(__cvta_generic_to_shared(shared));
}
#else
namespace host {

// c += a * b in f32, for a lane whose operands are widened: group l / 4, position l % 4.
// a: (row, columns) = (group, 2p..), (group + 8, 2p..), (group, 2p + 8..), (group + 8, 2p + 8..);
// b: (rows, column) = (2p.., group), (2p + 8.., group); c: (group, 2p..), (group + 8, 2p..).
inline void multiply(const char* instruction, float (&c)[4], const float (&ab)[12]) {
  emulator::Operands mine;
  std::memcpy(mine.words, ab, sizeof(ab));
  const emulator::Operands* lanes = emulator::meet_warp(instruction, mine);
  const int group = lane() / 4, position = lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int column = 2 * position + i % 2;
    for (int k = 0; k < 16; k++) {
      const int holder = k % 8 / 2, half = k % 2, upper = k / 8;
      const u32 a = lanes[4 * group + holder].words[2 * (2 * upper + i / 2) + half];
      const u32 b = lanes[4 * column + holder].words[8 + 2 * upper + half];
      c[i] += as_float(a) * as_float(b);
    }
  }
}

// Word l % 4 of row l / 4 of an 8 x 8 matrix of halves, or of its transpose.
template <class Row>
inline u32 word_of_matrix(Row row, bool transposed) {
  const int i = lane() / 4, j = 2 * (lane() % 4);
  if (!transposed) return row(i)[j] | u32(row(i)[j + 1]) << 16;
  return row(j)[i] | u32(row(j + 1)[i]) << 16;
}

inline void load(const char* instruction, u32 (&r)[4], const void* shared, bool transposed) {
  emulator::check_shared(instruction, shared, 16);
  emulator::Operands mine{};
  std::memcpy(mine.words, shared, 16);
  const emulator::Operands* lanes = emulator::meet_warp(instruction, mine);
  for (int m = 0; m < 4; m++) {
    const auto row = [&](int i) { return reinterpret_cast<const u16*>(lanes[8 * m + i].words); };
    r[m] = word_of_matrix(row, transposed);
  }
}

}  // namespace host
#endif

// c += a * b for a 16 x 16 matrix a and a 16 x 8 matrix b of f16 values.
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef __CUDACC__
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  float widened[12];
  for (int i = 0; i < 12; i++) {
    widened[i] = i % 2 ? high_half(words[i / 2]) : low_half(words[i / 2]);
  }
  host::multiply("mma", c, widened);
#endif
}

// The same for a 16 x 8 matrix a and an 8 x 8 matrix b.
DEVICE void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
#ifdef __CUDACC__
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
#else
  const u32 words[6] = {a0, a1, 0, 0, b0, 0};
  float widened[12];
  for (int i = 0; i < 12; i++) {
    widened[i] = i % 2 ? high_half(words[i / 2]) : low_half(words[i / 2]);
  }
  host::multiply("mma_k8", c, widened);
#endif
}

// mma for bf16 values.
DEVICE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef __CUDACC__
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  float widened[12];
  for (int i = 0; i < 12; i++) {
    widened[i] = i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
  }
  host::multiply("mma_bf16", c, widened);
#endif
}

// Four 8 x 8 matrices of halves: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes in
// shared memory, and gets word l % 4 of row l / 4 of each.
DEVICE void load_matrices(u32 (&r)[4], const void* shared) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
#else
  host::load("load_matrices", r, shared, false);
#endif
}

// The same, of each matrix' transpose.
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* shared) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
#else
  host::load("load_matrices_transposed", r, shared, true);
#endif
}

// The transpose of an 8 x 8 matrix of halves of which lane l holds word l % 4 of row l / 4.
DEVICE u32 transpose_matrix(u32 word) {
#ifdef __CUDACC__
  u32 result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
#else
  const emulator::Operands* lanes = emulator::meet_warp("transpose_matrix", {{word}});
  const auto row = [&](int i) {
    return [lanes, i](int j) { return lanes[4 * i + j / 2].words[0] >> 16 * (j % 2) & 0xFFFF; };
  };
  const int i = lane() / 4, j = 2 * (lane() % 4);
  return row(j)(i) | row(j + 1)(i) << 16;
#endif
}

// Begins a copy of 16 bytes, from `global` + FROM to `shared` + TO, both multiples of 16, past the
// first-level cache. Where it is not live, the bytes become 0 and nothing is read. AROUND: the 256
// bytes around are wanted soon, maybe by others.
template <int TO = 0, int FROM = 0, bool AROUND = false>
DEVICE void copy_async(u8* shared, const u8* global, bool live) {
#ifdef __CUDACC__
  // Sums of addresses are part of the instruction; what the compiler sums up takes others.
  if constexpr (AROUND) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0 + %3], [%1 + %4], 16, %2;" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(live ? 16 : 0), "n"(TO), "n"(FROM)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(live ? 16 : 0), "n"(TO), "n"(FROM)
                 : "memory");
  }
#else
  emulator::check_shared("copy_async", shared + TO, 16);
  emulator::copy(shared + TO, global + FROM, 16, live);
#endif
}

// An address in shared memory, a multiple of 16, as `kept` keeps a word.
DEVICE u8* kept_shared(u8* shared) {
#ifdef __CUDACC__
  void* address = __cvta_shared_to_generic(kept(shared_address(shared)));
  return static_cast<u8*>(__builtin_assume_aligned(address, 16));
#else
  return shared;
#endif
}

// An address in shared memory that is computed here, not wherever it is used.
DEVICE u8* pinned_shared(u8* shared) {
#ifdef __CUDACC__
  u32 address;
  asm volatile("mov.b32 %0, %1;" : "=r"(address) : "r"(shared_address(shared)));
  return static_cast<u8*>(__cvta_shared_to_generic(address));
#else
  return shared;
#endif
}

// Lets the kernel behind this one in a stream start beside it, if it was launched so.
DEVICE void launch_dependents() {
#if defined(__CUDACC__) && KVQ_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before this one is complete, and what it wrote can be read.
DEVICE void wait_for_earlier() {
#if defined(__CUDACC__) && KVQ_ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Closes a group of the copies that this thread began.
DEVICE void copies_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::commit_copies();
#endif
}

// Waits until all of this thread's groups but the latest LEFT are complete.
template <int LEFT>
DEVICE void copies_wait() {
  static_assert(LEFT >= 0, "a number of groups");
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#else
  emulator::wait_copies(LEFT);
#endif
}
