/* NCCL, loaded at run time: a machine with one GPU needs no NCCL library. */
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

/* The library's functions, without the prefix. */
struct nccl {
#define X(name) __typeof__(nccl##name) *name;
    NCCL_FUNCTIONS(X)
#undef X
};

/* Loads the library, which stays open for the process's life. ERR_UNSUPPORTED: there is
 * none, or it is too old. */
int nccl_open(const struct nccl **ret, struct err *e);
/* Writes the version, as "2.28.3". */
void nccl_version_text(const struct nccl *n, char *ret, size_t cap);

/* A communicator of several processes. Zeroed: none. */
struct nccl_group {
    const struct nccl *lib; /* from nccl_open */
    ncclComm_t comm;        /* NULL until nccl_ready */
    struct nccl_init *init; /* the initialisation in progress; NULL: none */
    pthread_t aborter;      /* runs CommAbort, which may block */
    bool aborting;          /* aborter must be joined */
};

/* Starts initialising a communicator of n processes, of which this is number `rank`, on
 * a thread: it is slow and waits for all processes without a limit. All pass the same
 * id, made by one of them. */
int nccl_init_start(struct nccl_group *g, int device, const ncclUniqueId *id, int32_t n,
                    int32_t rank, struct err *e);
/* Waits for the initialisation, or until cuda_check_peers fails. */
int nccl_ready(struct nccl_group *g, struct cuda_backend *c, struct err *e);
/* Releases kernels that wait for other processes; returns at once. */
void nccl_abort(struct nccl_group *g);
/* Frees the communicator without talking to the others, which may be gone. */
void nccl_release(struct nccl_group *g);
/* Records the first failure in c->failed. Returns true if rc is success. */
bool nccl_check(struct cuda_backend *c, const struct nccl *n, ncclResult_t rc, const char *what);

#endif
