/* NCCL, opened at run time: a machine with one GPU needs no NCCL library. */
#ifndef QUIRE_KERNELS_CUDA_COMM_NCCL_H
#define QUIRE_KERNELS_CUDA_COMM_NCCL_H

#include <nccl.h>

#include "kernels/cuda/cuda.h"

#define NCCL_FUNCTIONS(X) \
    X(GetVersion)         \
    X(GetUniqueId)        \
    X(CommInitRank)       \
    X(CommAbort)          \
    X(AllReduce) X(Broadcast) X(Send) X(Recv) X(GroupStart) X(GroupEnd) X(GetErrorString)

struct nccl {
#define X(name) __typeof__(nccl##name) *name;
    NCCL_FUNCTIONS(X)
#undef X
};

/* The library, which stays open for the process's life. ERR_UNSUPPORTED: there is none,
 * or it is too old. */
int nccl_open(const struct nccl **ret, struct err *e);
/* "2.28.3" */
void nccl_version_text(const struct nccl *n, char *ret, size_t cap);

/* Processes that share a communicator. Zeroed: none. */
struct nccl_group {
    const struct nccl *lib;
    ncclComm_t comm;        /* NULL until nccl_ready */
    struct nccl_init *init; /* NULL: it is over */
    pthread_t aborter;
    bool aborting;
};

/* Begins the meeting of n processes, of which this is number `rank`, on a thread: it
 * takes most of a second, and waits for all without a limit. All pass the same id,
 * which one has made. */
int nccl_init_start(struct nccl_group *g, int device, const ncclUniqueId *id, int32_t n,
                    int32_t rank, struct err *e);
/* Until all have come, or cuda_others_gone says that they will not. */
int nccl_ready(struct nccl_group *g, struct cuda_backend *c, struct err *e);
/* Let the device's kernels go that wait for others; returns at once. */
void nccl_abort(struct nccl_group *g);
/* Without last words: the others may be gone. */
void nccl_release(struct nccl_group *g);
/* Keeps the first failure in c->failed. */
bool nccl_check(struct cuda_backend *c, const struct nccl *n, ncclResult_t rc, const char *what);

#endif
