/* The seam between the stages of a pipeline: what each hands to the next inside a step.
 *
 *     stage 0 ──activations──► stage 1 ── … ──► last stage
 *        ▲                                          │
 *        └────────────────── tokens ────────────────┘
 *
 * Stages hold a part of the layers each and stand in a ring. A stage is n_ranks
 * processes, which share its layers (comm.h); every rank gets bytes from one other: the
 * rank of its number in the stage before, or, in the first stage, rank 0 of the last.
 * Bytes come in the order in which they were sent; both sides know how many, from the
 * step. A call fails as comm's do.
 *
 * As comm it has a memory of one machine (pipeline_shm.c) and sockets between machines
 * (pipeline_tcp.c).
 */
#ifndef QUIRE_KERNELS_COMM_PIPELINE_H
#define QUIRE_KERNELS_COMM_PIPELINE_H

#include "config/base/base.h"

struct pipeline;

struct pipeline_ops {
    /* data[n_bytes] to rank `to` of the next stage; may wait until it takes them, if
     * they are many. */
    int (*send)(struct pipeline *p, int32_t to, const void *data, size_t n_bytes, struct err *e);
    /* The next n_bytes from the stage before. */
    int (*receive)(struct pipeline *p, void *data, size_t n_bytes, struct err *e);
    /* Every call under way and to come fails with `why`, on all ranks. Any thread; the
     * first reason stays. */
    void (*abort)(struct pipeline *p, const char *why);
    /* 0, or ERR_DEVICE with the reason that abort was given. Any thread. */
    int (*check)(struct pipeline *p, struct err *e);
    void (*free)(struct pipeline *p);
};

/* Where a rank stands. Ranks are numbered stage by stage. */
struct pipeline_place {
    int32_t stage, n_stages;
    int32_t rank, n_ranks; /* in the stage */
};

/* Rank `number` of n_stages * n_ranks. */
static inline struct pipeline_place pipeline_place_of(int32_t number, int32_t n_stages,
                                                      int32_t n_ranks)
{
    return (struct pipeline_place){number / n_ranks, n_stages, number % n_ranks, n_ranks};
}

static inline int32_t pipeline_number(const struct pipeline_place *at, int32_t stage, int32_t rank)
{
    return stage * at->n_ranks + rank;
}

static inline bool pipeline_is_last(const struct pipeline_place *at)
{
    return at->stage == at->n_stages - 1;
}

struct pipeline {
    const struct pipeline_ops *ops;
    struct pipeline_place at;
    int64_t timeout_us; /* how long a rank waits for another before it gives up */
};

/* The number among all ranks of the one that this one gets bytes from. */
int32_t pipeline_source(const struct pipeline_place *at);
/* The same for those it sends to: ret[n_ranks] by their rank in the next stage, -1
 * where it sends nothing. */
void pipeline_targets(const struct pipeline_place *at, int32_t *ret);

/* Memory for so many ranks in all, zeroed by whoever makes it and mapped shared by
 * all. */
size_t pipeline_shm_bytes(int32_t n_ranks);
int pipeline_shm_open(struct pipeline **ret, void *shared, const struct pipeline_place *at,
                      int64_t timeout_us, struct err *e);
/* Over connected stream sockets, as pipeline_source and pipeline_targets name them.
 * Closed with the pipeline; on error they stay the caller's. */
int pipeline_tcp_open(struct pipeline **ret, int source, const int *target,
                      const struct pipeline_place *at, int64_t timeout_us, struct err *e);

#endif
