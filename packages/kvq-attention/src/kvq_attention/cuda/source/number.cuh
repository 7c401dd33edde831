// Numbers of queries and outputs: NUMBER is f32 (0), f16 (1) or bf16 (2).
#pragma once

#include "scalar.cuh"

// Eight numbers that begin at a multiple of 16 bytes.
DEVICE void load_numbers(const void* numbers, i64 at, float (&x)[8]) {
  if constexpr (NUMBER == 0) {
    const float* from = static_cast<const float*>(numbers) + at;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const auto four = *reinterpret_cast<const Words<16>*>(from + i);
#pragma unroll
      for (int j = 0; j < 4; j++) x[i + j] = as_float(four.word[j]);
    }
  } else {
    const auto all = *reinterpret_cast<const Words<16>*>(static_cast<const u16*>(numbers) + at);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 pair = all.word[i / 2];
      if (NUMBER == 1) {
        x[i] = i % 2 ? high_half(pair) : low_half(pair);
      } else {
        x[i] = i % 2 ? high_bf16(pair) : low_bf16(pair);
      }
    }
  }
}

DEVICE void store_number(void* numbers, i64 at, float value) {
  if (NUMBER == 0) {
    static_cast<float*>(numbers)[at] = value;
  } else {
    const u32 bits = NUMBER == 1 ? pack_halves(value, 0.0f) : pack_bf16(value, 0.0f);
    static_cast<u16*>(numbers)[at] = u16(bits);
  }
}
