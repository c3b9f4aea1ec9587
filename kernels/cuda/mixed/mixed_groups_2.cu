/* Mixed-input products with weights in groups, of codes of two bits
 * (quant/groups.h). */
#include "kernels/cuda/mixed/operands_groups.cuh"

MIXED_FORMAT(FUSED_GROUPS_2)
