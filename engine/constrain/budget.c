#include "engine/constrain/budget.h"

#include <stdlib.h>
#include <string.h>

bool budget_fail(struct budget *b, int rc, const char *limit)
{
    if (!b->failed) {
        b->failed = rc;
        b->limit = limit;
    }
    return false;
}

bool budget_work(struct budget *b, int64_t units)
{
    if (b->failed) {
        return false;
    }
    b->work += units;
    if (b->max_work > 0 && b->work > b->max_work) {
        return budget_fail(b, ERR_FULL, "work");
    }
    return true;
}

bool budget_item(struct budget *b)
{
    if (b->failed) {
        return false;
    }
    return ++b->items <= b->max_items || budget_fail(b, ERR_FULL, "items");
}

static bool charge(struct budget *b, size_t size)
{
    if (b->failed) {
        return false;
    }
    if (size > b->max_bytes || b->bytes > b->max_bytes - size) {
        return budget_fail(b, ERR_FULL, "memory");
    }
    b->bytes += size;
    return true;
}

bool budget_grow(struct budget *b, void *array, int32_t *cap, int64_t need, size_t size)
{
    int64_t wanted = MAX(need, MAX((int64_t)*cap * 2, 16));
    void *old;

    if (need <= *cap) {
        return !b->failed;
    }
    if (wanted > INT32_MAX || !charge(b, (size_t)(wanted - *cap) * size)) {
        return budget_fail(b, ERR_FULL, "memory");
    }
    memcpy(&old, array, sizeof(old));
    void *p = realloc(old, (size_t)wanted * size);
    if (!p) {
        return budget_fail(b, ERR_NOMEM, NULL);
    }
    memcpy(array, &p, sizeof(p));
    *cap = (int32_t)wanted;
    return true;
}

void *budget_alloc(struct budget *b, size_t size)
{
    if (!charge(b, size)) {
        return NULL;
    }
    void *p = calloc(1, size);
    if (!p) {
        budget_fail(b, ERR_NOMEM, NULL);
    }
    return p;
}

void budget_free(struct budget *b, void *p, size_t size)
{
    if (p) {
        b->bytes -= size;
    }
    free(p);
}
