// Races in shared memory: accesses of two threads to a byte, one of them a write, that no barrier
// orders. Compiled with FIND_RACES and -fsanitize=thread, whose calls at each access are answered
// here and not by its library.
//
// Of a warp only sync_warp orders memory: other instructions of a warp, shuffles and products
// among them, do not.
#pragma once

#ifndef FIND_RACES

namespace emulator::races {

inline void watch(const unsigned char*, long) {}
inline void enter(int) {}
inline void pass_warp_barrier() {}
inline void pass_block_barrier() {}
inline void access(const void*, long, bool, void*) {}
inline bool found(char*, int) { return false; }

}  // namespace emulator::races

#else

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

// Not followed themselves.
#define UNFOLLOWED __attribute__((no_sanitize("thread")))

namespace emulator::races {

constexpr int MOST_THREADS = 1024;

struct Access {
  int thread;  // -1 = none
  unsigned block_barriers, warp_barriers;  // that the thread had passed
  void* at;                                // the instruction
};

// The last write of a byte, and the last reads of two threads.
struct Byte {
  Access write, reads[2];
};

inline const unsigned char* begin = nullptr;
inline long bytes = 0;
inline Byte* shadow = nullptr;
inline int thread = 0;
inline unsigned block_barriers[MOST_THREADS], warp_barriers[MOST_THREADS];
inline Access first, second;
inline long where = -1;
inline const char* kinds = "";

// A block begins, with this shared memory.
UNFOLLOWED inline void watch(const unsigned char* shared, long size) {
  begin = shared;
  bytes = size;
  where = -1;
  shadow = static_cast<Byte*>(std::realloc(shadow, sizeof(Byte) * (size + 1)));
  for (long i = 0; i < size; i++) {
    shadow[i].write.thread = shadow[i].reads[0].thread = shadow[i].reads[1].thread = -1;
  }
  for (int i = 0; i < MOST_THREADS; i++) block_barriers[i] = warp_barriers[i] = 0;
}

// This thread runs now.
UNFOLLOWED inline void enter(int index) { thread = index; }
UNFOLLOWED inline void pass_warp_barrier() { warp_barriers[thread]++; }
UNFOLLOWED inline void pass_block_barrier() { block_barriers[thread]++; }

UNFOLLOWED inline bool ordered(const Access& before, const Access& now) {
  if (before.thread < 0 || before.thread == now.thread) return true;
  if (before.block_barriers != now.block_barriers) return true;
  return before.thread / 32 == now.thread / 32 && before.warp_barriers != now.warp_barriers;
}

UNFOLLOWED inline void check(const Access& before, const Access& now, long byte, const char* what) {
  if (where >= 0 || ordered(before, now)) return;
  first = before;
  second = now;
  where = byte;
  kinds = what;
}

UNFOLLOWED inline void access(const void* address, long size, bool write, void* at) {
  const long from = static_cast<const unsigned char*>(address) - begin;
  if (from < 0 || from + size > bytes) return;
  const Access now{thread, block_barriers[thread], warp_barriers[thread], at};
  for (long i = from; i < from + size; i++) {
    Byte& byte = shadow[i];
    check(byte.write, now, i, write ? "a write and a write" : "a write and a read");
    if (write) {
      check(byte.reads[0], now, i, "a read and a write");
      check(byte.reads[1], now, i, "a read and a write");
      byte.write = now;
    } else {
      const bool again = byte.reads[0].thread == thread;
      if (!again) byte.reads[1] = byte.reads[0];
      byte.reads[0] = now;
    }
  }
}

// The block's first race, in words; instructions are offsets in this library.
UNFOLLOWED inline bool found(char* said, int size) {
  if (where < 0) return false;
  const auto offset = [](void* at) UNFOLLOWED {
    Dl_info library;
    const bool known = dladdr(at, &library) != 0;
    return static_cast<char*>(at) - (known ? static_cast<char*>(library.dli_fbase) : nullptr) - 1;
  };
  std::snprintf(said, size, "race: %s of byte %ld of shared memory, thread %d at +0x%lx, %d at +0x%lx",
                kinds, where, first.thread, offset(first.at), second.thread, offset(second.at));
  return true;
}

}  // namespace emulator::races

// What the compiler calls.
#define FOLLOWED(name, size, write)                                              \
  extern "C" UNFOLLOWED void __tsan_##name(void* address) {                      \
    emulator::races::access(address, size, write, __builtin_return_address(0)); \
  }
FOLLOWED(read1, 1, false)
FOLLOWED(read2, 2, false)
FOLLOWED(read4, 4, false)
FOLLOWED(read8, 8, false)
FOLLOWED(read16, 16, false)
FOLLOWED(write1, 1, true)
FOLLOWED(write2, 2, true)
FOLLOWED(write4, 4, true)
FOLLOWED(write8, 8, true)
FOLLOWED(write16, 16, true)
FOLLOWED(unaligned_read2, 2, false)
FOLLOWED(unaligned_read4, 4, false)
FOLLOWED(unaligned_read8, 8, false)
FOLLOWED(unaligned_read16, 16, false)
FOLLOWED(unaligned_write2, 2, true)
FOLLOWED(unaligned_write4, 4, true)
FOLLOWED(unaligned_write8, 8, true)
FOLLOWED(unaligned_write16, 16, true)
#undef FOLLOWED

extern "C" {
UNFOLLOWED void __tsan_read_range(void* address, unsigned long size) {
  emulator::races::access(address, long(size), false, __builtin_return_address(0));
}
UNFOLLOWED void __tsan_write_range(void* address, unsigned long size) {
  emulator::races::access(address, long(size), true, __builtin_return_address(0));
}
UNFOLLOWED void __tsan_init() {}
UNFOLLOWED void __tsan_func_entry(void*) {}
UNFOLLOWED void __tsan_func_exit() {}
UNFOLLOWED void __tsan_vptr_update(void**, void*) {}
UNFOLLOWED void __tsan_vptr_read(void**) {}
// Of the emulator's own: guards of static variables.
UNFOLLOWED unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
  return *address;
}
}

#endif
