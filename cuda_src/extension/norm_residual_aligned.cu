#define KSERVE_ALIGN 16
#include "norm_residual_launch.cuh"

int kserve_norm_residual_aligned(const float* x, const float* residual, const float* gamma, const float* beta, float* out,
                                 std::int64_t n, float eps, void* stream) {
  return launch_norm_residual(x, residual, gamma, beta, out, n, eps, stream);
}
