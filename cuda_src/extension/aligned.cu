#define KSERVE_ALIGN 16
#define KSERVE_NAMED(base) base##_aligned
#include "launch.cuh"
