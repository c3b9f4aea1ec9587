/* Collects a decode step's operations for a fused launch: operations that may join
 * become pending, any other operation launches the pending ones first. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/expert_stream/exchange.h"
#include "kernels/cuda/fused_decode/heuristics_fused.h"
#include "kernels/cuda/fused_decode/heuristics_grids.h"
#include "kernels/cuda/fused_decode/small_codes.h"
#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/heuristics.h"
#include "kernels/cuda/mixed/mixed.h"

int32_t cuda_fused_bytes(struct cuda_backend *c)
{
    int32_t bytes = cuda_shared_limit();

    /* its blocks wait for each other, so all of them must get on the device */
    if (mps_told()) {
        return 0;
    }
    return c->capability == 90 && !c->config.deterministic && fused_prepare(bytes) ? bytes : 0;
}

int cuda_fused_init(struct cuda_backend *c, struct err *e)
{
    int32_t bytes = c->ranks ? cuda_ranks_fused(c, &c->fused.p2p) : cuda_fused_bytes(c);

    if (bytes == 0) {
        return 0; /* operations are never fused */
    }
    size_t n_experts = (size_t)EXPERT_COUNTERS * EXPERT_COUNTER_STRIDE;
    size_t n_counters =
        (size_t)FUSED_COUNTERS * FUSED_COUNTER_STRIDE + n_experts + FUSED_MAX_PARTIALS;
    size_t n_bytes = n_counters * sizeof(int32_t);
    size_t n_partials = (size_t)FUSED_MAX_PARTIALS * FUSED_PARTIAL_BYTES;
    struct expert_exchange *exchange = cuda_alloc(c, sizeof(*exchange), "experts", e);
    int32_t *counter = exchange ? cuda_alloc(c, n_bytes + n_partials, "fused launches", e) : NULL;
    if (!counter) {
        return ERR_NOMEM;
    }
    cudaError_t rc = cudaMemsetAsync(counter, 0, n_bytes, c->stream);
    if (rc == cudaSuccess) {
        rc = cudaMemsetAsync(exchange->set, 0xff, sizeof(exchange->set), c->stream);
    }
    if (rc == cudaSuccess) {
        rc = cudaMemsetAsync(&exchange->turn, 0,
                             sizeof(*exchange) - offsetof(struct expert_exchange, turn), c->stream);
    }
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "fused launches");
    }
    c->fused.counter = counter;
    c->expert_counter = counter + (ptrdiff_t)FUSED_COUNTERS * FUSED_COUNTER_STRIDE;
    c->expert_exchange = exchange;
    c->fused.arrived = c->expert_counter + n_experts;
    c->fused.partials = counter + n_counters;
    c->fused_shared_bytes = bytes;
    if (c->ranks ? cuda_ranks_small(c) : small_prepare()) {
        size_t one = sizeof(*c->small_squares.sum[0]) * SMALL_ROWS;
        char *both = cuda_alloc(c, 2 * one, "sums of squares", e);
        if (!both) {
            return ERR_NOMEM;
        }
        small_codes_prepare();
        small_mixed_prepare();
        c->small_squares.sum[0] = (void *)both;
        c->small_squares.sum[1] = (void *)(both + one);
    }
    return 0;
}

/* Rows up to which fused launches are used. Over ranks they are so where each product
 * is short; more rows go by launches of their own. */
static int32_t worth_rows(const struct cuda_backend *c)
{
    return c->ranks ? FUSED_WORTH_ROWS_OVER_RANKS : FUSED_WORTH_ROWS;
}

/* Whether products with codes are launches of their own (mixed.h). */
static bool by_mixed(const struct cuda_backend *c, const struct fused_args *a)
{
    return c->small_squares.sum[0] && small_mixed_plan(a, c->n_sms);
}

void cuda_fused_flush(struct cuda_backend *c)
{
    cuda_linear_flush(c);
    cuda_experts_flush(c); /* no operation has joined since */
    cuda_pending_flush(c);
    if (c->fused.n_ops > 0) {
        bool ok = true;
        bool mixed = by_mixed(c, &c->fused); /* e4m3 of up to FUSED_ROWS rows suits codes too */
        if (cuda_experts_linear(c)) {
            ok = true;
        } else if (c->fused.rows <= worth_rows(c) && !mixed) {
            launch_fused_decode(&c->fused, c->n_sms, c->stream);
        } else if (!mixed && small_codes_plan(&c->fused, c->n_sms)) {
            ok = launch_small_codes(&c->fused, c->n_sms, c->stream);
        } else {
            ok = launch_small_rows(&c->fused, &c->small_squares, c->n_sms, c->stream);
        }
        if (!ok) {
            cudaError_t rc = cudaGetLastError();
            cuda_check(c, rc == cudaSuccess ? cudaErrorInvalidValue : rc, "products of few rows");
        }
        c->fused.n_ops = 0;
        c->fused.format = FUSED_16;
        c->fused.rope.kv.base = NULL;
    }
}

/* Whether this step's operations may become pending. They may during capture, when the
 * flush is certain. With several ranks they always may: all ranks must reduce in the
 * same way, and one of them may lack the memory for a graph. */
static bool fused_may_join(struct cuda_backend *c)
{
    bool waits = c->capturing || c->ranks != NULL;
    int32_t worth = c->small_squares.sum[0] ? SMALL_ROWS : worth_rows(c);

    if (!waits || c->padded > worth || !c->fused.counter || !cuda_usable(c)) {
        return false;
    }
    cuda_start_step(c);
    cuda_experts_flush(c);
    return true;
}

/* `next` is the pending launch plus one operation: adopts it if it fits the device. */
static bool fused_take(struct cuda_backend *c, struct fused_args *next)
{
    bool fits = by_mixed(c, next);

    if (!fits && next->rows > worth_rows(c)) {
        fits = (small_plan(next, c->n_sms) &&
                small_grids_fill(next, small_tile_of, c->n_sms, c->memory_blocks)) ||
               (small_codes_plan(next, c->n_sms) &&
                small_grids_fill(next, small_codes_tile, c->n_sms, c->memory_blocks));
    } else if (!fits && !by_mixed(c, &c->fused)) { /* what is pending may be better off alone */
        fits = fused_plan(next, c->n_sms, c->fused_shared_bytes);
    }
    if (!fits) {
        return false;
    }
    c->fused = *next;
    return true;
}

const struct fused_op *cuda_fused_last_norm(struct cuda_backend *c, struct mat out, int32_t rows)
{
    const struct fused_op *last = c->fused.n_ops > 0 ? &c->fused.op[c->fused.n_ops - 1] : NULL;
    bool is = last && last->n == 0 && last->h == out.data && last->h_stride == out.stride &&
              last->k == out.cols && c->fused.rows == rows;

    return is ? last : NULL;
}

bool cuda_fused_drop_last(struct cuda_backend *c)
{
    struct fused_args rest = c->fused;

    rest.n_ops--;
    if (rest.n_ops > 0) {
        return fused_take(c, &rest);
    }
    c->fused.n_ops = 0;
    return true;
}

/* Joins the pending launch, or starts another. `join` is an expression over `next`. */
#define FUSED_PUSH(c, next, join)                \
    do {                                         \
        struct fused_args next = (c)->fused;     \
        if (!fused_may_join(c)) {                \
            return false;                        \
        }                                        \
        if ((join) && fused_take((c), &next)) {  \
            return true;                         \
        }                                        \
        cuda_fused_flush(c);                     \
        next = (c)->fused;                       \
        return (join) && fused_take((c), &next); \
    } while (0)

bool cuda_fused_linear(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep)
{
    FUSED_PUSH(c, next, fused_push_linear(&next, cuda_rows(c, out), out, x, w, ep));
}

bool cuda_fused_norm(struct cuda_backend *c, struct mat out, struct mat x, const struct norm *n)
{
    FUSED_PUSH(c, next, fused_push_norm(&next, cuda_rows(c, out), out, x, n));
}

bool cuda_fused_add_norm(struct cuda_backend *c, struct mat out, struct mat x, struct mat y,
                         const struct norm *n, bool partial)
{
    FUSED_PUSH(c, next, fused_push_add_norm(&next, cuda_rows(c, out), out, x, y, n, partial));
}

bool cuda_fused_linear_gated(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                             struct mat bias, enum activation act)
{
    FUSED_PUSH(c, next, fused_push_linear_gated(&next, cuda_rows(c, out), out, x, w, bias, act));
}

bool cuda_fused_rope_kv(struct cuda_backend *c, struct mat qkv, const struct rope *r,
                        const struct attention *a)
{
    const struct step_arrays s = cuda_group_arrays(c, a->group);
    struct fused_rope at = {.position = s.position, .slot = s.slot, .kv = c->group_view[a->group]};

    FUSED_PUSH(c, next, fused_push_rope_kv(&next, cuda_rows(c, qkv), qkv, r, a, &at));
}
