// What formats share: functions of three words, for `logic`.
#pragma once

#include "primitives.cuh"

constexpr u32 AND_OR = 0xEA;   // (a & b) | c
constexpr u32 AND_XOR = 0x6A;  // (a & b) ^ c
