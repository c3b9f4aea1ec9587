/* A streamed answer of any server, in any pieces: what `quire bench serve` reads. The
 * first byte of the input says how the rest is cut into pieces; read at once it must be
 * counted the same. covers: server/bench/bench_stream.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/bench/bench_stream.h"

#define CHECK(x)                                                    \
    do {                                                            \
        if (!(x)) {                                                 \
            fprintf(stderr, "fuzz_stream: %s does not hold\n", #x); \
            abort();                                                \
        }                                                           \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct stream_reader *r)
{
    CHECK(r->n_line >= 0 && r->n_line < STREAM_LINE && memchr(r->line, 0, sizeof(r->line)));
    CHECK(r->n_protocol >= 0 && (size_t)r->n_protocol < sizeof(r->protocol));
    CHECK(r->n_events >= 0);
}

/* Feed `size` bytes, `step` at a time; a negative code, or 0. */
static int feed(struct stream_reader *r, const char *data, size_t size, size_t step)
{
    struct err e = {0};

    stream_reader_init(r);
    for (size_t at = 0; at < size; at += step) {
        int32_t before = r->n_events;
        int32_t n = stream_feed(r, data + at, MIN(step, size - at), &e);
        check(r);
        if (n < 0) {
            CHECK(e.code == n && e.text[0]);
            return n;
        }
        CHECK(n == r->n_events - before);
    }
    int rc = stream_closed(r, &e);
    CHECK(rc == 0 ? r->done : e.text[0] != '\0');
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct stream_reader whole, pieces;

    if (size < 2) {
        return 0;
    }
    const char *text = (const char *)data + 1;
    int at_once = feed(&whole, text, size - 1, size - 1);
    int in_pieces = feed(&pieces, text, size - 1, 1 + data[0] % 64);
    if (size >= STREAM_LINE) {
        return 0; /* of longer lines that come in pieces only the beginning is looked at */
    }
    CHECK(at_once == in_pieces && whole.status == pieces.status && whole.done == pieces.done);
    CHECK(whole.failed == pieces.failed && whole.close == pieces.close);
    CHECK(whole.n_events == pieces.n_events && whole.completion_tokens == pieces.completion_tokens);
    return 0;
}
