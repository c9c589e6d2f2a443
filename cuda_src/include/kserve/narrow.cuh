// The 16-bit floating-point types, without the toolkit's headers: a compile reads no other file. Stored as their bits,
// computed with as float, rounded to nearest even once.

#pragma once

#ifndef __CUDA_FP16_H__
struct __half {
  unsigned short bits;
  __half() = default;
  __device__ __forceinline__ explicit __half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ __forceinline__ explicit operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};
#endif

#ifndef __CUDA_BF16_H__
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __device__ __forceinline__ explicit __nv_bfloat16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ __forceinline__ explicit operator float() const { return __uint_as_float(static_cast<unsigned int>(bits) << 16); }
};
#endif
