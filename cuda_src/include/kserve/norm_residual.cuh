// LayerNorm of each row with an affine, dropout in training, plus a residual: every input is read once, the row stays in
// registers.
//
// Lanes threads hold one row, or Rows of them one after the other; a block has Groups such groups. kernel.toml chooses
// these three from Hidden, for both variants alike; the alignment facts, KSERVE_ALIGN_<ARGUMENT> in bytes, only choose how
// wide an access is.

#pragma once

#include <kserve/access.cuh>
#include <kserve/narrow.cuh>
#include <kserve/philox.cuh>

namespace row_norm {

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Elements of one access: the widest up to 16 bytes that divides a row and that all pointers are aligned for.
// A short row is spread over its lanes first.
template <typename T>
__host__ __device__ constexpr int access_elements(int hidden, int lanes) {
  constexpr int tensors = smaller(KSERVE_ALIGN_X, smaller(KSERVE_ALIGN_RESIDUAL, KSERVE_ALIGN_OUT));
  constexpr int affine = smaller(KSERVE_ALIGN_GAMMA, KSERVE_ALIGN_BETA);
  int elements = 16 / static_cast<int>(sizeof(T));
  while (elements > 1) {
    const int affine_bytes = smaller(16, elements * static_cast<int>(sizeof(float)));
    const bool aligned = tensors >= elements * static_cast<int>(sizeof(T)) && affine >= affine_bytes;
    if (hidden % elements == 0 && aligned && (elements <= 4 || hidden / elements >= lanes)) break;
    elements /= 2;
  }
  return elements;
}

constexpr unsigned int all_lanes = 0xffffffffu;

// Each value summed over groups of Span neighbouring lanes. Every lane gets the same bits, in an order that never changes.
template <int Span, int Count>
__device__ __forceinline__ void sum_over_lanes(float (&values)[Count]) {
#pragma unroll
  for (int step = Span / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] += __shfl_xor_sync(all_lanes, values[i], step);
  }
}

__host__ __device__ constexpr int next_power_of_two(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// Each value summed over the Lanes threads of a row. Beyond a warp the row is the whole block. Called at most once for
// each Count: that is why one barrier is enough.
template <int Lanes, int Count>
__device__ __forceinline__ void sum_over_row(float (&values)[Count]) {
  sum_over_lanes<smaller(Lanes, 32)>(values);
  if constexpr (Lanes > 32) {
    constexpr int Warps = Lanes / 32;
    constexpr int Span = next_power_of_two(Warps);
    static_assert(Lanes % 32 == 0 && Span <= 32, "a row is held by whole warps of one block");
    __shared__ float partial[Count][Warps];
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < Count; ++i) partial[i][threadIdx.x / 32] = values[i];
    }
    __syncthreads();
    const int warp = threadIdx.x % Span;
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] = warp < Warps ? partial[i][warp] : 0.0f;
    sum_over_lanes<Span>(values);
  }
}

// What training adds: an element is kept when its random number is not below `probability`, and then scaled.
struct Dropout {
  kserve::RandomState state;
  float probability;
};

template <typename T, int Hidden, bool Training, int Lanes, int Groups, int Rows>
__device__ __forceinline__ void normalise(const T* __restrict__ x, const T* __restrict__ residual,
                                          const float* __restrict__ gamma, const float* __restrict__ beta, T* __restrict__ out,
                                          long long n, float eps, const Dropout& dropout) {
  static_assert(Lanes <= 32 || (Groups == 1 && Rows == 1), "a row wider than a warp has the block to itself");
  constexpr int Width = access_elements<T>(Hidden, Lanes);
  constexpr int Accesses = Hidden / Width;
  constexpr int Items = (Accesses + Lanes - 1) / Lanes;

  const int lane = threadIdx.x % Lanes;
  const long long first = static_cast<long long>(blockIdx.x) * (Groups * Rows) + threadIdx.x / Lanes;
  const auto column = [&](int item) { return (item * Lanes + lane) * Width; };
  const auto inside = [&](int item) { return Accesses % Lanes == 0 || item * Lanes + lane < Accesses; };
  const auto exists = [&](int r) { return first + r * Groups < n; };
  const auto offset = [&](int r, int item) { return (first + r * Groups) * Hidden + column(item); };

  T loaded[Rows][Items][Width];
  T added[Rows][Items][Width];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      if (exists(r) && inside(i)) {
        kserve::load(x + offset(r, i), loaded[r][i]);
      } else {
#pragma unroll
        for (int j = 0; j < Width; ++j) loaded[r][i][j] = static_cast<T>(0.0f);
      }
    }
  }
  // Before the sums, so that both streams are under way together.
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      if (exists(r) && inside(i)) kserve::load(residual + offset(r, i), added[r][i]);
    }
  }

  float mean[Rows] = {};
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < Items; ++i) {
#pragma unroll
      for (int j = 0; j < Width; ++j) mean[r] += static_cast<float>(loaded[r][i][j]);
    }
  }
  sum_over_row<Lanes>(mean);

  // The rounded mean is off by an ulp or so. Summing the differences beside their squares measures by how much, at no
  // further pass: a constant row gives exactly beta, and a mean far above the deviation costs no digits.
  float centred[Rows][Items][Width];
  float moments[2 * Rows] = {};
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    mean[r] = mean[r] / static_cast<float>(Hidden);
#pragma unroll
    for (int i = 0; i < Items; ++i) {
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        const float difference = inside(i) ? static_cast<float>(loaded[r][i][j]) - mean[r] : 0.0f;
        centred[r][i][j] = difference;
        moments[2 * r] += difference;
        moments[2 * r + 1] = fmaf(difference, difference, moments[2 * r + 1]);
      }
    }
  }
  sum_over_row<Lanes>(moments);

  float shift[Rows], scale[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    shift[r] = moments[2 * r] / static_cast<float>(Hidden);
    const float variance = moments[2 * r + 1] / static_cast<float>(Hidden) - shift[r] * shift[r];
    scale[r] = rsqrtf(fmaxf(variance, 0.0f) + eps);
  }

  const float kept_scale = Training ? 1.0f / (1.0f - dropout.probability) : 1.0f;
#pragma unroll
  for (int i = 0; i < Items; ++i) {
    if (!inside(i)) continue;
    float weight[Width], bias[Width];
    kserve::load(gamma + column(i), weight);
    kserve::load(beta + column(i), bias);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (!exists(r)) continue;
      T result[Width];
      float drawn[Width];
      if constexpr (Training) {
        kserve::uniform(dropout.state, static_cast<unsigned long long>(offset(r, i)), Hidden % 4 == 0, drawn);
      }
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        const float normal = (centred[r][i][j] - shift[r]) * scale[r];
        float value = fmaf(normal, weight[j], bias[j]);
        // A choice, not a product with zero: with everything dropped the scale is infinite.
        if constexpr (Training) value = drawn[j] >= dropout.probability ? value * kept_scale : 0.0f;
        result[j] = static_cast<T>(value + static_cast<float>(added[r][i][j]));
      }
      kserve::store(out + offset(r, i), result);
    }
  }
}

}  // namespace row_norm

template <typename T, int Hidden, bool Training, int Lanes, int Groups, int Rows>
__global__ void __launch_bounds__(Lanes* Groups)
    norm_residual(const T* __restrict__ x, const T* __restrict__ residual, const float* __restrict__ gamma,
                  const float* __restrict__ beta, T* __restrict__ out, long long n, float eps) {
  static_assert(!Training, "norm_residual_dropout draws the random numbers");
  const row_norm::Dropout none{};
  row_norm::normalise<T, Hidden, false, Lanes, Groups, Rows>(x, residual, gamma, beta, out, n, eps, none);
}

template <typename T, int Hidden, int Lanes, int Groups, int Rows>
__global__ void __launch_bounds__(Lanes* Groups)
    norm_residual_dropout(const T* __restrict__ x, const T* __restrict__ residual, const float* __restrict__ gamma,
                          const float* __restrict__ beta, T* __restrict__ out, const unsigned long long* __restrict__ random,
                          long long n, float eps, float dropout_p) {
  const row_norm::Dropout dropout{{random[0], random[1]}, dropout_p};
  row_norm::normalise<T, Hidden, true, Lanes, Groups, Rows>(x, residual, gamma, beta, out, n, eps, dropout);
}
