// A row on the circle: Fourier coefficients to values at the points 2 pi k / NGrid and back, and the activation between.
//
// Points k and NGrid - k are taken together: cosines are even and sines odd in k, so one half of the products serves both.
// Every cosine and sine is a constant of the compile, and no value of the grid outlives its pair.

#pragma once

namespace circle {

constexpr double pi = 3.14159265358979323846;

// By its series, for |x| <= pi: exact to an ulp or two of pi.
__host__ __device__ constexpr double sine(double x) {
  double term = x, sum = x;
  for (int i = 2; i < 40; i += 2) {
    term *= -x * x / (i * (i + 1));
    sum += term;
  }
  return sum;
}

template <int NGrid>
struct Table {
  float cosine[NGrid], sine[NGrid];  // at 2 pi j / NGrid
};

__host__ __device__ constexpr double within_pi(double x) { return x > pi ? x - 2.0 * pi : x; }

template <int NGrid>
__host__ __device__ constexpr Table<NGrid> make_table() {
  Table<NGrid> table{};
  for (int j = 0; j < NGrid; ++j) {
    const double angle = 2.0 * pi * j / NGrid;
    table.cosine[j] = static_cast<float>(sine(within_pi(angle + 0.5 * pi)));
    table.sine[j] = static_cast<float>(sine(within_pi(angle)));
  }
  return table;
}

// What the products of a transform are scaled by, as part of their constants. Synthesis makes values of coefficients,
// analysis the other way round. Halved and doubled, so that the sum of two finite values is finite.
enum class Scale { synthesis, half_synthesis, analysis, double_analysis };

template <int NGrid>
__host__ __device__ constexpr float factor(Scale scale, int order) {
  const double weight = (order == 0 ? 1.0 : 2.0) / NGrid;
  const double found = scale == Scale::synthesis        ? 1.0
                       : scale == Scale::half_synthesis ? 0.5
                       : scale == Scale::analysis       ? weight
                                                        : 2.0 * weight;
  return static_cast<float>(found);
}

#ifdef __CUDA_ARCH__
// One instruction each, right to two units in the last place.
__device__ __forceinline__ float power_of_two(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
__device__ __forceinline__ float reciprocal(float x) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
#else
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
#endif

// 1 / (1 + exp(-f)): 0 where exp(-f) overflows, so f times it is a signed zero and never NaN for a finite f.
__device__ __forceinline__ float logistic(float f) { return reciprocal(1.0f + power_of_two(-1.4426950408889634f * f)); }

// Half of f / (1 + exp(-f)), from half of f.
__device__ __forceinline__ float half_silu(float half) { return half * logistic(2.0f * half); }

__device__ __forceinline__ float silu_slope(float f) {
  const float sigma = logistic(f);
  return sigma * fmaf(f, 1.0f - sigma, 1.0f);
}

// Values at a point and at its mirror are even + odd and even - odd.
struct Pair {
  float even, odd;
};

template <int NAng, int NGrid, Scale scale>
__device__ __forceinline__ Pair values_at(const float (&a)[NAng], const float (&b)[NAng], int k) {
  constexpr Table<NGrid> table = make_table<NGrid>();
  Pair found{scale == Scale::synthesis ? a[0] : factor<NGrid>(scale, 0) * a[0], 0.0f};
#pragma unroll
  for (int m = 1; m < NAng; ++m) {
    const float cosine = factor<NGrid>(scale, m) * table.cosine[m * k % NGrid];
    const float sine = factor<NGrid>(scale, m) * table.sine[m * k % NGrid];
    found.even = fmaf(cosine, a[m], found.even);
    found.odd = m == 1 ? sine * b[m] : fmaf(sine, b[m], found.odd);
  }
  return found;
}

// Sums of coefficients over the points that were added. The sine of order 0 has no influence and no value but 0.
template <int NAng, int NGrid, Scale scale>
struct Coefficients {
  float a[NAng] = {}, b[NAng] = {};

  // The sum of the values at a point and at its mirror, or the value of a point that has none.
  __device__ __forceinline__ void add_even(float value, int k) {
    constexpr Table<NGrid> table = make_table<NGrid>();
#pragma unroll
    for (int m = 0; m < NAng; ++m) {
      a[m] = fmaf(factor<NGrid>(scale, m) * table.cosine[m * k % NGrid], value, a[m]);
    }
  }

  // The difference of the values at a point and at its mirror.
  __device__ __forceinline__ void add_odd(float value, int k) {
    constexpr Table<NGrid> table = make_table<NGrid>();
#pragma unroll
    for (int m = 1; m < NAng; ++m) {
      b[m] = fmaf(factor<NGrid>(scale, m) * table.sine[m * k % NGrid], value, b[m]);
    }
  }
};

template <int NGrid>
__host__ __device__ constexpr bool is_own_mirror(int k) {
  return k == 0 || 2 * k == NGrid;
}

// a, b: coefficients; then those of the activation's values.
template <int NAng, int NGrid>
__device__ __forceinline__ void forward(float (&a)[NAng], float (&b)[NAng]) {
  Coefficients<NAng, NGrid, Scale::double_analysis> out;
#pragma unroll
  for (int k = 0; k <= NGrid / 2; ++k) {
    const Pair f = values_at<NAng, NGrid, Scale::half_synthesis>(a, b, k);
    if (is_own_mirror<NGrid>(k)) {
      out.add_even(half_silu(f.even), k);
    } else {
      const float here = half_silu(f.even + f.odd), mirrored = half_silu(f.even - f.odd);
      out.add_even(here + mirrored, k);
      out.add_odd(here - mirrored, k);
    }
  }
#pragma unroll
  for (int m = 0; m < NAng; ++m) {
    a[m] = out.a[m];
    b[m] = out.b[m];
  }
}

// ga, gb: gradient of the results; then that of the coefficients a, b.
template <int NAng, int NGrid>
__device__ __forceinline__ void backward(float (&ga)[NAng], float (&gb)[NAng], const float (&a)[NAng], const float (&b)[NAng]) {
  Coefficients<NAng, NGrid, Scale::synthesis> out;
#pragma unroll
  for (int k = 0; k <= NGrid / 2; ++k) {
    const Pair f = values_at<NAng, NGrid, Scale::synthesis>(a, b, k);
    const Pair g = values_at<NAng, NGrid, Scale::analysis>(ga, gb, k);
    if (is_own_mirror<NGrid>(k)) {
      out.add_even(g.even * silu_slope(f.even), k);
    } else {
      const float here = (g.even + g.odd) * silu_slope(f.even + f.odd);
      const float mirrored = (g.even - g.odd) * silu_slope(f.even - f.odd);
      out.add_even(here + mirrored, k);
      out.add_odd(here - mirrored, k);
    }
  }
#pragma unroll
  for (int m = 0; m < NAng; ++m) {
    ga[m] = out.a[m];
    gb[m] = out.b[m];
  }
}

}  // namespace circle
