// The losses of a warp's edges as one run: the part of graph_norm_bce that reads.

#pragma once

#include <kserve/access.cuh>

#include "segments.cuh"

namespace bce {

using segments::all_lanes;
constexpr int warp = segments::lanes;
constexpr int per_lane = 4;                    // neighbouring edges of one access
constexpr int tile = warp * per_lane;          // edges that a warp takes at once
constexpr int unsorted = 1, out_of_range = 2;  // what is wrong with some edges

using Segment = segments::Segment<float, int>;
using Run = segments::Run<float, int>;

// log(1 + exp(-a)) for a >= 0, to 4e-7 of its value, however small that is. Beyond 128 it is 0 in float: the bound keeps an
// infinite a finite.
__device__ __forceinline__ float log1p_exp_of_negative(float a) {
  constexpr float log2_e = 1.44269504f, rest_of_log2_e = 1.92596299e-8f, ln_2 = 0.693147181f;
  const float bounded = fminf(a, 128.0f);
  // exp2 of a rounded product is off by what rounding took away: too much where a is large.
  const float power = -log2_e * bounded;
  const float rounded_off = fmaf(-rest_of_log2_e, bounded, fmaf(-log2_e, bounded, -power));
  const float rough = exp2f(power);
  const float e = fmaf(rough * ln_2, rounded_off, rough);
  // log(1 + e) / e for e from 0 to 1, minimax: 5e-9.
  float p = -0.00324400957f;
  p = fmaf(p, e, 0.0198513903f);
  p = fmaf(p, e, -0.0569593981f);
  p = fmaf(p, e, 0.10603641f);
  p = fmaf(p, e, -0.153055847f);
  p = fmaf(p, e, 0.196759358f);
  p = fmaf(p, e, -0.249541327f);
  p = fmaf(p, e, 0.333299637f);
  p = fmaf(p, e, -0.499999017f);
  p = fmaf(p, e, 1.0f);
  return p * e;
}

// (1 - t) z + (1 + (w - 1) t) (max(-z, 0) + log(1 + exp(-|z|))): finite for every finite logit.
__device__ __forceinline__ float loss(float z, float t, float positive_weight) {
  const float softplus = fmaxf(-z, 0.0f) + log1p_exp_of_negative(fabsf(z));
  // fmaxf and fminf drop a NaN; the first term keeps it.
  return (1.0f - t) * z + (1.0f + (positive_weight - 1.0f) * t) * softplus;
}

struct Inputs {
  const float* logits;
  const float* labels;
  const long long* edge_graph;
  const float* pos_weight;
  long long n_edges, n_graphs;

  __device__ __forceinline__ float positive_weight() const { return pos_weight == nullptr ? 1.0f : *pos_weight; }
};

// Four neighbouring edges as they lie in memory. Those past the last edge repeat it.
struct Fetched {
  float z[per_lane], t[per_lane];
  long long id[per_lane];
};

template <typename T>
__device__ __forceinline__ void load_some(const T* from, long long at, long long n, T (&to)[per_lane]) {
#pragma unroll
  for (int i = 0; i < per_lane; ++i) to[i] = __ldcs(from + (at + i < n ? at + i : n - 1));
}

#ifdef KSERVE_ALIGN_LOGITS
constexpr bool aligned = KSERVE_ALIGN_LOGITS >= 16 && KSERVE_ALIGN_LABELS >= 16 && KSERVE_ALIGN_EDGE_GRAPH >= 16;
#else
constexpr bool aligned = false;  // an entry that reads no edges
#endif

__device__ __forceinline__ void fetch(const Inputs& from, long long at, Fetched& to) {
  if (aligned && at + per_lane <= from.n_edges) {
    kserve::load_once(from.logits + at, to.z);
    kserve::load_once(from.labels + at, to.t);
    kserve::load_once(from.edge_graph + at, to.id);
  } else {
    load_some(from.logits, at, from.n_edges, to.z);
    load_some(from.labels, at, from.n_edges, to.t);
    load_some(from.edge_graph, at, from.n_edges, to.id);
  }
}

// A lane's edges of a tile: `count` of them exist, which come first.
struct Edges {
  float loss[per_lane];
  int graph[per_lane];
  int count;

  __device__ __forceinline__ void set_graphs(const long long (&id)[per_lane], long long n_graphs, int& wrong) {
    unsigned int high = 0;
    bool is_outside = false;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      const unsigned int low = static_cast<unsigned int>(id[i]);
      high |= static_cast<unsigned int>(id[i] >> 32);
      is_outside = is_outside || low >= static_cast<unsigned int>(n_graphs);
      graph[i] = static_cast<int>(low);
    }
    if (high != 0 || is_outside) wrong |= out_of_range;
  }

  __device__ __forceinline__ void set_losses(const float (&z)[per_lane], const float (&t)[per_lane], float positive_weight) {
#pragma unroll
    for (int i = 0; i < per_lane; ++i) loss[i] = bce::loss(z[i], t[i], positive_weight);
    // Not asked above: a branch an edge would keep their losses from being worked out side by side.
    if (count < per_lane) {
#pragma unroll
      for (int i = 0; i < per_lane; ++i) loss[i] = i < count ? loss[i] : 0.0f;
    }
  }
};

// The run of a warp while it walks: the graph that is open, with each lane's part of its sum, and what was before it. Of
// `before.complete` too each lane has a part. As long as a graph goes on, a tile costs additions alone.
struct Walk {
  Run before = Run::empty();
  int open_graph = 0, open_count = 0;
  float open_sum = 0.0f;

  __device__ __forceinline__ void add_to_open(const Edges& edges, int count) {
    open_sum += (edges.loss[0] + edges.loss[1]) + (edges.loss[2] + edges.loss[3]);
    open_count += count;
  }

  __device__ __forceinline__ Segment open() const { return {open_graph, open_count, segments::sum_of_lanes(open_sum)}; }

  // A tile in which the open graph ends.
  __device__ __forceinline__ void add_many(const Edges& edges) {
    const bool is_first_lane = threadIdx.x % warp == 0;
    const Segment ending = open();
    Run mine = Run::empty();
    if (is_first_lane) mine.first = ending;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      if (i < edges.count) mine.append(Segment{edges.graph[i], 1, edges.loss[i]});
    }
    const Run joined = segments::join_lanes(mine);
    before.complete += joined.complete;
    if (before.first.graph == segments::none) {
      before.first = joined.first;
    } else if (is_first_lane) {
      before.complete += segments::mean(joined.first);
    }
    open_graph = joined.last.graph;
    open_count = joined.last.count;
    open_sum = is_first_lane ? joined.last.sum : 0.0f;
  }

  __device__ __forceinline__ Run whole() const {
    Run run = before;
    run.complete = segments::sum_of_lanes(before.complete);
    (run.first.graph == segments::none ? run.first : run.last) = open();
    return run;
  }
};

// The edges from `begin`, `share` of them or as many as there are, as one run, which every lane gets. share: a multiple of a
// tile, below 2^31. `wrong` collects what is amiss with their graphs; then the run means nothing.
__device__ __forceinline__ Run run_of_warp(const Inputs& from, long long begin, long long share, int& wrong) {
  const long long end = begin + share < from.n_edges ? begin + share : from.n_edges;
  if (begin >= end) return Run::empty();
  const int first = threadIdx.x % warp * per_lane;  // of this lane in a tile
  Walk walk;
  Fetched next;
  long long at = begin + first;
  fetch(from, at, next);
  const float positive_weight = from.positive_weight();
  const long long before_all = begin > 0 ? from.edge_graph[begin - 1] : 0;
  walk.open_graph = __shfl_sync(all_lanes, static_cast<int>(next.id[0]), 0);
  if (before_all > walk.open_graph) wrong |= unsorted;
#pragma unroll 1
  for (int left = static_cast<int>(end - begin); left > 0; left -= tile) {
    Edges edges;
    edges.count = left - first < 0 ? 0 : left - first < per_lane ? left - first : per_lane;
    edges.set_graphs(next.id, from.n_graphs, wrong);  // before the next tile is fetched: half the registers hold them
    const Fetched now = next;
    at += tile;
    if (left > tile) fetch(from, at, next);  // under way while this one is worked on
    edges.set_losses(now.z, now.t, positive_weight);
    const int neighbour = __shfl_up_sync(all_lanes, edges.graph[per_lane - 1], 1);
    const int previous = first == 0 ? walk.open_graph : neighbour;
    bool is_sorted = previous <= edges.graph[0];
#pragma unroll
    for (int i = 1; i < per_lane; ++i) is_sorted = is_sorted && edges.graph[i - 1] <= edges.graph[i];
    if (!is_sorted) wrong |= unsorted;
    if (__any_sync(all_lanes, previous != edges.graph[per_lane - 1])) {
      walk.add_many(edges);
    } else {
      walk.add_to_open(edges, left < tile ? left : tile);
    }
  }
  return walk.whole();
}

}  // namespace bce
