// torch.ops.kserve.<kernel>_<hidden>, on torch's stable ABI. The checks are those that memory safety needs;
// kserve.ops.extension has the documented functions in front.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "launch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check(const char* name, const Tensor& tensor, const Tensor& beside, ScalarType type,
           const std::vector<std::int64_t>& shape) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == beside.get_device_index(), name,
                  " lies on another device than the first tensor");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has another dtype than the kernel takes");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
  bool fits = tensor.dim() == static_cast<std::int64_t>(shape.size());
  for (std::size_t i = 0; fits && i < shape.size(); ++i) fits = tensor.size(static_cast<std::int64_t>(i)) == shape[i];
  STD_TORCH_CHECK(fits, name, " has another shape than the kernel takes");
}

const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.data_ptr()); }
const std::int64_t* integers(const Tensor& tensor) { return static_cast<const std::int64_t*>(tensor.data_ptr()); }

bool is_aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

void* stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

void check_launch(const char* name, int status) {
  STD_TORCH_CHECK(status == 0, name, " cannot be launched: CUDA error ", status);
}

Tensor norm_residual(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta, double eps) {
  STD_TORCH_CHECK(x.dim() == 2, "x has another shape than [N, H]");
  const std::int64_t n = x.size(0);
  check("x", x, x, ScalarType::Float, {n, KSERVE_HIDDEN});
  check("residual", residual, x, ScalarType::Float, {n, KSERVE_HIDDEN});
  check("gamma", gamma, x, ScalarType::Float, {KSERVE_HIDDEN});
  check("beta", beta, x, ScalarType::Float, {KSERVE_HIDDEN});
  Tensor out = torch::stable::empty_like(x);
  if (n == 0) return out;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  auto* result = static_cast<float*>(out.data_ptr());
  const bool aligned = is_aligned({floats(x), floats(residual), floats(gamma), floats(beta), result});
  const auto launch = aligned ? kserve_norm_residual_aligned : kserve_norm_residual_any;
  check_launch("norm_residual", launch(floats(x), floats(residual), floats(gamma), floats(beta), result, n,
                                       static_cast<float>(eps), stream_of(x)));
  return out;
}

Tensor edge_features(const Tensor& x, const Tensor& edge_index, const Tensor& edge_h) {
  STD_TORCH_CHECK(x.dim() == 2 && edge_h.dim() == 2, "x and edge_h have another shape than [N, H] and [E, H]");
  const std::int64_t n_nodes = x.size(0), n_edges = edge_h.size(0);
  check("x", x, x, ScalarType::Float, {n_nodes, KSERVE_HIDDEN});
  check("edge_index", edge_index, x, ScalarType::Long, {2, n_edges});
  check("edge_h", edge_h, x, ScalarType::Float, {n_edges, KSERVE_HIDDEN});
  STD_TORCH_CHECK(n_nodes > 0 || n_edges == 0, "edge_index names edges, and x has no node");
  Tensor out = torch::stable::new_empty(x, {n_edges, 3 * KSERVE_HIDDEN});
  if (n_edges == 0) return out;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  auto* result = static_cast<float*>(out.data_ptr());
  const auto launch = is_aligned({floats(x), floats(edge_h), result}) ? kserve_edge_features_aligned : kserve_edge_features_any;
  check_launch("edge_features",
               launch(floats(x), integers(edge_index), floats(edge_h), result, n_nodes, n_edges, stream_of(x)));
  return out;
}

Tensor graph_norm_bce(const Tensor& logits, const Tensor& target, const Tensor& edge_graph, std::int64_t n_graphs,
                      const std::optional<Tensor>& pos_weight, std::int64_t chunk) {
  STD_TORCH_CHECK(logits.dim() == 1 && logits.size(0) > 0, "logits has another shape than [E], E from 1");
  const std::int64_t n_edges = logits.size(0);
  check("logits", logits, logits, ScalarType::Float, {n_edges});
  check("target", target, logits, ScalarType::Float, {n_edges});
  check("edge_graph", edge_graph, logits, ScalarType::Long, {n_edges});
  if (pos_weight.has_value()) check("pos_weight", *pos_weight, logits, ScalarType::Float, {});
  STD_TORCH_CHECK(n_graphs >= 1 && n_graphs < (std::int64_t{1} << 31), "n_graphs is 1 to 2**31 - 1");
  STD_TORCH_CHECK(chunk >= 1024 && chunk <= (1 << 30) && chunk % 1024 == 0, "chunk is a multiple of 1024 up to 2**30");
  Tensor scratch = torch::stable::new_empty(edge_graph, {(n_edges + chunk - 1) / chunk * 5 + 2 * n_graphs + 2});
  Tensor out = torch::stable::new_empty(logits, {});
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const bool aligned = is_aligned({floats(logits), floats(target), integers(edge_graph)});
  const auto launch = aligned ? kserve_graph_norm_bce_aligned : kserve_graph_norm_bce_any;
  check_launch("graph_norm_bce",
               launch(floats(logits), floats(target), integers(edge_graph), pos_weight ? floats(*pos_weight) : nullptr,
                      static_cast<std::int64_t*>(scratch.data_ptr()), static_cast<float*>(out.data_ptr()), n_edges, n_graphs,
                      chunk, stream_of(logits)));
  return out;
}

}  // namespace

#define KSERVE_TEXT_(name) #name
#define KSERVE_TEXT(name) KSERVE_TEXT_(name)
#define KSERVE_OPERATOR(base) base "_" KSERVE_TEXT(KSERVE_HIDDEN)

STABLE_TORCH_LIBRARY_FRAGMENT(kserve, library) {
  library.def(KSERVE_OPERATOR("norm_residual") "(Tensor x, Tensor residual, Tensor gamma, Tensor beta, float eps) -> Tensor");
  library.def(KSERVE_OPERATOR("edge_features") "(Tensor x, Tensor edge_index, Tensor edge_h) -> Tensor");
  library.def(KSERVE_OPERATOR("graph_norm_bce") "(Tensor logits, Tensor target, Tensor edge_graph, int n_graphs,"
                                                " Tensor? pos_weight, int chunk) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kserve, CUDA, library) {
  library.impl(KSERVE_OPERATOR("norm_residual"), TORCH_BOX(&norm_residual));
  library.impl(KSERVE_OPERATOR("edge_features"), TORCH_BOX(&edge_features));
  library.impl(KSERVE_OPERATOR("graph_norm_bce"), TORCH_BOX(&graph_norm_bce));
}
