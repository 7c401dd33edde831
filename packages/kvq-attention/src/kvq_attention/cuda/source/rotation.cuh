// iso's quaternions, one for each group of four values of a block of 128.
#pragma once

#include "types.cuh"

constexpr int TURNS = 32;

// The left product with a group's quaternion (w, x, y, z), or with its conjugate.
DEVICE void turn(float (&v)[4], const float* turns, int group, bool back) {
  const float* q = turns + group % TURNS * 4;
  const float sign = back ? -1.0f : 1.0f;
  const float w = q[0], x = sign * q[1], y = sign * q[2], z = sign * q[3];
  const float a = v[0], b = v[1], c = v[2], d = v[3];
  v[0] = w * a - x * b - y * c - z * d;
  v[1] = w * b + x * a + y * d - z * c;
  v[2] = w * c - x * d + y * a + z * b;
  v[3] = w * d + x * c - y * b + z * a;
}
