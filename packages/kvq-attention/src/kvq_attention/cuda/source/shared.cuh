// Places in a block's shared memory whose addresses are known when a kernel is compiled.
//
// `shared_memory()` is not known then: from sm_90 on a loop adds it to each address that is found
// by its data, one more instruction a load.
#pragma once

#include "warp.cuh"

// 32 bits on a device, where 0 is an address, too.
#ifdef __CUDACC__
using SharedAddress = u32;
#else
using SharedAddress = u8*;
#endif

// Dynamic shared memory begins here or before, behind what the system keeps of it. Who uses
// `known_address` has so many bytes more of it, for all that may lie before.
constexpr int KNOWN_FROM = 1024;

DEVICE SharedAddress known_address(int offset) {
#ifdef __CUDACC__
  return KNOWN_FROM + offset;
#else
  return shared_memory() + KNOWN_FROM + offset;
#endif
}

// Ends a kernel whose shared memory begins behind KNOWN_FROM.
DEVICE void check_known_addresses() {
#ifdef __CUDACC__
  if (shared_address(shared_memory()) > KNOWN_FROM) __trap();
#endif
}

// A word that nobody writes once it has been read. The compiler may move the load, so that the
// address must come from what is read behind the barrier that ends the writing.
DEVICE u32 load_shared(SharedAddress address) {
#ifdef __CUDACC__
  u32 word;
  asm("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
#else
  emulator::check_shared("load_shared", address, 4);
  return *reinterpret_cast<const u32*>(address);
#endif
}

DEVICE void store_shared(SharedAddress address, u32 word) {
#ifdef __CUDACC__
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
#else
  emulator::check_shared("store_shared", address, 4);
  *reinterpret_cast<u32*>(address) = word;
#endif
}
