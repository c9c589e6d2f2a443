// The loss of each edge, averaged inside its graph, then over the graphs.
//
// Sorted edges, without atomics and bit for bit the same every time: bce_chunks makes one record of each chunk of edges, with
// what belongs to graphs that may go on in the neighbouring chunks kept apart; bce_mean joins the records in order. One giant
// graph is no special case. Where edges are not sorted the first kernel says so, and the blocks of the second sum the
// losses of each graph in fixed point instead: integer addition has no order either.

#pragma once

#include <kserve/access.cuh>

#include "segments.cuh"

namespace bce {

constexpr int warp = 32;
constexpr unsigned int all_lanes = 0xffffffffu;
constexpr int threads = 256;
constexpr int per_lane = 4;                         // neighbouring edges of one access
constexpr int tile = warp * per_lane;               // edges of one access of a warp
constexpr int joining_threads = 512;                // of the second kernel
constexpr int edges_per_tile = threads * per_lane;  // of a chunk, for each tile of its warps
constexpr int words = 4;                            // of a record, 8 bytes each
constexpr int unsorted = 1, out_of_range = 2;       // what is wrong with a chunk
constexpr float fixed_one = 16777216.0f;            // 2^24: a step of the fixed-point sums

using Segment = segments::Segment<float, int>;
using Run = segments::Run<float, int>;
using WideRun = segments::Run<double, long long>;

// What the first kernel leaves for the second.
struct __align__(16) Record {
  double complete;
  int first_graph, last_graph;
  float first_sum, last_sum;
  unsigned short first_count, last_count;
  int wrong;
};
static_assert(sizeof(Record) == words * 8, "kernel.toml states the size");

// (1 - t) z + (1 + (w - 1) t) (max(-z, 0) + log(1 + exp(-|z|))): finite for every finite logit.
__device__ __forceinline__ float loss(float z, float t, float positive_weight) {
  const float softplus = fmaxf(-z, 0.0f) + log1pf(expf(-fabsf(z)));
  // fmaxf drops a NaN; the first term keeps it.
  return (1.0f - t) * z + (1.0f + (positive_weight - 1.0f) * t) * softplus;
}

template <typename Value>
__device__ __forceinline__ Value warp_sum(Value value) {
#pragma unroll
  for (int step = warp / 2; step > 0; step /= 2) value += __shfl_xor_sync(all_lanes, value, step);
  return value;
}

// Four neighbouring edges.
struct Edges {
  float loss[per_lane];
  int graph[per_lane];
  int count;  // that exist; they come first
};

template <typename T>
__device__ __forceinline__ void load_some(const T* from, long long at, long long end, T (&to)[per_lane]) {
#pragma unroll
  for (int i = 0; i < per_lane; ++i) to[i] = at + i < end ? __ldcs(from + at + i) : static_cast<T>(0);
}

#ifdef KSERVE_ALIGN_LOGITS
constexpr bool aligned = KSERVE_ALIGN_LOGITS >= 16 && KSERVE_ALIGN_LABELS >= 16 && KSERVE_ALIGN_EDGE_GRAPH >= 16;
#else
constexpr bool aligned = false;  // an entry that reads no edges
#endif

// wrong collects what is amiss with the ids.
__device__ __forceinline__ Edges load(const float* logits, const float* labels, const long long* edge_graph, long long at,
                                      long long n_edges, long long n_graphs, float positive_weight, int& wrong) {
  float z[per_lane], t[per_lane];
  long long id[per_lane];
  Edges found;
  const long long left = n_edges - at;
  found.count = left < 0 ? 0 : left < per_lane ? static_cast<int>(left) : per_lane;
  if (aligned && found.count == per_lane) {
    kserve::load_once(logits + at, z);
    kserve::load_once(labels + at, t);
    kserve::load_once(edge_graph + at, id);
  } else {
    load_some(logits, at, n_edges, z);
    load_some(labels, at, n_edges, t);
    load_some(edge_graph, at, n_edges, id);
  }
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const bool exists = i < found.count;
    if (exists && (id[i] < 0 || id[i] >= n_graphs)) wrong |= out_of_range;
    found.graph[i] = exists ? static_cast<int>(id[i]) : 0;
    found.loss[i] = exists ? loss(z[i], t[i], positive_weight) : 0.0f;
  }
  return found;
}

// The ids of a tile that exist, in order, with nothing before them that is larger?
__device__ __forceinline__ bool is_sorted(const Edges& edges, int before) {
  const int neighbour = __shfl_up_sync(all_lanes, edges.graph[per_lane - 1], 1);
  int previous = threadIdx.x % warp == 0 ? before : neighbour;
  bool sorted = true;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    if (i < edges.count) {
      sorted = sorted && previous <= edges.graph[i];
      previous = edges.graph[i];
    }
  }
  return __all_sync(all_lanes, sorted);
}

// Append the segments of a sorted tile of `count` edges, one graph after the other.
__device__ __forceinline__ void append_tile(Run& run, const Edges& edges, int count) {
  for (int done = 0; done < count;) {
    const int slot = done % per_lane;
    int candidate = edges.graph[0];
#pragma unroll
    for (int i = 1; i < per_lane; ++i) candidate = slot == i ? edges.graph[i] : candidate;
    Segment next{__shfl_sync(all_lanes, candidate, done / per_lane), 0, 0.0f};
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      if (i < edges.count && edges.graph[i] == next.graph) {
        next.sum += edges.loss[i];
        ++next.count;
      }
    }
    next.sum = warp_sum(next.sum);
    next.count = warp_sum(next.count);
    run.append(next);
    done += next.count;
  }
}

__device__ __forceinline__ Run run_of(const Record& record) {
  return Run{{record.first_graph, record.first_count, record.first_sum},
             {record.last_graph, record.last_count, record.last_sum},
             record.complete};
}

__device__ __forceinline__ Record record_of(const Run& run, int wrong) {
  Record record;
  record.complete = run.complete;
  record.first_graph = run.first.graph;
  record.last_graph = run.last.graph;
  record.first_sum = run.first.sum;
  record.last_sum = run.last.sum;
  record.first_count = static_cast<unsigned short>(run.first.count);
  record.last_count = static_cast<unsigned short>(run.last.count);
  record.wrong = wrong;
  return record;
}

// The sum of a double over the block, in a fixed order; the first thread has it. Called once in a kernel.
template <int Threads>
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double partial[Threads / warp];
  value = warp_sum(value);
  if (threadIdx.x % warp == 0) partial[threadIdx.x / warp] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Threads / warp; ++i) sum += partial[i];
  }
  return sum;
}

// Where the fixed-point sums, the counts, the ticket and the mark of a loss that is not finite lie behind the records.
struct Diverted {
  unsigned long long* sums;
  unsigned long long* counts;
  unsigned long long* ticket;
  unsigned long long* not_finite;

  __device__ __forceinline__ Diverted(long long* scratch, long long n_chunks, long long n_graphs) {
    sums = reinterpret_cast<unsigned long long*>(scratch + n_chunks * words);
    counts = sums + n_graphs;
    ticket = counts + n_graphs;
    not_finite = ticket + 1;
  }
};

// Every block adds its edges; the last one to finish has the mean.
__device__ __forceinline__ void mean_of_unsorted(const float* logits, const float* labels, const long long* edge_graph,
                                                 float positive_weight, const Diverted& diverted, float* out, long long n_edges,
                                                 long long n_graphs) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; e < n_edges; e += step) {
    const float one = loss(logits[e], labels[e], positive_weight);
    if (!isfinite(one)) atomicExch(diverted.not_finite, 1ull);
    const long long fixed = isfinite(one) ? __float2ll_rn(one * fixed_one) : 0;
    atomicAdd(diverted.sums + edge_graph[e], static_cast<unsigned long long>(fixed));
    atomicAdd(diverted.counts + edge_graph[e], 1ull);
  }
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(diverted.ticket, 1ull) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  double sum = 0;
  for (long long g = threadIdx.x; g < n_graphs; g += blockDim.x) {
    const long long count = static_cast<long long>(__ldcg(diverted.counts + g));
    const double total = static_cast<double>(static_cast<long long>(__ldcg(diverted.sums + g)));
    if (count > 0) sum += total / fixed_one / static_cast<double>(count);
  }
  sum = block_sum<joining_threads>(sum);
  if (threadIdx.x == 0) {
    const bool finite = __ldcg(diverted.not_finite) == 0;
    *out = finite ? static_cast<float>(sum / static_cast<double>(n_graphs)) : __int_as_float(0x7fffffff);
  }
}

}  // namespace bce

template <int Tiles>
__global__ void __launch_bounds__(bce::threads)
    bce_chunks(const float* __restrict__ logits, const float* __restrict__ labels, const long long* __restrict__ edge_graph,
               const float* __restrict__ pos_weight, long long* __restrict__ scratch, long long n_edges, long long n_graphs) {
  __shared__ bce::Record of_warp[bce::threads / bce::warp];
  const float positive_weight = pos_weight == nullptr ? 1.0f : *pos_weight;
  const int lane = threadIdx.x % bce::warp;
  const long long begin =
      static_cast<long long>(blockIdx.x) * (Tiles * bce::edges_per_tile) + (threadIdx.x / bce::warp) * (Tiles * bce::tile);

  int wrong = 0;
  bce::Edges edges[Tiles];
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    const long long at = begin + i * bce::tile + lane * bce::per_lane;
    edges[i] = bce::load(logits, labels, edge_graph, at, n_edges, n_graphs, positive_weight, wrong);
  }
  int before = 0;
  if (lane == 0 && begin > 0 && begin < n_edges) before = static_cast<int>(edge_graph[begin - 1]);
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    if (!bce::is_sorted(edges[i], before)) wrong |= bce::unsorted;
    before = __shfl_sync(bce::all_lanes, edges[i].graph[bce::per_lane - 1], bce::warp - 1);
  }
  wrong = __reduce_or_sync(bce::all_lanes, wrong);

  bce::Run run = bce::Run::empty();
  if (wrong == 0) {
    const long long left = n_edges - begin;
    constexpr int whole = Tiles * bce::tile;
    const int count = left < 0 ? 0 : left < whole ? static_cast<int>(left) : whole;
    const int first_id = __shfl_sync(bce::all_lanes, edges[0].graph[0], 0);
    if (count == whole && first_id == before) {  // one graph: the usual case of large ones
      bce::Segment all{first_id, whole, 0.0f};
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
#pragma unroll
        for (int j = 0; j < bce::per_lane; ++j) all.sum += edges[i].loss[j];
      }
      all.sum = bce::warp_sum(all.sum);
      run.append(all);
    } else {
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        const int here = count - i * bce::tile;
        bce::append_tile(run, edges[i], here < bce::tile ? here : bce::tile);
      }
    }
  }
  if (lane == 0) of_warp[threadIdx.x / bce::warp] = bce::record_of(run, wrong);
  __syncthreads();

  if (threadIdx.x == 0) {
    bce::Run whole = bce::Run::empty();
    int any = 0;
    for (int w = 0; w < bce::threads / bce::warp; ++w) {
      whole.append(bce::run_of(of_warp[w]));
      any |= of_warp[w].wrong;
    }
    reinterpret_cast<bce::Record*>(scratch)[blockIdx.x] = bce::record_of(whole, any);
  }
  // What the second kernel counts in, should it have to.
  const long long n_words = 2 * n_graphs + 2;
  long long* behind = scratch + static_cast<long long>(gridDim.x) * bce::words;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n_words;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    behind[i] = 0;
  }
}

template <int Tiles>
__global__ void __launch_bounds__(bce::joining_threads)
    bce_mean(const float* __restrict__ logits, const float* __restrict__ labels, const long long* __restrict__ edge_graph,
             const float* __restrict__ pos_weight, long long* __restrict__ scratch, float* __restrict__ out, long long n_edges,
             long long n_graphs) {
  constexpr int chunk = Tiles * bce::edges_per_tile;
  const long long n_chunks = (n_edges + chunk - 1) / chunk;
  const bce::Record* records = reinterpret_cast<const bce::Record*>(scratch);
  int wrong = 0;
  for (long long i = threadIdx.x; i < n_chunks; i += blockDim.x) wrong |= records[i].wrong;
  const bool is_unsorted = __syncthreads_or(wrong & bce::unsorted);
  const bool is_out_of_range = __syncthreads_or(wrong & bce::out_of_range);
  if (is_out_of_range) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *out = __int_as_float(0x7fffffff);
    return;
  }
  if (is_unsorted) {
    const float positive_weight = pos_weight == nullptr ? 1.0f : *pos_weight;
    const bce::Diverted diverted(scratch, n_chunks, n_graphs);
    bce::mean_of_unsorted(logits, labels, edge_graph, positive_weight, diverted, out, n_edges, n_graphs);
    return;
  }
  if (blockIdx.x != 0) return;

  // Records in order: each thread joins its share, then each warp's first lane those of its warp, then the first thread.
  __shared__ bce::WideRun of_thread[bce::joining_threads];
  const long long share = (n_chunks + blockDim.x - 1) / blockDim.x;
  bce::WideRun run = bce::WideRun::empty();
  for (long long i = threadIdx.x * share; i < (threadIdx.x + 1) * share && i < n_chunks; ++i)
    run.append(bce::run_of(records[i]));
  of_thread[threadIdx.x] = run;
  __syncthreads();
  if (threadIdx.x < bce::warp) {
    constexpr int each = bce::joining_threads / bce::warp;
    bce::WideRun of_share = bce::WideRun::empty();
    for (int i = 0; i < each; ++i) of_share.append(of_thread[threadIdx.x * each + i]);
    __syncwarp();
    of_thread[threadIdx.x * each] = of_share;
    __syncwarp();
    if (threadIdx.x == 0) {
      bce::WideRun whole = bce::WideRun::empty();
      for (int i = 0; i < bce::warp; ++i) whole.append(of_thread[i * each]);
      *out = static_cast<float>(whole.closed() / static_cast<double>(n_graphs));
    }
  }
}

// Edges in any order: lanes with neighbours of the same graph add up first, and the last of each such stretch adds to memory.
extern "C" __global__ void __launch_bounds__(256)
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

extern "C" __global__ void __launch_bounds__(1024)
    bce_atomic_mean(const float* __restrict__ sums, const int* __restrict__ counts, float* __restrict__ out,
                    long long n_graphs) {
  double sum = 0;
  for (long long g = threadIdx.x; g < n_graphs; g += blockDim.x) {
    if (counts[g] > 0) sum += static_cast<double>(sums[g]) / counts[g];
  }
  sum = bce::block_sum<1024>(sum);
  if (threadIdx.x == 0) *out = static_cast<float>(sum / static_cast<double>(n_graphs));
}
