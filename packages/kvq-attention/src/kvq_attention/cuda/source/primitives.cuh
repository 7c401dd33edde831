// Every instruction that the kernels name, as a function; on a host the same function in plain C++.
// A word holds two 16-bit values ("halves"): the low one in bits 0-15, the high one in bits 16-31.
#pragma once

#include "types.cuh"

#include "scalar.cuh"

#include "warp.cuh"

#include "shared.cuh"
