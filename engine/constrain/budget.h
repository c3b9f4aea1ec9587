/* What compiling a grammar, or adding states to it, may cost: bytes, items, work.
 *
 * Work is counted, not timed: what is refused does not depend on the machine or on what
 * else it does. A unit is charged for what takes some ten nanoseconds.
 *
 * The first limit that is reached is kept by name; from then on growth fails. */
#ifndef QUIRE_ENGINE_CONSTRAIN_BUDGET_H
#define QUIRE_ENGINE_CONSTRAIN_BUDGET_H

#include "config/base/base.h"

struct budget {
    size_t bytes, max_bytes;  /* memory held, and its limit */
    int64_t items, max_items; /* nodes, and their limit */
    int64_t work, max_work;   /* steps done, and their limit */
    int failed;               /* 0, ERR_NOMEM or ERR_FULL; sticky */
    const char *limit;        /* with ERR_FULL: which limit, in words */
};

/* Records the first failure; returns false. */
bool budget_fail(struct budget *b, int rc, const char *limit);
/* Charge `units` of work; false: a limit is reached. */
bool budget_work(struct budget *b, int64_t units);
bool budget_item(struct budget *b);
/* Enlarge an array to hold `need` elements, at least twice as many as before; false:
 * the memory limit is reached or memory ran out, and the array is as it was. */
bool budget_grow(struct budget *b, void *array, int32_t *cap, int64_t need, size_t size);
/* Memory that is zero. NULL: the limit is reached or memory ran out. */
void *budget_alloc(struct budget *b, size_t size);
void budget_free(struct budget *b, void *p, size_t size);

#endif
