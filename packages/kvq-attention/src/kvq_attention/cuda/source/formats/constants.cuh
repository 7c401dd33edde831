// Made from the oracle's tables by kvq_attention.cuda.formats; not to be edited.
#pragma once

#include "primitives.cuh"

// Low and high bytes of eight centroids in fp16, as `permute` looks them up.
constexpr u32 ISO3_LOW_0 = 0x7E358B1A;
constexpr u32 ISO3_LOW_4 = 0x1A8B357E;
constexpr u32 ISO3_HIGH_0 = 0xA5ACAFB2;
constexpr u32 ISO3_HIGH_4 = 0x322F2C25;
constexpr u32 ISO4_LOW_0 = 0x66BB8091;
constexpr u32 ISO4_LOW_4 = 0x1B608E90;
constexpr u32 ISO4_HIGH_0 = 0xACADAFB1;
constexpr u32 ISO4_HIGH_4 = 0x9FA5A8AA;
