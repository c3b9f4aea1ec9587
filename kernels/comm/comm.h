/* Collectives between the ranks of tensor parallelism: the processes that share each
 * layer of a model, inside a forward pass.
 *
 * A backend gets its `struct comm` through backend_config and calls it from its
 * operations; nothing else calls it. Every rank makes the same calls in the same order
 * with the same sizes. Sums are taken in the order of the ranks, in float32, so results
 * do not depend on timing. A call that fails does so on all ranks that are still there,
 * and every later call fails too: ERR_DEVICE with the reason given to abort, or with
 * the rank that did not answer in time.
 *
 * Implementations: shared memory on one machine (comm_shm.c), sockets between machines
 * (comm_tcp.c). A backend whose device has collectives of its own (NCCL) uses those,
 * and this seam for rank and n_ranks, the exchange of addresses at start, and failures.
 */
#ifndef QUIRE_KERNELS_COMM_COMM_H
#define QUIRE_KERNELS_COMM_COMM_H

#include "kernels/backend.h"

enum { COMM_MAX_RANKS = 64 };

struct comm_ops {
    /* x (float32) = the sum of all ranks' x, on every rank, in place. */
    int (*all_reduce)(struct comm *c, struct mat x, struct err *e);
    /* On rank 0: out = the ranks' `part`s side by side, rank r's from column
     * r * div_ceil(out.cols, n_ranks) on; the last ranks' are narrower where out ends.
     * On the others out is not written. float32. */
    int (*gather_cols)(struct comm *c, struct mat out, struct mat part, struct err *e);
    /* data[n_bytes] = rank 0's, on every rank. */
    int (*broadcast)(struct comm *c, void *data, size_t n_bytes, struct err *e);
    /* Wait until all ranks have called it. */
    int (*barrier)(struct comm *c, struct err *e);
    /* Make every call, under way or later, fail with `why` on all ranks. Any thread;
     * the first reason stays. */
    void (*abort)(struct comm *c, const char *why);
    /* 0, or ERR_DEVICE with the reason given to abort: for a rank that waits for its
     * device and not in a call. Any thread. */
    int (*check)(struct comm *c, struct err *e);
    void (*free)(struct comm *c);
};

struct comm {
    const struct comm_ops *ops; /* of the implementation */
    int32_t rank, n_ranks;      /* of this process in its stage; ranks of the stage */
    int32_t first_rank;         /* rank 0's number among those of all stages, for messages */
    int64_t timeout_us;         /* a rank that is silent for longer is taken for lost */
};

/* Bytes of the shared memory of n_ranks ranks. The caller zeroes it, maps it shared
 * into every rank's process, and frees it after the ranks' comms. */
size_t comm_shm_bytes(int32_t n_ranks);
int comm_shm_open(struct comm **ret, void *shared, int32_t rank, int32_t n_ranks,
                  int64_t timeout_us, struct err *e);
/* Over connected stream sockets: rank 0 has one to every other rank, fd[1 .. n_ranks);
 * the others have fd[0], to rank 0. The comm closes them; on error they stay the
 * caller's. */
int comm_tcp_open(struct comm **ret, const int *fd, int32_t rank, int32_t n_ranks,
                  int64_t timeout_us, struct err *e);

#endif
