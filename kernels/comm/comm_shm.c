/* Collectives through shared memory, for the ranks of one machine (see comm.h).
 *
 * Every collective is a sequence of exchanges: each rank writes its part into its slot
 * and raises its counter; once all counters have risen, all slots may be read. Two sets
 * of slots alternate, which makes a second barrier unnecessary: a rank writes a set
 * again in exchange k + 2, after it has seen every rank's counter of exchange k + 1,
 * and a rank raises that only when it has read the slots of exchange k.
 */
#include "kernels/comm/comm.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/comm/comm_wait.h"

enum { SLOT_FLOATS = 1 << 18 };

struct shared {
    struct counter arrived[COMM_MAX_RANKS]; /* exchanges that each rank has joined */
    struct sync_group group;                /* of all ranks */
    _Alignas(64) float slot[];              /* [2][n_ranks][SLOT_FLOATS] */
};

struct comm_shm {
    struct comm base;
    struct shared *shared;
    unsigned n; /* exchanges so far */
};

size_t comm_shm_bytes(int32_t n_ranks)
{
    return sizeof(struct shared) + (size_t)n_ranks * 2 * SLOT_FLOATS * sizeof(float);
}

static float *slot_of(const struct comm_shm *c, int32_t rank)
{
    return c->shared->slot + ((int64_t)(c->n & 1) * c->base.n_ranks + rank) * SLOT_FLOATS;
}

static int shm_check(struct comm *base, struct err *e)
{
    return failure_check(&CONTAINER_OF(base, struct comm_shm, base)->shared->group.failure, e);
}

static void shm_abort(struct comm *base, const char *why)
{
    struct comm_shm *c = CONTAINER_OF(base, struct comm_shm, base);

    failure_set(&c->shared->group.failure, why);
    for (int32_t r = 0; r < base->n_ranks; r++) {
        counter_wake(&c->shared->arrived[r]);
    }
}

/* Publish slot_of(c, own rank). On return all ranks' slots can be read, until this rank
 * begins the exchange after next. */
static int exchange(struct comm_shm *c, struct err *e)
{
    struct shared *s = c->shared;

    counter_set(&s->group, &s->arrived[c->base.rank], c->n);
    for (int32_t r = 0; r < c->base.n_ranks; r++) {
        int rc = r == c->base.rank ? 0
                                   : counter_await(&s->group, &s->arrived[r], c->n,
                                                   c->base.first_rank + r, c->base.timeout_us, e);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

/* Start an exchange: from here on slot_of gives its slots. */
static int begin(struct comm_shm *c, struct err *e)
{
    int rc = shm_check(&c->base, e);

    c->n += rc == 0;
    return rc;
}

/* ---- floats ---- */

/* The rectangle of m at (row, col) that fits into a slot. */
static struct mat tile_of(struct mat m, int32_t row, int32_t col)
{
    int32_t cols = MIN(m.cols, SLOT_FLOATS), rows = MIN(m.rows - row, SLOT_FLOATS / cols);

    cols = MIN(cols, m.cols - col);
    return mat_cols(mat_rows(m, row, rows), col, cols);
}

static float *row_of(struct mat m, int64_t r)
{
    return (float *)m.data + r * m.stride;
}

static void copy_in(float *slot, struct mat m)
{
    for (int32_t r = 0; r < m.rows; r++) {
        memcpy(slot + (int64_t)r * m.cols, row_of(m, r), (size_t)m.cols * sizeof(float));
    }
}

static void copy_out(struct mat m, const float *slot)
{
    for (int32_t r = 0; r < m.rows; r++) {
        memcpy(row_of(m, r), slot + (int64_t)r * m.cols, (size_t)m.cols * sizeof(float));
    }
}

typedef float float4 __attribute__((vector_size(16), aligned(4), may_alias));

static void add(float *x, const float *y, int64_t n)
{
    int64_t i = 0;

    for (; i + 4 <= n; i += 4) {
        *(float4 *)(x + i) += *(const float4 *)(y + i);
    }
    for (; i < n; i++) {
        x[i] += y[i];
    }
}

static int reduce_tile(struct comm_shm *c, struct mat x, struct err *e)
{
    int rc = begin(c, e);

    if (rc < 0) {
        return rc;
    }
    copy_in(slot_of(c, c->base.rank), x);
    rc = exchange(c, e);
    if (rc < 0) {
        return rc;
    }
    copy_out(x, slot_of(c, 0));
    for (int32_t i = 1; i < c->base.n_ranks; i++) {
        for (int32_t r = 0; r < x.rows; r++) {
            add(row_of(x, r), slot_of(c, i) + (int64_t)r * x.cols, x.cols);
        }
    }
    return 0;
}

static int shm_all_reduce(struct comm *base, struct mat x, struct err *e)
{
    struct comm_shm *c = CONTAINER_OF(base, struct comm_shm, base);
    struct mat tile;

    for (int32_t row = 0; row < x.rows; row += tile.rows) {
        for (int32_t col = 0; col < x.cols; col += tile.cols) {
            tile = tile_of(x, row, col);
            int rc = reduce_tile(c, tile, e);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return 0;
}

/* The columns of `out` for columns [col, col + cols) of rank r's part, as far as out
 * has them. */
static struct mat columns_of(struct mat out, int32_t r, int32_t width, int32_t col, int32_t cols)
{
    int32_t first = MIN(r * width + col, out.cols),
            end = MIN(MIN(r * width + col + cols, (r + 1) * width), out.cols);

    return mat_cols(out, first, MAX(end - first, 0));
}

static int gather_tile(struct comm_shm *c, struct mat out, struct mat part, int32_t width,
                       int32_t col, int32_t cols, struct err *e)
{
    int rc = begin(c, e);

    if (rc < 0) {
        return rc;
    }
    copy_in(slot_of(c, c->base.rank),
            mat_cols(part, MIN(col, part.cols), MAX(MIN(cols, part.cols - col), 0)));
    rc = exchange(c, e);
    for (int32_t r = 0; rc == 0 && c->base.rank == 0 && r < c->base.n_ranks; r++) {
        copy_out(columns_of(out, r, width, col, cols), slot_of(c, r));
    }
    return rc;
}

static int shm_gather_cols(struct comm *base, struct mat out, struct mat part, struct err *e)
{
    struct comm_shm *c = CONTAINER_OF(base, struct comm_shm, base);
    int32_t width = (int32_t)div_ceil(out.cols, base->n_ranks), cols = MIN(width, SLOT_FLOATS);
    int32_t rows = SLOT_FLOATS / cols;

    for (int32_t row = 0; row < part.rows; row += rows) {
        int32_t n = MIN(rows, part.rows - row);
        for (int32_t col = 0; col < width; col += cols) {
            int rc =
                gather_tile(c, mat_rows(out, row, n), mat_rows(part, row, n), width, col, cols, e);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return 0;
}

/* ---- bytes ---- */

static int shm_broadcast(struct comm *base, void *data, size_t n_bytes, struct err *e)
{
    struct comm_shm *c = CONTAINER_OF(base, struct comm_shm, base);
    const size_t most = SLOT_FLOATS * sizeof(float);

    for (size_t at = 0; at < n_bytes; at += most) {
        size_t n = MIN(n_bytes - at, most);
        int rc = begin(c, e);
        if (rc == 0 && base->rank == 0) {
            memcpy(slot_of(c, 0), (char *)data + at, n);
        }
        if (rc == 0) {
            rc = exchange(c, e);
        }
        if (rc < 0) {
            return rc;
        }
        if (base->rank != 0) {
            memcpy((char *)data + at, slot_of(c, 0), n);
        }
    }
    return 0;
}

static int shm_barrier(struct comm *base, struct err *e)
{
    struct comm_shm *c = CONTAINER_OF(base, struct comm_shm, base);
    int rc = begin(c, e);

    return rc < 0 ? rc : exchange(c, e);
}

static void shm_free(struct comm *base)
{
    free(CONTAINER_OF(base, struct comm_shm, base));
}

static const struct comm_ops SHM_OPS = {
    .all_reduce = shm_all_reduce,
    .gather_cols = shm_gather_cols,
    .broadcast = shm_broadcast,
    .barrier = shm_barrier,
    .abort = shm_abort,
    .check = shm_check,
    .free = shm_free,
};

int comm_shm_open(struct comm **ret, void *shared, int32_t rank, int32_t n_ranks,
                  int64_t timeout_us, struct err *e)
{
    if (n_ranks < 1 || n_ranks > COMM_MAX_RANKS || rank < 0 || rank >= n_ranks) {
        return err_set(e, ERR_INVALID, "rank %d of %d; 1 to %d ranks are possible", rank, n_ranks,
                       COMM_MAX_RANKS);
    }
    struct comm_shm *c = calloc(1, sizeof(*c));
    if (!c) {
        return err_nomem(e, "exchange between ranks");
    }
    c->base =
        (struct comm){.ops = &SHM_OPS, .rank = rank, .n_ranks = n_ranks, .timeout_us = timeout_us};
    c->shared = shared;
    *ret = &c->base;
    return 0;
}
