/* Tensor-parallel ranks of the CUDA backend: made by ranks_open.c, used by ranks.c and
 * rank_sample.c. */
#ifndef QUIRE_KERNELS_CUDA_COMM_RANKS_H
#define QUIRE_KERNELS_CUDA_COMM_RANKS_H

#include "kernels/comm/comm.h"
#include "kernels/cuda/comm/nccl.h"
#include "kernels/cuda/comm/p2p.h"
#include "kernels/cuda/cuda.h"

/* Device memory that all ranks allocate alike: where each rank's is mapped here. */
struct rank_map {
    void *of[P2P_MAX_RANKS]; /* by rank; all NULL: not reachable */
};

struct cuda_ranks {
    struct nccl_group nccl; /* all ranks */
    struct comm *comm;      /* the config's */
    int32_t rank, n;        /* this rank, number of ranks */
    /* as kernels get it; inbox[rank].row NULL: devices do not reach each other */
    struct p2p_args p2p;
    /* [n_maps] the inboxes first, then logits; peers' memory is unmapped at the end */
    struct rank_map *map;
    int32_t n_maps; /* entries of map */
    /* the least cuda_fused_bytes of all ranks, so that all build the same fused
     * launches */
    int32_t fused_bytes;
    bool small_rows;             /* small_prepare, on all ranks */
    struct step_results results; /* results, in rank 0's inbox */
    bool shares_rows;            /* each rank samples its share of this step's logits rows */
    /* NCCL's buffer; rank 0: the other ranks' shards [n - 1][rows][width], others:
     * their own */
    float *shards;
    int64_t shards_bytes; /* its size */
    struct mat shard;     /* this rank's shard of the logits gathered last */
};

/* Whether the devices can access each other's memory. */
static inline bool cuda_ranks_p2p(const struct cuda_ranks *r)
{
    return r->p2p.inbox[r->rank].row != NULL;
}

/* ranks_open.c: maps `memory`, an allocation of each rank's own, on all ranks; all call
 * it. Waits for the device. */
int cuda_ranks_map(struct cuda_backend *c, void *memory, struct rank_map *ret, struct err *e);
/* Releases kernels that wait for ranks that are gone. */
void cuda_ranks_abort(struct cuda_backend *c);

#endif
