/* The chain of a decode step under capture: operations that may join wait here, any
 * other lets them go first. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fused_decode/heuristics_fused.h"

int32_t cuda_chain_bytes(struct cuda_backend *c)
{
    int32_t bytes = cuda_shared_limit();

    return c->capability == 90 && !c->config.deterministic && chain_prepare(bytes) ? bytes : 0;
}

int cuda_chain_init(struct cuda_backend *c, struct err *e)
{
    int32_t bytes = c->ranks ? cuda_ranks_chain(c, &c->chain.peer) : cuda_chain_bytes(c);

    if (bytes == 0) {
        return 0; /* every operation goes alone */
    }
    size_t n_counters = (size_t)CHAIN_COUNTERS * CHAIN_COUNTER_STRIDE + CHAIN_MAX_SUMS;
    size_t n_bytes = n_counters * sizeof(int32_t);
    int32_t *counter =
        cuda_alloc(c, n_bytes + (size_t)CHAIN_MAX_SUMS * CHAIN_SUM_BYTES, "chains", e);
    if (!counter) {
        return ERR_NOMEM;
    }
    cudaError_t rc = cudaMemsetAsync(counter, 0, n_bytes, c->stream);
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "chains");
    }
    c->chain.counter = counter;
    c->chain.arrived = counter + (ptrdiff_t)CHAIN_COUNTERS * CHAIN_COUNTER_STRIDE;
    c->chain.sums = counter + n_counters;
    c->chain_shared_bytes = bytes;
    return 0;
}

void cuda_chain_flush(struct cuda_backend *c)
{
    if (c->chain.n_phases > 0) {
        launch_chain(&c->chain, c->n_sms, c->stream);
        c->chain.n_phases = 0;
        c->chain.rope.kv.base = NULL;
    }
}

/* Whether this step's operations may wait: they do while it is captured, when their
 * launches are sure to follow. Where there are ranks they always do: all ranks have to
 * sum in the same way, and one may have no room left for a graph. */
static bool chain_open(struct cuda_backend *c)
{
    bool waits = c->capturing || c->ranks != NULL;
    int32_t worth = c->ranks ? CHAIN_WORTH_ROWS_OVER_RANKS : CHAIN_WORTH_ROWS;

    if (!waits || c->padded > worth || !c->chain.counter || !cuda_usable(c)) {
        return false;
    }
    cuda_start_step(c);
    return true;
}

/* Once an operation has joined `next`, take that as the chain if it fits the device. */
static bool chain_take(struct cuda_backend *c, struct chain_args *next)
{
    if (!chain_plan(next, c->n_sms, c->chain_shared_bytes)) {
        return false;
    }
    c->chain = *next;
    return true;
}

/* Join what waits, or else a chain of its own. `join` is an expression over `next`. */
#define CHAIN_JOIN(c, next, join)                \
    do {                                         \
        struct chain_args next = (c)->chain;     \
        if (!chain_open(c)) {                    \
            return false;                        \
        }                                        \
        if ((join) && chain_take((c), &next)) {  \
            return true;                         \
        }                                        \
        cuda_chain_flush(c);                     \
        next = (c)->chain;                       \
        return (join) && chain_take((c), &next); \
    } while (0)

bool cuda_chain_linear(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep)
{
    CHAIN_JOIN(c, next, chain_join_linear(&next, cuda_rows(c, out), out, x, w, ep));
}

bool cuda_chain_norm(struct cuda_backend *c, struct mat out, struct mat x, const struct norm *n)
{
    CHAIN_JOIN(c, next, chain_join_norm(&next, cuda_rows(c, out), out, x, n));
}

bool cuda_chain_add_norm(struct cuda_backend *c, struct mat out, struct mat x, struct mat y,
                         const struct norm *n, bool partial)
{
    CHAIN_JOIN(c, next, chain_join_add_norm(&next, cuda_rows(c, out), out, x, y, n, partial));
}

bool cuda_chain_linear_gated(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                             struct mat bias, enum activation act)
{
    CHAIN_JOIN(c, next, chain_join_linear_gated(&next, cuda_rows(c, out), out, x, w, bias, act));
}

bool cuda_chain_rope_kv(struct cuda_backend *c, struct mat qkv, const struct rope *r,
                        const struct attention *a)
{
    struct chain_rope at = {
        .position = c->arrays.position, .slot = c->arrays.slot, .kv = c->kv_view};

    CHAIN_JOIN(c, next, chain_join_rope_kv(&next, cuda_rows(c, qkv), qkv, r, a, &at));
}
