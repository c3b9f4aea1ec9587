/* See format.h: calls that are a name and then JSON: name[ARGS]{…}. All that stands
 * before the arguments is the header; what of it is not the name, the description
 * tells. */
#include <string.h>

#include "models/chat/format/format.h"

enum {
    N_BEGIN,  /* behind the mark around all calls, or between two calls */
    N_HEADER, /* behind the mark of a call */
    N_STREAM, /* inside the arguments */
    N_AFTER,  /* behind them */
};
enum { HEADER_BYTES = 512 };

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

/* Cut `part` out of a text. */
static void cut(char *text, const char *part)
{
    char *at = part ? strstr(text, part) : NULL;

    if (at) {
        memmove(at, at + strlen(part), strlen(at + strlen(part)) + 1);
    }
}

static void trim(char *text)
{
    size_t from = strspn(text, " \n\r\t"), len = strlen(text);

    while (len > from && is_space(text[len - 1])) {
        len--;
    }
    memmove(text, text + from, len - from);
    text[len - from] = '\0';
}

/* "name[CALL_ID]id": take the id off. */
static void take_id(struct chat_parser *p, char *header)
{
    char *at = p->f->id_mark ? strstr(header, p->f->id_mark) : NULL;

    p->has_id = false;
    if (!at) {
        return;
    }
    const char *id = at + strlen(p->f->id_mark);
    size_t len = strcspn(id, "[ \n");
    if (len && len < sizeof(p->id)) {
        memcpy(p->id, id, len);
        p->id[len] = '\0';
        p->has_id = true;
    }
    memmove(at, id + len, strlen(id + len) + 1);
}

/* "functions.name:0": the whole is the id. */
static void take_index(struct chat_parser *p, char *header)
{
    char *colon = strrchr(header, ':');

    trim(header);
    colon = strrchr(header, ':');
    if (!colon || !colon[1] || colon[1 + strspn(colon + 1, "0123456789")]) {
        return;
    }
    size_t len = strlen(header);
    if (len < sizeof(p->id)) {
        memcpy(p->id, header, len + 1);
        p->has_id = true;
    }
    *colon = '\0';
}

/* The header is complete: the call begins. */
static bool begin(struct chat_parser *p)
{
    char header[HEADER_BYTES + 1];
    size_t len = p->word.len;

    if (!len || len > HEADER_BYTES || p->word.failed) {
        return false;
    }
    memcpy(header, p->word.data, len);
    header[len] = '\0';
    take_id(p, header);
    for (int32_t i = 0; i < FORMAT_MARKS && p->f->header[i]; i++) {
        if (!p->f->name_index || strcmp(p->f->header[i], p->f->name_before) != 0) {
            cut(header, p->f->header[i]);
        }
    }
    if (p->f->name_index) {
        take_index(p, header);
        if (strncmp(header, p->f->name_before, strlen(p->f->name_before)) == 0) {
            cut(header, p->f->name_before);
        }
    }
    trim(header);
    if (strlen(header) >= sizeof(p->name)) {
        return false;
    }
    memcpy(p->name, header, strlen(header) + 1);
    return call_begin(p, p->name, p->has_id ? p->id : NULL);
}

static bool ends_with(const struct buf *b, const char *end)
{
    size_t len = end ? strlen(end) : 0;

    return len && b->len >= len && memcmp(b->data + b->len - len, end, len) == 0;
}

static enum body_rc after_call(struct chat_parser *p)
{
    p->step = N_AFTER;
    p->n_hold = 0;
    body_reset(p);
    return BODY_MORE;
}

static enum body_rc in_header(struct chat_parser *p, char c)
{
    const char *closes[] = {p->f->call_close, p->f->section_close, p->f->call_open};

    if (!p->word.len && is_space(c)) {
        return BODY_MORE;
    }
    if (!p->word.len && !p->committed && p->f->list && (c == '[' || c == '{')) {
        p->as_object = true;
        p->step = 0;
        return body_object_byte(p, c);
    }
    if (c == '{') {
        if (!begin(p)) {
            return BODY_NOT;
        }
        memset(&p->scan, 0, sizeof(p->scan));
        p->step = N_STREAM;
        json_scan_byte(&p->scan, c);
        call_arguments(p, "{", 1);
        return BODY_MORE;
    }
    buf_putc(&p->word, c);
    for (size_t i = 0; i < ARRAY_LEN(closes); i++) {
        if (!ends_with(&p->word, closes[i])) {
            continue;
        }
        p->word.len -= strlen(closes[i]); /* a call without arguments */
        p->word.data[p->word.len] = '\0';
        if (!begin(p)) {
            return BODY_NOT;
        }
        call_arguments(p, "{}", 2);
        call_end(p);
        after_call(p);
        p->step = i == 2 ? N_HEADER : N_AFTER;
        return i == 1 || (i == 0 && !p->in_section) ? BODY_END : BODY_MORE;
    }
    return p->word.len < HEADER_BYTES ? BODY_MORE : BODY_NOT;
}

static enum body_rc in_arguments(struct chat_parser *p, char c)
{
    enum json_scan_rc rc = call_json_byte(p, c);

    return rc == SCAN_BAD ? BODY_BEFORE : rc == SCAN_DONE ? after_call(p) : BODY_MORE;
}

/* Before the first call, between two, and behind the last. */
static enum body_rc between(struct chat_parser *p, char c)
{
    const char *marks[] = {p->f->call_open, p->f->open_too, p->f->section_close, p->f->call_close,
                           p->f->close_too};
    int32_t which;

    if (!p->n_hold && (is_space(c) || (p->step == N_AFTER && c == '`'))) {
        return BODY_MORE;
    }
    p->hold[p->n_hold++] = c;
    enum mark_rc rc = parser_mark(p, marks, ARRAY_LEN(marks), &which);
    while (rc == MARK_NO && !p->committed && p->n_hold) {
        /* Text between the mark around all calls and the first has no meaning. */
        memmove(p->hold, p->hold + 1, (size_t)--p->n_hold);
        rc = p->n_hold ? parser_mark(p, marks, ARRAY_LEN(marks), &which) : MARK_PART;
    }
    if (rc == MARK_PART) {
        return BODY_MORE;
    }
    if (rc == MARK_NO || (!p->committed && which > 1)) {
        return p->committed ? BODY_BEFORE : BODY_NOT;
    }
    p->n_hold = 0;
    if (which < 2) {
        p->step = N_HEADER;
        return BODY_MORE;
    }
    return which == 2 || !p->in_section ? BODY_END : BODY_MORE;
}

enum body_rc body_named_byte(struct chat_parser *p, char c)
{
    switch (p->step) {
    case N_BEGIN:
        if (!p->in_section) {
            p->step = N_HEADER;
            return in_header(p, c);
        }
        return between(p, c);
    case N_HEADER:
        return in_header(p, c);
    case N_STREAM:
        return in_arguments(p, c);
    default:
        return between(p, c);
    }
}
