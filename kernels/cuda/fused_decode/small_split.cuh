/* Products of few rows whose depth the two blocks of a cluster share (small_rows.cu,
 * small_codes.cu): each adds up half of the tile's columns.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_SPLIT_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_SPLIT_CUH

#include "kernels/cuda/fused_decode/small_pipeline.cuh"
#include "kernels/cuda/gemm/wgmma.cuh"

enum { MULTIPLIERS = 128 }; /* threads of a block that multiply: one warpgroup */

#if HAS_WGMMA

/* Floats of a row of half a tile's sums in shared memory. */
template <int WIDTH> constexpr int HALF_PITCH = WIDTH / 2 + 4;

/* A barrier of the threads that multiply. */
__device__ __forceinline__ void sync_multipliers(void)
{
    static_assert(MULTIPLIERS == 128, "as the barrier counts");
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

/* mine [SMALL_ROWS][HALF_PITCH] = this block's sums of the columns that it adds up.
 * Those of the other block's columns are pushed to `theirs` there, as all that it
 * waits for; on return those that come from there are behind the address `theirs`
 * here. The room of both is free in this block. */
template <int WIDTH>
__device__ __forceinline__ void share_sums(const float (&d)[WIDTH / 2], float *mine,
                                           uint32_t theirs, uint32_t pushed, int rows, int part)
{
    constexpr int COLUMNS = WIDTH / 2;
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2), c = (lane & 3) * 2;
    uint32_t to = address_in(theirs, part ^ 1), bar = address_in(pushed, part ^ 1);

    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            int column = j * 8 + c, half = column >= COLUMNS,
                at = row * HALF_PITCH<WIDTH> + column - half * COLUMNS;
            float2 v = make_float2(d[j * 4 + h * 2], d[j * 4 + h * 2 + 1]);
            if (half == part) {
                *(float2 *)(mine + at) = v;
            } else if (row < rows) {
                push(to + at * 4, v, bar);
            }
        }
    }
    sync_multipliers();
    push_wait(pushed);
}

#endif

#endif
