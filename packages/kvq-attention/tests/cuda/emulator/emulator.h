// Runs kernels written with primitives.cuh on the CPU, blocks one after another: what warp.cuh asks
// an emulator for, and launches. Not thread-safe: one launch at a time.
#pragma once

#include <type_traits>
#include <utility>

#include "block.h"

namespace emulator {

inline const Place& place() { return Block::running().current().place; }

inline u8* shared_memory() { return Block::running().shared().begin(); }

inline const Operands* meet_warp(const char* instruction, const Operands& mine) {
  return Block::running().exchange(instruction, mine);
}

inline void meet_block() { Block::running().leave(State::AT_BLOCK, "sync_block"); }

inline void check_shared(const char* instruction, const void* address, int bytes) {
  const GuardedMemory& shared = Block::running().shared();
  const i64 offset = static_cast<const u8*>(address) - shared.begin();
  const i64 size = shared.end() - shared.begin();
  if (offset < 0 || offset + bytes > size || offset % bytes) {
    Block::running().fail(std::string(instruction) + " of " + std::to_string(bytes) +
                          " bytes at byte " + std::to_string(offset) + " of " +
                          std::to_string(size) + " of shared memory");
  }
  if (!std::strncmp(instruction, "load", 4)) {
    races::access(address, bytes, false, __builtin_return_address(0));
  }
}

inline void copy(void* shared, const void* global, int bytes, bool live) {
  Fiber& fiber = Block::running().current();
  if (live && reinterpret_cast<std::uintptr_t>(global) % bytes) {
    Block::running().fail("a copy of " + std::to_string(bytes) +
                          " bytes begins between their multiples");
  }
  const Copy copy{static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, fiber.groups,
                  live};
  // The bytes may arrive from now on, and have when they are waited for.
  races::access(shared, bytes, true, __builtin_return_address(0));
  if (Block::running().launch().late) {
    std::memset(shared, POISON, bytes);
    fiber.copies.push_back(copy);
  } else {
    copy.complete();
  }
}

inline void commit_copies() { Block::running().current().groups++; }

inline void wait_copies(int left) {
  Fiber& fiber = Block::running().current();
  const auto open = std::find_if(fiber.copies.begin(), fiber.copies.end(), [&](const Copy& copy) {
    return copy.group >= fiber.groups - left;
  });
  std::for_each(fiber.copies.begin(), open, [](const Copy& copy) {
    races::access(copy.shared, copy.bytes, true, __builtin_return_address(0));
    copy.complete();
  });
  fiber.copies.erase(fiber.copies.begin(), open);
}

// An argument as the caller has it; kind: 'p' pointer, 'i' integer, 'f' floating, 's' structure;
// 0 bytes: of 8, of which a shorter parameter takes the low ones.
struct Argument {
  const void* value;
  int bytes;
  char kind;
};

template <class T>
constexpr char kind_of() {
  return std::is_pointer_v<T> ? 'p'
         : std::is_floating_point_v<T> ? 'f'
         : std::is_integral_v<T> || std::is_enum_v<T> ? 'i'
                                                      : 's';
}

template <class... Parameters, std::size_t... I>
void run(void (*kernel)(Parameters...), const Launch& launch, const Argument* arguments, int count,
         std::index_sequence<I...>) {
  if (count != sizeof...(Parameters)) {
    throw std::runtime_error("the kernel has " + std::to_string(sizeof...(Parameters)) +
                             " parameters, given were " + std::to_string(count));
  }
  const Argument wanted[] = {{nullptr, sizeof(Parameters), kind_of<Parameters>()}..., {}};
  for (int i = 0; i < count; i++) {
    const bool fits = arguments[i].bytes == 0 || arguments[i].bytes == wanted[i].bytes;
    if (!fits || arguments[i].kind != wanted[i].kind) {
      const auto said = [](const Argument& one) {
        return std::string(1, one.kind) + std::to_string(8 * one.bytes);
      };
      throw std::runtime_error("parameter " + std::to_string(i) + " is " + said(wanted[i]) +
                               ", given was " + said(arguments[i]));
    }
  }
  static std::vector<Fiber> fibers;
  if (int(fibers.size()) < launch.threads) fibers = std::vector<Fiber>(launch.threads);
  const std::function<void()> body = [&] {
    kernel(*static_cast<const Parameters*>(arguments[I].value)...);
  };
  for (int block = 0; block < launch.grid; block++) Block(launch, block, fibers, body).run();
}

// What went wrong, or a null pointer.
template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), const Launch& launch, const Argument* arguments,
                   int count) {
  static std::string failure;
  try {
    run(kernel, launch, arguments, count, std::index_sequence_for<Parameters...>());
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
  return nullptr;
}

}  // namespace emulator
