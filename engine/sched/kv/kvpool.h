/* Block ids, reference counts and a free list: the bookkeeping of one pool of KV
 * blocks, O(1) everywhere.
 *
 * The pool knows nothing of tokens, tables or bytes. The engine has two: the device's
 * and the host's (for swapping). A block is in one of three states:
 *
 *     used    count > 0: `count` block tables hold it
 *     cached  count = 0, hashed: the prefix cache (prefix.h) can find its contents
 *     free    count = 0, not hashed
 *
 * Cached and free blocks form one intrusive list in the order in which they are taken:
 * free blocks are pushed at the front, cached ones at the back, so free blocks go first
 * and then the least recently used cached ones.
 *
 *     free, cached -> used    kvpool_take (the front), kvpool_ref (a cached block)
 *     used -> cached, free    kvpool_unref of the last table
 *     cached -> free          kvpool_set_hashed(false)
 *
 * Invariants (kvpool_check):
 *  P1  free + cached + used = total, each counted from the blocks themselves
 *  P2  a block is in the list exactly when its count is 0, and the list's links agree
 *      in both directions
 *  P3  no free block stands behind a cached one
 */
#ifndef QUIRE_ENGINE_SCHED_KV_KVPOOL_H
#define QUIRE_ENGINE_SCHED_KV_KVPOOL_H

#include "config/base/base.h"

struct kvblock {
    int32_t count;      /* block tables that hold it, and 1 if it is pinned */
    int32_t prev, next; /* in the list of blocks with count 0; -1 at the ends */
    bool hashed;        /* the prefix cache has an entry for its contents */
};

struct kvpool {
    struct kvblock *block; /* [n_blocks] */
    int32_t n_blocks;      /* all of the pool; fixed */
    int32_t first, last;   /* ends of the list of blocks with count 0; -1: empty */
    int32_t n_free;        /* count 0, not hashed */
    int32_t n_cached;      /* count 0, hashed */
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
/* Take the first block of the list; its count becomes 1. There must be one, and the
 * caller has dropped its hash (prefix_drop). */
int32_t kvpool_take(struct kvpool *p);
/* One more table holds the block, which is used or cached. */
void kvpool_ref(struct kvpool *p, int32_t block);
/* One table less. At 0 the block joins the list. A table is released from its tail, so
 * that of a cached chain the tail is taken first. */
void kvpool_unref(struct kvpool *p, int32_t block);
/* The prefix cache has added or dropped the block's entry. */
void kvpool_set_hashed(struct kvpool *p, int32_t block, bool hashed);

/* NULL, or a sentence about the first invariant that does not hold. O(n_blocks): tests
 * and debug builds. */
const char *kvpool_check(const struct kvpool *p);

#endif
