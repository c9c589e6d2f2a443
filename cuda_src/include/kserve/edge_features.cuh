// For each edge: the sum of its two nodes' rows, the absolute difference, and the edge's own row, side by side.
//
// A warp takes a few neighbouring edges: it reads their indices in two coalesced accesses and hands them round, so that the
// rows of all of them are under way at once and no gather waits for an index of its own. A row is held by Lanes lanes; a
// warp does 32 / Lanes edges side by side. What is read or written once leaves the caches first; node rows stay.
//
// No warp comes back for more: blocks start in order, so that all multiprocessors read and write one stretch of memory that
// moves on. With a stretch for each block the memory is slower.

#pragma once

#include <kserve/access.cuh>
#include <kserve/narrow.cuh>

namespace edges {

constexpr int warp = 32;
constexpr unsigned int all_lanes = 0xffffffffu;

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Elements of one access: the widest up to 16 bytes that divides a row and that all pointers are aligned for.
template <typename T>
__host__ __device__ constexpr int access_elements(int hidden) {
  constexpr int aligned = smaller(KSERVE_ALIGN_X, smaller(KSERVE_ALIGN_EDGE_H, KSERVE_ALIGN_OUT));
  int elements = 16 / static_cast<int>(sizeof(T));
  while (elements > 1 && (hidden % elements != 0 || aligned < elements * static_cast<int>(sizeof(T)))) elements /= 2;
  return elements;
}

}  // namespace edges

template <typename T, int Hidden, int Lanes, int MostAhead, int Threads>
__global__ void __launch_bounds__(Threads)
    edge_features(const T* __restrict__ x, const long long* __restrict__ edge_index, const T* __restrict__ edge_h,
                  T* __restrict__ out, long long n_nodes, long long n_edges) {
  constexpr int Width = edges::access_elements<T>(Hidden);
  constexpr int Accesses = Hidden / Width;
  constexpr int Items = (Accesses + Lanes - 1) / Lanes;
  constexpr int Side = edges::warp / Lanes;  // edges side by side in a warp
  constexpr int Ahead = edges::smaller(edges::warp / Side, MostAhead);
  constexpr int Count = Ahead * Side;  // edges of the warp

  const int lane = threadIdx.x % edges::warp;
  const int part = lane % Lanes;
  const long long first = (static_cast<long long>(blockIdx.x) * (Threads / edges::warp) + threadIdx.x / edges::warp) * Count;
  const int count = n_edges - first < Count ? static_cast<int>(n_edges - first) : Count;  // not above 0: nothing is done
  const long long source = lane < count ? __ldcs(edge_index + first + lane) : 0;
  const long long target = lane < count ? __ldcs(edge_index + n_edges + first + lane) : 0;
#ifdef KSERVE_CHECKED
  if (lane < count && (source < 0 || source >= n_nodes || target < 0 || target >= n_nodes)) __trap();
#endif

#pragma unroll 1
  for (int item = 0; item < Items; ++item) {
    const int column = (item * Lanes + part) * Width;
    const bool inside = Accesses % Lanes == 0 || column < Hidden;
    T a[Ahead][Width], b[Ahead][Width], own[Ahead][Width];
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      const int edge = i * Side + lane / Lanes;
      const long long from = __shfl_sync(edges::all_lanes, source, edge);
      const long long to = __shfl_sync(edges::all_lanes, target, edge);
      if (edge < count && inside) {
        kserve::load(x + from * Hidden + column, a[i]);
        kserve::load(x + to * Hidden + column, b[i]);
        kserve::load_once(edge_h + (first + edge) * Hidden + column, own[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      const int edge = i * Side + lane / Lanes;
      if (edge < count && inside) {
        T sum[Width], difference[Width];
#pragma unroll
        for (int j = 0; j < Width; ++j) {
          const float left = static_cast<float>(a[i][j]), right = static_cast<float>(b[i][j]);
          sum[j] = static_cast<T>(left + right);
          difference[j] = static_cast<T>(fabsf(left - right));
        }
        T* row = out + (first + edge) * (3LL * Hidden) + column;
        kserve::store_once(row, sum);
        kserve::store_once(row + Hidden, difference);
        kserve::store_once(row + 2 * Hidden, own[i]);
      }
    }
  }
}
