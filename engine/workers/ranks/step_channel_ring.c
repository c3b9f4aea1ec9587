/* The step channel within one machine: a ring of slots in shared memory; a message is
 * written once and read in place by all ranks.
 *
 * `published` counts messages, `taken[r]` those that rank r has released; slot i %
 * SLOTS is free again when all ranks have released message i. A step costs one copy
 * into the slot, one store, and a futex call if a rank sleeps. Before sleeping, a
 * process increments `sleeping` and looks at the counter once more, so no wake-up is
 * lost. */
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine/workers/ranks/step_channel.h"
#include "kernels/comm/comm.h"

enum {
    SLOTS = 4,
    SPIN_ROUNDS = 4000, /* long enough that the next step of a running batch arrives sooner */
    YIELD_EVERY = 1000,
    NAP_US = 100000, /* of one futex wait */
};

struct counter {
    _Alignas(64) atomic_uint n; /* used as a futex */
};

struct envelope {
    _Alignas(64) uint32_t kind;
    uint64_t n_bytes;
};

struct shared {
    struct counter published;
    struct counter taken[COMM_MAX_RANKS];
    _Alignas(64) atomic_int sleeping;
    struct envelope envelope[SLOTS];
    _Alignas(64) char slot[]; /* [SLOTS][slot_bytes] */
};

struct ring_channel {
    struct step_channel base;
    struct shared *shared;
    unsigned n; /* messages published (rank 0) or released */
};

static size_t padded(size_t n_bytes)
{
    return (n_bytes + 63) / 64 * 64;
}

size_t ring_channel_bytes(size_t slot_bytes)
{
    return sizeof(struct shared) + SLOTS * padded(slot_bytes);
}

static char *slot_at(const struct ring_channel *r, unsigned n)
{
    return r->shared->slot + n % SLOTS * padded(r->base.slot_bytes);
}

static void wake(struct ring_channel *r, atomic_uint *word)
{
    if (atomic_load(&r->shared->sleeping) > 0) {
        syscall(SYS_futex, word, FUTEX_WAKE, COMM_MAX_RANKS, NULL, NULL, 0);
    }
}

/* Waits until *word has reached `least`; false: not within timeout_us. */
static bool await(struct ring_channel *r, atomic_uint *word, unsigned least, int64_t timeout_us)
{
    int64_t start_us = 0;

    for (int round = 0;; round++) {
        unsigned now = atomic_load_explicit(word, memory_order_acquire);
        if ((int)(now - least) >= 0) {
            return true;
        }
        if (round < SPIN_ROUNDS) {
            if (round % YIELD_EVERY == YIELD_EVERY - 1) {
                sched_yield();
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        int64_t now_us = clock_us();
        start_us = start_us ? start_us : now_us;
        int64_t left_us = timeout_us - (now_us - start_us);
        if (left_us <= 0) {
            return false;
        }
        struct timespec nap = {.tv_nsec = MIN(left_us, NAP_US) * 1000};
        atomic_fetch_add(&r->shared->sleeping, 1);
        if (atomic_load(word) == now) {
            syscall(SYS_futex, word, FUTEX_WAIT, now, &nap, NULL, 0);
        }
        atomic_fetch_sub(&r->shared->sleeping, 1);
    }
}

/* ---- rank 0 ---- */

static int ring_begin(struct step_channel *l, void **ret, int64_t timeout_us, struct err *e)
{
    struct ring_channel *r = CONTAINER_OF(l, struct ring_channel, base);

    for (int32_t i = 1; i < l->n_ranks && r->n >= SLOTS; i++) {
        if (!await(r, &r->shared->taken[i].n, r->n - SLOTS + 1, timeout_us)) {
            return err_set(e, ERR_TIMEOUT, "rank %d took no message for %.0f s", i,
                           (double)timeout_us * 1e-6);
        }
    }
    *ret = slot_at(r, r->n);
    return 0;
}

static int ring_commit(struct step_channel *l, uint32_t kind, size_t n_bytes, struct err *e)
{
    struct ring_channel *r = CONTAINER_OF(l, struct ring_channel, base);

    if (n_bytes > l->slot_bytes) {
        return err_set(e, ERR_INVALID, "a message of %zu bytes for slots of %zu", n_bytes,
                       l->slot_bytes);
    }
    struct envelope *v = &r->shared->envelope[r->n % SLOTS];
    v->kind = kind;
    v->n_bytes = n_bytes;
    atomic_store(&r->shared->published.n, ++r->n);
    wake(r, &r->shared->published.n);
    return 0;
}

/* ---- other ranks ---- */

static int ring_take(struct step_channel *l, struct step_message *ret, int64_t timeout_us,
                     struct err *e)
{
    struct ring_channel *r = CONTAINER_OF(l, struct ring_channel, base);

    if (!await(r, &r->shared->published.n, r->n + 1, timeout_us)) {
        return 0;
    }
    const struct envelope *v = &r->shared->envelope[r->n % SLOTS];
    if (v->n_bytes > l->slot_bytes) {
        return err_set(e, ERR_INVALID, "a message of %llu bytes in a slot of %zu",
                       (unsigned long long)v->n_bytes, l->slot_bytes);
    }
    *ret = (struct step_message){
        .kind = v->kind, .data = slot_at(r, r->n), .n_bytes = (size_t)v->n_bytes};
    return 1;
}

static void ring_release(struct step_channel *l)
{
    struct ring_channel *r = CONTAINER_OF(l, struct ring_channel, base);

    atomic_store(&r->shared->taken[l->rank].n, ++r->n);
    wake(r, &r->shared->taken[l->rank].n);
}

static void ring_free(struct step_channel *l)
{
    free(CONTAINER_OF(l, struct ring_channel, base));
}

static const struct step_channel_ops RING_OPS = {.begin = ring_begin,
                                                 .commit = ring_commit,
                                                 .take = ring_take,
                                                 .release = ring_release,
                                                 .free = ring_free};

int ring_channel_open(struct step_channel **ret, void *shared, int32_t rank, int32_t n_ranks,
                      size_t slot_bytes, struct err *e)
{
    struct ring_channel *r = calloc(1, sizeof(*r));

    if (!r) {
        return err_nomem(e, "messages to the ranks");
    }
    r->base = (struct step_channel){
        .ops = &RING_OPS, .rank = rank, .n_ranks = n_ranks, .slot_bytes = slot_bytes};
    r->shared = shared;
    *ret = &r->base;
    return 0;
}
