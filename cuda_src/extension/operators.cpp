// torch.ops.kserve.norm_residual_<hidden>, on torch's stable ABI. The checks are those that memory safety needs;
// kserve.ops.extension has the documented function in front.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>

#include "launch.h"

namespace {

using torch::stable::Tensor;

void check(const Tensor& tensor, const Tensor& x, std::initializer_list<std::int64_t> shape) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), "all tensors lie on one CUDA device");
  STD_TORCH_CHECK(tensor.scalar_type() == torch::headeronly::ScalarType::Float, "all tensors are float32");
  STD_TORCH_CHECK(tensor.is_contiguous(), "all tensors are contiguous");
  STD_TORCH_CHECK(tensor.dim() == static_cast<std::int64_t>(shape.size()), "x and residual are [N, H], gamma and beta [H]");
  std::int64_t at = 0;
  for (const std::int64_t size : shape) {
    STD_TORCH_CHECK(tensor.size(at) == size, "x and residual are [N, H], gamma and beta [H]");
    ++at;
  }
}

bool is_aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

Tensor norm_residual(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta, double eps) {
  STD_TORCH_CHECK(x.dim() == 2, "x and residual are [N, H], gamma and beta [H]");
  const std::int64_t n = x.size(0);
  for (const Tensor* rows : {&x, &residual}) check(*rows, x, {n, KSERVE_HIDDEN});
  for (const Tensor* affine : {&gamma, &beta}) check(*affine, x, {KSERVE_HIDDEN});
  Tensor out = torch::stable::empty_like(x);
  if (n == 0) return out;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const auto* values = static_cast<const float*>(x.data_ptr());
  const auto* added = static_cast<const float*>(residual.data_ptr());
  const auto* weight = static_cast<const float*>(gamma.data_ptr());
  const auto* bias = static_cast<const float*>(beta.data_ptr());
  auto* result = static_cast<float*>(out.data_ptr());
  const bool aligned = is_aligned({values, added, weight, bias, result});
  const auto launch = aligned ? kserve_norm_residual_aligned : kserve_norm_residual_any;
  const int status = launch(values, added, weight, bias, result, n, static_cast<float>(eps), stream);
  STD_TORCH_CHECK(status == 0, "norm_residual cannot be launched: CUDA error ", status);
  return out;
}

}  // namespace

#define KSERVE_TEXT_(name) #name
#define KSERVE_TEXT(name) KSERVE_TEXT_(name)
#define KSERVE_NAMED(base) base KSERVE_TEXT(KSERVE_HIDDEN)

STABLE_TORCH_LIBRARY_FRAGMENT(kserve, library) {
  library.def(KSERVE_NAMED("norm_residual_") "(Tensor x, Tensor residual, Tensor gamma, Tensor beta, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kserve, CUDA, library) { library.impl(KSERVE_NAMED("norm_residual_"), TORCH_BOX(&norm_residual)); }
