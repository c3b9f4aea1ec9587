/* Pipeline stages on several machines: a connection from each rank to each rank that it
 * sends to (see pipeline.h). The sender continues once the sockets' buffers have taken
 * everything; a long prompt's activations wait for the receiver. */
#include <stdlib.h>

#include "kernels/comm/comm.h"
#include "kernels/comm/comm_wait.h"
#include "kernels/comm/pipeline.h"

enum { SOURCE = COMM_MAX_RANKS, N_SOCKETS };

struct pipeline_tcp {
    struct pipeline base;
    struct failure failure; /* of this rank's connections */
    int fd[N_SOCKETS];      /* targets by their rank in the next stage, [SOURCE]; -1: none */
    int32_t target_rank[COMM_MAX_RANKS]; /* the targets' numbers among all ranks */
};

static void tcp_abort(struct pipeline *p, const char *why)
{
    struct pipeline_tcp *t = CONTAINER_OF(p, struct pipeline_tcp, base);

    sockets_abort(&t->failure, t->fd, N_SOCKETS, why);
}

/* n_bytes to (`out`) or from a rank. A failure is passed on to all ranks. */
static int move(struct pipeline_tcp *t, int fd, int32_t rank, void *data, size_t n_bytes, bool out,
                struct err *e)
{
    int rc = socket_move(&t->failure, fd, rank, data, n_bytes, out, t->base.timeout_us, e);

    if (rc < 0) {
        tcp_abort(&t->base, e->text);
    }
    return rc;
}

static int tcp_send(struct pipeline *p, int32_t to, const void *data, size_t n_bytes, struct err *e)
{
    struct pipeline_tcp *t = CONTAINER_OF(p, struct pipeline_tcp, base);

    return move(t, t->fd[to], t->target_rank[to], (void *)(uintptr_t)data, n_bytes, true, e);
}

static int tcp_receive(struct pipeline *p, void *data, size_t n_bytes, struct err *e)
{
    struct pipeline_tcp *t = CONTAINER_OF(p, struct pipeline_tcp, base);

    return move(t, t->fd[SOURCE], pipeline_source(&p->at), data, n_bytes, false, e);
}

static int tcp_check(struct pipeline *p, struct err *e)
{
    struct pipeline_tcp *t = CONTAINER_OF(p, struct pipeline_tcp, base);
    int rc = socket_check(&t->failure, t->fd[SOURCE], pipeline_source(&p->at), e);

    for (int32_t i = 0; i < p->at.n_ranks && rc == 0; i++) {
        rc = socket_check(&t->failure, t->fd[i], t->target_rank[i], e);
    }
    return rc;
}

static void tcp_free(struct pipeline *p)
{
    struct pipeline_tcp *t = CONTAINER_OF(p, struct pipeline_tcp, base);

    sockets_close(t->fd, N_SOCKETS);
    free(t);
}

static const struct pipeline_ops TCP_OPS = {.send = tcp_send,
                                            .receive = tcp_receive,
                                            .abort = tcp_abort,
                                            .check = tcp_check,
                                            .free = tcp_free};

int pipeline_tcp_open(struct pipeline **ret, int source, const int *target,
                      const struct pipeline_place *at, int64_t timeout_us, struct err *e)
{
    struct pipeline_tcp *p = calloc(1, sizeof(*p));

    if (!p) {
        return err_nomem(e, "exchange between stages");
    }
    p->base = (struct pipeline){.ops = &TCP_OPS, .at = *at, .timeout_us = timeout_us};
    pipeline_targets(at, p->target_rank);
    for (int32_t i = 0; i < COMM_MAX_RANKS; i++) {
        p->fd[i] = i < at->n_ranks ? target[i] : -1;
    }
    p->fd[SOURCE] = source;
    *ret = &p->base;
    return 0;
}
