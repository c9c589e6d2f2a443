// SiLU on the grid of a circle, between Fourier coefficients, and its gradient: one thread has whole rows in registers.
//
// A thread has Rows neighbouring rows, so many that they are a whole number of 16-byte accesses. The 32 threads of a warp
// read their rows together in coalesced accesses and exchange them through shared memory, with no barrier of the block;
// where a thread's rows are one access there is nothing to exchange. Operands that lie order by order need none either.

#include <kserve/access.cuh>
#include <kserve/narrow.cuh>

#include "circle.cuh"

namespace rows {

constexpr int warp = 32;

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Of all pointers of the entry that is compiled.
constexpr int operands_aligned = smaller(KSERVE_ALIGN_A_COS, KSERVE_ALIGN_A_SIN);
#ifdef KSERVE_ALIGN_G_COS
constexpr int aligned = smaller(operands_aligned, smaller(smaller(KSERVE_ALIGN_G_COS, KSERVE_ALIGN_G_SIN),
                                                          smaller(KSERVE_ALIGN_DA_COS, KSERVE_ALIGN_DA_SIN)));
#else
constexpr int aligned = smaller(operands_aligned, smaller(KSERVE_ALIGN_OUT_COS, KSERVE_ALIGN_OUT_SIN));
#endif

// Elements of one access: the widest up to 16 bytes that divides what a thread has and that all pointers are aligned for.
template <typename T>
__host__ __device__ constexpr int access_elements(int elements) {
  int width = 16 / static_cast<int>(sizeof(T));
  while (width > 1 && (elements % width != 0 || aligned < width * static_cast<int>(sizeof(T)))) width /= 2;
  return width;
}

// The rows of one warp.
template <typename T, int NAng, int Rows>
struct Tile {
  static constexpr int elements = Rows * NAng;  // of a thread
  static constexpr int width = access_elements<T>(elements);
  static constexpr int accesses = elements / width;
  static constexpr bool is_aligned = aligned >= smaller(16, Rows* static_cast<int>(sizeof(T)));

  T* exchange;  // [warp * elements], this warp's own
  int lane;
  long long first;  // row of the warp
  long long rows;
  bool is_whole;  // every row of the warp exists

  __device__ __forceinline__ Tile(T* exchanges, long long n_rows) {
    exchange = exchanges + threadIdx.x / warp * (warp * elements);
    lane = threadIdx.x % warp;
    first = (static_cast<long long>(blockIdx.x) * (blockDim.x / warp) + threadIdx.x / warp) * (warp * Rows);
    rows = n_rows;
    is_whole = first + warp * Rows <= n_rows;
  }

  // Row r of the thread.
  __device__ __forceinline__ long long row(int r) const { return first + lane * Rows + r; }

  // Where access `index` of the warp lies while it is exchanged: neighbours of eight owners in different banks.
  __device__ __forceinline__ static T* place(T* exchange, int index) {
    constexpr int spread = (accesses & -accesses) - 1;
    return exchange + (index ^ (index / 8 & spread)) * width;
  }

  // Starts the loads of one operand. order_stride: elements from one order to the next, the rows of an order being
  // neighbours; 0 where the orders of a row are.
  __device__ __forceinline__ void fetch(const T* from, long long order_stride, T (&to)[elements]) const {
    if (!is_whole) {
      fetch_some(from, order_stride == 0 ? NAng : 1, order_stride == 0 ? 1 : order_stride, to);
    } else if (order_stride == 0) {
      const T* at = from + first * NAng;
#pragma unroll
      for (int i = 0; i < accesses; ++i) kserve::load_once(at + (i * warp + lane) * width, part<width>(to, i * width));
    } else if (is_aligned && order_stride % Rows == 0) {
#pragma unroll
      for (int m = 0; m < NAng; ++m) kserve::load_once(from + m * order_stride + row(0), part<Rows>(to, m * Rows));
    } else {
#pragma unroll
      for (int i = 0; i < elements; ++i) kserve::load_once(from + i / Rows * order_stride + row(i % Rows), part<1>(to, i));
    }
  }

  // Gives each thread its rows of what `fetch` has read, as [Rows][NAng].
  __device__ __forceinline__ void settle(long long order_stride, T (&values)[elements]) const {
    if (!is_whole) return;
    if (order_stride == 0) {
      if constexpr (accesses > 1) turn<true>(values);
    } else {
      T found[elements];
#pragma unroll
      for (int i = 0; i < elements; ++i) found[i] = values[i % NAng * Rows + i / NAng];
#pragma unroll
      for (int i = 0; i < elements; ++i) values[i] = found[i];
    }
  }

  // Writes the rows of each thread, [Rows][NAng], row by row.
  __device__ __forceinline__ void store(T (&values)[elements], T* to) const {
    if (!is_whole) {
#pragma unroll
      for (int i = 0; i < elements; ++i) {
        if (row(i / NAng) < rows) to[row(0) * NAng + i] = values[i];
      }
      return;
    }
    if constexpr (accesses > 1) turn<false>(values);
    T* at = to + first * NAng;
#pragma unroll
    for (int i = 0; i < accesses; ++i) kserve::store_once(at + (i * warp + lane) * width, part<width>(values, i * width));
  }

 private:
  template <int Count>
  __device__ __forceinline__ static T (&part(T (&values)[elements], int begin))
      [Count] { return *reinterpret_cast<T(*)[Count]>(&values[begin]); }

  __device__ __forceinline__ void fetch_some(const T* from, int row_stride, long long order_stride, T (&to)[elements]) const {
#pragma unroll
    for (int i = 0; i < elements; ++i) {
      const long long at = row(i / NAng);
      to[i] = at < rows ? from[at * row_stride + i % NAng * order_stride] : static_cast<T>(0.0f);
    }
  }

  // From accesses of the warp to rows of the threads, or back.
  template <bool ToRows>
  __device__ __forceinline__ void turn(T (&values)[elements]) const {
    using Word = typename kserve::Word<width * sizeof(T)>::type;
    Word word;
#pragma unroll
    for (int i = 0; i < accesses; ++i) {
      memcpy(&word, &values[i * width], sizeof(word));
      *reinterpret_cast<Word*>(place(exchange, ToRows ? i * warp + lane : lane * accesses + i)) = word;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < accesses; ++i) {
      word = *reinterpret_cast<const Word*>(place(exchange, ToRows ? lane * accesses + i : i * warp + lane));
      memcpy(&values[i * width], &word, sizeof(word));
    }
    __syncwarp();
  }
};

template <int NAng, typename T>
__device__ __forceinline__ void widen(const T* from, float (&to)[NAng]) {
#pragma unroll
  for (int m = 0; m < NAng; ++m) to[m] = static_cast<float>(from[m]);
}

template <int NAng, typename T>
__device__ __forceinline__ void narrow(const float (&from)[NAng], T* to) {
#pragma unroll
  for (int m = 0; m < NAng; ++m) to[m] = static_cast<T>(from[m]);
}

}  // namespace rows

template <typename T, int NAng, int NGrid, int Rows, int Threads>
__global__ void __launch_bounds__(Threads)
    realspace_forward(const T* __restrict__ a_cos, const T* __restrict__ a_sin, T* __restrict__ out_cos,
                      T* __restrict__ out_sin, long long n_rows, long long cos_stride, long long sin_stride) {
  static_assert(NGrid >= 2 * NAng - 1, "n_grid is below 2 * n_ang - 1: the grid cannot tell the orders apart");
  using Tile = rows::Tile<T, NAng, Rows>;
  alignas(16) __shared__ T exchange[Tile::accesses > 1 ? Threads * Tile::elements : 8];
  const Tile tile(exchange, n_rows);
  if (tile.first >= n_rows) return;

  T cosines[Tile::elements], sines[Tile::elements];
  tile.fetch(a_cos, cos_stride, cosines);
  tile.fetch(a_sin, sin_stride, sines);
  tile.settle(cos_stride, cosines);
  tile.settle(sin_stride, sines);
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float a[NAng], b[NAng];
    rows::widen(cosines + r * NAng, a);
    rows::widen(sines + r * NAng, b);
    circle::forward<NAng, NGrid>(a, b);
    rows::narrow(a, cosines + r * NAng);
    rows::narrow(b, sines + r * NAng);
  }
  tile.store(cosines, out_cos);
  tile.store(sines, out_sin);
}
template <typename T, int NAng, int NGrid, int Rows, int Threads>
__global__ void __launch_bounds__(Threads)
    realspace_backward(const T* __restrict__ g_cos, const T* __restrict__ g_sin, const T* __restrict__ a_cos,
                       const T* __restrict__ a_sin, T* __restrict__ da_cos, T* __restrict__ da_sin, long long n_rows,
                       long long g_cos_stride, long long g_sin_stride, long long cos_stride, long long sin_stride) {
  static_assert(NGrid >= 2 * NAng - 1, "n_grid is below 2 * n_ang - 1: the grid cannot tell the orders apart");
  using Tile = rows::Tile<T, NAng, Rows>;
  alignas(16) __shared__ T exchange[Tile::accesses > 1 ? Threads * Tile::elements : 8];
  const Tile tile(exchange, n_rows);
  if (tile.first >= n_rows) return;

  T g_cosines[Tile::elements], g_sines[Tile::elements], cosines[Tile::elements], sines[Tile::elements];
  tile.fetch(g_cos, g_cos_stride, g_cosines);
  tile.fetch(g_sin, g_sin_stride, g_sines);
  tile.fetch(a_cos, cos_stride, cosines);
  tile.fetch(a_sin, sin_stride, sines);
  tile.settle(g_cos_stride, g_cosines);
  tile.settle(g_sin_stride, g_sines);
  tile.settle(cos_stride, cosines);
  tile.settle(sin_stride, sines);
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float ga[NAng], gb[NAng], a[NAng], b[NAng];
    rows::widen(g_cosines + r * NAng, ga);
    rows::widen(g_sines + r * NAng, gb);
    rows::widen(cosines + r * NAng, a);
    rows::widen(sines + r * NAng, b);
    circle::backward<NAng, NGrid>(ga, gb, a, b);
    rows::narrow(ga, g_cosines + r * NAng);
    rows::narrow(gb, g_sines + r * NAng);
  }
  tile.store(g_cosines, da_cos);
  tile.store(g_sines, da_sin);
}
