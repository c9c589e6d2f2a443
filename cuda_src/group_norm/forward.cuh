// Forward: moments of each group by block, then the normalised values.

#pragma once

#include "moments.cuh"

namespace group_norm {

// y before the activation. The gradient asks the same expression for its sign.
__device__ __forceinline__ float before_relu(float centred, float scale, float bias) { return fmaf(centred, scale, bias); }

// Moments of the block's voxels, from those of each thread: partial[3][groups][splits] of the batch.
template <typename L, int Threads>
__device__ __forceinline__ void join_block(const L& layout, const Moments (&of_thread)[L::pieces], float* partial, int splits) {
  constexpr int slots = L::vectors * L::pieces;  // of one lane
  constexpr int run = slots / (L::vectors * L::width / L::per_group);
  __shared__ float means[L::lanes * slots], squares[L::lanes * slots];
  if (layout.lane < L::lanes) {
#pragma unroll
    for (int p = 0; p < L::pieces; ++p) {
      means[threadIdx.x * L::pieces + p] = of_thread[p].mean;
      squares[threadIdx.x * L::pieces + p] = of_thread[p].square;
    }
  }
  __syncthreads();
  constexpr float channels = L::in_one_group ? L::width : 1;
  for (int group = threadIdx.x / warp; group < slots / run; group += Threads / warp) {
    Moments found{0.0f, 0.0f, 0.0f};
    for (int entry = threadIdx.x % warp; entry < L::lanes * run; entry += warp) {
      const int lane = entry / run, slot = lane * slots + group * run + entry % run;
      found.join({channels * layout.voxels_of(lane), means[slot], squares[slot]});
    }
    found.join_warp();
    if (threadIdx.x % warp == 0) {
      constexpr int groups = slots / run;
      float* to = partial + layout.batch * splits * (groups * 3LL) + layout.split;
      to[static_cast<long long>(group) * splits] = found.count;
      to[static_cast<long long>(groups + group) * splits] = found.mean;
      to[static_cast<long long>(2 * groups + group) * splits] = found.square;
    }
  }
}

}  // namespace group_norm

// partial: [batches][3][Groups][splits]: count, mean, square.
template <typename T, int Channels, int Groups, int Threads, int Ahead>
__global__ void __launch_bounds__(Threads, group_norm::blocks_at_once<T>(Channels, Groups, Threads))
    group_norm_stats(const T* __restrict__ x, float* __restrict__ partial, long long spatial, int splits, int /* batches */) {
  using L = group_norm::Layout<T, Channels, Groups, Threads>;
  const L layout(spatial, splits);
  group_norm::Sums<L::width> sums;
  int i = 0;
  if (layout.voxels >= Ahead) {
    T values[Ahead][L::width];
    const auto load = [&](int first) {
#pragma unroll
      for (int u = 0; u < Ahead; ++u) group_norm::load(x + layout.at(first + u), values[u]);
    };
    load(0);
    sums.start(values);
    sums.add(values);
    for (i = Ahead; i + Ahead <= layout.voxels; i += Ahead) {
      load(i);
      sums.add(values);
    }
  }
  for (; i < layout.voxels; ++i) {
    T value[1][L::width];
    group_norm::load(x + layout.at(i), value[0]);
    if (i == 0) sums.start(value);
    sums.add(value);
  }

  group_norm::Moments of_thread[L::pieces];
#pragma unroll
  for (int p = 0; p < L::pieces; ++p) of_thread[p] = sums.of_channel(p, layout.voxels);
  if constexpr (L::in_one_group) {
#pragma unroll
    for (int j = 1; j < L::width; ++j) of_thread[0].join(sums.of_channel(j, layout.voxels));
  }
  group_norm::join_block<L, Threads>(layout, of_thread, partial, splits);
}

template <typename T, typename Out, typename Affine, int Channels, int Groups, bool Relu, int Threads, int Ahead>
__global__ void __launch_bounds__(Threads, group_norm::blocks_at_once<T>(Channels, Groups, Threads))
    group_norm_apply(const T* __restrict__ x, const Affine* __restrict__ weight, const Affine* __restrict__ bias,
                     const float* __restrict__ partial, Out* __restrict__ out, float* __restrict__ mean,
                     float* __restrict__ rstd, long long spatial, int splits, int /* batches */, float eps) {
  using L = group_norm::Layout<T, Channels, Groups, Threads>;
  const L layout(spatial, splits);
  __shared__ float means[Groups], scales[Groups];
  const float* of_batch = partial + layout.batch * splits * (Groups * 3LL);
  for (int group = threadIdx.x / group_norm::warp; group < Groups; group += Threads / group_norm::warp) {
    group_norm::Moments found{0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int split = threadIdx.x % group_norm::warp; split < splits; split += group_norm::warp) {
      const float* from = of_batch + static_cast<long long>(group) * splits + split;
      const long long next = static_cast<long long>(Groups) * splits;
      found.join({from[0], from[next], from[2 * next]});
    }
    found.join_warp();
    if (threadIdx.x % group_norm::warp == 0) {
      const float variance = found.square / static_cast<float>(spatial * L::per_group);
      means[group] = found.mean;
      scales[group] = 1.0f / sqrtf(variance + eps);
      if (blockIdx.x % splits == 0) {
        mean[layout.batch * Groups + group] = means[group];
        rstd[layout.batch * Groups + group] = scales[group];
      }
    }
  }
  __syncthreads();
  if (layout.voxels == 0) return;

  float centre[L::pieces], scale[L::width], offset[L::width];
  group_norm::load_parameter(weight, layout.channel, 1.0f, scale);
  group_norm::load_parameter(bias, layout.channel, 0.0f, offset);
#pragma unroll
  for (int p = 0; p < L::pieces; ++p) centre[p] = means[layout.group(p)];
#pragma unroll
  for (int j = 0; j < L::width; ++j) scale[j] *= scales[layout.group(L::piece(j))];

  const auto normalise = [&](const T(&values)[L::width], int i) {
    Out result[L::width];
#pragma unroll
    for (int j = 0; j < L::width; ++j) {
      const float centred = static_cast<float>(values[j]) - centre[L::piece(j)];
      const float value = group_norm::before_relu(centred, scale[j], offset[j]);
      // Not a maximum: a NaN stays.
      result[j] = static_cast<Out>(Relu && value <= 0.0f ? 0.0f : value);
    }
    group_norm::store(out + layout.at(i), result);
  };
  int i = layout.voxels;
  for (; i % Ahead != 0; --i) {
    T value[L::width];
    group_norm::load(x + layout.at(i - 1), value);
    normalise(value, i - 1);
  }
  for (; i > 0; i -= Ahead) {
    T values[Ahead][L::width];
#pragma unroll
    for (int u = 0; u < Ahead; ++u) group_norm::load(x + layout.at(i - 1 - u), values[u]);
#pragma unroll
    for (int u = 0; u < Ahead; ++u) normalise(values[u], i - 1 - u);
  }
}
