/* A rank's connections to the other ranks: the step channel from rank 0, comm within
 * its stage, and the pipeline between stages. On one machine all three live in shared
 * memory (the ring of steps, each stage's comm, the pipeline); between machines they
 * are sockets. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_TRANSPORTS_H
#define QUIRE_ENGINE_WORKERS_RANKS_TRANSPORTS_H

#include "engine/workers/ranks/cluster.h"
#include "engine/workers/ranks/step_channel.h"
#include "kernels/comm/comm.h"
#include "kernels/comm/pipeline.h"

struct transports {
    void *memory;                 /* shared memory; NULL: sockets */
    size_t n_bytes;               /* of `memory` */
    struct step_channel *channel; /* messages from rank 0 */
    struct comm *comm;            /* all-reduce within the stage; NULL: one rank a stage */
    struct pipeline *pipeline;    /* between stages; NULL: one stage */
};

/* Creates zeroed memory for all ranks and returns its descriptor; pages are allocated
 * at the first write. */
int transports_create(int *ret_fd, const struct pipeline_place *at, size_t slot_bytes,
                      struct err *e);
/* Opens one rank's ends in that memory. timeout_us: as in comm_shm_open. */
int transports_open(struct transports *ret, int fd, const struct pipeline_place *at,
                    size_t slot_bytes, int64_t timeout_us, struct err *e);
/* Opens one rank's ends over the connections of `net`, which must be complete. Takes
 * over those of comm and the pipeline, also on error; the others stay net's. */
int transports_connect(struct transports *ret, struct cluster *net, size_t slot_bytes,
                       int64_t timeout_us, struct err *e);
/* Ends every wait for another rank in comm or the pipeline with the error `why`. Any
 * thread. */
void transports_abort(struct transports *s, const char *why);
/* 0, or the error that ended comm or the pipeline. Any thread. */
int transports_check(struct transports *s, struct err *e);
void transports_release(struct transports *s);

#endif
