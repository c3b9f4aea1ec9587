/* What ranks_open.c makes and ranks.c uses. */
#ifndef QUIRE_KERNELS_CUDA_COMM_RANKS_H
#define QUIRE_KERNELS_CUDA_COMM_RANKS_H

#include "kernels/comm/comm.h"
#include "kernels/cuda/comm/nccl.h"
#include "kernels/cuda/comm/p2p.h"
#include "kernels/cuda/cuda.h"

/* A piece of device memory that all ranks have of the same size: where each rank's
 * is. */
struct rank_map {
    void *of[P2P_MAX_RANKS];
};

struct cuda_ranks {
    struct nccl_group nccl;
    struct comm *comm; /* the config's */
    int32_t rank, n;
    struct p2p_args p2p;
    /* [n_maps] the inboxes first; what is of other ranks is closed at the end */
    struct rank_map *map;
    int32_t n_maps;
    /* cuda_fused_bytes of the rank that has the least: all collect the same fused
     * launches */
    int32_t fused_bytes;
    struct step_answers answers; /* in rank 0's inbox */
    bool shares_rows;            /* in this step each rank draws its share of the logits rows */
    /* rank 0: the other ranks' parts of logits, [n - 1][rows][width]; the others: their
     * own */
    float *shards;
    int64_t shards_bytes;
    struct mat shard; /* of the logits gathered last */
};

/* Whether the devices reach each other's memory. */
static inline bool cuda_ranks_p2p(const struct cuda_ranks *r)
{
    return r->p2p.inbox[r->rank].row != NULL;
}

/* ranks_open.c: all ranks call it; ret->of[its own] is `memory`, an allocation of its
 * own. Waits for the device. */
int cuda_ranks_map(struct cuda_backend *c, void *memory, struct rank_map *ret, struct err *e);
/* The others are gone: let the device's kernels go. */
void cuda_ranks_abort(struct cuda_backend *c);

#endif
