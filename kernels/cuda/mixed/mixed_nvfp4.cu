/* Mixed-input products with weights of four bits in segments. */
#include "kernels/cuda/mixed/mixed.cuh"

MIXED_FORMAT(FUSED_NVFP4)
