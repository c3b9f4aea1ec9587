/* A buddy allocator: a chunk has 2^order slots and starts at a multiple of its size. A
 * chunk is split to serve a smaller request and joined with its buddy when both are
 * free. An arena whose size is not a power of two starts as one chunk for each of its
 * binary digits. */
#include <string.h>

#include "engine/sched/kv/contiguous_alloc.h"

static void list_add(struct contiguous_alloc *r, int32_t at, int order)
{
    r->free_order[at] = (int8_t)order;
    r->prev[at] = -1;
    r->next[at] = r->first[order];
    if (r->first[order] >= 0) {
        r->prev[r->first[order]] = at;
    }
    r->first[order] = at;
}

static void list_take(struct contiguous_alloc *r, int32_t at)
{
    int order = r->free_order[at];

    if (r->prev[at] >= 0) {
        r->next[r->prev[at]] = r->next[at];
    } else {
        r->first[order] = r->next[at];
    }
    if (r->next[at] >= 0) {
        r->prev[r->next[at]] = r->prev[at];
    }
    r->free_order[at] = -1;
}

static int order_of(int32_t size)
{
    int order = 0;

    while (((int64_t)1 << order) < size) {
        order++;
    }
    return order;
}

void contiguous_clear(struct contiguous_alloc *r)
{
    int32_t at = 0;

    r->n_taken = 0;
    memset(r->free_order, -1, (size_t)r->rule.slots);
    memset(r->first, -1, sizeof(r->first));
    for (int order = RESERVE_ORDERS - 1; order >= 0; order--) {
        if (r->rule.slots & (1 << order)) {
            list_add(r, at, order);
            at += 1 << order;
        }
    }
}

static int32_t wanted(const struct reserve_rule *rule, int32_t n_prompt, int32_t n_output)
{
    switch (rule->policy) {
    case KV_ORCA_POW2:
        return MIN(n_prompt + (1 << order_of(n_output)), rule->max_len);
    case KV_ORCA_ORACLE:
        return n_prompt + n_output;
    default:
        return rule->max_len;
    }
}

int32_t reserve_most(const struct reserve_rule *rule, int32_t n_prompt, int32_t n_output)
{
    return rule->slots >> order_of(MAX(wanted(rule, n_prompt, n_output), rule->least));
}

bool contiguous_take(struct contiguous_alloc *r, int32_t n_prompt, int32_t n_output,
                     struct reservation *ret)
{
    *ret = (struct reservation){.wanted = wanted(&r->rule, n_prompt, n_output)};
    int order = order_of(MAX(ret->wanted, r->rule.least)), from = order;
    while (from < RESERVE_ORDERS && r->first[from] < 0) {
        from++;
    }
    if (from == RESERVE_ORDERS) {
        return false;
    }
    int32_t at = r->first[from];
    list_take(r, at);
    while (from > order) {
        from--;
        list_add(r, at + (1 << from), from);
    }
    ret->start = at;
    ret->size = 1 << order;
    r->n_taken++;
    return true;
}

void contiguous_give(struct contiguous_alloc *r, struct reservation *x)
{
    int32_t at = x->start;

    if (x->size == 0) {
        return;
    }
    int order = order_of(x->size);
    r->n_taken--;
    *x = (struct reservation){0};
    for (;; order++) {
        int32_t buddy = at ^ (1 << order);
        if (buddy >= r->rule.slots || r->free_order[buddy] != order) {
            break;
        }
        list_take(r, buddy);
        at = MIN(at, buddy);
    }
    list_add(r, at, order);
}
