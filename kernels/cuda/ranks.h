/* What ranks_open.c makes and ranks.c uses. */
#ifndef QUIRE_CUDA_RANKS_H
#define QUIRE_CUDA_RANKS_H

#include <nccl.h>

#include "kernels/comm.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/peer.h"

#define NCCL_FUNCTIONS(X) \
    X(GetVersion)         \
    X(GetUniqueId)        \
    X(CommInitRank)       \
    X(CommAbort) X(AllReduce) X(AllGather) X(Broadcast) X(Send) X(Recv) X(GroupStart) X(GroupEnd) X(GetErrorString)

/* A piece of device memory that all ranks have of the same size: where each rank's is. */
struct rank_map {
    void *of[PEER_MAX_RANKS];
};

struct cuda_ranks {
    void *lib;
#define X(name) __typeof__(nccl##name) *name;
    NCCL_FUNCTIONS(X)
#undef X
    ncclComm_t nccl;         /* NULL until cuda_ranks_ready */
    struct meeting *meeting; /* ranks_open.c; NULL: it is over */
    pthread_t meeter;
    bool left;         /* the meeting's thread is left behind */
    struct comm *comm; /* the config's */
    int32_t rank, n;
    struct peer_args peer;
    struct rank_map *map; /* [n_maps] the inboxes first; what is of other ranks is closed at the end */
    int32_t n_maps;
    struct step_answers answers; /* in rank 0's inbox */
    bool shares_rows;            /* in this step each rank draws its share of the logits rows */
    float *logits;               /* rank 0: the other ranks' parts, [n - 1][rows][width] */
    int64_t logits_bytes;
    struct mat part; /* of the logits gathered last */
    bool let_go;     /* the ranks have failed: the device may wait for one that does not come */
    bool aborting;   /* `aborter` aborts NCCL */
    pthread_t aborter;
};

/* Whether the devices reach each other's memory. */
static inline bool cuda_ranks_peers(const struct cuda_ranks *r)
{
    return r->peer.inbox[r->rank].row != NULL;
}

/* ranks_open.c: all ranks call it; ret->of[its own] is `memory`, an allocation of its own. Waits for the device. */
int cuda_ranks_map(struct cuda_backend *c, void *memory, struct rank_map *ret, struct err *e);
bool nccl_check(struct cuda_backend *c, ncclResult_t rc, const char *what);

#endif
