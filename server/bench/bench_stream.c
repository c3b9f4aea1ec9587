/* The states of the parser: protocol lines (status, headers, chunk sizes), then
 * body. */
#include "server/bench/bench_stream.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { STATUS_LINE, HEADER_LINE, CHUNK_SIZE, CHUNK_END, TRAILER, BODY };

void stream_reader_init(struct stream_reader *r)
{
    r->state = STATUS_LINE;
    r->status = 0;
    r->chunked = r->close = r->done = r->failed = false;
    r->left = -1;
    r->n_events = 0;
    r->completion_tokens = -1;
    r->n_line = r->n_protocol = 0;
    r->line[0] = '\0';
}

static void keep(struct stream_reader *r, const char *data, size_t len)
{
    size_t n = MIN(len, (size_t)(STREAM_LINE - 1 - r->n_line));

    memcpy(r->line + r->n_line, data, n);
    r->n_line += (int32_t)n;
    r->line[r->n_line] = '\0';
}

/* The decimal number at `text`. The line ends without a NUL, so strtol cannot be
 * used. */
static int32_t count_of(const char *text, const char *end)
{
    int32_t n = 0;

    for (; text < end && *text >= '0' && *text <= '9' && n < INT32_MAX / 10; text++) {
        n = n * 10 + (*text - '0');
    }
    return n;
}

/* One line of the body, without its end. Returns 1 for an event with choices; the usage
 * event has none, and the last event is [DONE]. */
static int32_t body_line(struct stream_reader *r, const char *line, size_t len)
{
    if (len < 7 || memcmp(line, "data: {", 7) != 0) {
        return 0;
    }
    const char *usage = memmem(line, len, "\"completion_tokens\":", 20);
    if (usage) {
        r->completion_tokens = count_of(usage + 20, line + len);
    }
    if (memmem(line, MIN(len, 32), "\"error\":", 8)) {
        r->failed = true;
        r->n_line = 0;
        keep(r, line, len);
        return 0;
    }
    if (usage && memmem(line, len, "\"choices\":[]", 12)) {
        return 0;
    }
    r->n_events++;
    return 1;
}

static int32_t body_bytes(struct stream_reader *r, const char *data, size_t len)
{
    int32_t n = 0;

    if (r->status != 200) {
        keep(r, data, len); /* the text of the error */
        return 0;
    }
    while (len > 0) {
        const char *end = memchr(data, '\n', len);
        size_t part = end ? (size_t)(end - data) : len;
        if (!end || r->n_line > 0) {
            keep(r, data, part);
        }
        if (!end) {
            return n;
        }
        if (r->n_line > 0) {
            int32_t whole = r->n_line;
            r->n_line = 0;
            n += body_line(r, r->line, (size_t)whole);
        } else {
            n += body_line(r, data, part);
        }
        data += part + 1;
        len -= part + 1;
    }
    return n;
}

/* Parse a length in a header or chunk line. */
static int read_length(int64_t *ret, const char *text, int base, struct err *e)
{
    char *end;

    errno = 0;
    *ret = strtoll(text, &end, base);
    if (end == text || errno || *ret < 0) {
        return err_set(e, ERR_INVALID, "the answer has an invalid length: %.40s", text);
    }
    return 0;
}

static int header_line(struct stream_reader *r, struct err *e)
{
    const char *h = r->protocol;

    if (strncasecmp(h, "transfer-encoding:", 18) == 0 && strcasestr(h, "chunked")) {
        r->chunked = true;
    } else if (strncasecmp(h, "content-length:", 15) == 0) {
        return read_length(&r->left, h + 15, 10, e);
    } else if (strncasecmp(h, "connection:", 11) == 0 && strcasestr(h, "close")) {
        r->close = true;
    }
    return 0;
}

static void end_of_headers(struct stream_reader *r)
{
    r->failed = r->status != 200;
    r->state = r->chunked ? CHUNK_SIZE : BODY;
    r->done = !r->chunked && r->left == 0;
}

/* Process the complete line in r->protocol. */
static int protocol_line(struct stream_reader *r, struct err *e)
{
    int n = r->n_protocol;

    if (n > 0 && r->protocol[n - 1] == '\r') {
        n--;
    }
    r->protocol[n] = '\0';
    r->n_protocol = 0;
    switch (r->state) {
    case STATUS_LINE:
        if (sscanf(r->protocol, "HTTP/1.%*1d %d", &r->status) != 1) {
            return err_set(e, ERR_INVALID, "the answer is not HTTP: %.80s", r->protocol);
        }
        r->state = HEADER_LINE;
        return 0;
    case HEADER_LINE:
        if (n > 0) {
            return header_line(r, e);
        }
        end_of_headers(r);
        return 0;
    case CHUNK_SIZE:
        if (read_length(&r->left, r->protocol, 16, e) < 0) {
            return ERR_INVALID;
        }
        r->state = r->left > 0 ? BODY : TRAILER;
        return 0;
    case CHUNK_END:
        r->state = CHUNK_SIZE;
        return 0;
    default: /* TRAILER */
        r->done = n == 0;
        return 0;
    }
}

/* Consume bytes up to the end of a protocol line, or all. */
static int64_t take_protocol(struct stream_reader *r, const char *data, size_t len, struct err *e)
{
    const char *end = memchr(data, '\n', len);
    size_t part = end ? (size_t)(end - data) : len;
    size_t n = MIN(part, sizeof(r->protocol) - 1 - (size_t)r->n_protocol);

    memcpy(r->protocol + r->n_protocol, data, n);
    r->n_protocol += (int32_t)n;
    if (!end) {
        return (int64_t)len;
    }
    int rc = protocol_line(r, e);
    return rc < 0 ? rc : (int64_t)part + 1;
}

int32_t stream_feed(struct stream_reader *r, const char *data, size_t len, struct err *e)
{
    int32_t n = 0;

    while (len > 0) {
        if (r->done) {
            return err_set(e, ERR_INVALID, "the server sent more than one answer");
        }
        if (r->state != BODY) {
            int64_t used = take_protocol(r, data, len, e);
            if (used < 0) {
                return (int32_t)used;
            }
            data += used;
            len -= (size_t)used;
            continue;
        }
        size_t part = r->left < 0 ? len : MIN(len, (size_t)r->left);
        n += body_bytes(r, data, part);
        data += part;
        len -= part;
        if (r->left >= 0 && (r->left -= (int64_t)part) == 0) {
            r->done = !r->chunked;
            r->state = CHUNK_END;
        }
    }
    return n;
}

int stream_closed(struct stream_reader *r, struct err *e)
{
    if (r->done) {
        return 0;
    }
    if (r->state == BODY && !r->chunked && r->left < 0) {
        r->done = true;
        return 0;
    }
    return err_set(e, ERR_IO, "the server closed the connection in the middle of an answer");
}
