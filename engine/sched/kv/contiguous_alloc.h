/* Reservations of before paging, to measure paging against: each sequence gets one
 * contiguous chunk for its whole life, from a buddy allocator. How many tokens it asks
 * for is the baseline of the paper (SOSP'23, section 6.1): Max, the model's length;
 * Pow2, its prompt and the next power of two of its output; Oracle, its prompt and
 * exactly its output.
 *
 * The allocator only keeps the books. `quire simulate --manager` asks it before the
 * scheduler gets a request; with the setting kv_policy the scheduler asks it at
 * admission, over the paged pool: then blocks lie where they always do, and what a
 * reservation withholds is withheld by not admitting. */
#ifndef QUIRE_ENGINE_SCHED_KV_CONTIGUOUS_ALLOC_H
#define QUIRE_ENGINE_SCHED_KV_CONTIGUOUS_ALLOC_H

#include "config/base/base.h"
#include "config/base/policies.h"

struct reservation {
    int32_t start, size; /* slots of a chunk; size 0: none */
    int32_t wanted;      /* tokens asked for */
};

struct reserve_rule {
    int policy; /* enum kv_policy, not KV_PAGED */
    int32_t slots;
    int32_t max_len;
    int32_t least; /* slots of the smallest chunk, a power of two */
};

enum { RESERVE_ORDERS = 31 };

struct contiguous_alloc {
    struct reserve_rule rule;
    int8_t *free_order;   /* [slots] order of the free chunk that starts here; -1: none */
    int32_t *next, *prev; /* [slots] lists of free chunks by order; -1: end */
    int32_t first[RESERVE_ORDERS];
    int32_t n_taken; /* chunks */
};

/* Both in setup.c: all else is pure. */
int contiguous_open(struct contiguous_alloc **ret, const struct reserve_rule *rule, struct err *e);
void contiguous_free(struct contiguous_alloc *r);
/* Nothing is taken. */
void contiguous_clear(struct contiguous_alloc *r);
/* Room for one sequence of so many tokens; false: not now. */
bool contiguous_take(struct contiguous_alloc *r, int32_t n_prompt, int32_t n_output,
                     struct reservation *ret);
/* Give a chunk back; nothing for one of size 0. */
void contiguous_give(struct contiguous_alloc *r, struct reservation *x);
/* Sequences of such lengths that an empty arena has room for. */
int32_t reserve_most(const struct reserve_rule *rule, int32_t n_prompt, int32_t n_output);

#endif
