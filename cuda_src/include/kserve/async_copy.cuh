// Copies from global to shared memory that are under way while the thread goes on, without the toolkit's headers: a compile
// reads no other file. Names and meaning are those of <cuda_pipeline_primitives.h>.

#pragma once

#ifndef _CUDA_PIPELINE_PRIMITIVES_H_
// bytes: 4, 8 or 16, a constant; both addresses are multiples of it. 16 bytes pass the L1 cache by.
__device__ __forceinline__ void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  const unsigned int shared = static_cast<unsigned int>(__cvta_generic_to_shared(to));
  if (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else if (bytes == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
  }
}

__device__ __forceinline__ void __pipeline_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits at least for all but the last `newer` commits of this thread, a constant. What other threads copy needs a barrier too.
__device__ __forceinline__ void __pipeline_wait_prior(size_t newer) {
  if (newer == 0) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  }
}
#endif
