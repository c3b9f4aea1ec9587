/* Memory managers of before paging: each sequence gets one contiguous chunk for its whole life, from a buddy allocator.
 *
 * A chunk has a power of two of slots and starts at a multiple of its size. A chunk is split to serve a smaller one,
 * and joined with its buddy when both are free. An arena that is no power of two begins as the chunks of its binary
 * digits. */
#include <stdlib.h>
#include <string.h>

#include "engine/simulate_impl.h"

enum { ORDERS = 31 };

struct reserver {
    int manager;
    int32_t max_len, slots;
    int8_t *free_order;   /* [slots] order of the free chunk that starts here; -1: none */
    int32_t *next, *prev; /* [slots] lists of free chunks by order; -1: end */
    int32_t first[ORDERS];
    int32_t n_taken;
};

static void list_add(struct reserver *r, int32_t at, int order)
{
    r->free_order[at] = (int8_t)order;
    r->prev[at] = -1;
    r->next[at] = r->first[order];
    if (r->first[order] >= 0)
        r->prev[r->first[order]] = at;
    r->first[order] = at;
}

static void list_take(struct reserver *r, int32_t at)
{
    int order = r->free_order[at];
    if (r->prev[at] >= 0)
        r->next[r->prev[at]] = r->next[at];
    else
        r->first[order] = r->next[at];
    if (r->next[at] >= 0)
        r->prev[r->next[at]] = r->prev[at];
    r->free_order[at] = -1;
}

static int order_of(int32_t size)
{
    int order = 0;
    while (((int64_t)1 << order) < size)
        order++;
    return order;
}

int reserver_open(struct reserver **ret, const struct sim_options *o, struct err *e)
{
    struct reserver *r = calloc(1, sizeof(*r));
    if (!r)
        return err_nomem(e, "the reservations");
    r->manager = o->manager;
    r->max_len = o->max_len;
    r->slots = o->slots;
    r->free_order = malloc((size_t)o->slots);
    r->next = malloc((size_t)o->slots * sizeof(*r->next));
    r->prev = malloc((size_t)o->slots * sizeof(*r->prev));
    if (!r->free_order || !r->next || !r->prev) {
        reserver_free(r);
        return err_nomem(e, "the reservations");
    }
    memset(r->free_order, -1, (size_t)o->slots);
    memset(r->first, -1, sizeof(r->first));
    int32_t at = 0;
    for (int order = ORDERS - 1; order >= 0; order--)
        if (o->slots & (1 << order)) {
            list_add(r, at, order);
            at += 1 << order;
        }
    *ret = r;
    return 0;
}

void reserver_free(struct reserver *r)
{
    if (!r)
        return;
    free(r->free_order);
    free(r->next);
    free(r->prev);
    free(r);
}

static int32_t wanted(const struct reserver *r, const struct sim_arrival *a)
{
    switch (r->manager) {
    case MANAGER_ORCA_POW2:
        return MIN(a->prompt + (1 << order_of(a->output)), r->max_len);
    case MANAGER_ORCA_ORACLE:
        return a->prompt + a->output;
    default:
        return r->max_len;
    }
}

bool reserver_take(struct reserver *r, const struct sim_arrival *a, struct reservation *ret)
{
    *ret = (struct reservation){.wanted = wanted(r, a), .needed = a->prompt + a->output};
    int order = order_of(ret->wanted), from = order;
    while (from < ORDERS && r->first[from] < 0)
        from++;
    if (from == ORDERS)
        return false;
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

void reserver_give(struct reserver *r, const struct reservation *x)
{
    int32_t at = x->start;
    int order = order_of(x->size);
    r->n_taken--;
    for (;; order++) {
        int32_t buddy = at ^ (1 << order);
        if (buddy >= r->slots || r->free_order[buddy] != order)
            break;
        list_take(r, buddy);
        at = MIN(at, buddy);
    }
    list_add(r, at, order);
}
