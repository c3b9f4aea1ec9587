/* Choosing a product's algorithm by timing. */
#include "kernels/cuda/gemm/linear.h"

enum { TIME_REPEATS = 3 };

/* Microseconds of one run with the weights out of the cache (the workspace, larger than
 * the cache, is overwritten first); a huge value if it does not run. The first run
 * loads the kernel; the least of the following ones counts, and a single one suffices
 * if it is far above best_us. */
static float time_algo(struct cuda_backend *c, struct matmul_plan *p,
                       const cublasLtMatmulAlgo_t *algo, const struct product *d,
                       const cudaEvent_t event[2], float best_us)
{
    float least = 1e30f;

    for (int i = 0; i < TIME_REPEATS && (i < 2 || least < best_us * 1.1f); i++) {
        float ms = 0;
        bool ok = cudaMemsetAsync(c->workspace, 0, WORKSPACE_BYTES, c->stream) == cudaSuccess &&
                  cudaEventRecord(event[0], c->stream) == cudaSuccess &&
                  product_run(c, p, algo, d) == CUBLAS_STATUS_SUCCESS &&
                  cudaEventRecord(event[1], c->stream) == cudaSuccess &&
                  cuda_wait_event(c, event[1]) == cudaSuccess &&
                  cudaEventElapsedTime(&ms, event[0], event[1]) == cudaSuccess;
        if (!ok) {
            cudaGetLastError();
            return 1e30f;
        }
        least = i > 0 ? MIN(least, ms * 1000.0f) : least;
    }
    return least;
}

static void time_algorithms(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                            const cublasLtMatmulHeuristicResult_t *found, int n,
                            const cudaEvent_t event[2])
{
    float least = 1e30f;

    for (int i = 0; i < n; i++) {
        float us = found[i].state == CUBLAS_STATUS_SUCCESS
                       ? time_algo(c, p, &found[i].algo, d, event, least)
                       : 1e30f;
        if (i == 0 || us < least * 0.98f) { /* a gain within noise changes nothing */
            least = us;
            p->algo = found[i].algo;
        }
    }
}

void product_time(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                  const cublasLtMatmulHeuristicResult_t *found, int n)
{
    cudaEvent_t event[2] = {NULL, NULL};

    if (cudaEventCreate(&event[0]) == cudaSuccess && cudaEventCreate(&event[1]) == cudaSuccess) {
        time_algorithms(c, p, d, found, n, event);
    }
    for (int i = 0; i < 2; i++) {
        if (event[i]) {
            cudaEventDestroy(event[i]);
        }
    }
}
