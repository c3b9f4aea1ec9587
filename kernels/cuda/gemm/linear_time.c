/* Choosing a product's algorithm by timing it as a step runs it: a graph of products
 * with the weights of several layers, one behind the other. So an algorithm pays for
 * its gaps and for weights that come from memory, and not for its launch by the
 * host. */
#include "kernels/cuda/gemm/linear.h"

enum {
    TIME_REPEATS = 3,  /* launches of the graph; the first does not count */
    TIME_RUNS = 16,    /* products in the graph, fewer of those that take long */
    TIME_WEIGHTS = 16, /* different weights that they take in turn, if there are so many */
    TIME_US = 400,     /* about what the graph takes on a fast device */
};

/* Products in the graph. */
static int32_t runs_of(const struct product_key *k)
{
    double weights_us = 2.0 * k->n * k->k / 4e6, product_us = 2.0 * k->m * k->n * k->k / 6e8;
    double us = MAX(weights_us, product_us);

    return us * TIME_RUNS <= TIME_US ? TIME_RUNS : us * 2 >= TIME_US ? 2 : (int32_t)(TIME_US / us);
}

/* Weights of one shape. */
struct alike {
    const void *data[TIME_WEIGHTS]; /* [n] on the device */
    int32_t n;
};

/* The product's own weight, and others of its shape. */
static struct alike weights_like(const struct cuda_backend *c, const struct product *d)
{
    const struct product_key *k = &d->key;
    struct alike ret = {.data = {d->args.w}, .n = 1};

    for (int32_t i = 0; i < c->n_weights && ret.n < TIME_WEIGHTS; i++) {
        const struct mat *m = &c->weight[i];
        if (m->data != d->args.w && m->rows == k->n && m->cols == k->k &&
            m->stride == k->w_stride && (int32_t)m->dtype == k->x_type) {
            ret.data[ret.n++] = m->data;
        }
    }
    return ret;
}

/* A graph of n products. NULL: the algorithm does not run, or there is no room
 * for a graph. */
static cudaGraphExec_t record_runs(struct cuda_backend *c, struct matmul_plan *p,
                                   const cublasLtMatmulAlgo_t *algo, const struct product *d,
                                   const struct alike *w, int32_t n)
{
    struct product one = *d;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;

    /* the first run loads the kernel, which a capture cannot */
    if (product_run(c, p, algo, d) != CUBLAS_STATUS_SUCCESS ||
        cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        return NULL;
    }
    bool ok = true;
    for (int32_t i = 0; i < n && ok; i++) {
        one.args.w = w->data[i % w->n];
        ok = product_run(c, p, algo, &one) == CUBLAS_STATUS_SUCCESS;
    }
    ok = cudaStreamEndCapture(c->stream, &graph) == cudaSuccess && ok;
    ok = ok && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
    if (graph) {
        cudaGraphDestroy(graph);
    }
    return ok ? exec : NULL;
}

/* Microseconds of one product; a huge value if it does not run. A second launch is
 * enough where it is far above best_us. */
static float time_algo(struct cuda_backend *c, struct matmul_plan *p,
                       const cublasLtMatmulAlgo_t *algo, const struct product *d,
                       const struct alike *w, const cudaEvent_t event[2], float best_us)
{
    int32_t n = runs_of(&d->key);
    cudaGraphExec_t exec = record_runs(c, p, algo, d, w, n);
    float least = 1e30f, ms = 0;

    for (int i = 0; exec && i < TIME_REPEATS && (i < 2 || least < best_us * 1.1f); i++) {
        bool ok = cudaEventRecord(event[0], c->stream) == cudaSuccess &&
                  cudaGraphLaunch(exec, c->stream) == cudaSuccess &&
                  cudaEventRecord(event[1], c->stream) == cudaSuccess &&
                  cuda_wait_event(c, event[1]) == cudaSuccess &&
                  cudaEventElapsedTime(&ms, event[0], event[1]) == cudaSuccess;
        if (!ok) {
            least = 1e30f;
            break;
        }
        least = i > 0 ? MIN(least, ms * 1000.0f / (float)n) : least;
    }
    if (exec) {
        cudaGraphExecDestroy(exec);
    }
    cudaGetLastError(); /* an algorithm that does not run is no failure of the step */
    return least;
}

static void time_algorithms(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                            const cublasLtMatmulHeuristicResult_t *found, int n,
                            const cudaEvent_t event[2])
{
    const struct alike w = weights_like(c, d);
    float least = 1e30f;

    for (int i = 0; i < n; i++) {
        float us = found[i].state == CUBLAS_STATUS_SUCCESS
                       ? time_algo(c, p, &found[i].algo, d, &w, event, least)
                       : 1e30f;
        if (i == 0 || us < least * 0.99f) { /* a gain within noise changes nothing */
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
