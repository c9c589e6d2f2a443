// The device code of the CUDA kernels for pointers divisible by KSERVE_ALIGN bytes, and their launches, named by
// KSERVE_NAMED(base).
//
// Everything lies in an unnamed namespace: the same templates for another alignment are in another unit of this library.

#pragma once

#include <kserve/access.cuh>
#include <kserve/narrow.cuh>
#include <kserve/philox.cuh>

#include "launch.h"

#define KSERVE_ALIGN_X KSERVE_ALIGN
#define KSERVE_ALIGN_RESIDUAL KSERVE_ALIGN
#define KSERVE_ALIGN_OUT KSERVE_ALIGN
#define KSERVE_ALIGN_GAMMA KSERVE_ALIGN
#define KSERVE_ALIGN_BETA KSERVE_ALIGN
#define KSERVE_ALIGN_EDGE_H KSERVE_ALIGN
#define KSERVE_ALIGN_LOGITS KSERVE_ALIGN
#define KSERVE_ALIGN_LABELS KSERVE_ALIGN
#define KSERVE_ALIGN_EDGE_GRAPH KSERVE_ALIGN

namespace {

#include <kserve/edge_features.cuh>
#include <kserve/graph_norm_bce.cuh>
#include <kserve/norm_residual.cuh>

using Index = const long long*;  // what the kernels call an int64

unsigned int blocks(std::int64_t of, std::int64_t each) { return static_cast<unsigned int>((of + each - 1) / each); }

}  // namespace

int KSERVE_NAMED(kserve_norm_residual)(const float* x, const float* residual, const float* gamma, const float* beta, float* out,
                                       std::int64_t n, float eps, void* stream) {
  norm_residual<float, KSERVE_HIDDEN, false, KSERVE_LANES, KSERVE_GROUPS, KSERVE_ROWS>
      <<<blocks(n, KSERVE_GROUPS * KSERVE_ROWS), KSERVE_LANES * KSERVE_GROUPS, 0, static_cast<cudaStream_t>(stream)>>>(
          x, residual, gamma, beta, out, n, eps);
  return static_cast<int>(cudaGetLastError());
}

int KSERVE_NAMED(kserve_edge_features)(const float* x, const std::int64_t* edge_index, const float* edge_h, float* out,
                                       std::int64_t n_nodes, std::int64_t n_edges, void* stream) {
  constexpr int ahead = 1, threads = 256;  // as the knobs are by default
  constexpr int of_warp = ahead * (32 / KSERVE_EDGE_LANES) < 32 ? ahead * (32 / KSERVE_EDGE_LANES) : 32;
  edge_features<float, KSERVE_HIDDEN, KSERVE_EDGE_LANES, ahead, threads>
      <<<blocks(n_edges, threads / 32 * of_warp), threads, 0, static_cast<cudaStream_t>(stream)>>>(
          x, reinterpret_cast<Index>(edge_index), edge_h, out, n_nodes, n_edges);
  return static_cast<int>(cudaGetLastError());
}

int KSERVE_NAMED(kserve_graph_norm_bce)(const float* logits, const float* labels, const std::int64_t* edge_graph,
                                        const float* pos_weight, std::int64_t* scratch, float* out, std::int64_t n_edges,
                                        std::int64_t n_graphs, std::int64_t chunk, void* stream) {
  const auto graph = reinterpret_cast<Index>(edge_graph);
  auto* words = reinterpret_cast<long long*>(scratch);
  const auto on = static_cast<cudaStream_t>(stream);
  if (n_edges <= chunk) {
    bce_few<1024><<<1, 1024, 0, on>>>(logits, labels, graph, pos_weight, words, out, n_edges, n_graphs);
    return static_cast<int>(cudaGetLastError());
  }
  const unsigned int n_chunks = blocks(n_edges, chunk);
  bce_chunks<256><<<n_chunks, 256, 0, on>>>(logits, labels, graph, pos_weight, words, n_edges, n_graphs, chunk);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return static_cast<int>(status);
  const unsigned int joining = blocks(n_edges, 8192) < 264 ? blocks(n_edges, 8192) : 264;
  bce_mean<1024><<<joining, 1024, 0, on>>>(logits, labels, graph, pos_weight, words, out, n_edges, n_graphs, n_chunks);
  return static_cast<int>(cudaGetLastError());
}
