// A block on the CPU: each thread is a fiber with a stack of its own, which runs until it comes to
// an instruction of its warp or block.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "races.h"
#include "warp.cuh"

namespace emulator {

struct Launch {
  int grid, threads, shared_bytes;
  // Copies complete when they are waited for; until then their destination is NaN.
  int late;
  // The last lane and the last warp run first. Two lanes that touch the same bytes without a
  // barrier between them do so in one order forward and in the other backward.
  int backward;
};

constexpr int STACK_BYTES = 256 * 1024;
constexpr int GUARD_BYTES = 1024;
constexpr u8 GUARD = 0xA5, POISON = 0xFF;

enum class State { READY, AT_WARP, AT_BLOCK, ENDED };

struct Copy {
  u8* shared;
  const u8* global;
  int bytes, group;
  bool live;

  void complete() const {
    if (live) {
      std::memcpy(shared, global, bytes);
    } else {
      std::memset(shared, 0, bytes);
    }
  }
};

struct Fiber {
  Place place;
  State state;
  const char* instruction;
  std::vector<Copy> copies;
  int groups;
  std::unique_ptr<u8[]> stack{new u8[STACK_BYTES]};
  bool started;
  ucontext_t start;
  jmp_buf at;
};

inline bool unwritten(const u8* first, const u8* last) {
  return std::all_of(first, last, [](u8 byte) { return byte == GUARD; });
}

// Memory with a strip on either side that nobody may write.
class GuardedMemory {
 public:
  explicit GuardedMemory(int bytes)
      : bytes_(bytes), memory_(new (std::align_val_t(128)) u8[bytes + 2 * GUARD_BYTES]) {
    std::memset(memory_.get(), GUARD, bytes + 2 * GUARD_BYTES);
    std::memset(begin(), POISON, bytes);
  }
  u8* begin() const { return memory_.get() + GUARD_BYTES; }
  u8* end() const { return begin() + bytes_; }
  bool intact() const {
    return unwritten(begin() - GUARD_BYTES, begin()) && unwritten(end(), end() + GUARD_BYTES);
  }

 private:
  struct Delete {
    void operator()(u8* memory) const { operator delete[](memory, std::align_val_t(128)); }
  };
  int bytes_;
  std::unique_ptr<u8[], Delete> memory_;
};

class Block {
 public:
  Block(const Launch& launch, int block, std::vector<Fiber>& fibers,
        const std::function<void()>& body)
      : launch_(launch),
        block_(block),
        fibers_(fibers),
        body_(body),
        shared_(launch.shared_bytes) {
    races::watch(shared_.begin(), launch.shared_bytes);
  }

  void run() {
    running_ = this;
    for (int i = 0; i < launch_.threads; i++) start(i);
    while (true) {
      for (int i = 0; i < warps(); i++) run_warp(launch_.backward ? warps() - 1 - i : i);
      check_guards();
      check_races();
      if (all(0, launch_.threads, State::ENDED)) return;
      if (!all(0, launch_.threads, State::AT_BLOCK)) {
        throw std::runtime_error("not all threads reach sync_block: " + whereabouts(0, threads()));
      }
      release(0, launch_.threads);
    }
  }

  static Block& running() { return *running_; }
  Fiber& current() { return *current_; }
  const Launch& launch() const { return launch_; }
  const GuardedMemory& shared() const { return shared_; }

  // Leaves the current fiber until its state is READY again.
  void leave(State state, const char* instruction) {
    if (state == State::AT_BLOCK) races::pass_block_barrier();
    current_->state = state;
    current_->instruction = instruction;
    if (!_setjmp(current_->at)) _longjmp(scheduler_, 1);
  }

  [[noreturn]] void fail(const std::string& why) {
    failure_ = "thread " + std::to_string(current_ - fibers_.data()) + ": " + why;
    _longjmp(scheduler_, 1);
  }

  const Operands* exchange(const char* instruction, const Operands& mine) {
    // Who is first may be at the next instruction before the last has read: two sets in turn.
    Meetings& meetings = meetings_[current_->place.warp];
    const int turn = meetings.turns[current_->place.lane]++ % 2;
    meetings.brought[turn][current_->place.lane] = mine;
    if (!std::strcmp(instruction, "sync_warp")) races::pass_warp_barrier();
    leave(State::AT_WARP, instruction);
    return meetings.brought[turn];
  }

 private:
  struct Meetings {
    unsigned turns[32] = {};
    Operands brought[2][32];
  };

  int threads() const { return launch_.threads; }
  int warps() const { return launch_.threads / 32; }

  void start(int thread) {
    Fiber& fiber = fibers_[thread];
    fiber.place = {thread % 32, thread / 32, block_, launch_.grid};
    fiber.state = State::READY;
    fiber.copies.clear();
    fiber.groups = 0;
    fiber.started = false;
    std::memset(fiber.stack.get(), GUARD, GUARD_BYTES);  // stacks grow towards it
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, enter, 0);
  }

  static void enter() {
    running_->body_();
    running_->leave(State::ENDED, "the end");
  }

  void check_races() const {
    char said[200];
    if (races::found(said, sizeof(said))) throw std::runtime_error(said);
  }

  void check_guards() const {
    if (!shared_.intact()) throw std::runtime_error("a thread wrote beyond shared memory");
    for (int i = 0; i < launch_.threads; i++) {
      const u8* stack = fibers_[i].stack.get();
      if (!unwritten(stack, stack + GUARD_BYTES)) {
        throw std::runtime_error("thread " + std::to_string(i) + " needs more stack than there is");
      }
    }
  }

  void resume(Fiber& fiber) {
    current_ = &fiber;
    races::enter(int(current_ - fibers_.data()));
    if (!_setjmp(scheduler_)) {
      if (current_->started) _longjmp(current_->at, 1);
      current_->started = true;
      setcontext(&current_->start);
    }
    if (!failure_.empty()) throw std::runtime_error(failure_);
  }

  // Until its threads are at sync_block or have ended.
  void run_warp(int warp) {
    const int first = 32 * warp, last = first + 32;
    while (true) {
      for (int i = 0; i < 32; i++) {
        Fiber& fiber = fibers_[launch_.backward ? last - 1 - i : first + i];
        if (fiber.state == State::READY) resume(fiber);
      }
      if (all(first, last, State::AT_BLOCK) || all(first, last, State::ENDED)) return;
      if (!all(first, last, State::AT_WARP) || !same_instruction(first, last)) {
        throw std::runtime_error("not all lanes of a warp reach the same instruction: " +
                                 whereabouts(first, last));
      }
      release(first, last);
    }
  }

  bool all(int first, int last, State state) const {
    return std::all_of(&fibers_[first], &fibers_[first] + (last - first),
                       [&](const Fiber& fiber) { return fiber.state == state; });
  }

  bool same_instruction(int first, int last) const {
    const char* name = fibers_[first].instruction;
    return std::all_of(&fibers_[first], &fibers_[first] + (last - first), [&](const Fiber& fiber) {
      return fiber.instruction == name || !std::strcmp(fiber.instruction, name);
    });
  }

  void release(int first, int last) {
    for (int i = first; i < last; i++) fibers_[i].state = State::READY;
  }

  // "threads 0-15 are at any, 16-31 at the end"
  std::string whereabouts(int first, int last) const {
    std::string said;
    for (int i = first, j; i < last; i = j) {
      for (j = i + 1; j < last && same_instruction(i, j + 1); j++) {
      }
      said += (said.empty() ? "threads " : ", ") + std::to_string(i) + "-" +
              std::to_string(j - 1) + " at " + fibers_[i].instruction;
    }
    return said;
  }

  inline static Block* running_ = nullptr;
  const Launch& launch_;
  int block_;
  std::vector<Fiber>& fibers_;
  const std::function<void()>& body_;
  GuardedMemory shared_;
  std::vector<Meetings> meetings_ = std::vector<Meetings>(launch_.threads / 32);
  Fiber* current_ = nullptr;
  jmp_buf scheduler_;
  std::string failure_;
};

}  // namespace emulator
