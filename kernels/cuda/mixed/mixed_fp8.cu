/* Mixed-input products with weights of e4m3. */
#include "kernels/cuda/mixed/mixed.cuh"

MIXED_FORMAT(FUSED_FP8)
