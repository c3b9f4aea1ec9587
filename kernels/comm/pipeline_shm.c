/* Pipeline stages on one machine: each rank has an inbox in shared memory, a ring of
 * bytes with one writer and one reader (see pipeline.h).
 *
 * An inbox holds the activations of a micro-batch of decodes. More, such as a prompt's,
 * are sent piece by piece as the reader makes space.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/comm/comm.h"
#include "kernels/comm/comm_wait.h"
#include "kernels/comm/pipeline.h"

enum { INBOX_BYTES = 1 << 22 };

struct inbox {
    struct counter written, read;        /* bytes so far, modulo 2^32 */
    _Alignas(64) char ring[INBOX_BYTES]; /* byte i is at i modulo INBOX_BYTES */
};

struct shared {
    struct sync_group group; /* of all ranks of all stages */
    struct inbox inbox[];    /* by number among all ranks */
};

struct pipeline_shm {
    struct pipeline base;
    struct shared *shared;
};

int32_t pipeline_source(const struct pipeline_place *at)
{
    return at->stage > 0 ? pipeline_number(at, at->stage - 1, at->rank)
                         : pipeline_number(at, at->n_stages - 1, 0);
}

void pipeline_targets(const struct pipeline_place *at, int32_t *ret)
{
    bool last = pipeline_is_last(at);

    for (int32_t i = 0; i < at->n_ranks; i++) {
        ret[i] = last && at->rank == 0    ? pipeline_number(at, 0, i)
                 : !last && i == at->rank ? pipeline_number(at, at->stage + 1, i)
                                          : -1;
    }
}

size_t pipeline_shm_bytes(int32_t n_ranks)
{
    return sizeof(struct shared) + (size_t)n_ranks * sizeof(struct inbox);
}

/* The ring's memory from byte `at` on; *n_bytes is cut down to what is contiguous. */
static char *contiguous(struct inbox *b, unsigned at, size_t *n_bytes)
{
    size_t first = at % INBOX_BYTES;

    *n_bytes = MIN(*n_bytes, INBOX_BYTES - first);
    return b->ring + first;
}

static int shm_send(struct pipeline *p, int32_t to, const void *data, size_t n_bytes, struct err *e)
{
    struct shared *s = CONTAINER_OF(p, struct pipeline_shm, base)->shared;
    int32_t target[COMM_MAX_RANKS];

    pipeline_targets(&p->at, target);
    struct inbox *b = &s->inbox[target[to]];
    for (size_t at = 0; at < n_bytes;) {
        unsigned written = atomic_load_explicit(&b->written.n, memory_order_relaxed);
        int rc = counter_await(&s->group, &b->read, written - INBOX_BYTES + 1, target[to],
                               p->timeout_us, e);
        if (rc < 0) {
            return rc;
        }
        size_t space = INBOX_BYTES - (size_t)(written - atomic_load(&b->read.n)),
               n = MIN(n_bytes - at, space);
        char *dst = contiguous(b, written, &n);
        memcpy(dst, (const char *)data + at, n);
        counter_set(&s->group, &b->written, written + (unsigned)n);
        at += n;
    }
    return failure_check(&s->group.failure, e);
}

static int shm_receive(struct pipeline *p, void *data, size_t n_bytes, struct err *e)
{
    struct shared *s = CONTAINER_OF(p, struct pipeline_shm, base)->shared;
    struct inbox *b = &s->inbox[pipeline_number(&p->at, p->at.stage, p->at.rank)];

    for (size_t at = 0; at < n_bytes;) {
        unsigned read = atomic_load_explicit(&b->read.n, memory_order_relaxed);
        int rc = counter_await(&s->group, &b->written, read + 1, pipeline_source(&p->at),
                               p->timeout_us, e);
        if (rc < 0) {
            return rc;
        }
        size_t there = atomic_load(&b->written.n) - read, n = MIN(n_bytes - at, there);
        const char *src = contiguous(b, read, &n);
        memcpy((char *)data + at, src, n);
        counter_set(&s->group, &b->read, read + (unsigned)n);
        at += n;
    }
    return failure_check(&s->group.failure, e);
}

static void shm_abort(struct pipeline *p, const char *why)
{
    struct shared *s = CONTAINER_OF(p, struct pipeline_shm, base)->shared;

    failure_set(&s->group.failure, why);
    for (int32_t r = 0; r < p->at.n_stages * p->at.n_ranks; r++) {
        counter_wake(&s->inbox[r].written);
        counter_wake(&s->inbox[r].read);
    }
}

static int shm_check(struct pipeline *p, struct err *e)
{
    return failure_check(&CONTAINER_OF(p, struct pipeline_shm, base)->shared->group.failure, e);
}

static void shm_free(struct pipeline *p)
{
    free(CONTAINER_OF(p, struct pipeline_shm, base));
}

static const struct pipeline_ops SHM_OPS = {.send = shm_send,
                                            .receive = shm_receive,
                                            .abort = shm_abort,
                                            .check = shm_check,
                                            .free = shm_free};

int pipeline_shm_open(struct pipeline **ret, void *shared, const struct pipeline_place *at,
                      int64_t timeout_us, struct err *e)
{
    struct pipeline_shm *p = calloc(1, sizeof(*p));

    if (!p) {
        return err_nomem(e, "exchange between stages");
    }
    p->base = (struct pipeline){.ops = &SHM_OPS, .at = *at, .timeout_us = timeout_us};
    p->shared = shared;
    *ret = &p->base;
    return 0;
}
