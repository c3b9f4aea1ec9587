/* Collectives over sockets, for ranks on several machines (see comm.h): a star with
 * rank 0 in the middle.
 *
 * An all-reduce goes to rank 0 chunk by chunk, is summed there in the order of the
 * ranks, in float32, and is sent back, which gives the same bits as shared memory. Each
 * costs two trips over the network: enough for CPUs and for control. Devices have their
 * own collectives and use only broadcast, abort and check from here.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/comm/comm.h"
#include "kernels/comm/comm_wait.h"

enum { CHUNK_FLOATS = 1 << 16 };

struct comm_tcp {
    struct comm base;
    int fd[COMM_MAX_RANKS]; /* by rank; -1 where there is no connection (see comm.h) */
    struct failure failure; /* of this rank's connections */
    float *chunk;           /* [CHUNK_FLOATS] being sent, received or summed */
    float *other;           /* [CHUNK_FLOATS] rank 0: another rank's summand */
};

static void tcp_abort(struct comm *base, const char *why)
{
    struct comm_tcp *c = CONTAINER_OF(base, struct comm_tcp, base);

    sockets_abort(&c->failure, c->fd, base->n_ranks, why);
}

static int tcp_check(struct comm *base, struct err *e)
{
    struct comm_tcp *c = CONTAINER_OF(base, struct comm_tcp, base);
    int rc = 0;

    for (int32_t r = 0; r < base->n_ranks && rc == 0; r++) {
        rc = socket_check(&c->failure, c->fd[r], base->first_rank + r, e);
    }
    return rc;
}

/* n_bytes to (`out`) or from a rank. A failure is passed on to all ranks. */
static int move(struct comm_tcp *c, int32_t rank, void *data, size_t n_bytes, bool out,
                struct err *e)
{
    int64_t timeout_us = c->base.timeout_us;
    int rc = socket_move(&c->failure, c->fd[rank], c->base.first_rank + rank, data, n_bytes, out,
                         timeout_us, e);

    if (rc < 0) {
        tcp_abort(&c->base, e->text);
    }
    return rc;
}

static int tcp_broadcast(struct comm *base, void *data, size_t n_bytes, struct err *e)
{
    struct comm_tcp *c = CONTAINER_OF(base, struct comm_tcp, base);

    if (base->rank > 0) {
        return move(c, 0, data, n_bytes, false, e);
    }
    int rc = 0;
    for (int32_t r = 1; r < base->n_ranks && rc == 0; r++) {
        rc = move(c, r, data, n_bytes, true, e);
    }
    return rc;
}

/* chunk[n] = its sum over the ranks, on every rank. */
static int reduce_chunk(struct comm_tcp *c, int64_t n, struct err *e)
{
    size_t n_bytes = (size_t)n * sizeof(float);
    int rc = 0;

    if (c->base.rank > 0) {
        rc = move(c, 0, c->chunk, n_bytes, true, e);
    }
    for (int32_t r = 1; c->base.rank == 0 && r < c->base.n_ranks && rc == 0; r++) {
        rc = move(c, r, c->other, n_bytes, false, e);
        for (int64_t i = 0; i < n && rc == 0; i++) {
            c->chunk[i] += c->other[i];
        }
    }
    return rc < 0 ? rc : tcp_broadcast(&c->base, c->chunk, n_bytes, e);
}

static float *row_of(struct mat m, int32_t r)
{
    return (float *)m.data + r * m.stride;
}

/* Elements [first, first + n) of a mat in row-major order, to (`out`) or from
 * contiguous memory. */
static void copy_elements(struct mat m, int64_t first, int64_t n, float *flat, bool out)
{
    for (int64_t at = 0; at < n;) {
        int64_t i = first + at, col = i % m.cols, some = MIN(n - at, m.cols - col);
        float *in_mat = row_of(m, (int32_t)(i / m.cols)) + col;
        memcpy(out ? flat + at : in_mat, out ? in_mat : flat + at, (size_t)some * sizeof(float));
        at += some;
    }
}

static int tcp_all_reduce(struct comm *base, struct mat x, struct err *e)
{
    struct comm_tcp *c = CONTAINER_OF(base, struct comm_tcp, base);
    int64_t total = (int64_t)x.rows * x.cols;

    for (int64_t first = 0; first < total; first += CHUNK_FLOATS) {
        int64_t n = MIN(total - first, CHUNK_FLOATS);
        copy_elements(x, first, n, c->chunk, true);
        int rc = reduce_chunk(c, n, e);
        if (rc < 0) {
            return rc;
        }
        copy_elements(x, first, n, c->chunk, false);
    }
    return 0;
}

/* The mat m to (`out`) or from a rank. */
static int move_rows(struct comm_tcp *c, int32_t rank, struct mat m, bool out, struct err *e)
{
    int64_t total = (int64_t)m.rows * m.cols;

    for (int64_t first = 0; first < total; first += CHUNK_FLOATS) {
        int64_t n = MIN(total - first, CHUNK_FLOATS);
        if (out) {
            copy_elements(m, first, n, c->chunk, true);
        }
        int rc = move(c, rank, c->chunk, (size_t)n * sizeof(float), out, e);
        if (rc < 0) {
            return rc;
        }
        if (!out) {
            copy_elements(m, first, n, c->chunk, false);
        }
    }
    return 0;
}

static int tcp_gather_cols(struct comm *base, struct mat out, struct mat part, struct err *e)
{
    struct comm_tcp *c = CONTAINER_OF(base, struct comm_tcp, base);
    int32_t width = (int32_t)div_ceil(out.cols, base->n_ranks);

    if (base->rank > 0) {
        return move_rows(c, 0, part, true, e);
    }
    for (int32_t row = 0; row < part.rows; row++) {
        memcpy(row_of(out, row), row_of(part, row), (size_t)part.cols * sizeof(float));
    }
    int rc = 0;
    for (int32_t r = 1; r < base->n_ranks && rc == 0; r++) {
        int32_t first = MIN(r * width, out.cols), cols = MIN(width, out.cols - first);
        rc = move_rows(c, r, mat_rows(mat_cols(out, first, cols), 0, part.rows), false, e);
    }
    return rc;
}

static int tcp_barrier(struct comm *base, struct err *e)
{
    struct comm_tcp *c = CONTAINER_OF(base, struct comm_tcp, base);

    c->chunk[0] = 0;
    return reduce_chunk(c, 1, e);
}

static void tcp_free(struct comm *base)
{
    struct comm_tcp *c = CONTAINER_OF(base, struct comm_tcp, base);

    sockets_close(c->fd, base->n_ranks);
    free(c->chunk);
    free(c->other);
    free(c);
}

static const struct comm_ops TCP_OPS = {
    .all_reduce = tcp_all_reduce,
    .gather_cols = tcp_gather_cols,
    .broadcast = tcp_broadcast,
    .barrier = tcp_barrier,
    .abort = tcp_abort,
    .check = tcp_check,
    .free = tcp_free,
};

int comm_tcp_open(struct comm **ret, const int *fd, int32_t rank, int32_t n_ranks,
                  int64_t timeout_us, struct err *e)
{
    if (n_ranks < 1 || n_ranks > COMM_MAX_RANKS || rank < 0 || rank >= n_ranks) {
        return err_set(e, ERR_INVALID, "rank %d of %d; 1 to %d ranks are possible", rank, n_ranks,
                       COMM_MAX_RANKS);
    }
    struct comm_tcp *c = calloc(1, sizeof(*c));
    if (!c) {
        return err_nomem(e, "exchange between ranks");
    }
    c->base =
        (struct comm){.ops = &TCP_OPS, .rank = rank, .n_ranks = n_ranks, .timeout_us = timeout_us};
    for (int32_t r = 0; r < n_ranks; r++) {
        c->fd[r] = -1;
    }
    c->chunk = malloc(CHUNK_FLOATS * sizeof(float));
    c->other = malloc(CHUNK_FLOATS * sizeof(float));
    if (!c->chunk || !c->other) {
        tcp_free(&c->base);
        return err_nomem(e, "exchange between ranks");
    }
    for (int32_t r = 0; r < n_ranks; r++) {
        c->fd[r] = (rank == 0 ? r > 0 : r == 0) ? fd[r] : -1;
    }
    *ret = &c->base;
    return 0;
}
