/* Mixed-input products with weights in groups, of codes that are places in levels. */
#include "kernels/cuda/mixed/operands_groups.cuh"

MIXED_FORMAT(FUSED_LEVELS)
