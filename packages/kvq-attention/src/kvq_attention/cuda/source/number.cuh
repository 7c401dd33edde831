// Numbers of queries and outputs: NUMBER is f32 (0), f16 (1) or bf16 (2).
#pragma once

#include "scalar.cuh"

DEVICE float load_number(const void* numbers, i64 at) {
  if (NUMBER == 0) return static_cast<const float*>(numbers)[at];
  const u32 bits = static_cast<const u16*>(numbers)[at];
  return NUMBER == 1 ? low_half(bits) : low_bf16(bits);
}

DEVICE void store_number(void* numbers, i64 at, float value) {
  if (NUMBER == 0) {
    static_cast<float*>(numbers)[at] = value;
  } else {
    const u32 bits = NUMBER == 1 ? pack_halves(value, 0.0f) : pack_bf16(value, 0.0f);
    static_cast<u16*>(numbers)[at] = u16(bits);
  }
}
