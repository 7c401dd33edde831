// Instructions of one thread: bits, f16 and bf16 pairs, conversions, powers of two.
// On a host they are exact (NaN, infinities, subnormals, round to nearest even); NaNs are 0x7FFF.
#pragma once

#include "types.cuh"

#ifndef __CUDACC__
#include <cmath>
#include <cstring>
#endif

DEVICE float as_float(u32 bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

DEVICE u32 as_bits(float value) {
#ifdef __CUDACC__
  return __float_as_uint(value);
#else
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

// Words that are loaded or stored at once.
template <int BYTES>
struct alignas(BYTES) Words {
  u32 word[BYTES / 4];
};

#ifndef __CUDACC__
namespace host {

inline u64 bits_of(double value) {
  u64 bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}

inline double double_of(u64 bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

inline u32 half_of(double value) {
  if (value != value) return 0x7FFF;
  const u32 sign = u32(bits_of(value) >> 48) & 0x8000;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65536.0) return sign | 0x7C00;
  int exponent = int(bits_of(magnitude) >> 52) - 1023;
  if (exponent < -14) exponent = -14;
  // Beside 2^52 quanta a sum keeps whole quanta only: the addition rounds.
  const u64 quanta = u64(exponent - 10 + 52 + 1023) << 52;
  const u64 rounded = bits_of(magnitude + double_of(quanta)) - quanta;
  return sign | (u32(exponent + 14) * 1024 + u32(rounded));
}

inline float value_of_half(u32 half) {
  const u32 sign = (half & 0x8000) << 16, magnitude = half & 0x7FFF;
  if (magnitude >= 0x7C00) return as_float(sign | 0x7F800000 | magnitude << 13);
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

inline u32 bf16_of(float value) {
  if (value != value) return 0x7FFF;
  const u32 bits = as_bits(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline u32 max_half(u32 a, u32 b) {
  const float x = value_of_half(a), y = value_of_half(b);
  if (x != x) return y != y ? 0x7FFF : b;
  if (y != y) return a;
  if (x == y) return a & b;  // +0 is above -0
  return x > y ? a : b;
}

// Applies a function of one half, or of one of each operand, to low and high halves.
template <class Function, class... Words>
inline u32 each_half(Function function, Words... words) {
  return function((words & 0xFFFF)...) | function((words >> 16)...) << 16;
}

}  // namespace host
#endif

// Byte i of the result is byte n % 8 of (b, a) for nibble n = i of the selector, or that byte's
// sign in all bits where bit 3 of the nibble is set.
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
#ifdef __CUDACC__
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#else
  const u64 bytes = u64(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 nibble = selector >> 4 * i & 15;
    const u32 byte = u32(bytes >> 8 * (nibble & 7)) & 255;
    result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return result;
#endif
}

// TABLE is the wanted function of (0xF0, 0xCC, 0xAA).
template <u32 TABLE>
DEVICE u32 logic(u32 a, u32 b, u32 c) {
  static_assert(TABLE < 256, "one bit for each of eight cases");
#ifdef __CUDACC__
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return result;
#else
  u32 result = 0;
  for (u32 i = 0; i < 8; i++) {
    if (TABLE >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
#endif
}

DEVICE u32 mul_halves(u32 a, u32 b) {
#ifdef __CUDACC__
  u32 result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  const auto mul = [](u32 x, u32 y) {
    return host::half_of(double(host::value_of_half(x)) * host::value_of_half(y));
  };
  return host::each_half(mul, a, b);
#endif
}

// The number where one of two is NaN.
DEVICE u32 max_halves(u32 a, u32 b) {
#ifdef __CUDACC__
  u32 result;
  asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::each_half(host::max_half, a, b);
#endif
}

DEVICE u32 pack_halves(float low, float high) {
#ifdef __CUDACC__
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return host::half_of(low) | host::half_of(high) << 16;
#endif
}

DEVICE u32 pack_bf16(float low, float high) {
#ifdef __CUDACC__
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return host::bf16_of(low) | host::bf16_of(high) << 16;
#endif
}

DEVICE float low_half(u32 word) {
#ifdef __CUDACC__
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(u16(word)));
  return result;
#else
  return host::value_of_half(word & 0xFFFF);
#endif
}

DEVICE float high_half(u32 word) { return low_half(word >> 16); }

DEVICE float low_bf16(u32 word) { return as_float(word << 16); }

DEVICE float high_bf16(u32 word) { return as_float(word & 0xFFFF0000); }

// A pair's low half in both halves, or its high one. Written so it is part of the instruction that
// takes it, which a permutation is not.
DEVICE u32 twice_low_half(u32 pair) {
#ifdef __CUDACC__
  u32 result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
      : "=r"(result)
      : "r"(pair));
  return result;
#else
  return permute(pair, 0, 0x1010);
#endif
}

DEVICE u32 twice_high_half(u32 pair) {
#ifdef __CUDACC__
  u32 result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
      : "=r"(result)
      : "r"(pair));
  return result;
#else
  return permute(pair, 0, 0x3232);
#endif
}

// The e4m3 numbers in bits 0-7 and 8-15; below sm_89 the codes of NaN read as 480 and -480.
DEVICE u32 halves_of_e4m3(u32 two) {
#if defined(__CUDACC__) && KVQ_ARCH >= 89
  u32 result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(u16(two)));
  return result;
#else
  const u32 codes = permute(two, 0, 0x1404);
  const u32 small = (codes >> 1 & 0x3F803F80) | (codes & 0x80008000);
  const u32 halves = mul_halves(small, 0x5C005C00);  // the exponents' biases differ by 8
#if KVQ_ARCH >= 89
  const auto nan = [](u32 half) { return (half & 0x7FFF) == 0x5F80 ? 0x7FFF : half; };
  return host::each_half(nan, halves);
#else
  return halves;
#endif
#endif
}

// The same of bits 16-23 and 24-31: no shift comes first.
DEVICE u32 upper_halves_of_e4m3(u32 four) {
#if defined(__CUDACC__) && KVQ_ARCH >= 89
  u32 result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
      : "=r"(result)
      : "r"(four));
  return result;
#else
  return halves_of_e4m3(four >> 16);
#endif
}

// a * b + c, rounded once.
DEVICE float fused(float a, float b, float c) {
#ifdef __CUDACC__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// a * b.
DEVICE u64 multiply_wide(u32 a, u32 b) {
#ifdef __CUDACC__
  u64 result;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(result) : "r"(a), "r"(b));
  return result;
#else
  return u64(a) * b;
#endif
}

// Within two units in the last place; subnormal results and operands are 0.
DEVICE float exp2_fast(float x) {
#ifdef __CUDACC__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

// 1 / x; subnormal numbers count as 0.
DEVICE float reciprocal(float x) {
#ifdef __CUDACC__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = 1.0f / (std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x);
  return std::fabs(result) < 0x1p-126f ? std::copysign(0.0f, result) : result;
#endif
}

// Subnormal numbers count as 0.
DEVICE float log2_fast(float x) {
#ifdef __CUDACC__
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::log2(x < 0x1p-126f && x > -0x1p-126f ? 0.0f : x);
#endif
}
