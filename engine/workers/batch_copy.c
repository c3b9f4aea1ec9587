#include "engine/workers/batch_copy.h"

#include <stdlib.h>
#include <string.h>

static size_t rounded(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

static size_t batch_bytes(const struct batch *b)
{
    size_t n = 0;

#define X(array, count) n += rounded((size_t)(b->count) * sizeof(*b->array));
    BATCH_ARRAYS(X)
#undef X
    return n;
}

int batch_copy_reserve(struct batch_copy *c, size_t n_bytes, struct err *e)
{
    char *p = n_bytes > c->cap ? realloc(c->arena, n_bytes) : c->arena;

    if (!p) {
        return err_nomem(e, "a step's batch");
    }
    c->arena = p;
    c->cap = MAX(c->cap, n_bytes);
    return 0;
}

int batch_copy_set(struct batch_copy *c, const struct batch *b, struct err *e)
{
    size_t need = batch_bytes(b);

    if (need > c->cap && batch_copy_reserve(c, need + need / 2, e) < 0) {
        return ERR_NOMEM;
    }
    c->batch = *b;
    char *at = c->arena;
#define X(array, count)                                               \
    if ((b->count) > 0 && b->array) {                                 \
        memcpy(at, b->array, (size_t)(b->count) * sizeof(*b->array)); \
        c->batch.array = (const void *)at;                            \
        at += rounded((size_t)(b->count) * sizeof(*b->array));        \
    }
    BATCH_ARRAYS(X)
#undef X
    return 0;
}

void batch_copy_release(struct batch_copy *c)
{
    free(c->arena);
    *c = (struct batch_copy){0};
}
