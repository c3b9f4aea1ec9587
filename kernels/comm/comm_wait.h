/* Private to comm_*.c and pipeline_*.c: waiting for another rank, and the reason why
 * ranks cannot go on. */
#ifndef QUIRE_KERNELS_COMM_COMM_WAIT_H
#define QUIRE_KERNELS_COMM_COMM_WAIT_H

#include <stdatomic.h>

#include "config/base/base.h"

enum { FAILURE_BYTES = 256 };

/* The first reason why ranks cannot go on. All zeros: none. Any thread. */
struct failure {
    atomic_int state;        /* 0: none, 1: `why` is being written, 2: it is valid */
    char why[FAILURE_BYTES]; /* the reason; never changes in state 2 */
};

/* True: this is the first reason, and it stays. False: there was one. */
bool failure_set(struct failure *f, const char *why);
/* 0: no failure; else ERR_DEVICE with the reason. */
int failure_check(struct failure *f, struct err *e);
/* Set as the reason, if there is none, that `rank` did not answer for timeout_us.
 * Returns ERR_DEVICE. */
int failure_timeout(struct failure *f, int32_t rank, int64_t timeout_us, struct err *e);

/* ---- shared memory: counters that only grow, modulo 2^32 ---- */

/* On a cache line of its own. */
struct counter {
    _Alignas(64) atomic_uint n; /* also the futex that waiters sleep on */
};

/* Shared by all processes that wait for each other. Starts as zeros. */
struct sync_group {
    _Alignas(64) atomic_int sleeping;    /* processes that sleep on some counter */
    _Alignas(64) struct failure failure; /* of the whole group */
};

/* c = n; wakes the processes that sleep on it. */
void counter_set(struct sync_group *g, struct counter *c, unsigned n);
void counter_wake(struct counter *c);
/* Wait until `rank` has raised c to `least`, for at most timeout_us. Spins for a while,
 * because a step's collectives are microseconds apart, then sleeps. 0, or ERR_DEVICE
 * with the group's failure set. */
int counter_await(struct sync_group *g, struct counter *c, unsigned least, int32_t rank,
                  int64_t timeout_us, struct err *e);

/* ---- sockets ---- */

/* Move n_bytes to (`out`) or from `rank`, the peer of the connected stream fd, waiting
 * at most timeout_us for each byte. ERR_DEVICE: `f` is set, from elsewhere or because
 * the connection was closed or silent; the caller then calls sockets_abort for the
 * other ranks. */
int socket_move(struct failure *f, int fd, int32_t rank, void *data, size_t n_bytes, bool out,
                int64_t timeout_us, struct err *e);
/* 0, or ERR_DEVICE: `f` is set, which it becomes if the connection was closed. fd -1:
 * no connection to look at. */
int socket_check(struct failure *f, int fd, int32_t rank, struct err *e);
/* Set the failure, and shut the connections down so that the other ranks see it. */
void sockets_abort(struct failure *f, const int *fd, int32_t n, const char *why);
void sockets_close(const int *fd, int32_t n);

#endif
