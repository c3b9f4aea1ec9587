/* How rank 0 speaks to the other ranks: one message to all, taken by each in order,
 * read in place.
 *
 * A small table, so that ranks of one machine (shared memory, step_channel_ring.c) and of
 * several (a stream to each) are the same to ranks.c and worker_main.c. What ranks say to
 * rank 0 is rare and goes as notes over a socket (control_msg.h); what they say to each
 * other inside a step is comm's.
 */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_STEP_CHANNEL_H
#define QUIRE_ENGINE_WORKERS_RANKS_STEP_CHANNEL_H

#include "config/base/base.h"

enum rank_message_kind {
    RANK_POOLS, /* struct rank_pools: make the cache */
    RANK_STEP,  /* batch_wire.h */
    RANK_STOP,  /* end in order; or, with a text, while starting, for that reason */
};

struct rank_message {
    uint32_t kind;
    const void *data; /* aligned to 64; holds until release */
    size_t n_bytes;
};

struct rank_link;

struct rank_link_ops {
    /* Rank 0, one thread: where the next message of up to slot_bytes is written.
     * ERR_TIMEOUT: a rank took none for timeout_us. */
    int (*begin)(struct rank_link *l, void **ret, int64_t timeout_us, struct err *e);
    /* It is written: to all. */
    int (*commit)(struct rank_link *l, uint32_t kind, size_t n_bytes, struct err *e);
    /* The others: the next message; 1, or 0 when there is none for timeout_us. Spins
     * for a moment, then sleeps. */
    int (*take)(struct rank_link *l, struct rank_message *ret, int64_t timeout_us, struct err *e);
    /* The message taken last is no longer read. */
    void (*release)(struct rank_link *l);
    void (*free)(struct rank_link *l);
};

struct rank_link {
    const struct rank_link_ops *ops;
    int32_t rank, n_ranks;
    size_t slot_bytes;
};

/* step_channel_ring.c: in memory that the ranks of a machine share. Zeroed, of rank_ring_bytes,
 * aligned to 64; the caller's. */
size_t rank_ring_bytes(size_t slot_bytes);
int rank_ring_open(struct rank_link **ret, void *shared, int32_t rank, int32_t n_ranks,
                   size_t slot_bytes, struct err *e);

#endif
