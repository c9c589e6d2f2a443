// SiLU on the grid of a circle, between Fourier coefficients, and its gradient: one thread has whole rows in registers.
//
// A thread has Rows neighbouring rows, so many that they are a whole number of 16-byte accesses. The 32 threads of a warp
// copy their rows together to shared memory, all operands at once and without waiting, take their own from there, and give
// the results back the same way. No warp waits for another: while some compute, the copies of others are under way.

#include <kserve/access.cuh>
#include <kserve/async_copy.cuh>
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

// The rows of one warp. An area of shared memory holds them for one operand.
template <typename T, int NAng, int Rows>
struct Tile {
  static constexpr int elements = Rows * NAng;  // of a thread
  static constexpr int size = warp * elements;  // of an area
  static constexpr int width = access_elements<T>(elements);
  static constexpr int accesses = elements / width;
  using Word = typename kserve::Word<width * sizeof(T)>::type;
  static constexpr bool can_copy = sizeof(Word) >= 4;
  static constexpr int wide = 16 / sizeof(T);               // elements of 16 bytes
  static constexpr int wide_in_order = warp * Rows / wide;  // such accesses of one order
  static constexpr int wide_in_area = NAng * wide_in_order;

  int lane;
  long long first;  // row of the warp
  long long rows;
  bool is_whole;  // every row of the warp exists

  __device__ __forceinline__ explicit Tile(long long n_rows) {
    lane = threadIdx.x % warp;
    first = (static_cast<long long>(blockIdx.x) * (blockDim.x / warp) + threadIdx.x / warp) * (warp * Rows);
    rows = n_rows;
    is_whole = first + warp * Rows <= n_rows;
  }

  // Starts to copy one operand into an area. order_stride: elements from one order to the next, the rows of an order being
  // neighbours; 0 where the orders of a row are.
  __device__ __forceinline__ void fetch(const T* from, long long order_stride, T* area) const {
    if (keeps_orders(order_stride)) {
#pragma unroll
      for (int i = 0; i < (wide_in_area + warp - 1) / warp; ++i) {
        const int index = i * warp + lane, order = index / wide_in_order, row = index % wide_in_order * wide;
        if (wide_in_area % warp == 0 || index < wide_in_area) {
          __pipeline_memcpy_async(area + index * wide, from + order * order_stride + first + row, 16);
        }
      }
    } else if (can_copy && is_whole && order_stride == 0) {
      const T* at = from + first * NAng;
#pragma unroll
      for (int i = 0; i < accesses; ++i) {
        __pipeline_memcpy_async(place(area, i * warp + lane), at + (i * warp + lane) * width, sizeof(Word));
      }
    } else {
      fetch_elements(from, order_stride, area);
    }
  }

  // Until all that the warp has fetched is there.
  __device__ __forceinline__ void wait() const {
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncwarp();
  }

  // Gives the thread its rows of an area, [Rows][NAng].
  __device__ __forceinline__ void take(const T* area, long long order_stride, T (&values)[elements]) const {
    if (keeps_orders(order_stride)) {
#pragma unroll
      for (int m = 0; m < NAng; ++m) {
        T found[Rows];
        kserve::load_shared(area + (m * warp + lane) * Rows, found);
#pragma unroll
        for (int r = 0; r < Rows; ++r) values[r * NAng + m] = found[r];
      }
    } else {
#pragma unroll
      for (int i = 0; i < accesses; ++i) {
        const Word word = *reinterpret_cast<const Word*>(place(area, lane * accesses + i));
        memcpy(&values[i * width], &word, sizeof(word));
      }
    }
  }

  // Writes the rows of each thread, [Rows][NAng], row by row, through an area.
  __device__ __forceinline__ void give(const T (&values)[elements], T* area, T* to) const {
#pragma unroll
    for (int i = 0; i < accesses; ++i) {
      Word word;
      memcpy(&word, &values[i * width], sizeof(word));
      *reinterpret_cast<Word*>(place(area, lane * accesses + i)) = word;
    }
    __syncwarp();
    T* at = to + first * NAng;
    const long long left = (rows - first) * NAng;
#pragma unroll
    for (int i = 0; i < accesses; ++i) {
      const int index = i * warp + lane;
      T found[width];
      kserve::load_shared(place(area, index), found);
      if (is_whole) {
        kserve::store(at + index * width, found);
      } else {
#pragma unroll
        for (int j = 0; j < width; ++j) {
          if (index * width + j < left) at[index * width + j] = found[j];
        }
      }
    }
  }

 private:
  // Whether an area has the operand order by order: where the orders are apart and can be copied 16 bytes at a time.
  __device__ __forceinline__ bool keeps_orders(long long order_stride) const {
    return aligned >= 16 && is_whole && order_stride != 0 && order_stride % wide == 0;
  }

  // Where access `index` of a row-by-row area lies: neighbours of eight owners in different banks.
  template <typename Element>
  __device__ __forceinline__ static Element* place(Element* area, int index) {
    constexpr int spread = (accesses & -accesses) - 1;
    return area + (index ^ (index / 8 & spread)) * width;
  }

  __device__ __forceinline__ void fetch_elements(const T* from, long long order_stride, T* area) const {
#pragma unroll
    for (int i = 0; i < elements; ++i) {
      // Whatever is contiguous is read by neighbouring threads.
      const int index = i * warp + lane;
      const int row = order_stride == 0 ? index / NAng : index % (warp * Rows);
      const int order = order_stride == 0 ? index % NAng : index / (warp * Rows);
      const long long at = order_stride == 0 ? (first + row) * NAng + order : order * order_stride + first + row;
      const int to = row * NAng + order;
      place(area, to / width)[to % width] = first + row < rows ? from[at] : static_cast<T>(0.0f);
    }
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
  alignas(16) __shared__ T areas[Threads / rows::warp][2][Tile::size];
  const Tile tile(n_rows);
  if (tile.first >= n_rows) return;

  T(&area)[2][Tile::size] = areas[threadIdx.x / rows::warp];
  tile.fetch(a_cos, cos_stride, area[0]);
  tile.fetch(a_sin, sin_stride, area[1]);
  tile.wait();
  T cosines[Tile::elements], sines[Tile::elements];
  tile.take(area[0], cos_stride, cosines);
  tile.take(area[1], sin_stride, sines);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float a[NAng], b[NAng];
    rows::widen(cosines + r * NAng, a);
    rows::widen(sines + r * NAng, b);
    circle::forward<NAng, NGrid>(a, b);
    rows::narrow(a, cosines + r * NAng);
    rows::narrow(b, sines + r * NAng);
  }
  tile.give(cosines, area[0], out_cos);
  tile.give(sines, area[1], out_sin);
}

template <typename T, int NAng, int NGrid, int Rows, int Threads>
__global__ void __launch_bounds__(Threads)
    realspace_backward(const T* __restrict__ g_cos, const T* __restrict__ g_sin, const T* __restrict__ a_cos,
                       const T* __restrict__ a_sin, T* __restrict__ da_cos, T* __restrict__ da_sin, long long n_rows,
                       long long g_cos_stride, long long g_sin_stride, long long cos_stride, long long sin_stride) {
  static_assert(NGrid >= 2 * NAng - 1, "n_grid is below 2 * n_ang - 1: the grid cannot tell the orders apart");
  using Tile = rows::Tile<T, NAng, Rows>;
  alignas(16) __shared__ T areas[Threads / rows::warp][4][Tile::size];
  const Tile tile(n_rows);
  if (tile.first >= n_rows) return;

  T(&area)[4][Tile::size] = areas[threadIdx.x / rows::warp];
  tile.fetch(g_cos, g_cos_stride, area[0]);
  tile.fetch(g_sin, g_sin_stride, area[1]);
  tile.fetch(a_cos, cos_stride, area[2]);
  tile.fetch(a_sin, sin_stride, area[3]);
  tile.wait();
  T g_cosines[Tile::elements], g_sines[Tile::elements], cosines[Tile::elements], sines[Tile::elements];
  tile.take(area[0], g_cos_stride, g_cosines);
  tile.take(area[1], g_sin_stride, g_sines);
  tile.take(area[2], cos_stride, cosines);
  tile.take(area[3], sin_stride, sines);
  __syncwarp();
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
  tile.give(g_cosines, area[0], da_cos);
  tile.give(g_sines, area[1], da_sin);
}
