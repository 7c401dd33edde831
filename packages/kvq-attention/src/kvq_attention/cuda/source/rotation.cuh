// iso's quaternions, one for each group of four values of a block of 128.
#pragma once

#include "warp.cuh"

constexpr int TURNS = 32;

struct Quaternion {
  float w, x, y, z;
};

DEVICE Quaternion quaternion_of(const float* turns, int group) {
  const auto q = *reinterpret_cast<const Words<16>*>(turns + group % TURNS * 4);
  return {as_float(q.word[0]), as_float(q.word[1]), as_float(q.word[2]), as_float(q.word[3])};
}

// Another lane's.
DEVICE Quaternion shuffle(const Quaternion& q, int source) {
  return {shuffle(q.w, source), shuffle(q.x, source), shuffle(q.y, source), shuffle(q.z, source)};
}

// What turns back.
DEVICE Quaternion conjugate(const Quaternion& q) { return {q.w, -q.x, -q.y, -q.z}; }

// The left product with a quaternion: the same bits in every kernel.
DEVICE void turn(float (&v)[4], const Quaternion& q) {
  const float a = v[0], b = v[1], c = v[2], d = v[3];
  v[0] = fused(-q.z, d, fused(-q.y, c, fused(-q.x, b, q.w * a)));
  v[1] = fused(-q.z, c, fused(q.y, d, fused(q.x, a, q.w * b)));
  v[2] = fused(q.z, b, fused(q.y, a, fused(-q.x, d, q.w * c)));
  v[3] = fused(q.z, a, fused(-q.y, b, fused(q.x, c, q.w * d)));
}
