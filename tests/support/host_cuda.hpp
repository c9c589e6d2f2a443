// Runs CUDA C++ kernels on the host, one thread of a block after the other: enough of the language for the built-in kernels.
//
// The threads of a block are fibers of one thread, so shared memory is static memory and an atomic is an assignment. They are
// resumed in a shuffled order, so that a missing barrier shows as a wrong result. What would hang a device (a barrier that
// some threads never reach) is an error here.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __CUDA_FP16_H__  // kserve/narrow.cuh leaves the types to us
#define __CUDA_BF16_H__
#define _CUDA_PIPELINE_PRIMITIVES_H_  // as kserve/async_copy.cuh leaves the functions

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace host {

constexpr int warp_size = 32;
constexpr size_t stack_bytes = 128 << 10;

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "host_cuda: %s\n", why);
  std::abort();
}

// An argument that is an address, whatever the kernel takes it for.
struct Pointer {
  void* address;
  template <typename T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};

// A barrier of some threads: `arrived` of those expected; everybody waits for the next generation.
struct Barrier {
  int arrived = 0;
  unsigned long generation = 0;
};

struct Warp {
  Barrier barrier;
  unsigned char slots[warp_size][16];
};

// What a thread has begun to copy: done when it waits, so that a missing wait shows.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<Copy> copies;
  bool done = false;
  const Barrier* waits_for = nullptr;
  unsigned long until = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  ucontext_t scheduler;
  int current = 0;
  int alive = 0;
  int either = 0;
  const std::function<void()>* body = nullptr;
};

inline Block* block = nullptr;
inline dim3 grid_dim, block_dim, block_index;

inline dim3 thread_index() {
  const unsigned int linear = block->current;
  return {linear % block_dim.x, linear / block_dim.x % block_dim.y, linear / block_dim.x / block_dim.y};
}

inline void wait_at(Barrier& barrier, int expected) {
  Fiber& self = block->fibers[block->current];
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  self.waits_for = &barrier;
  self.until = barrier.generation + 1;
  swapcontext(&self.context, &block->scheduler);
}

inline void wait_for_block() {
  if (block->alive != static_cast<int>(block->fibers.size())) fail("a block's barrier after some of its threads have ended");
  wait_at(block->barrier, block->alive);
}

inline Warp& warp() { return block->warps[block->current / warp_size]; }
inline int lane() { return block->current % warp_size; }

inline int lanes_of(unsigned int mask) {
  if (!(mask >> lane() & 1u)) fail("a thread calls a warp function that leaves it out");
  return __builtin_popcount(mask);
}

inline void wait_for_warp(unsigned int mask) { wait_at(warp().barrier, lanes_of(mask)); }

// Every lane's value, seen by all; `use` reads the slots before anybody may write them again.
template <typename Value, typename Use>
auto exchange(unsigned int mask, Value value, Use use) {
  static_assert(sizeof(Value) <= sizeof(Warp::slots[0]));
  std::memcpy(warp().slots[lane()], &value, sizeof(Value));
  wait_for_warp(mask);
  const auto at = [](int from) {
    Value found;
    std::memcpy(&found, warp().slots[from & (warp_size - 1)], sizeof(Value));
    return found;
  };
  const auto result = use(at);
  wait_for_warp(mask);
  return result;
}

inline void enter() {
  (*block->body)();
  block->fibers[block->current].done = true;
  --block->alive;
  swapcontext(&block->fibers[block->current].context, &block->scheduler);
}

inline void run_block(const std::function<void()>& body, std::vector<unsigned char>& stacks, std::mt19937& random) {
  const int threads = block_dim.x * block_dim.y * block_dim.z;
  Block here;
  here.fibers.resize(threads);
  here.warps.resize((threads + warp_size - 1) / warp_size);
  here.alive = threads;
  here.body = &body;
  block = &here;
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) {
    order[i] = i;
    Fiber& fiber = here.fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + i * stack_bytes;
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  while (here.alive > 0) {
    std::shuffle(order.begin(), order.end(), random);
    bool moved = false;
    for (const int i : order) {
      Fiber& fiber = here.fibers[i];
      if (fiber.done || (fiber.waits_for != nullptr && fiber.waits_for->generation < fiber.until)) continue;
      fiber.waits_for = nullptr;
      here.current = i;
      swapcontext(&here.scheduler, &fiber.context);
      moved = true;
    }
    if (!moved) fail("every thread waits: some never reach a barrier");
  }
  block = nullptr;
}

// Blocks one after the other, in a shuffled order too.
inline void launch(dim3 grid, dim3 threads, unsigned int seed, const std::function<void()>& body) {
  grid_dim = grid;
  block_dim = threads;
  std::mt19937 random(seed);
  std::vector<unsigned char> stacks(stack_bytes * threads.x * threads.y * threads.z);
  std::vector<unsigned int> order(grid.x * grid.y * grid.z);
  for (unsigned int i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (const unsigned int i : order) {
    block_index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    run_block(body, stacks, random);
  }
}

}  // namespace host

#define threadIdx (host::thread_index())
#define blockIdx (host::block_index)
#define blockDim (host::block_dim)
#define gridDim (host::grid_dim)

inline void __syncthreads() { host::wait_for_block(); }
inline int __syncthreads_or(int value) {
  host::wait_for_block();
  host::block->either = 0;
  host::wait_for_block();
  host::block->either |= value != 0;
  host::wait_for_block();
  return host::block->either;
}
inline void __syncwarp(unsigned int mask = 0xffffffffu) { host::wait_for_warp(mask); }
inline void __threadfence() {}
[[noreturn]] inline void __trap() { host::fail("__trap"); }

template <typename Value>
Value __shfl_sync(unsigned int mask, Value value, int from) {
  return host::exchange(mask, value, [&](auto at) { return at(from); });
}
template <typename Value>
Value __shfl_xor_sync(unsigned int mask, Value value, int bits) {
  return host::exchange(mask, value, [&](auto at) { return at(host::lane() ^ bits); });
}
template <typename Value>
Value __shfl_up_sync(unsigned int mask, Value value, int step) {
  return host::exchange(mask, value, [&](auto at) { return host::lane() < step ? value : at(host::lane() - step); });
}
inline unsigned int __ballot_sync(unsigned int mask, int value) {
  return host::exchange(mask, value, [&](auto at) {
    unsigned int found = 0;
    for (int i = 0; i < host::warp_size; ++i) found |= (mask >> i & 1u) && at(i) ? 1u << i : 0u;
    return found;
  });
}
inline int __all_sync(unsigned int mask, int value) { return __ballot_sync(mask, value) == mask; }
inline int __any_sync(unsigned int mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __reduce_max_sync(unsigned int mask, int value) {
  return host::exchange(mask, value, [&](auto at) {
    int found = value;
    for (int i = 0; i < host::warp_size; ++i) found = mask >> i & 1u ? std::max(found, at(i)) : found;
    return found;
  });
}
inline int __reduce_or_sync(unsigned int mask, int value) {
  return host::exchange(mask, value, [&](auto at) {
    int found = 0;
    for (int i = 0; i < host::warp_size; ++i) found |= mask >> i & 1u ? at(i) : 0;
    return found;
  });
}

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % bytes == 0 && reinterpret_cast<uintptr_t>(from) % bytes == 0;
  if (!aligned || (bytes != 4 && bytes != 8 && bytes != 16))
    host::fail("an asynchronous copy of a size or alignment that is none");
  host::block->fibers[host::block->current].copies.push_back({to, from, bytes});
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(size_t newer) {
  if (newer != 0) host::fail("only waiting for all copies is here");
  std::vector<host::Copy>& copies = host::block->fibers[host::block->current].copies;
  for (const host::Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  copies.clear();
}

template <typename Value>
Value atomicAdd(Value* where, Value value) {
  const Value before = *where;
  *where = before + value;
  return before;
}
template <typename Value>
Value atomicExch(Value* where, Value value) {
  return std::exchange(*where, value);
}

template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
void __stwb(T* to, T value) {
  *to = value;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}

inline unsigned int __float_as_uint(float value) {
  unsigned int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned int>(bits)); }
inline long long __float2ll_rn(float value) { return std::llrint(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return static_cast<uint64_t>(a) * b >> 32; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
using std::isfinite;
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float from) : value(static_cast<_Float16>(from)) {}
  explicit operator float() const { return static_cast<float>(value); }
};
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float from) {
    const unsigned int whole = __float_as_uint(from);
    bits = std::isnan(from) ? 0x7fff : static_cast<unsigned short>((whole + 0x7fffu + (whole >> 16 & 1u)) >> 16);
  }
  explicit operator float() const { return __uint_as_float(static_cast<unsigned int>(bits) << 16); }
};
