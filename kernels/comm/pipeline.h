/* Point-to-point transport of pipeline parallelism: what a stage hands to the next one
 * inside a step.
 *
 *     stage 0 ──activations──► stage 1 ── … ──► last stage
 *        ▲                                          │
 *        └────────────────── tokens ────────────────┘
 *
 * The stages form a ring, and each holds a range of the layers. A stage is n_ranks
 * processes, which share its layers (comm.h). Every rank receives from one other rank:
 * that of the same number in the stage before, or, in the first stage, rank 0 of the
 * last. Bytes arrive in the order in which they were sent; both sides know their number
 * from the step. Calls fail as comm's do.
 *
 * Implementations: shared memory on one machine (pipeline_shm.c), sockets between
 * machines (pipeline_tcp.c).
 */
#ifndef QUIRE_KERNELS_COMM_PIPELINE_H
#define QUIRE_KERNELS_COMM_PIPELINE_H

#include "config/base/base.h"

struct pipeline;

struct pipeline_ops {
    /* data[n_bytes] to rank `to` of the next stage. May block until the receiver has
     * taken what does not fit into the transport's buffer. */
    int (*send)(struct pipeline *p, int32_t to, const void *data, size_t n_bytes, struct err *e);
    /* The next n_bytes from this rank's source; blocks until they are there. */
    int (*receive)(struct pipeline *p, void *data, size_t n_bytes, struct err *e);
    /* Make every call, under way or later, fail with `why` on all ranks. Any thread;
     * the first reason stays. */
    void (*abort)(struct pipeline *p, const char *why);
    /* 0, or ERR_DEVICE with the reason given to abort. Any thread. */
    int (*check)(struct pipeline *p, struct err *e);
    void (*free)(struct pipeline *p);
};

/* The coordinates of a rank. Among all ranks, numbers go stage by stage. */
struct pipeline_place {
    int32_t stage, n_stages; /* 0: the first, which embeds; the last one samples */
    int32_t rank, n_ranks;   /* in the stage */
};

/* The coordinates of rank `number` of n_stages * n_ranks. */
static inline struct pipeline_place pipeline_place_of(int32_t number, int32_t n_stages,
                                                      int32_t n_ranks)
{
    return (struct pipeline_place){number / n_ranks, n_stages, number % n_ranks, n_ranks};
}

/* The number among all ranks of a stage's rank. */
static inline int32_t pipeline_number(const struct pipeline_place *at, int32_t stage, int32_t rank)
{
    return stage * at->n_ranks + rank;
}

static inline bool pipeline_is_last(const struct pipeline_place *at)
{
    return at->stage == at->n_stages - 1;
}

struct pipeline {
    const struct pipeline_ops *ops; /* of the implementation */
    struct pipeline_place at;       /* this process's */
    int64_t timeout_us;             /* a rank that is silent for longer is taken for lost */
};

/* The number among all ranks of the rank that `at` receives from. */
int32_t pipeline_source(const struct pipeline_place *at);
/* The numbers of the ranks that `at` sends to: ret[n_ranks] by their rank in the next
 * stage, -1 for those that it does not send to. */
void pipeline_targets(const struct pipeline_place *at, int32_t *ret);

/* Bytes of the shared memory of n_ranks ranks, those of all stages. The caller zeroes
 * it and maps it shared into every rank's process. */
size_t pipeline_shm_bytes(int32_t n_ranks);
int pipeline_shm_open(struct pipeline **ret, void *shared, const struct pipeline_place *at,
                      int64_t timeout_us, struct err *e);
/* Over connected stream sockets to the ranks that pipeline_source and pipeline_targets
 * name; -1: none. The pipeline closes them; on error they stay the caller's. */
int pipeline_tcp_open(struct pipeline **ret, int source, const int *target,
                      const struct pipeline_place *at, int64_t timeout_us, struct err *e);

#endif
