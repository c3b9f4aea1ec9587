/* The memory that the ranks of a machine share: the ring of steps, then what they exchange inside them. */
#ifndef QUIRE_ENGINE_RANK_SHARED_H
#define QUIRE_ENGINE_RANK_SHARED_H

#include "engine/rank_link.h"
#include "kernels/comm.h"

struct rank_shared {
    void *memory;
    size_t n_bytes;
    struct rank_link *link;
    struct comm *comm;
};

/* Zeroed memory for n_ranks; its descriptor (pages are taken when they are first written). */
int rank_shared_create(int *ret_fd, int32_t n_ranks, size_t slot_bytes, struct err *e);
/* One rank's ends. timeout_us: as comm_shm_open. */
int rank_shared_open(struct rank_shared *ret, int fd, int32_t rank, int32_t n_ranks, size_t slot_bytes,
                     int64_t timeout_us, struct err *e);
void rank_shared_release(struct rank_shared *s);

#endif
