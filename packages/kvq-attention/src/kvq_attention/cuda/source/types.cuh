// What device code and plain C++ spell differently: types, qualifiers, the architecture.
#pragma once

#ifdef __CUDACC__

// NVRTC comes without the standard headers.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define GLOBAL __global__
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define KVQ_ARCH (__CUDA_ARCH__ / 10)

#else

#include <cstdint>
typedef std::uint8_t u8;
typedef std::uint16_t u16;
typedef std::uint32_t u32;
typedef std::uint64_t u64;
typedef std::int32_t i32;
typedef std::int64_t i64;

#define DEVICE inline
#define GLOBAL
#define LAUNCH_BOUNDS(threads, blocks)
#ifndef KVQ_ARCH
#define KVQ_ARCH 90
#endif

#endif
