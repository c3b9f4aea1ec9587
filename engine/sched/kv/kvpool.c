#include "engine/sched/kv/kvpool.h"

#include <assert.h>

static void unlink_block(struct kvpool *p, int32_t b)
{
    struct kvblock *k = &p->block[b];

    if (k->prev >= 0) {
        p->block[k->prev].next = k->next;
    } else {
        p->first = k->next;
    }
    if (k->next >= 0) {
        p->block[k->next].prev = k->prev;
    } else {
        p->last = k->prev;
    }
    k->prev = k->next = -1;
}

static void push_front(struct kvpool *p, int32_t b)
{
    struct kvblock *k = &p->block[b];

    k->prev = -1;
    k->next = p->first;
    if (p->first >= 0) {
        p->block[p->first].prev = b;
    } else {
        p->last = b;
    }
    p->first = b;
}

static void push_back(struct kvpool *p, int32_t b)
{
    struct kvblock *k = &p->block[b];

    k->next = -1;
    k->prev = p->last;
    if (p->last >= 0) {
        p->block[p->last].next = b;
    } else {
        p->first = b;
    }
    p->last = b;
}

/* The counter of b's state, for a block with count 0. */
static int32_t *state_counter(struct kvpool *p, int32_t b)
{
    return p->block[b].hashed ? &p->n_cached : &p->n_free;
}

int32_t kvpool_take(struct kvpool *p)
{
    int32_t b = p->first;

    assert(b >= 0 && p->block[b].count == 0 && !p->block[b].hashed);
    unlink_block(p, b);
    p->n_free--;
    p->block[b].count = 1;
    return b;
}

void kvpool_ref(struct kvpool *p, int32_t b)
{
    assert(b >= 0 && b < p->n_blocks);
    if (p->block[b].count++ > 0) {
        return;
    }
    assert(p->block[b].hashed); /* nothing can find the contents of a free block */
    unlink_block(p, b);
    p->n_cached--;
}

void kvpool_unref(struct kvpool *p, int32_t b)
{
    assert(b >= 0 && b < p->n_blocks && p->block[b].count > 0);
    if (--p->block[b].count > 0) {
        return;
    }
    ++*state_counter(p, b);
    if (p->block[b].hashed) {
        push_back(p, b);
    } else {
        push_front(p, b);
    }
}

void kvpool_set_hashed(struct kvpool *p, int32_t b, bool hashed)
{
    struct kvblock *k = &p->block[b];

    if (k->hashed == hashed) {
        return;
    }
    if (k->count > 0) {
        k->hashed = hashed;
        return;
    }
    assert(!hashed); /* only used blocks become hashed, at commit */
    p->n_cached--;
    p->n_free++;
    k->hashed = false;
    unlink_block(p, b);
    push_front(p, b);
}

const char *kvpool_check(const struct kvpool *p)
{
    int32_t n_free = 0, n_cached = 0, listed = 0, before = -1;

    for (int32_t b = 0; b < p->n_blocks; b++) {
        if (p->block[b].count < 0) {
            return "P1: a block's count is negative";
        }
        if (p->block[b].count == 0) {
            p->block[b].hashed ? n_cached++ : n_free++;
        }
    }
    if (n_free != p->n_free || n_cached != p->n_cached) {
        return "P1: free and cached blocks do not add up";
    }
    for (int32_t b = p->first; b >= 0; before = b, b = p->block[b].next) {
        if (p->block[b].count != 0 || p->block[b].prev != before || ++listed > p->n_blocks) {
            return "P2: the free list is broken";
        }
        if (before >= 0 && p->block[before].hashed && !p->block[b].hashed) {
            return "P3: a free block stands behind a cached one";
        }
    }
    if (p->last != before || listed != n_free + n_cached) {
        return "P2: a free block is missing from the list";
    }
    return NULL;
}
