// What a call hands to the kernels; decode.py has the same structures.
#pragma once

#include "types.cuh"

// A plane of a cache, [pages, KV heads, tokens, items], whose tokens lie next to each other.
struct Plane {
  const u8* data;
  u32 page, head;  // strides in bytes
};

// The first code plane, the second one and the scales; what a format lacks is not read.
struct Cache {
  Plane codes, second, scale;
};

struct Arguments {
  Cache k, v;
  const void* q;  // [tokens, heads, DIM], the values of a head next to each other
  i64 q_token, q_head;
  void* out;  // as q
  i64 out_token, out_head;
  const i32* query_offsets;  // [requests + 1]
  const i32* seq_lens;       // [requests]
  const i32* page_table;     // [requests, columns]
  i64 table_row;
  const float* turns;  // quaternions [32, 4] of the rotated formats
  const float* sinks;  // [heads] or null
  float* partial;      // [pieces, KV heads, ROWS, DIM]; null where every request is one chunk
  float* partial_lse;  // [KV heads, ROWS, pieces], pieces as many as `capacity`
  i32 num_pages, num_requests, num_tokens;
  i32 kv_heads, group;  // group: query heads a KV head
  i32 page_shift;       // log2 of tokens a page
  i32 capacity;         // pieces of a KV head that `partial` has room for
  i32 reach;            // positions that the page table has columns for
  i32 wanted;           // chunks a request that fill the device
  i32 window;           // 0 = none
  float score_scale;    // turns a product into a score, in base 2 where there is no soft cap
  float softcap;
};
