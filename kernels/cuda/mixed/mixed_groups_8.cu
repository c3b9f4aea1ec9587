/* Mixed-input products with weights in groups, of codes of eight bits. */
#include "kernels/cuda/mixed/operands_groups.cuh"

MIXED_FORMAT(FUSED_GROUPS_8)
