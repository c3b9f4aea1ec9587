/* What thresholds need to know of the device (heuristics_speed.h): found when a backend
 * opens, measured at the first one of a device, driver and library, and kept beside the
 * timings of products. Over ranks it is what the driver tells, the same on all.
 *
 * The environment variable QUIRE_CUDA_MEMORY_GBS, a number, takes the place of what is
 * measured and of what the driver tells. QUIRE_CUDA_PRODUCTS says what decides between
 * cuBLASLt and own tiles: `timed`, `shape`, as if nothing had been timed, or
 * `cublaslt`, which is always taken. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fused_decode/heuristics_grids.h"
#include "kernels/cuda/step/speed.h"

static int32_t measure(void *arg)
{
    const struct cuda_backend *c = arg;

    return rated_gbs(cuda_time_reads(c->stream));
}

/* The number in QUIRE_CUDA_MEMORY_GBS; 0: it is not set. */
static int asked_gbs(int32_t *ret, struct err *e)
{
    enum { MOST = 1000000 };
    const char *text = getenv("QUIRE_CUDA_MEMORY_GBS");
    char *end = NULL;

    *ret = 0;
    if (!text || text[0] == '\0') {
        return 0;
    }
    long n = strtol(text, &end, 10);
    if (*end != '\0' || n < 1 || n > MOST) {
        return err_set(e, ERR_INVALID, "QUIRE_CUDA_MEMORY_GBS: \"%.32s\" is no number of GB/s",
                       text);
    }
    *ret = (int32_t)n;
    return 0;
}

static int find_ways(enum cuda_ways *ret, struct err *e)
{
    static const char *const names[] = {
        [CUDA_WAYS_TIMED] = "timed", [CUDA_WAYS_SHAPE] = "shape", [CUDA_WAYS_LIBRARY] = "cublaslt"};
    const char *text = getenv("QUIRE_CUDA_PRODUCTS");

    *ret = CUDA_WAYS_TIMED;
    if (!text || text[0] == '\0') {
        return 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *ret = (enum cuda_ways)i;
            return 0;
        }
    }
    return err_set(e, ERR_INVALID,
                   "QUIRE_CUDA_PRODUCTS: \"%.32s\" is neither \"timed\" nor \"shape\" nor "
                   "\"cublaslt\"",
                   text);
}

int cuda_speed_init(struct cuda_backend *c, struct err *e)
{
    int32_t asked;
    int rc = asked_gbs(&asked, e);

    rc = rc < 0 ? rc : find_ways(&c->ways, e);
    if (rc < 0) {
        return rc;
    }
    int32_t told = asked > 0 ? asked : cuda_memory_gbs();
    c->memory_blocks = memory_blocks(told); /* ranks must agree on it */
    c->speed = (struct device_speed){.n_sms = c->n_sms, .memory_gbs = told};
    /* With a shared prefix a step has another graph, and one rank would run its rows
     * where another pads them. */
    if (asked == 0 && !c->config.deterministic && !c->config.comm) {
        product_store_memory(&c->products, measure, c);
        if (c->products.memory_gbs > 0) {
            c->speed.memory_gbs = (int32_t)c->products.memory_gbs;
        }
    }
    return 0;
}
