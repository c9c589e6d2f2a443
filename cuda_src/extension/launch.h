// What the operators ask of the device code: plain C, so that neither includes the other's world.
//
// Each launch is there for pointers divisible by 16, and for any. A status is a cudaError_t.

#pragma once

#include <cstdint>

// Rows of KSERVE_HIDDEN floats.
using kserve_norm_residual = int(const float* x, const float* residual, const float* gamma, const float* beta, float* out,
                                 std::int64_t n, float eps, void* stream);
using kserve_edge_features = int(const float* x, const std::int64_t* edge_index, const float* edge_h, float* out,
                                 std::int64_t n_nodes, std::int64_t n_edges, void* stream);
// scratch: 4 words a chunk, then 2 for each graph and 2 more. chunk: KSERVE_SMALL_CHUNK or KSERVE_LARGE_CHUNK edges.
using kserve_graph_norm_bce = int(const float* logits, const float* labels, const std::int64_t* edge_graph,
                                  const float* pos_weight, std::int64_t* scratch, float* out, std::int64_t n_edges,
                                  std::int64_t n_graphs, std::int64_t chunk, void* stream);

extern "C" kserve_norm_residual kserve_norm_residual_aligned, kserve_norm_residual_any;
extern "C" kserve_edge_features kserve_edge_features_aligned, kserve_edge_features_any;
extern "C" kserve_graph_norm_bce kserve_graph_norm_bce_aligned, kserve_graph_norm_bce_any;

constexpr std::int64_t KSERVE_SMALL_CHUNK = 1024, KSERVE_LARGE_CHUNK = 4096;
