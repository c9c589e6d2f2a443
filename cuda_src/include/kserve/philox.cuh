// Random numbers by counter: Philox 4x32, ten rounds (Salmon, Moraes, Dror, Shaw, SC 2011). A number depends on seed, offset
// and its index alone, not on who draws it.

#pragma once

namespace kserve {

// Where a stream of numbers stands, in device memory: a captured graph then draws new ones at each replay.
struct RandomState {
  unsigned long long seed;
  unsigned long long offset;  // in blocks of four numbers
};

// The four 32-bit numbers of one block.
__device__ __forceinline__ uint4 philox_block(const RandomState& state, unsigned long long block) {
  const unsigned long long counter = state.offset + block;
  unsigned int c0 = static_cast<unsigned int>(counter), c1 = static_cast<unsigned int>(counter >> 32), c2 = 0, c3 = 0;
  unsigned int k0 = static_cast<unsigned int>(state.seed), k1 = static_cast<unsigned int>(state.seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned int high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const unsigned int high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  uint4 found;
  found.x = c0;
  found.y = c1;
  found.z = c2;
  found.w = c3;
  return found;
}

__device__ __forceinline__ unsigned int word_of(const uint4& block, int lane) {
  return lane == 0 ? block.x : lane == 1 ? block.y : lane == 2 ? block.z : block.w;
}

// Uniform in [0, 1), from the 24 high bits.
__device__ __forceinline__ float uniform_of(unsigned int word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// The N uniform numbers from `index` on.
template <int N>
__device__ __forceinline__ void uniform(const RandomState& state, unsigned long long index, bool starts_block, float (&to)[N]) {
  if (N % 4 == 0 && starts_block) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 block = philox_block(state, index / 4 + i / 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + j] = uniform_of(word_of(block, j));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = uniform_of(word_of(philox_block(state, (index + i) / 4), static_cast<int>((index + i) % 4)));
    }
  }
}

}  // namespace kserve
