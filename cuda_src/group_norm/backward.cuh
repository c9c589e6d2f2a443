// Backward: sums over voxels by block, for each channel and each group, then the gradients.

#pragma once

#include "forward.cuh"

namespace group_norm {

// Each thread's constants: what the forward made of its channels.
template <typename L, typename Affine>
struct Forward {
  float weight[L::width], scale[L::width], bias[L::width];
  float mean[L::pieces], rstd[L::pieces];

  __device__ __forceinline__ Forward(const L& layout, const Affine* weights, const Affine* biases, const float* means,
                                     const float* rstds) {
    constexpr int groups = L::vectors * L::width / L::per_group;
    load_parameter(weights, layout.channel, 1.0f, weight);
    load_parameter(biases, layout.channel, 0.0f, bias);
#pragma unroll
    for (int p = 0; p < L::pieces; ++p) {
      mean[p] = means[layout.batch * groups + layout.group(p)];
      rstd[p] = rstds[layout.batch * groups + layout.group(p)];
    }
    // The product in the forward's order, so that the sign before the activation is the forward's.
#pragma unroll
    for (int j = 0; j < L::width; ++j) scale[j] = weight[j] * rstd[L::piece(j)];
  }

  // The gradient behind the activation.
  template <bool Relu>
  __device__ __forceinline__ float behind_relu(float gradient, float centred, int j) const {
    return Relu && before_relu(centred, scale[j], bias[j]) <= 0.0f ? 0.0f : gradient;
  }
};

}  // namespace group_norm

// by_group: [batches][2][Groups][splits]: sums of grad w, of grad w xhat. by_channel: [batches][splits][2][Channels] of sums
// of grad xhat and grad. grad is that behind the activation.
template <typename T, typename Out, typename Affine, int Channels, int Groups, bool Relu, int Threads, int Ahead>
__global__ void __launch_bounds__(Threads, group_norm::blocks_at_once<T>(Channels, Groups, Threads))
    group_norm_bwd_sums(const Out* __restrict__ grad_out, const T* __restrict__ x, const Affine* __restrict__ weight,
                        const Affine* __restrict__ bias, const float* __restrict__ mean, const float* __restrict__ rstd,
                        float* __restrict__ by_group, float* __restrict__ by_channel, long long spatial, int splits,
                        int /* batches */) {
  using L = group_norm::Layout<T, Channels, Groups, Threads>;
  const L layout(spatial, splits);
  const group_norm::Forward<L, Affine> forward(layout, weight, bias, mean, rstd);
  float products[L::width] = {}, plain[L::width] = {};
  const auto add = [&](const Out(&gradients)[L::width], const T(&values)[L::width]) {
#pragma unroll
    for (int j = 0; j < L::width; ++j) {
      const float centred = static_cast<float>(values[j]) - forward.mean[L::piece(j)];
      const float gradient = forward.template behind_relu<Relu>(static_cast<float>(gradients[j]), centred, j);
      products[j] = fmaf(gradient, centred, products[j]);
      plain[j] += gradient;
    }
  };
  int i = 0;
  for (; i + Ahead <= layout.voxels; i += Ahead) {
    Out gradients[Ahead][L::width];
    T values[Ahead][L::width];
#pragma unroll
    for (int u = 0; u < Ahead; ++u) {
      group_norm::load(grad_out + layout.at(i + u), gradients[u]);
      group_norm::load(x + layout.at(i + u), values[u]);
    }
#pragma unroll
    for (int u = 0; u < Ahead; ++u) add(gradients[u], values[u]);
  }
  for (; i < layout.voxels; ++i) {
    Out gradient[L::width];
    T value[L::width];
    group_norm::load(grad_out + layout.at(i), gradient);
    group_norm::load(x + layout.at(i), value);
    add(gradient, value);
  }

  // The lanes of each channel one after the other, then the channels of each group.
  __shared__ float of_products[L::lanes * Channels], of_plain[L::lanes * Channels];
  if (layout.lane < L::lanes) {
#pragma unroll
    for (int j = 0; j < L::width; ++j) {
      of_products[layout.lane * Channels + layout.channel + j] = products[j] * forward.rstd[L::piece(j)];
      of_plain[layout.lane * Channels + layout.channel + j] = plain[j];
    }
  }
  __syncthreads();
  const long long block = blockIdx.x;
  for (int channel = threadIdx.x; channel < Channels; channel += Threads) {
    float product = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int lane = 0; lane < L::lanes; ++lane) {
      product += of_products[lane * Channels + channel];
      sum += of_plain[lane * Channels + channel];
    }
    by_channel[block * (2 * Channels) + channel] = product;
    by_channel[block * (2 * Channels) + Channels + channel] = sum;
    const float scale = weight == nullptr ? 1.0f : static_cast<float>(weight[channel]);
    of_products[channel] = product * scale;
    of_plain[channel] = sum * scale;
  }
  __syncthreads();
  for (int group = threadIdx.x / group_norm::warp; group < Groups; group += Threads / group_norm::warp) {
    float found[2] = {};
    for (int c = threadIdx.x % group_norm::warp; c < L::per_group; c += group_norm::warp) {
      found[0] += of_plain[group * L::per_group + c];
      found[1] += of_products[group * L::per_group + c];
    }
    group_norm::sum_over_warp(found);
    if (threadIdx.x % group_norm::warp == 0) {
      float* to = by_group + layout.batch * splits * (Groups * 2LL) + layout.split;
      to[static_cast<long long>(group) * splits] = found[0];
      to[static_cast<long long>(Groups + group) * splits] = found[1];
    }
  }
}

namespace group_norm {

// The gradients of weight and bias from the sums of all blocks, in a fixed order: eight channels, one sector of memory, by a
// block, so that none has much more to do than the others.
template <typename Affine, int Channels, int Threads>
__device__ __forceinline__ void finish_parameters(const float* by_channel, Affine* grad_weight, Affine* grad_bias, int blocks) {
  constexpr int at_once = 8, rows = Threads / at_once, warps = Threads / warp;
  __shared__ float found[warps][2][at_once];
  const int lane = threadIdx.x % at_once, row = threadIdx.x / at_once;
  for (int first = blockIdx.x * at_once; first < Channels; first += gridDim.x * at_once) {
    const int channel = first + lane;
    float sums[2] = {};
    if (channel < Channels) {
#pragma unroll 4
      for (long long block = row; block < blocks; block += rows) {
        sums[0] += by_channel[block * (2 * Channels) + channel];
        sums[1] += by_channel[block * (2 * Channels) + Channels + channel];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = at_once; step < warp; step *= 2) sums[i] += __shfl_xor_sync(all_lanes, sums[i], step);
      if (threadIdx.x % warp < at_once) found[threadIdx.x / warp][i][lane] = sums[i];
    }
    __syncthreads();
    if (row < 2 && channel < Channels) {
      Affine* to = row == 0 ? grad_weight : grad_bias;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) sum += found[w][row][lane];
      if (to != nullptr) to[channel] = static_cast<Affine>(sum);
    }
    __syncthreads();
  }
}

}  // namespace group_norm

template <typename T, typename Out, typename Affine, int Channels, int Groups, bool Relu, int Threads, int Ahead>
__global__ void __launch_bounds__(Threads, group_norm::blocks_at_once<T>(Channels, Groups, Threads))
    group_norm_bwd_apply(const Out* __restrict__ grad_out, const T* __restrict__ x, const Affine* __restrict__ weight,
                         const Affine* __restrict__ bias, const float* __restrict__ mean, const float* __restrict__ rstd,
                         const float* __restrict__ by_group, const float* __restrict__ by_channel, T* __restrict__ grad_x,
                         Affine* __restrict__ grad_weight, Affine* __restrict__ grad_bias, long long spatial, int splits,
                         int batches) {
  using L = group_norm::Layout<T, Channels, Groups, Threads>;
  group_norm::finish_parameters<Affine, Channels, Threads>(by_channel, grad_weight, grad_bias, batches * splits);
  if (grad_x == nullptr) return;

  const L layout(spatial, splits);
  __shared__ float of_plain[Groups], of_products[Groups];
  const float* of_batch = by_group + layout.batch * splits * (Groups * 2LL);
  const float elements = static_cast<float>(spatial * L::per_group);
  for (int group = threadIdx.x / group_norm::warp; group < Groups; group += Threads / group_norm::warp) {
    float found[2] = {};
#pragma unroll 4
    for (int split = threadIdx.x % group_norm::warp; split < splits; split += group_norm::warp) {
      found[0] += of_batch[static_cast<long long>(group) * splits + split];
      found[1] += of_batch[static_cast<long long>(Groups + group) * splits + split];
    }
    group_norm::sum_over_warp(found);
    if (threadIdx.x % group_norm::warp == 0) {
      of_plain[group] = found[0] / elements;
      of_products[group] = found[1] / elements;
    }
  }
  __syncthreads();
  if (layout.voxels == 0) return;

  const group_norm::Forward<L, Affine> forward(layout, weight, bias, mean, rstd);
  // One element in its group has no gradient at all; the formula would give its own rounding, divided by sqrt(eps).
  const float exists = spatial * L::per_group == 1 ? 0.0f : 1.0f;
  float constant[L::pieces], slope[L::pieces], own[L::width];
#pragma unroll
  for (int p = 0; p < L::pieces; ++p) {
    const int group = layout.group(p);
    constant[p] = -exists * forward.rstd[p] * of_plain[group];
    slope[p] = -exists * forward.rstd[p] * forward.rstd[p] * of_products[group];
  }
#pragma unroll
  for (int j = 0; j < L::width; ++j) own[j] = exists * forward.scale[j];

  const auto finish = [&](const Out(&gradients)[L::width], const T(&values)[L::width], int i) {
    T result[L::width];
#pragma unroll
    for (int j = 0; j < L::width; ++j) {
      const float centred = static_cast<float>(values[j]) - forward.mean[L::piece(j)];
      const float gradient = forward.template behind_relu<Relu>(static_cast<float>(gradients[j]), centred, j);
      result[j] = static_cast<T>(fmaf(gradient, own[j], fmaf(centred, slope[L::piece(j)], constant[L::piece(j)])));
    }
    group_norm::store(grad_x + layout.at(i), result);
  };
  int i = layout.voxels;
  for (; i % Ahead != 0; --i) {
    Out gradient[L::width];
    T value[L::width];
    group_norm::load(grad_out + layout.at(i - 1), gradient);
    group_norm::load(x + layout.at(i - 1), value);
    finish(gradient, value, i - 1);
  }
  for (; i > 0; i -= Ahead) {
    Out gradients[Ahead][L::width];
    T values[Ahead][L::width];
#pragma unroll
    for (int u = 0; u < Ahead; ++u) {
      group_norm::load(grad_out + layout.at(i - 1 - u), gradients[u]);
      group_norm::load(x + layout.at(i - 1 - u), values[u]);
    }
#pragma unroll
    for (int u = 0; u < Ahead; ++u) finish(gradients[u], values[u], i - 1 - u);
  }
}
