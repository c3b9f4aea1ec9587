/* Loading NCCL, and initialising communicators.
 *
 * NCCL's initialisation waits for all processes without a limit. If one does not come,
 * its thread is abandoned: the process then ends anyway. The thread uses only memory of
 * its own, or memory that stays for the process's life.
 */
#include "kernels/cuda/comm/nccl.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { POLL_NS = 1000000 };

int nccl_open(const struct nccl **ret, struct err *e)
{
    static struct nccl library;
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);

    if (!lib) {
        return err_set(e, ERR_UNSUPPORTED, "several GPUs need the NCCL library: %s", dlerror());
    }
#define X(name)                                                                        \
    *(void **)&library.name = dlsym(lib, "nccl" #name);                                \
    if (!library.name) {                                                               \
        return err_set(e, ERR_UNSUPPORTED,                                             \
                       "several GPUs need NCCL 2.7 or newer: there is no nccl" #name); \
    }
    NCCL_FUNCTIONS(X)
#undef X
    *ret = &library;
    return 0;
}

void nccl_version_text(const struct nccl *n, char *ret, size_t cap)
{
    int v = 0;

    n->GetVersion(&v);
    snprintf(ret, cap, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}

bool nccl_check(struct cuda_backend *c, const struct nccl *n, ncclResult_t rc, const char *what)
{
    if (rc != ncclSuccess && c->failed.code == 0) {
        err_set(&c->failed, ERR_DEVICE, "cuda: rank %d: %s: %s", cuda_rank_number(c), what,
                n->GetErrorString(rc));
    }
    return rc == ncclSuccess;
}

/* ---- initialisation ---- */

/* An initialisation in progress; leaked if its thread is abandoned. */
struct nccl_init {
    const struct nccl *lib;
    pthread_t thread;
    int device;
    int32_t n, rank;
    ncclUniqueId id;
    ncclComm_t comm;
    ncclResult_t rc;
    atomic_bool done;
};

static void *init_main(void *arg)
{
    struct nccl_init *m = arg;

    m->rc = cudaSetDevice(m->device) == cudaSuccess
                ? m->lib->CommInitRank(&m->comm, m->n, m->id, m->rank)
                : ncclUnhandledCudaError;
    atomic_store(&m->done, true);
    return NULL;
}

int nccl_init_start(struct nccl_group *g, int device, const ncclUniqueId *id, int32_t n,
                    int32_t rank, struct err *e)
{
    struct nccl_init *m = calloc(1, sizeof(*m));

    if (!m) {
        return err_nomem(e, "NCCL's initialisation");
    }
    m->lib = g->lib;
    m->device = device;
    m->id = *id;
    m->n = n;
    m->rank = rank;
    if (pthread_create(&m->thread, NULL, init_main, m) != 0) {
        free(m);
        return err_set(e, ERR_IO, "cuda: no thread for NCCL's initialisation");
    }
    g->init = m;
    return 0;
}

static int wait_init(struct nccl_init *m, struct cuda_backend *c, struct err *e)
{
    int64_t start_us = clock_us();

    while (!atomic_load(&m->done)) {
        int rc = cuda_check_peers(c, start_us, "joined NCCL", e);
        if (rc < 0) {
            return rc;
        }
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    return 0;
}

/* Abandons the thread: not all processes will come, or its result is no longer
 * needed. */
static void abandon_init(struct nccl_group *g)
{
    pthread_detach(g->init->thread);
    g->init = NULL;
}

int nccl_ready(struct nccl_group *g, struct cuda_backend *c, struct err *e)
{
    struct nccl_init *m = g->init;

    if (!m) {
        return 0;
    }
    int rc = wait_init(m, c, e);
    if (rc < 0) {
        abandon_init(g);
        return rc;
    }
    pthread_join(m->thread, NULL);
    g->init = NULL;
    g->comm = m->comm;
    if (m->rc != ncclSuccess) {
        rc = err_set(e, ERR_DEVICE, "cuda: rank %d: NCCL: %s", cuda_rank_number(c),
                     g->lib->GetErrorString(m->rc));
    }
    free(m);
    return rc;
}

/* ---- the end ---- */

static void *aborter_main(void *arg)
{
    struct nccl_group *g = arg;

    g->lib->CommAbort(g->comm);
    return NULL;
}

/* CommAbort returns only when no graph uses the communicator any more, so it runs on a
 * thread. */
void nccl_abort(struct nccl_group *g)
{
    g->aborting =
        g->aborting || (g->comm && pthread_create(&g->aborter, NULL, aborter_main, g) == 0);
}

void nccl_release(struct nccl_group *g)
{
    if (g->init) {
        abandon_init(g);
    }
    if (g->aborting) {
        pthread_join(g->aborter, NULL); /* returns now: all graphs are freed */
    } else if (g->comm) {
        g->lib->CommAbort(g->comm);
    }
    *g = (struct nccl_group){0};
}
