/* A rank's ends of what leads to the others: messages of rank 0, and comm. On one machine both lie in memory that the ranks
 * share, the ring of steps, then comm's; between machines they are sockets. */
#ifndef QUIRE_ENGINE_RANK_SHARED_H
#define QUIRE_ENGINE_RANK_SHARED_H

#include "engine/rank_link.h"
#include "kernels/comm.h"

struct rank_shared {
    void *memory; /* NULL: sockets */
    size_t n_bytes;
    struct rank_link *link;
    struct comm *comm;
};

/* Zeroed memory for n_ranks; its descriptor (pages are taken when they are first written). */
int rank_shared_create(int *ret_fd, int32_t n_ranks, size_t slot_bytes, struct err *e);
/* One rank's ends. timeout_us: as comm_shm_open. */
int rank_shared_open(struct rank_shared *ret, int fd, int32_t rank, int32_t n_ranks, size_t slot_bytes,
                     int64_t timeout_us, struct err *e);
/* Over connected sockets, as in rank_stream_open and comm_tcp_open; comm's are closed with it, or on error. */
int rank_shared_connect(struct rank_shared *ret, const int *control, const int *comm, int32_t rank, int32_t n_ranks,
                        size_t slot_bytes, int64_t timeout_us, struct err *e);
void rank_shared_release(struct rank_shared *s);

#endif
