/* Block ids, reference counts and a free list: the bookkeeping of one pool of KV
 * blocks, O(1) everywhere.
 *
 * The pool knows nothing of tokens, tables or bytes. Two pools of the same kind serve
 * the engine: the device's and the host's (for swapping). A block is in one of three
 * conditions:
 *
 *     used    count > 0: `count` block tables hold it
 *     cached  count = 0, but its contents have a name (prefix.h) and may be wanted
 *             again
 *     free    count = 0, nameless
 *
 * Cached and free blocks stand in one intrusive list in the order in which they will be
 * taken: nameless ones are put in front, named ones at the back, so the list is least
 * recently used first among those worth keeping.
 *
 * Invariants (kvpool_check):
 *  P1  free + cached + used = total, each counted from the blocks themselves
 *  P2  a block is in the list exactly when its count is 0, and the list's links agree
 *      in both directions
 *  P3  no nameless block stands behind a named one
 */
#ifndef QUIRE_ENGINE_SCHED_KV_KVPOOL_H
#define QUIRE_ENGINE_SCHED_KV_KVPOOL_H

#include "config/base/base.h"

struct kvblock {
    int32_t count;      /* tables that hold it */
    int32_t prev, next; /* in the list of takeable blocks; -1 at the ends */
    bool named;         /* the prefix cache knows its contents */
};

struct kvpool {
    struct kvblock *block; /* [n_blocks] */
    int32_t n_blocks;
    int32_t first, last; /* the list's ends; -1: empty */
    int32_t n_free;      /* count 0, nameless */
    int32_t n_cached;    /* count 0, named */
};

/* All blocks free. n_blocks may be 0 (no swap space). */
int kvpool_init(struct kvpool *p, int32_t n_blocks, struct err *e);
void kvpool_release(struct kvpool *p);

/* Blocks that can be taken now. */
static inline int32_t kvpool_available(const struct kvpool *p)
{
    return p->n_free + p->n_cached;
}
static inline int32_t kvpool_used(const struct kvpool *p)
{
    return p->n_blocks - p->n_free - p->n_cached;
}

/* The block that kvpool_take would return; -1: none. */
static inline int32_t kvpool_peek(const struct kvpool *p)
{
    return p->first;
}
/* Take the next block with count 1. There must be one, and the caller has made it
 * nameless (prefix_drop). */
int32_t kvpool_take(struct kvpool *p);
/* One more table holds it; revives a cached block. */
void kvpool_ref(struct kvpool *p, int32_t block);
/* One table less. At 0 the block joins the list. Unref a table from its tail, so that a
 * chain is taken tail first. */
void kvpool_unref(struct kvpool *p, int32_t block);
/* The prefix cache gives or withdraws the name. */
void kvpool_name(struct kvpool *p, int32_t block, bool named);

/* NULL, or the sentence of the first invariant that does not hold. O(n_blocks): tests
 * and debug builds. */
const char *kvpool_check(const struct kvpool *p);

#endif
