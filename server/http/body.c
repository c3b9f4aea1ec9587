/* Short bodies are sent from one buffer; long ones through MHD's content reader. */
#include "server/http/body.h"

#include <stdlib.h>

enum {
    SHORT_BYTES = 32 * 1024, /* up to this a body is given to MHD as one buffer */
    BLOCK_BYTES = 64 * 1024, /* of a longer one, MHD reads this much at once */
};

struct body *body_new(struct budget *budget, struct segments *g)
{
    struct body *b = calloc(1, sizeof(*b));

    if (!b) {
        segments_release(g);
        return NULL;
    }
    account_open(&b->account, budget);
    b->segments = *g;
    *g = (struct segments){0};
    atomic_init(&b->refs, 1);
    account_set(&b->account, (int64_t)segments_held(&b->segments));
    return b;
}

void body_unref(struct body *b)
{
    if (atomic_fetch_sub_explicit(&b->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    account_close(&b->account);
    segments_release(&b->segments);
    free(b);
}

void body_leave(struct body *b)
{
    account_unlist(&b->account);
    body_unref(b);
}

static void response_unref(void *body)
{
    body_unref(body);
}

/* An MHD_ContentReaderCallback: a call means that the client took the last block. */
static ssize_t body_read(void *body, uint64_t pos, char *to, size_t max)
{
    struct body *b = body;

    (void)pos;
    size_t n = segments_read(&b->segments, to, max);
    account_set(&b->account, (int64_t)segments_held(&b->segments));
    atomic_store_explicit(&b->account.since_us, clock_us(), memory_order_relaxed);
    return n ? (ssize_t)n : MHD_CONTENT_READER_END_OF_STREAM;
}

static bool is_short(const struct segments *g)
{
    return g->n == 0 || (g->n == 1 && g->list[0].owned && g->total <= SHORT_BYTES);
}

/* For a body of at most one segment. */
static struct MHD_Response *short_response(struct body *b)
{
    struct segments *g = &b->segments;
    void *data = g->n ? g->list[0].owned : "";

    return MHD_create_response_from_buffer_with_free_callback_cls(g->total, data, response_unref,
                                                                  b);
}

struct MHD_Response *body_response(struct body *b, int fd)
{
    struct MHD_Response *m;

    atomic_fetch_add(&b->refs, 1);
    if (is_short(&b->segments)) {
        m = short_response(b);
    } else {
        atomic_store(&b->account.since_us, clock_us());
        account_list(&b->account, fd);
        m = MHD_create_response_from_callback(b->segments.total, BLOCK_BYTES, body_read, b,
                                              response_unref);
    }
    if (!m) {
        body_unref(b);
    }
    return m;
}
