// Runs of edges of one graph, summed in the order of the edges.
//
// A Run is a stretch of neighbouring edges, taken apart into its first and last graph, which may go on outside it, and those
// in between, which are complete. Joining runs in order gives the same as taking the whole stretch at once.

#pragma once

namespace segments {

constexpr int none = -1;

// Edges of one graph: the sum of their losses and how many they are.
template <typename Real, typename Count>
struct Segment {
  int graph;
  Count count;
  Real sum;
};

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
  template <typename OtherReal, typename OtherCount>
  __device__ __forceinline__ void append(const Run<OtherReal, OtherCount>& next) {
    append(widened(next.first));
    complete += next.complete;
    append(widened(next.last));
  }

  // The sum of the mean losses of all graphs, when nothing follows.
  __device__ __forceinline__ double closed() const {
    return complete + (first.graph == none ? 0.0 : mean(first)) + (last.graph == none ? 0.0 : mean(last));
  }

 private:
  __device__ __forceinline__ static double mean(const Segment<Real, Count>& segment) {
    return static_cast<double>(segment.sum) / static_cast<double>(segment.count);
  }

  template <typename OtherReal, typename OtherCount>
  __device__ __forceinline__ static Segment<Real, Count> widened(const Segment<OtherReal, OtherCount>& other) {
    return {other.graph, static_cast<Count>(other.count), static_cast<Real>(other.sum)};
  }
};

}  // namespace segments
