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

struct cuda_ranks {
    void *lib;
#define X(name) __typeof__(nccl##name) *name;
    NCCL_FUNCTIONS(X)
#undef X
    ncclComm_t nccl;
    struct comm *comm; /* the config's */
    int32_t rank, n;
    struct peer_args peer; /* inbox[rank] NULL: the devices cannot reach each other's memory */
    void *opened[PEER_MAX_RANKS];
    int32_t n_opened;
    float *logits; /* rank 0: the other ranks' parts, [n - 1][rows][width] */
    int64_t logits_bytes;
    bool let_go; /* the ranks have failed: nothing on the device waits for another one any more */
};

bool nccl_check(struct cuda_backend *c, ncclResult_t rc, const char *what);

#endif
