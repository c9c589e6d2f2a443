// Moves a few neighbouring elements between memory and registers in accesses of up to 16 bytes.
//
// The address must be a multiple of the access, min(16, N * sizeof(T)) bytes. "once" marks memory whose lines shall leave the
// caches first, because others there are read again. A kernel that reads nothing twice does without: where other kernels
// have left lines of normal priority, evict-first ones have little of the cache to themselves (docs/performance.md).

#pragma once

namespace kserve {

template <int Bytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<2> {
  using type = unsigned short;
};

// How N elements of T are cut into words.
template <typename T, int N>
struct Access {
  static constexpr int bytes = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
  static constexpr int words = sizeof(T) * N / bytes;
  static constexpr int per_word = N / words;
  using word = typename Word<bytes>::type;
};

// Global memory that no thread of the kernel writes.
template <typename T, int N>
__device__ __forceinline__ void load(const T* from, T (&to)[N]) {
  using A = Access<T, N>;
#pragma unroll
  for (int i = 0; i < A::words; ++i) {
    const typename A::word word = __ldg(reinterpret_cast<const typename A::word*>(from) + i);
    memcpy(&to[i * A::per_word], &word, A::bytes);
  }
}

template <typename T, int N>
__device__ __forceinline__ void load_once(const T* from, T (&to)[N]) {
  using A = Access<T, N>;
#pragma unroll
  for (int i = 0; i < A::words; ++i) {
    const typename A::word word = __ldcs(reinterpret_cast<const typename A::word*>(from) + i);
    memcpy(&to[i * A::per_word], &word, A::bytes);
  }
}

// Shared memory.
template <typename T, int N>
__device__ __forceinline__ void load_shared(const T* from, T (&to)[N]) {
  using A = Access<T, N>;
#pragma unroll
  for (int i = 0; i < A::words; ++i) {
    const typename A::word word = reinterpret_cast<const typename A::word*>(from)[i];
    memcpy(&to[i * A::per_word], &word, A::bytes);
  }
}

// Global memory, with the usual priority in the caches. The intrinsic keeps the access whole.
template <typename T, int N>
__device__ __forceinline__ void store(T* to, const T (&from)[N]) {
  using A = Access<T, N>;
#pragma unroll
  for (int i = 0; i < A::words; ++i) {
    typename A::word word;
    memcpy(&word, &from[i * A::per_word], A::bytes);
    __stwb(reinterpret_cast<typename A::word*>(to) + i, word);
  }
}

template <typename T, int N>
__device__ __forceinline__ void store_once(T* to, const T (&from)[N]) {
  using A = Access<T, N>;
#pragma unroll
  for (int i = 0; i < A::words; ++i) {
    typename A::word word;
    memcpy(&word, &from[i * A::per_word], A::bytes);
    __stcs(reinterpret_cast<typename A::word*>(to) + i, word);
  }
}

}  // namespace kserve
