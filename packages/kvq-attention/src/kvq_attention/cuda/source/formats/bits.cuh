// What formats share: functions of three words, for `logic`, and shifts for an idle pipe.
//
// Logic, right shifts and byte permutations run on one pipe, at half the rate at which a warp
// issues; multiplications and f16 arithmetic run beside it. A comment "5 + 4" on an unpack counts
// instructions of sm_90 there and elsewhere, for one word, without constants that are set up once.
#pragma once

#include "primitives.cuh"

constexpr u32 AND_OR = 0xEA;     // (a & b) | c
constexpr u32 AND_XOR = 0x6A;    // (a & b) ^ c
constexpr u32 OR_AND = 0xA8;     // (a | b) & c
constexpr u32 XOR_AND = 0x28;    // (a ^ b) & c
constexpr u32 SELECT = 0xE4;     // (a & c) | (b & ~c)

// Upper word of a * b. A shift right by n is a product with 2^(32 - n), which the compiler would
// turn back into a shift, but it does not see that a further term of b adds nothing.
DEVICE u32 multiply_high(u32 a, u32 b) {
#ifdef __CUDACC__
  return __umulhi(a, b);
#else
  return u32(u64(a) * b >> 32);
#endif
}

// A constant that lies in a register of each thread. Left to itself the compiler keeps constants in
// uniform registers, which `permute` cannot read, and copies them whenever they are used; NVRTC
// 13.0 does so on sm_100 and sm_120 in spite of this.
DEVICE u32 in_register(u32 constant) { return constant ^ u32(warp()) >> 10; }
