/* How fast the device's memory is read. */
#ifndef QUIRE_KERNELS_CUDA_STEP_SPEED_H
#define QUIRE_KERNELS_CUDA_STEP_SPEED_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In GB/s, timed for a few milliseconds; 0: there is no memory to do it. Waits for the
 * stream. */
double cuda_time_reads(cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
