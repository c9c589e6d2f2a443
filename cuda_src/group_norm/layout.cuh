// Who does what with channels-last volumes: a dense matrix [batches][spatial voxels][Channels].
//
// A thread has the same few neighbouring channels of every voxel it sees, one access of up to 16 bytes; `lanes` threads side
// by side have the same channels of different voxels. The blocks of a batch, `splits` of them, take turns: together they walk
// through it, so that at any time the device reads and writes one stretch of memory. A stretch for each block is slower
// where there is much to write.

#pragma once

#include <kserve/access.cuh>

namespace group_norm {

constexpr int warp = 32;
constexpr unsigned int all_lanes = 0xffffffffu;

// An entry without one of these has no such argument.
#ifndef KSERVE_ALIGN_OUT
#define KSERVE_ALIGN_OUT 16
#endif
#ifndef KSERVE_ALIGN_GRAD_OUT
#define KSERVE_ALIGN_GRAD_OUT 16
#endif
#ifndef KSERVE_ALIGN_GRAD_X
#define KSERVE_ALIGN_GRAD_X 16
#endif

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int aligned = smaller(smaller(KSERVE_ALIGN_X, KSERVE_ALIGN_OUT), smaller(KSERVE_ALIGN_GRAD_OUT, KSERVE_ALIGN_GRAD_X));

// Channels of a thread: the most that are one access and divide a voxel.
template <typename T>
__host__ __device__ constexpr int channels_of_thread(int channels) {
  int width = 16 / static_cast<int>(sizeof(T));
  while (channels % width != 0) width /= 2;
  return width;
}

template <typename T, int Width>
constexpr bool is_wide = aligned >= smaller(16, Width* static_cast<int>(sizeof(T)));

template <typename T, int Width>
__device__ __forceinline__ void load(const T* from, T (&to)[Width]) {
  if constexpr (is_wide<T, Width>) {
    kserve::load(from, to);
  } else {
#pragma unroll
    for (int j = 0; j < Width; ++j) to[j] = from[j];
  }
}

// What is written leaves the caches first: the second pass finds more of what the first has read.
template <typename T, int Width>
__device__ __forceinline__ void store(T* to, const T (&from)[Width]) {
  if constexpr (is_wide<T, Width>) {
    kserve::store_once(to, from);
  } else {
#pragma unroll
    for (int j = 0; j < Width; ++j) to[j] = from[j];
  }
}

template <typename T, int Channels, int Groups, int Threads>
struct Layout {
  static_assert(Channels % Groups == 0, "groups divide the channels");
  static constexpr int width = channels_of_thread<T>(Channels);
  static constexpr int vectors = Channels / width;  // accesses of a voxel
  static constexpr int lanes = Threads / vectors;
  static_assert(lanes >= 1, "a voxel has more channels than a block can hold");
  static constexpr int per_group = Channels / Groups;
  // Values that the channels of a thread have in common by group: one, or one for each channel.
  static constexpr bool in_one_group = per_group % width == 0;
  static constexpr int pieces = in_one_group ? 1 : width;

  int lane, channel;  // of the thread; the first of its channels
  long long batch;
  int split;
  long long offset;  // element of its first voxel
  long long step;    // elements to its next
  int turns, rest;   // that every lane has; lanes, counted through the blocks, that have one more
  int voxels;        // that the thread sees

  __device__ __forceinline__ Layout(long long spatial, int splits) {
    lane = threadIdx.x / vectors;
    channel = threadIdx.x % vectors * width;
    batch = blockIdx.x / splits;
    split = blockIdx.x % splits;
    const long long at_once = static_cast<long long>(splits) * lanes;
    turns = static_cast<int>(spatial / at_once);
    rest = static_cast<int>(spatial - turns * at_once);
    voxels = lane < lanes ? voxels_of(lane) : 0;
    offset = (batch * spatial + static_cast<long long>(split) * lanes + lane) * Channels + channel;
    step = at_once * Channels;
  }

  __device__ __forceinline__ int voxels_of(int which) const { return turns + (split * lanes + which < rest ? 1 : 0); }

  // Element of voxel i of the thread.
  __device__ __forceinline__ long long at(int i) const { return offset + i * step; }

  // Where the group of the thread's channel j lies among `pieces` values, and which it is.
  __device__ __forceinline__ static constexpr int piece(int j) { return in_one_group ? 0 : j; }
  __device__ __forceinline__ int group(int piece) const { return (channel + piece) / per_group; }
};

// Blocks that share a multiprocessor at least. A thread whose channels have several groups needs more registers.
template <typename T>
__host__ __device__ constexpr int blocks_at_once(int channels, int groups, int threads) {
  return channels / groups % channels_of_thread<T>(channels) == 0 ? 1024 / threads : 1;
}

// Each value summed over a warp, in an order that never changes; all lanes have the same bits.
template <int Count>
__device__ __forceinline__ void sum_over_warp(float (&values)[Count]) {
#pragma unroll
  for (int step = warp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] += __shfl_xor_sync(all_lanes, values[i], step);
  }
}

// One value for each channel of a thread; `missing` where the parameter is absent.
template <typename A, int Width>
__device__ __forceinline__ void load_parameter(const A* parameter, int channel, float missing, float (&to)[Width]) {
#pragma unroll
  for (int j = 0; j < Width; ++j) to[j] = parameter == nullptr ? missing : static_cast<float>(parameter[channel + j]);
}

}  // namespace group_norm
