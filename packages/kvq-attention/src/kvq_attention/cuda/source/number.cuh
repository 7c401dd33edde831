// Numbers of queries and outputs: NUMBER is f32 (0), f16 (1) or bf16 (2).
#pragma once

#include "scalar.cuh"

// Floats that begin at a multiple of what they take, next to each other.
template <int COUNT>
DEVICE void load_floats(const float* at, float (&x)[COUNT]) {
  const auto words = *reinterpret_cast<const Words<4 * COUNT>*>(at);
#pragma unroll
  for (int i = 0; i < COUNT; i++) x[i] = as_float(words.word[i]);
}

template <int COUNT>
DEVICE void store_floats(float* at, const float (&x)[COUNT]) {
  Words<4 * COUNT> words;
#pragma unroll
  for (int i = 0; i < COUNT; i++) words.word[i] = as_bits(x[i]);
  *reinterpret_cast<Words<4 * COUNT>*>(at) = words;
}

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

// Numbers that begin at a multiple of what they take, next to each other.
template <int COUNT>
DEVICE void store_numbers(void* numbers, i64 at, const float (&x)[COUNT]) {
  if constexpr (COUNT == 1) {
    store_number(numbers, at, x[0]);
  } else if constexpr (NUMBER == 0) {
    store_floats(static_cast<float*>(numbers) + at, x);
  } else {
    Words<2 * COUNT> words;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      words.word[i / 2] = NUMBER == 1 ? pack_halves(x[i], x[i + 1]) : pack_bf16(x[i], x[i + 1]);
    }
    *reinterpret_cast<Words<2 * COUNT>*>(static_cast<u16*>(numbers) + at) = words;
  }
}
