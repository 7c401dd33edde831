// The softmax of decode: in base 2, with a reference that moves only where it must.
#pragma once

#include "scalar.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
// Below every score and finite: 2^(-inf - LOWEST) is 0, where -inf - -inf would be NaN.
constexpr float LOWEST = -3.0e38f;
// How far scores may exceed the reference before it follows them: while it stays, sums need not be
// scaled, and 2^SLACK is far from the most that f16 holds.
constexpr float SLACK = 8.0f;

DEVICE float infinity() { return as_float(0x7F800000); }
DEVICE float not_a_number() { return as_float(0x7FC00000); }

// The greater one; of NaN and a number the number.
DEVICE float greater(float a, float b) {
#ifdef __CUDACC__
  return fmaxf(a, b);
#else
  return std::fmax(a, b);
#endif
}

// softcap * tanh(score / softcap), in base 2.
DEVICE float soft_cap(float score, float softcap) {
  const float x = score / softcap;
  // 1 - 2 / (e^2x + 1) cancels near 0, where two terms of the series are enough.
  const float near = x * (1.0f - x * x * (1.0f / 3.0f));
  const float far = 1.0f - 2.0f / (exp2_fast(x * (2.0f * LOG2_E)) + 1.0f);
  return softcap * LOG2_E * (x > -1.0f / 64 && x < 1.0f / 64 ? near : far);
}

// A sink's logit in base 2; infinity is the largest number there is, beside which all else is 0.
DEVICE float log2_sink(float sink) {
  const float logit = sink * LOG2_E;
  return logit > -LOWEST ? -LOWEST : logit;
}

// log2 of a scale to choose a reference by: of 0 that of LEAST, of infinity 120, of NaN a number.
DEVICE float log2_bound(float scale, float least) {
  const float bound = log2_fast(greater(scale, least));
  return bound < 120.0f ? bound : 120.0f;
}
