/* Inside comm_*.c and pipeline_*.c: waiting for another rank, and the word that ranks
 * cannot go on. Nobody else includes this. */
#ifndef QUIRE_KERNELS_COMM_COMM_WAIT_H
#define QUIRE_KERNELS_COMM_COMM_WAIT_H

#include <stdatomic.h>

#include "config/base/base.h"

enum { FATE_BYTES = 256 };

/* The first reason for which ranks cannot go on. Zeroed: they can. Any thread. */
struct fate {
    atomic_int state; /* 0, 1: being written, 2: `why` holds */
    char why[FATE_BYTES];
};

/* True: this is the first reason, and it stays. */
bool fate_set(struct fate *f, const char *why);
/* 0, or ERR_DEVICE with the reason. */
int fate_check(struct fate *f, struct err *e);
/* Sets that `rank` has not answered for so long, unless there is a reason. Returns
 * ERR_DEVICE. */
int fate_silence(struct fate *f, int32_t rank, int64_t timeout_us, struct err *e);

/* ---- shared memory: counters that only grow, modulo 2^32 ---- */

/* Alone on its cache line; a futex. */
struct counter {
    _Alignas(64) atomic_uint n;
};

/* Of all processes that share the memory. Zeroed. */
struct gathering {
    _Alignas(64) atomic_int sleeping;
    _Alignas(64) struct fate fate;
};

/* c = n; whoever sleeps on it wakes. */
void counter_set(struct gathering *g, struct counter *c, unsigned n);
void counter_wake(struct counter *c);
/* Until c has reached `least`, by the doing of `rank`, who is given timeout_us. Spins
 * for a moment (a step's meetings are microseconds apart), then sleeps. 0, or
 * ERR_DEVICE and the fate is set. */
int counter_await(struct gathering *g, struct counter *c, unsigned least, int32_t rank,
                  int64_t timeout_us, struct err *e);

/* ---- sockets ---- */

/* n_bytes to (`out`) or from `rank`, at the other end of a connected stream, never
 * without a byte for longer than timeout_us. ERR_DEVICE: the fate is set, by somebody
 * else or because the connection ended or was silent; sockets_abort tells the
 * others. */
int socket_move(struct fate *f, int fd, int32_t rank, void *data, size_t n_bytes, bool out,
                int64_t timeout_us, struct err *e);
/* 0, or ERR_DEVICE: the fate is set, or becomes so because the connection has ended. -1
 * is none. */
int socket_check(struct fate *f, int fd, int32_t rank, struct err *e);
/* The fate is set, and the others see that their connections ended. */
void sockets_abort(struct fate *f, const int *fd, int32_t n, const char *why);
void sockets_close(const int *fd, int32_t n);

#endif
