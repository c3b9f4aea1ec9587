/* Contiguous reservations, the baselines that PagedAttention is compared with: each
 * sequence gets one contiguous chunk for its whole life, from a buddy allocator. A
 * chunk's size follows the Orca baselines of the PagedAttention paper (SOSP'23, section
 * 6.1): Max reserves the model's length; Pow2 the prompt and the output's length
 * rounded up to a power of two; Oracle the prompt and exactly the output.
 *
 * The allocator does accounting only. `quire simulate --manager` asks it before the
 * scheduler gets a request. With the setting kv_policy the scheduler asks it at
 * admission: the KV cache stays paged, and a group without a reservation waits. */
#ifndef QUIRE_ENGINE_SCHED_KV_CONTIGUOUS_ALLOC_H
#define QUIRE_ENGINE_SCHED_KV_CONTIGUOUS_ALLOC_H

#include "config/base/base.h"
#include "config/base/policies.h"

struct reservation {
    int32_t start, size; /* slots of a chunk; size 0: none */
    int32_t wanted;      /* tokens asked for; size is that, rounded up to a chunk */
};

struct reserve_rule {
    int policy;      /* enum kv_policy, not KV_PAGED */
    int32_t slots;   /* of the arena, one a token */
    int32_t max_len; /* tokens of the longest sequence */
    int32_t least;   /* slots of the smallest chunk, a power of two */
};

enum { RESERVE_ORDERS = 31 }; /* a chunk of order k has 2^k slots */

struct contiguous_alloc {
    struct reserve_rule rule;
    int8_t *free_order;            /* [slots] order of the free chunk that starts here; -1: none */
    int32_t *next, *prev;          /* [slots] lists of free chunks by order; -1: end */
    int32_t first[RESERVE_ORDERS]; /* heads of these lists; -1: empty */
    int32_t n_taken;               /* chunks reserved */
};

/* These two are in setup.c: they allocate. */
int contiguous_open(struct contiguous_alloc **ret, const struct reserve_rule *rule, struct err *e);
void contiguous_free(struct contiguous_alloc *r);
/* Give everything back. */
void contiguous_clear(struct contiguous_alloc *r);
/* Reserve a chunk for one sequence; false: none is free. */
bool contiguous_take(struct contiguous_alloc *r, int32_t n_prompt, int32_t n_output,
                     struct reservation *ret);
/* Give a chunk back and clear *x; no-op for size 0. */
void contiguous_give(struct contiguous_alloc *r, struct reservation *x);
/* How many sequences of these lengths fit into an empty arena. */
int32_t reserve_most(const struct reserve_rule *rule, int32_t n_prompt, int32_t n_output);

#endif
