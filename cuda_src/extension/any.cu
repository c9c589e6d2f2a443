// An element's own alignment, which every pointer has.
#define KSERVE_ALIGN 4
#define KSERVE_NAMED(base) base##_any
#include "launch.cuh"
