/* Mixed-input products with weights of int8. */
#include "kernels/cuda/mixed/mixed.cuh"

MIXED_FORMAT(FUSED_INT8)
