// The kernels are in a header, which the built-in extension has too.

#include <kserve/edge_features.cuh>
