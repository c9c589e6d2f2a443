// GroupNorm of channels-last volumes with its affine and ReLU, and its gradient: two launches each way.
//
// The first launch of each way leaves partial sums of every block in scratch memory; every block of the second joins them
// again in the same order, then walks its voxels backwards: what the first launch read last is what the caches still hold.
// No atomics: the same shape gives the same bits every time. Nothing is reduced inside a loop over voxels.

#include <kserve/narrow.cuh>

#include "backward.cuh"
#include "forward.cuh"
