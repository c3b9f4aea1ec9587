/* The sums of a step's counts (load.h), by one block. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/experts/load.h"

namespace
{

enum { LOAD_THREADS = 1024 };

/* A warp adds up the counts of a layer. */
__global__ void __launch_bounds__(LOAD_THREADS)
    load_kernel(int32_t *counts, int32_t n_layers, int32_t n, load_sums *sums, load_sums *copy)
{
    __shared__ unsigned long long rows, peak;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    if (threadIdx.x == 0) {
        rows = peak = 0;
    }
    __syncthreads();
    pdl_release();
    pdl_wait();
    for (int layer = warp; layer < n_layers; layer += LOAD_THREADS / 32) {
        int32_t *of = counts + (int64_t)layer * n;
        int sum = 0, most = 0;
        for (int e = lane; e < n; e += 32) {
            sum += of[e];
            most = max(most, of[e]);
            of[e] = 0;
        }
        sum = __reduce_add_sync(0xffffffffu, sum);
        most = __reduce_max_sync(0xffffffffu, most);
        if (lane == 0) {
            atomicAdd(&rows, (unsigned long long)sum);
            atomicAdd(&peak, (unsigned long long)most * n);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        sums->rows += rows;
        sums->peak += peak;
        *copy = *sums;
    }
}

} // namespace

extern "C" void launch_expert_load(int32_t *counts, int32_t n_layers, int32_t n,
                                   struct load_sums *sums, struct load_sums *copy,
                                   cudaStream_t stream)
{
    launch(load_kernel, dim3(1), dim3(LOAD_THREADS), 0, stream, counts, n_layers, n, sums, copy);
}
