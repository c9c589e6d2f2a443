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
// chunk: a multiple of 1,024 edges. scratch: 2 words for each graph and 2 more, and 5 a chunk where there is more than one.
using kserve_graph_norm_bce = int(const float* logits, const float* labels, const std::int64_t* edge_graph,
                                  const float* pos_weight, std::int64_t* scratch, float* out, std::int64_t n_edges,
                                  std::int64_t n_graphs, std::int64_t chunk, void* stream);

extern "C" kserve_norm_residual kserve_norm_residual_aligned, kserve_norm_residual_any;
extern "C" kserve_edge_features kserve_edge_features_aligned, kserve_edge_features_any;
extern "C" kserve_graph_norm_bce kserve_graph_norm_bce_aligned, kserve_graph_norm_bce_any;
