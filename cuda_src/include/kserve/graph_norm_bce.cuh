// The loss of each edge, averaged inside its graph, then over the graphs.
//
// Sorted edges, without atomics and bit for bit the same every time: bce_chunks makes one record of each chunk of edges, with
// what belongs to graphs that may go on in the neighbouring chunks kept apart; bce_mean joins the records in order. One giant
// graph is no special case. Where edges are few bce_few does both in one block. Where edges are not sorted the kernels find
// out, and sum the losses of each graph in fixed point instead: integer addition has no order either.

#pragma once

#include "bce_edges.cuh"

namespace bce {

constexpr int threads_of_multiprocessor = 1024;  // half of what fit, so that each has registers to fetch into
constexpr int words = 5;                         // of scratch for each chunk, 8 bytes each
constexpr float fixed_one = 16777216.0f;         // 2^24: a step of the fixed-point sums

using WideRun = segments::Run<double, long long>;
using WideSegment = segments::Segment<double, long long>;

// What the first kernel leaves of each chunk for the second.
struct __align__(16) Record {
  double complete;
  int first_graph, last_graph;
  float first_sum, last_sum;
  int first_count, last_count;
};
static_assert(sizeof(Record) == (words - 1) * 8, "kernel.toml states the size");

__device__ __forceinline__ Record record_of(const Run& run) {
  return {run.complete, run.first.graph, run.last.graph, run.first.sum, run.last.sum, run.first.count, run.last.count};
}

__device__ __forceinline__ WideRun wide(const Record& record) {
  return {{record.first_graph, record.first_count, record.first_sum},
          {record.last_graph, record.last_count, record.last_sum},
          record.complete};
}

// Scratch: the records, what is wrong with each chunk apart from them, since every block reads that; then what edges in no
// order are summed in.
struct Scratch {
  Record* records;
  long long* wrong;
  unsigned long long* sums;
  unsigned long long* counts;
  unsigned long long* ticket;
  unsigned long long* not_finite;

  __device__ __forceinline__ Scratch(long long* scratch, long long n_chunks, long long n_graphs) {
    records = reinterpret_cast<Record*>(scratch);
    wrong = scratch + n_chunks * (words - 1);
    sums = reinterpret_cast<unsigned long long*>(wrong + n_chunks);
    counts = sums + n_graphs;
    ticket = counts + n_graphs;
    not_finite = ticket + 1;
  }

  // Every block of the grid calls this.
  __device__ __forceinline__ void clear_sums(long long n_graphs) const {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < 2 * n_graphs + 2; i += step)
      sums[i] = 0;
  }
};

// The run of the block's warps, in their order; the first warp has it. Called once in a kernel.
template <typename AnyRun, int Warps>
__device__ __forceinline__ AnyRun join_warps(const AnyRun (&of_warp)[Warps]) {
  const int lane = threadIdx.x % warp;
  AnyRun whole = segments::join_lanes(lane < Warps ? of_warp[lane] : AnyRun::empty());
  whole.complete = segments::sum_of_lanes(whole.complete);
  return whole;
}

__device__ __forceinline__ float mean_over_graphs(double sum, long long n_graphs) {
  return static_cast<float>(segments::mean(WideSegment{segments::none, n_graphs, sum}));
}

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// The sum of a double over the block, in a fixed order; the first thread has it. Called once in a kernel.
template <int Threads>
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double partial[Threads / warp];
  value = segments::sum_of_lanes(value);
  if (threadIdx.x % warp == 0) partial[threadIdx.x / warp] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Threads / warp; ++i) sum += partial[i];
  }
  return sum;
}

// Every block adds its edges; the last one to finish has the mean.
template <int Threads>
__device__ __forceinline__ void mean_of_unsorted(const Inputs& from, const Scratch& scratch, float* out) {
  const float positive_weight = from.positive_weight();
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; e < from.n_edges; e += step) {
    const float one = loss(from.logits[e], from.labels[e], positive_weight);
    if (!isfinite(one)) atomicExch(scratch.not_finite, 1ull);
    const long long fixed = isfinite(one) ? __float2ll_rn(one * fixed_one) : 0;
    atomicAdd(scratch.sums + from.edge_graph[e], static_cast<unsigned long long>(fixed));
    atomicAdd(scratch.counts + from.edge_graph[e], 1ull);
  }
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(scratch.ticket, 1ull) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  double sum = 0;
  for (long long g = threadIdx.x; g < from.n_graphs; g += blockDim.x) {
    const long long count = static_cast<long long>(__ldcg(scratch.counts + g));
    const double total = static_cast<double>(static_cast<long long>(__ldcg(scratch.sums + g)));
    if (count > 0) sum += total / fixed_one / static_cast<double>(count);
  }
  sum = block_sum<Threads>(sum);
  if (threadIdx.x == 0) {
    const bool finite = __ldcg(scratch.not_finite) == 0;
    *out = finite ? mean_over_graphs(sum, from.n_graphs) : not_a_number();
  }
}

// Edges of which some are wrong: a graph outside gives NaN, whatever the order. Every thread of the block calls this.
template <int Threads>
__device__ __forceinline__ void mean_of_wrong(const Inputs& from, int wrong, const Scratch& scratch, float* out) {
  if (__syncthreads_or(wrong & out_of_range)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *out = not_a_number();
  } else {
    mean_of_unsorted<Threads>(from, scratch, out);
  }
}

}  // namespace bce

// chunk: a multiple of 1,024.
template <int Threads>
__global__ void __launch_bounds__(Threads, bce::threads_of_multiprocessor / Threads)
    bce_chunks(const float* __restrict__ logits, const float* __restrict__ labels, const long long* __restrict__ edge_graph,
               const float* __restrict__ pos_weight, long long* __restrict__ scratch, long long n_edges, long long n_graphs,
               long long chunk) {
  constexpr int warps = Threads / bce::warp;
  __shared__ bce::Run of_warp[warps];
  __shared__ int wrong_of_warp[warps];
  const bce::Inputs from{logits, labels, edge_graph, pos_weight, n_edges, n_graphs};
  const bce::Scratch to(scratch, gridDim.x, n_graphs);
  const int lane = threadIdx.x % bce::warp, which = threadIdx.x / bce::warp;
  const long long share = chunk / warps;
  int wrong = 0;
  const bce::Run run = bce::run_of_warp(from, blockIdx.x * chunk + which * share, share, wrong);
  wrong = __reduce_or_sync(bce::all_lanes, wrong);
  if (lane == 0) {
    of_warp[which] = run;
    wrong_of_warp[which] = wrong;
  }
  to.clear_sums(n_graphs);  // the second kernel may have to count in them
  __syncthreads();
  if (which != 0) return;
  const bce::Run whole = bce::join_warps(of_warp);
  const int any = __reduce_or_sync(bce::all_lanes, lane < warps ? wrong_of_warp[lane] : 0);
  if (lane == 0) {
    to.records[blockIdx.x] = bce::record_of(whole);
    to.wrong[blockIdx.x] = any;
  }
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    bce_mean(const float* __restrict__ logits, const float* __restrict__ labels, const long long* __restrict__ edge_graph,
             const float* __restrict__ pos_weight, long long* __restrict__ scratch, float* __restrict__ out, long long n_edges,
             long long n_graphs, long long n_chunks) {
  __shared__ bce::WideRun of_warp[Threads / bce::warp];
  const bce::Inputs from{logits, labels, edge_graph, pos_weight, n_edges, n_graphs};
  const bce::Scratch left(scratch, n_chunks, n_graphs);
  int wrong = 0;
  if (blockIdx.x != 0) {
#pragma unroll 1
    for (long long i = threadIdx.x; i < n_chunks; i += Threads) wrong |= static_cast<int>(left.wrong[i]);
  } else {  // the records in order: each thread joins its share, then each warp those of its lanes
    const long long share = (n_chunks + Threads - 1) / Threads;
    bce::WideRun run = bce::WideRun::empty();
#pragma unroll 1
    for (long long i = threadIdx.x * share; i < (threadIdx.x + 1) * share && i < n_chunks; ++i) {
      wrong |= static_cast<int>(left.wrong[i]);
      run.append(bce::wide(left.records[i]));
    }
    run = segments::join_lanes(run);
    run.complete = segments::sum_of_lanes(run.complete);
    if (threadIdx.x % bce::warp == 0) of_warp[threadIdx.x / bce::warp] = run;
  }
  if (__syncthreads_or(wrong)) {
    bce::mean_of_wrong<Threads>(from, wrong, left, out);
  } else if (blockIdx.x == 0 && threadIdx.x < bce::warp) {
    const bce::WideRun whole = bce::join_warps(of_warp);
    if (threadIdx.x == 0) *out = bce::mean_over_graphs(whole.closed(), n_graphs);
  }
}

// Both halves in one block, without records.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    bce_few(const float* __restrict__ logits, const float* __restrict__ labels, const long long* __restrict__ edge_graph,
            const float* __restrict__ pos_weight, long long* __restrict__ scratch, float* __restrict__ out, long long n_edges,
            long long n_graphs) {
  constexpr int warps = Threads / bce::warp;
  __shared__ bce::WideRun of_warp[warps];
  const bce::Inputs from{logits, labels, edge_graph, pos_weight, n_edges, n_graphs};
  const int which = threadIdx.x / bce::warp;
  const long long share = (n_edges + Threads * bce::per_lane - 1) / (Threads * bce::per_lane) * bce::tile;
  int wrong = 0;
  const bce::Run run = bce::run_of_warp(from, which * share, share, wrong);
  if (threadIdx.x % bce::warp == 0) of_warp[which] = bce::wide(bce::record_of(run));
  if (__syncthreads_or(wrong)) {
    const bce::Scratch to(scratch, 0, n_graphs);
    to.clear_sums(n_graphs);
    __syncthreads();
    bce::mean_of_wrong<Threads>(from, wrong, to, out);
  } else if (which == 0) {
    const bce::WideRun whole = bce::join_warps(of_warp);
    if (threadIdx.x == 0) *out = bce::mean_over_graphs(whole.closed(), n_graphs);
  }
}

// Edges in any order: lanes with neighbours of the same graph add up first, and the last of each such stretch adds to memory.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    bce_atomic(const float* __restrict__ logits, const float* __restrict__ labels, const long long* __restrict__ edge_graph,
               const float* __restrict__ pos_weight, float* __restrict__ sums, int* __restrict__ counts, long long n_edges,
               long long n_graphs) {
  const long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x % bce::warp;
  const bool exists = e < n_edges;
  const long long graph = exists ? edge_graph[e] : -1;
  float sum = exists ? bce::loss(logits[e], labels[e], pos_weight == nullptr ? 1.0f : *pos_weight) : 0.0f;
  // A stretch begins where the graph differs from the lane before: an id that comes again later begins another one.
  const long long before = __shfl_up_sync(bce::all_lanes, graph, 1);
  const unsigned int heads = __ballot_sync(bce::all_lanes, lane == 0 || before != graph);
  const unsigned int at_or_below = lane == 31 ? bce::all_lanes : (2u << lane) - 1u;
  const int head = 31 - __clz(static_cast<int>(heads & at_or_below));
#pragma unroll
  for (int step = 1; step < bce::warp; step *= 2) {
    const float other = __shfl_up_sync(bce::all_lanes, sum, step);
    if (lane - step >= head) sum += other;
  }
  const bool is_tail = lane == 31 || (heads >> (lane + 1)) & 1u;
  if (exists && is_tail && graph >= 0 && graph < n_graphs) {
    atomicAdd(sums + graph, sum);
    atomicAdd(counts + graph, lane - head + 1);
  }
}

template <int Threads>
__global__ void __launch_bounds__(Threads) bce_atomic_mean(const float* __restrict__ sums, const int* __restrict__ counts,
                                                           float* __restrict__ out, long long n_graphs) {
  double sum = 0;
  for (long long g = threadIdx.x; g < n_graphs; g += blockDim.x) {
    if (counts[g] > 0) sum += static_cast<double>(sums[g]) / counts[g];
  }
  sum = bce::block_sum<Threads>(sum);
  if (threadIdx.x == 0) *out = static_cast<float>(sum / static_cast<double>(n_graphs));
}
