/* Choosing what multiplies, an algorithm of cuBLASLt or own tiles, by timing it as a
 * step runs it: a graph of products with the weights of several layers, one behind the
 * other. So each pays for its gaps and for weights that come from memory, and not for
 * its launch by the host. */
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

/* A way that is timed. */
struct candidate {
    enum product_way way;
    const cublasLtMatmulAlgo_t *algo; /* of PRODUCT_LT */
};

static bool run(struct cuda_backend *c, struct matmul_plan *p, struct candidate by,
                const struct product *d)
{
    return by.way == PRODUCT_LT ? product_run(c, p, by.algo, d) == CUBLAS_STATUS_SUCCESS
                                : product_run_own(c, by.way, d);
}

/* A graph of n products. NULL: they do not run this way, or there is no room for a
 * graph. */
static cudaGraphExec_t record_runs(struct cuda_backend *c, struct matmul_plan *p,
                                   struct candidate by, const struct product *d,
                                   const struct alike *w, int32_t n)
{
    struct product one = *d;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;

    /* the first run loads the kernel, which a capture cannot */
    if (!run(c, p, by, d) ||
        cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        return NULL;
    }
    bool ok = true;
    for (int32_t i = 0; i < n && ok; i++) {
        one.args.w = w->data[i % w->n];
        ok = run(c, p, by, &one);
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
static float time_way(struct cuda_backend *c, struct matmul_plan *p, struct candidate by,
                      const struct product *d, const struct alike *w, const cudaEvent_t event[2],
                      float best_us)
{
    int32_t n = runs_of(&d->key);
    cudaGraphExec_t exec = record_runs(c, p, by, d, w, n);
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
    cudaGetLastError(); /* a way that does not run is no failure of the step */
    return least;
}

/* Returns the time of the fastest. */
static float time_algorithms(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                             const struct alike *w, const cublasLtMatmulHeuristicResult_t *found,
                             int n, const cudaEvent_t event[2])
{
    float least = 1e30f;

    for (int i = 0; i < n; i++) {
        struct candidate by = {PRODUCT_LT, &found[i].algo};
        float us = found[i].state == CUBLAS_STATUS_SUCCESS ? time_way(c, p, by, d, w, event, least)
                                                           : 1e30f;
        if (i == 0 || us < least * 0.99f) { /* a gain within noise changes nothing */
            least = us;
            p->algo = found[i].algo;
        }
    }
    return least;
}

/* Within noise what the shape says is as good. */
static void time_own(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                     const struct alike *w, const cudaEvent_t event[2], float least)
{
    static const enum product_way own[] = {PRODUCT_WIDE_GATE, PRODUCT_TILES};
    enum product_way usual = product_way_by_shape(c, d);

    for (size_t i = 0; i < ARRAY_LEN(own); i++) {
        if (!product_suits(own[i], d)) {
            continue;
        }
        float us = time_way(c, p, (struct candidate){.way = own[i]}, d, w, event, least);
        if (us < least * (own[i] == usual ? 1.01f : 0.99f)) {
            least = us;
            p->way = own[i];
        }
    }
}

void product_time(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                  const cublasLtMatmulHeuristicResult_t *found, int n)
{
    cudaEvent_t event[2] = {NULL, NULL};

    if (cudaEventCreate(&event[0]) == cudaSuccess && cudaEventCreate(&event[1]) == cudaSuccess) {
        const struct alike w = weights_like(c, d);
        float least = time_algorithms(c, p, d, &w, found, n, event);
        if (product_may_be_own(c, d)) {
            time_own(c, p, d, &w, event, least);
        }
    }
    for (int i = 0; i < 2; i++) {
        if (event[i]) {
            cudaEventDestroy(event[i]);
        }
    }
}
