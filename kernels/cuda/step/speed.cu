/* How fast the device's memory is read. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/step/speed.h"

namespace
{

/* More than any second-level cache holds, read in a few hundred microseconds or a few
 * milliseconds. */
constexpr size_t READ_BYTES = (size_t)512 << 20;
constexpr int READ_THREADS = 256, READ_BLOCKS_OF_SM = 8, READ_AT_ONCE = 4, READ_TIMES = 4;

/* Of zeros, so that nothing is written. */
__global__ void __launch_bounds__(READ_THREADS)
    read_kernel(const uint4 *from, size_t n, uint32_t *never)
{
    size_t step = (size_t)gridDim.x * READ_THREADS,
           i = (size_t)blockIdx.x * READ_THREADS + threadIdx.x;
    uint32_t any = 0;

    for (; i + (READ_AT_ONCE - 1) * step < n; i += READ_AT_ONCE * step) {
        uint4 v[READ_AT_ONCE];
#pragma unroll
        for (int k = 0; k < READ_AT_ONCE; k++) {
            v[k] = __ldcs(from + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < READ_AT_ONCE; k++) {
            any |= v[k].x | v[k].y | v[k].z | v[k].w;
        }
    }
    if (any != 0) {
        *never = any;
    }
}

/* The least time of a few, in milliseconds; 0: it failed. */
float time_reads(const uint4 *from, uint32_t *never, cudaEvent_t begun, cudaEvent_t done,
                 cudaStream_t stream)
{
    int blocks = cuda_multiprocessors() * READ_BLOCKS_OF_SM;
    float least = 0;

    for (int i = 0; i <= READ_TIMES; i++) { /* the first one loads the kernel */
        float ms = 0;
        cudaEventRecord(begun, stream);
        read_kernel<<<blocks, READ_THREADS, 0, stream>>>(from, READ_BYTES / sizeof(*from), never);
        cudaEventRecord(done, stream);
        if (cudaEventSynchronize(done) != cudaSuccess ||
            cudaEventElapsedTime(&ms, begun, done) != cudaSuccess) {
            return 0;
        }
        least = i > 0 && (least == 0 || ms < least) ? ms : least;
    }
    return least;
}

} // namespace

extern "C" double cuda_time_reads(cudaStream_t stream)
{
    cudaEvent_t begun = NULL, done = NULL;
    char *data = NULL;
    float ms = 0;

    bool ok = cudaMalloc(&data, READ_BYTES + sizeof(uint4)) == cudaSuccess &&
              cudaEventCreate(&begun) == cudaSuccess && cudaEventCreate(&done) == cudaSuccess &&
              cudaMemsetAsync(data, 0, READ_BYTES, stream) == cudaSuccess;
    if (ok) {
        ms = time_reads((const uint4 *)data, (uint32_t *)(data + READ_BYTES), begun, done, stream);
    }
    if (begun) {
        cudaEventDestroy(begun);
    }
    if (done) {
        cudaEventDestroy(done);
    }
    cudaFree(data);
    cudaGetLastError(); /* thresholds are then those of the driver's numbers */
    return ms > 0 ? READ_BYTES / 1e6 / ms : 0;
}
