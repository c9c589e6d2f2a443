// Runs of edges of one graph, summed in the order of the edges.
//
// A Run is a stretch of neighbouring edges, taken apart into its first and last graph, which may go on outside it, and those
// in between, which are complete. Joining runs in order gives the same as taking the whole stretch at once.

#pragma once

namespace segments {

constexpr int none = -1;
constexpr int lanes = 32;
constexpr unsigned int all_lanes = 0xffffffffu;

// Edges of one graph: the sum of their losses and how many they are.
template <typename Real, typename Count>
struct Segment {
  int graph;
  Count count;
  Real sum;
};

// The mean loss. Divisions are the longest part of a join, so these multiply: by the device's quick reciprocal, which in
// double one step of Newton's brings from 2^-22 to 2^-44.
__device__ __forceinline__ double mean(const Segment<float, int>& segment) {
  return static_cast<double>(__fdividef(segment.sum, static_cast<float>(segment.count)));
}

__device__ __forceinline__ double mean(const Segment<double, long long>& segment) {
  const double count = static_cast<double>(segment.count);
  const double guess = static_cast<double>(__fdividef(1.0f, static_cast<float>(segment.count)));
  return segment.sum * (guess * (2.0 - count * guess));
}

// Trivial, so that it can lie in shared memory; `empty` makes one. Where the run has a single graph that is `first`, and
// `last` is empty. `complete` is the sum, over the graphs in between, of their mean losses: they may be thousands.
template <typename Real, typename Count>
struct Run {
  Segment<Real, Count> first, last;
  double complete;

  __device__ __forceinline__ static Run empty() { return Run{{none, 0, 0}, {none, 0, 0}, 0}; }

  // Append edges of one graph, which may go on behind them.
  __device__ __forceinline__ void append(const Segment<Real, Count>& next) {
    if (next.graph == none) return;
    if (first.graph == none) {
      first = next;
    } else if (last.graph == none && first.graph == next.graph) {
      first.count += next.count;
      first.sum += next.sum;
    } else if (last.graph == next.graph) {
      last.count += next.count;
      last.sum += next.sum;
    } else {
      if (last.graph != none) complete += mean(last);
      last = next;
    }
  }

  // Append a run that follows this one.
  __device__ __forceinline__ void append(const Run& next) {
    append(next.first);
    complete += next.complete;
    append(next.last);
  }

  // The sum of the mean losses of all graphs, when nothing follows.
  __device__ __forceinline__ double closed() const {
    return complete + (first.graph == none ? 0.0 : mean(first)) + (last.graph == none ? 0.0 : mean(last));
  }
};

template <typename Value>
__device__ __forceinline__ Value sum_of_lanes(Value value) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(all_lanes, value, step);
  return value;
}

// Join the runs of a warp's lanes, in the order of the lanes; empty ones come last. Every lane gets the first and the last
// graph of the whole, but of `complete` only a part: the sum over the lanes is that of the whole.
//
// A segmented scan: each lane learns the sum of the graph that is open where it begins, then all close graphs side by side.
template <typename Real, typename Count>
__device__ __forceinline__ Run<Real, Count> join_lanes(const Run<Real, Count>& mine) {
  const int lane = threadIdx.x % lanes;
  const bool has_many = mine.last.graph != none;
  Segment<Real, Count> open = has_many ? mine.last : mine.first;
  const int before = __shfl_up_sync(all_lanes, open.graph, 1);
  const bool begins_one = lane > 0 && mine.first.graph != none && mine.first.graph != before;
  const bool closes = begins_one || has_many;
  const unsigned int heads = __ballot_sync(all_lanes, closes);
  const unsigned int below = (1u << lane) - 1u;
  const unsigned int at_or_below = heads & (below << 1 | 1u);
  const int head = at_or_below == 0 ? 0 : lanes - 1 - __clz(static_cast<int>(at_or_below));
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) {
    const Real sum = __shfl_up_sync(all_lanes, open.sum, step);
    const Count count = __shfl_up_sync(all_lanes, open.count, step);
    if (lane - step >= head) {
      open.sum += sum;
      open.count += count;
    }
  }
  Segment<Real, Count> ending{none, __shfl_up_sync(all_lanes, open.count, 1), __shfl_up_sync(all_lanes, open.sum, 1)};
  if (lane == 0) ending = {none, 0, 0};
  if (!begins_one) {
    ending.sum += mine.first.sum;
    ending.count += mine.first.count;
  }
  Run<Real, Count> whole;
  whole.complete = mine.complete;
  if (closes && (heads & below) != 0) whole.complete += mean(ending);
  if (begins_one && has_many) whole.complete += mean(mine.first);

  constexpr int end = lanes - 1;
  const bool is_one = heads == 0;
  const int source = is_one ? end : __ffs(static_cast<int>(heads)) - 1;
  whole.first.graph = __shfl_sync(all_lanes, mine.first.graph, 0);
  whole.first.count = __shfl_sync(all_lanes, is_one ? open.count : ending.count, source);
  whole.first.sum = __shfl_sync(all_lanes, is_one ? open.sum : ending.sum, source);
  const int last_graph = __reduce_max_sync(all_lanes, open.graph);
  whole.last.graph = is_one ? none : last_graph;
  whole.last.count = is_one ? 0 : __shfl_sync(all_lanes, open.count, end);
  whole.last.sum = is_one ? 0 : __shfl_sync(all_lanes, open.sum, end);
  return whole;
}

}  // namespace segments
