/* The list of segments, and reading it while its memory is freed. */
#include "server/stream/segments.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Pages of a segment that were read are returned to the system in runs of at least
 * LONG_BYTES, before its end. */
enum { PAGE_BYTES = 4096, LONG_BYTES = 256 * 1024 };

void segments_init(struct segments *s, size_t max_literal)
{
    *s = (struct segments){0};
    buf_init(&s->literal, max_literal);
}

void segments_release(struct segments *s)
{
    for (int32_t i = 0; i < s->n; i++) {
        free(s->list[i].owned);
    }
    free(s->list);
    buf_release(&s->literal);
    *s = (struct segments){0};
}

static void add(struct segments *s, const struct segment *g)
{
    if (s->n == s->cap) {
        int32_t cap = MAX(16, s->cap * 2);
        struct segment *list = realloc(s->list, (size_t)cap * sizeof(*list));
        if (!list) {
            free(g->owned);
            s->failed = true;
            return;
        }
        s->list = list;
        s->cap = cap;
    }
    s->list[s->n++] = *g;
    s->total += g->len;
}

static void close_literal(struct segments *s)
{
    struct segment g = {.at = s->closed, .len = s->literal.len - s->closed};

    if (g.len) {
        add(s, &g);
    }
    s->closed = s->literal.len;
}

void segments_take(struct segments *s, struct buf *from)
{
    struct segment g = {
        .data = from->data, .len = from->len, .owned = from->data, .bytes = from->cap};

    close_literal(s);
    s->failed = s->failed || from->failed;
    buf_init(from, from->max);
    if (g.len) {
        add(s, &g);
    } else {
        free(g.owned);
    }
}

void segments_share(struct segments *s, const struct buf *from)
{
    struct segment g = {.data = from->data, .len = from->len};

    close_literal(s);
    s->failed = s->failed || from->failed;
    if (g.len) {
        add(s, &g);
    }
}

int segments_close(struct segments *s)
{
    close_literal(s);
    s->failed = s->failed || s->literal.failed;
    return s->failed ? ERR_NOMEM : 0;
}

size_t segments_held(const struct segments *s)
{
    size_t n = s->literal.cap + (size_t)s->cap * sizeof(*s->list);

    for (int32_t i = s->reading; i < s->n; i++) {
        n += s->list[i].bytes;
    }
    return n - s->given;
}

/* Return the pages of a long segment that were read completely. */
static void give_pages(struct segments *s, const struct segment *g)
{
    uintptr_t begin = (uintptr_t)g->owned,
              from = (begin + s->given + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES,
              to = (begin + s->offset) / PAGE_BYTES * PAGE_BYTES;

    if (!g->owned || to <= from || to - from < LONG_BYTES) {
        return;
    }
    if (madvise((char *)g->owned + (from - begin), to - from, MADV_DONTNEED) == 0) {
        s->given = to - begin;
    }
}

size_t segments_read(struct segments *s, char *to, size_t max)
{
    size_t n = 0;

    while (s->reading < s->n && n < max) {
        struct segment *g = &s->list[s->reading];
        const char *data = g->data ? g->data : s->literal.data + g->at;
        size_t part = MIN(max - n, g->len - s->offset);
        memcpy(to + n, data + s->offset, part);
        n += part;
        s->offset += part;
        if (s->offset < g->len) {
            give_pages(s, g);
            break;
        }
        free(g->owned);
        g->owned = NULL;
        s->reading++;
        s->offset = s->given = 0;
    }
    return n;
}
