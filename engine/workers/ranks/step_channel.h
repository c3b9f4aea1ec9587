/* The channel from rank 0 to the other ranks: each message goes to all of them, is
 * taken in order, and is read in place.
 *
 * A table of functions, so that shared memory on one machine (step_channel_ring.c) and
 * sockets between machines (step_channel_tcp.c) look alike to ranks.c and
 * worker_main.c. Messages to rank 0 are control messages over a socket (control_msg.h);
 * data exchanged within a step goes through comm. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_STEP_CHANNEL_H
#define QUIRE_ENGINE_WORKERS_RANKS_STEP_CHANNEL_H

#include "config/base/base.h"

enum step_message_kind {
    STEP_CHANNEL_POOLS, /* struct rank_pools: allocate the KV pools */
    STEP_CHANNEL_STEP,  /* a batch, as batch_wire.h */
    STEP_CHANNEL_DRAFT, /* the same for the draft model */
    STEP_CHANNEL_STOP,  /* exit normally; with a text, during start: fail for that reason */
};

struct step_message {
    uint32_t kind;    /* enum step_message_kind */
    const void *data; /* aligned to 64; valid until release */
    size_t n_bytes;   /* of data */
};

struct step_channel;

struct step_channel_ops {
    /* Rank 0, one thread: where to write the next message, of up to slot_bytes.
     * ERR_TIMEOUT: a rank took no message for timeout_us. */
    int (*begin)(struct step_channel *l, void **ret, int64_t timeout_us, struct err *e);
    /* Rank 0: publishes the message that was written to all ranks. */
    int (*commit)(struct step_channel *l, uint32_t kind, size_t n_bytes, struct err *e);
    /* Other ranks: takes the next message. 1, or 0 if none arrives within timeout_us.
     * Spins briefly, then sleeps. */
    int (*take)(struct step_channel *l, struct step_message *ret, int64_t timeout_us,
                struct err *e);
    /* Other ranks: the message taken last is no longer read. */
    void (*release)(struct step_channel *l);
    void (*free)(struct step_channel *l);
};

struct step_channel {
    const struct step_channel_ops *ops; /* of its kind */
    int32_t rank, n_ranks;              /* this rank; ranks in all */
    size_t slot_bytes;                  /* of the largest message */
};

/* step_channel_ring.c: a channel in memory that the ranks of one machine share.
 * `shared` is zeroed, of ring_channel_bytes, aligned to 64, and stays the caller's. */
size_t ring_channel_bytes(size_t slot_bytes);
int ring_channel_open(struct step_channel **ret, void *shared, int32_t rank, int32_t n_ranks,
                      size_t slot_bytes, struct err *e);

#endif
