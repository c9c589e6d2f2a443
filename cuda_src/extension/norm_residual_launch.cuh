// The device code of the kernel fused_norm_residual for pointers divisible by KSERVE_ALIGN, and its launch.
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

namespace {

#include <kserve/norm_residual.cuh>

int launch_norm_residual(const float* x, const float* residual, const float* gamma, const float* beta, float* out,
                         std::int64_t n, float eps, void* stream) {
  constexpr int rows_of_a_block = KSERVE_GROUPS * KSERVE_ROWS;
  const auto grid = static_cast<unsigned int>((n + rows_of_a_block - 1) / rows_of_a_block);
  norm_residual<float, KSERVE_HIDDEN, false, KSERVE_LANES, KSERVE_GROUPS, KSERVE_ROWS>
      <<<grid, KSERVE_LANES * KSERVE_GROUPS, 0, static_cast<cudaStream_t>(stream)>>>(x, residual, gamma, beta, out, n, eps);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace
