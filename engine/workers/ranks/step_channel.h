/* How rank 0 speaks to the other ranks: one message to all, taken by each in order,
 * read in place.
 *
 * A small table, so that ranks of one machine (shared memory, step_channel_ring.c) and
 * of several (a stream to each) are the same to ranks.c and worker_main.c. What ranks
 * say to rank 0 is rare and goes as notes over a socket (control_msg.h); what they say
 * to each other inside a step is comm's.
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

struct step_channel;

struct step_channel_ops {
    /* Rank 0, one thread: where the next message of up to slot_bytes is written.
     * ERR_TIMEOUT: a rank took none for timeout_us. */
    int (*begin)(struct step_channel *l, void **ret, int64_t timeout_us, struct err *e);
    /* It is written: to all. */
    int (*commit)(struct step_channel *l, uint32_t kind, size_t n_bytes, struct err *e);
    /* The others: the next message; 1, or 0 when there is none for timeout_us. Spins
     * for a moment, then sleeps. */
    int (*take)(struct step_channel *l, struct rank_message *ret, int64_t timeout_us,
                struct err *e);
    /* The message taken last is no longer read. */
    void (*release)(struct step_channel *l);
    void (*free)(struct step_channel *l);
};

struct step_channel {
    const struct step_channel_ops *ops;
    int32_t rank, n_ranks;
    size_t slot_bytes;
};

/* step_channel_ring.c: in memory that the ranks of a machine share. Zeroed, of
 * ring_channel_bytes, aligned to 64; the caller's. */
size_t ring_channel_bytes(size_t slot_bytes);
int ring_channel_open(struct step_channel **ret, void *shared, int32_t rank, int32_t n_ranks,
                      size_t slot_bytes, struct err *e);

#endif
