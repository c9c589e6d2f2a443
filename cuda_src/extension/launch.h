// What the operators ask of the device code: plain C, so that neither includes the other's world.

#pragma once

#include <cstdint>

// One pass over n rows of KSERVE_HIDDEN floats on the stream; a cudaError_t. `_aligned` takes pointers divisible by 16.
using kserve_norm_residual = int(const float* x, const float* residual, const float* gamma, const float* beta, float* out,
                                 std::int64_t n, float eps, void* stream);
extern "C" kserve_norm_residual kserve_norm_residual_aligned, kserve_norm_residual_any;
