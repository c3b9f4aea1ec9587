/* The seam between ranks: what the processes that share a model say to each other
 * inside a forward pass.
 *
 * A backend gets its `struct comm` through backend_config and calls it from its
 * operations; nobody else does. Every rank makes the same calls in the same order with
 * the same sizes. Sums are taken in the order of the ranks, in float32, so a result
 * depends neither on timing nor on who came last. A call fails on all ranks or, when a
 * rank is gone, on those that are left: ERR_DEVICE, sticky, with the reason that abort
 * was given or the rank that did not come in time.
 *
 * Here: memory shared by the processes of one machine (comm_shm.c), sockets between
 * machines (comm_tcp.c). A device with collectives of its own (NCCL) keeps them inside
 * its backend and takes rank, n_ranks, the first exchange of its addresses and word of
 * failures from here.
 */
#ifndef QUIRE_KERNELS_COMM_COMM_H
#define QUIRE_KERNELS_COMM_COMM_H

#include "kernels/backend.h"

enum { COMM_MAX_RANKS = 64 };

struct comm_ops {
    /* x (float32) = the sum of all ranks' x, on every rank. */
    int (*all_reduce)(struct comm *c, struct mat x, struct err *e);
    /* On rank 0: out = the ranks' `part`s side by side, rank r's from column r *
     * div_ceil(out.cols, n_ranks) on, the last ones' as narrow as out leaves them. On
     * the others out is not written. float32. */
    int (*gather_cols)(struct comm *c, struct mat out, struct mat part, struct err *e);
    /* data[n_bytes] of rank 0 on every rank. */
    int (*broadcast)(struct comm *c, void *data, size_t n_bytes, struct err *e);
    /* Until all ranks are here. */
    int (*barrier)(struct comm *c, struct err *e);
    /* Every call under way and to come fails with `why`, on all ranks. Any thread; the
     * first reason stays. */
    void (*abort)(struct comm *c, const char *why);
    /* 0, or ERR_DEVICE with the reason that abort was given: for ranks that wait for a
     * device. Any thread. */
    int (*check)(struct comm *c, struct err *e);
    void (*free)(struct comm *c);
};

struct comm {
    const struct comm_ops *ops;
    int32_t rank, n_ranks;
    /* the number of rank 0 among the ranks of all stages (pipeline.h): in messages */
    int32_t first_rank;
    int64_t timeout_us; /* how long a rank waits for the others before it gives up */
};

/* Memory for n_ranks, zeroed by whoever makes it and mapped shared by all; freed by the
 * caller after the ranks' comms. */
size_t comm_shm_bytes(int32_t n_ranks);
int comm_shm_open(struct comm **ret, void *shared, int32_t rank, int32_t n_ranks,
                  int64_t timeout_us, struct err *e);
/* Over connected stream sockets: rank 0 has one to every other, fd[1 .. n_ranks), the
 * others have fd[0]. Closed with the comm; on error they stay the caller's. */
int comm_tcp_open(struct comm **ret, const int *fd, int32_t rank, int32_t n_ranks,
                  int64_t timeout_us, struct err *e);

#endif
