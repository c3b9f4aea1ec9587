/* The CUDA runtime of recorder.c but for launches and graphs: an H200 whose work is
 * done at once. */
#include <cuda_runtime_api.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "config/base/base.h"
#include "tests/recorder/recorder.h"

#define TOTAL_BYTES ((size_t)139 << 30)
#define SPARE_BYTES ((size_t)2 << 30) /* free whatever is allocated */

struct recorder recorder = {.device = -1};

static size_t used_bytes; /* of device memory */

static bool is_last_rank(void)
{
    const char *n = getenv("RECORDER_RANKS");

    return n && recorder.device + 1 == atoi(n);
}

static void *reserve(size_t n_bytes)
{
    void *p = mmap(NULL, n_bytes + 4096, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

/* The driver's cuTensorMapEncodeTiled. */
static int encode_nothing(void)
{
    return 0;
}

/* ---- an H200 ---- */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, const void *kernel)
{
    memset(ret, 0, sizeof(*ret));
    ret->maxThreadsPerBlock = 1024;
    ret->ptxVersion = ret->binaryVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute what, int value)
{
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *ret, const void *kernel, int threads,
                                                          size_t n_bytes)
{
    *ret = 1;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *ret, const void *kernel,
                                                                   int threads, size_t n_bytes,
                                                                   unsigned flags)
{
    *ret = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret, int of)
{
    memset(ret, 0, sizeof(*ret));
    strcpy(ret->name, "NVIDIA H200");
    ret->major = 9;
    ret->multiProcessorCount = 132;
    ret->totalGlobalMem = TOTAL_BYTES;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *ret, enum cudaDeviceAttr what, int of)
{
    *ret = what == cudaDevAttrMultiProcessorCount                ? 132
           : what == cudaDevAttrMaxSharedMemoryPerBlockOptin     ? 227 << 10
           : what == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? 228 << 10
           : what == cudaDevAttrL2CacheSize                      ? 50 << 20
           : what == cudaDevAttrMemoryClockRate                  ? 3201000
           : what == cudaDevAttrGlobalMemoryBusWidth             ? 6144
                                                                 : 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *ret)
{
    *ret = MAX(recorder.device, 0);
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int d)
{
    const char *dir = getenv("RECORDER_DIR");
    char own[PATH_MAX];

    if (recorder.device < 0 && dir) {
        snprintf(own, sizeof(own), "%s/cache%d", dir, d);
        mkdir(own, 0700);
        setenv("XDG_CACHE_HOME", own, 1);
        srand48(d);
    }
    recorder.device = d;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *ret)
{
    *ret = 8;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *ret)
{
    *ret = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *ret)
{
    *ret = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *ret, int of, int peer)
{
    *ret = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **ret, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    *ret = (void *)encode_nothing;
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t rc)
{
    return "no memory to reserve";
}
cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **ret, size_t n_bytes)
{
    *ret = reserve(n_bytes);
    used_bytes += n_bytes;
    return *ret ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p)
{
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **ret, size_t n_bytes, unsigned flags)
{
    *ret = reserve(n_bytes);
    return *ret ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *p)
{
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *p, size_t n_bytes, unsigned flags)
{
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p)
{
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *ret_free, size_t *ret_total)
{
    bool full = getenv("RECORDER_FULL") && is_last_rank() && recorder.in_steps;
    size_t most = TOTAL_BYTES - SPARE_BYTES;

    *ret_free = full ? 0 : TOTAL_BYTES - (used_bytes < most ? used_bytes : most);
    *ret_total = TOTAL_BYTES;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    if (kind == cudaMemcpyDeviceToHost) {
        memcpy(to, from, n_bytes);
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t s)
{
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n_bytes, cudaStream_t s)
{
    return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *ret, void *p)
{
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **ret, cudaIpcMemHandle_t h, unsigned flags)
{
    *ret = reserve((size_t)1 << 30);
    return *ret ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaIpcCloseMemHandle(void *p)
{
    return cudaSuccess;
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned flags)
{
    *ret = malloc(1);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    free(s);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s)
{
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    *ret = malloc(1);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *ret)
{
    return cudaEventCreateWithFlags(ret, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    free(e);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ret_ms, cudaEvent_t begun, cudaEvent_t done)
{
    const char *slow = getenv("RECORDER_SLOW");

    *ret_ms = (0.05f + 0.1f * (float)drand48()) * (slow && is_last_rank() ? (float)atof(slow) : 1);
    return cudaSuccess;
}
