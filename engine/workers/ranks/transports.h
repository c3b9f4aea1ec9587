/* A rank's ends of what leads to the others: messages of rank 0, comm within its stage,
 * the pipeline between stages. On one machine all lie in memory that the ranks share:
 * the ring of steps, each stage's comm, the pipeline; between machines they are
 * sockets. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_TRANSPORTS_H
#define QUIRE_ENGINE_WORKERS_RANKS_TRANSPORTS_H

#include "engine/workers/ranks/cluster.h"
#include "engine/workers/ranks/step_channel.h"
#include "kernels/comm/comm.h"
#include "kernels/comm/pipeline.h"

struct transports {
    void *memory; /* NULL: sockets */
    size_t n_bytes;
    struct step_channel *channel;
    struct comm *comm;         /* NULL: one rank a stage */
    struct pipeline *pipeline; /* NULL: one stage */
};

/* Zeroed memory for all ranks; its descriptor (pages are taken when they are first
 * written). */
int transports_create(int *ret_fd, const struct pipeline_place *at, size_t slot_bytes,
                      struct err *e);
/* One rank's ends. timeout_us: as comm_shm_open. */
int transports_open(struct transports *ret, int fd, const struct pipeline_place *at,
                    size_t slot_bytes, int64_t timeout_us, struct err *e);
/* Over the connections of `net`, all of which are there; those of comm and the pipeline
 * are theirs then, also on error, the others stay net's. */
int transports_connect(struct transports *ret, struct cluster *net, size_t slot_bytes,
                       int64_t timeout_us, struct err *e);
/* Whoever waits for another rank in comm or the pipeline does so no longer, and why.
 * Any thread. */
void transports_abort(struct transports *s, const char *why);
/* 0, or what ended comm or the pipeline. Any thread. */
int transports_check(struct transports *s, struct err *e);
void transports_release(struct transports *s);

#endif
