/* The end of a tile of experts by mma: from accumulators to rows of pairs. */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_TILES_TILE_STORE_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_TILES_TILE_STORE_CUH

#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/experts/gate.cuh"

/* Where the results of a tile go. */
struct tile_place {
    const int32_t *list; /* [n] its pairs */
    int32_t n;
    int64_t first; /* row of the stacked weight of its first column */
    int column;    /* of that in the results */
};

/* The results of a warp: TILES tiles of 8 pairs from `first` on, times 16 rows of
 * weights from warp_row on, of one kind or of gate and up. */
template <typename T, int TILES, int KINDS>
__device__ __forceinline__ void store_tile(const float (&d)[KINDS][TILES][4],
                                           const expert_product &a, const tile_place &w,
                                           int warp_row, int first, int lane)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = warp_row + (lane >> 2) + h * 8;
        const T *bias = (const T *)a.bias + w.first + row;
        float b0 = a.bias ? to_float(bias[0]) : 0.0f;
        float b1 = a.bias && KINDS == 2 ? to_float(bias[a.width]) : 0.0f;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int r = first + t * 8 + (lane & 3) * 2 + c;
                float u = d[0][t][h * 2 + c] + b0, v = d[KINDS - 1][t][h * 2 + c] + b1;
                if (r < w.n) {
                    ((T *)a.out)[w.list[r] * a.out_stride + w.column + row] =
                        from_float<T>(KINDS == 2 ? expert_gate(u, v, a.act, a.limit) : u);
                }
            }
        }
    }
}

#endif
