// Count, mean and sum of squared differences from the mean, joined without losing digits (Chan, Golub, LeVeque, 1983).

#pragma once

#include "layout.cuh"

namespace group_norm {

struct Moments {
  float count, mean, square;

  // With those of further values. Nothing joined to nothing is nothing.
  __device__ __forceinline__ void join(const Moments& other) {
    const float both = count + other.count;
    const float share = both > 0.0f ? other.count / both : 0.0f;
    const float difference = other.mean - mean;
    // An empty side has no mean that could matter, whatever it holds.
    if (other.count > 0.0f) {
      mean = count > 0.0f ? fmaf(difference, share, mean) : other.mean;
      square += other.square + (count > 0.0f ? difference * difference * count * share : 0.0f);
    }
    count = both;
  }

  // Over the warp; lane 0 has the result.
  __device__ __forceinline__ void join_warp() {
#pragma unroll
    for (int step = 1; step < warp; step *= 2) {
      const Moments other{__shfl_xor_sync(all_lanes, count, step), __shfl_xor_sync(all_lanes, mean, step),
                          __shfl_xor_sync(all_lanes, square, step)};
      join(other);
    }
  }
};

// The moments of some channels, voxel by voxel. Sums are of differences from a shift near the mean, which the first voxels
// give, so that neither a large mean nor an outlier costs digits: the error of the square is at most the number of times
// that the first voxels fit into all of them, in units of the last place.
template <int Width>
struct Sums {
  float shift[Width], sum[Width], square[Width];

  template <typename T, int Count>
  __device__ __forceinline__ void start(const T (&first)[Count][Width]) {
#pragma unroll
    for (int j = 0; j < Width; ++j) {
      shift[j] = 0.0f;
#pragma unroll
      for (int u = 0; u < Count; ++u) shift[j] = fmaf(static_cast<float>(first[u][j]), 1.0f / Count, shift[j]);
      sum[j] = 0.0f;
      square[j] = 0.0f;
    }
  }

  template <typename T, int Count>
  __device__ __forceinline__ void add(const T (&values)[Count][Width]) {
#pragma unroll
    for (int u = 0; u < Count; ++u) {
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        const float difference = static_cast<float>(values[u][j]) - shift[j];
        sum[j] += difference;
        square[j] = fmaf(difference, difference, square[j]);
      }
    }
  }

  __device__ __forceinline__ Moments of_channel(int j, int count) const {
    if (count == 0) return {0.0f, 0.0f, 0.0f};
    const float n = static_cast<float>(count);
    const float mean = sum[j] / n;
    const float rest = fmaf(-mean, sum[j], square[j]);
    // Rounding may leave a little less than nothing; a NaN stays.
    return {n, shift[j] + mean, rest < 0.0f ? 0.0f : rest};
  }
};

}  // namespace group_norm
