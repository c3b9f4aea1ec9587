/* See chat_format.h and format.h: answers byte by byte. This file looks for marks in
 * content and reasoning, puts events together, and begins and ends calls; what is between
 * a call's marks is read by the bodies. */
#include <stdlib.h>
#include <string.h>

#include "config/base/utf8.h"
#include "models/chat/format/format.h"

#define TEXT_MAX ((size_t)1 << 30)

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

/* ---- events ---- */

static void report(struct chat_parser *p, const struct chat_event *event)
{
    p->fn(p->fn_arg, event);
}

/* Bytes of whole characters, without a last one that is cut. */
static size_t whole_chars(const char *text, size_t len)
{
    size_t back = 1;
    int bad;

    while (back < 4 && back <= len && ((uint8_t)text[len - back] & 0xC0) == 0x80) {
        back++;
    }
    if (back > len || back > 4) {
        return len;
    }
    return utf8_next((const uint8_t *)text + len - back, back, &bad) < 0 ? len - back : len;
}

void parser_flush(struct chat_parser *p, bool all)
{
    size_t len = all ? p->text.len : whole_chars(p->text.data, p->text.len);

    p->nomem = p->nomem || p->text.failed;
    if (!len || p->nomem) {
        return;
    }
    report(p, &(struct chat_event){.kind = p->kind,
                                   .text = p->text.data,
                                   .len = len,
                                   .call = MAX(p->n_calls - 1, 0)});
    buf_consume(&p->text, len);
}

void parser_put(struct chat_parser *p, enum chat_event_kind kind, const char *text, size_t len)
{
    if (!len) {
        return;
    }
    if (kind != p->kind) {
        parser_flush(p, true);
        p->kind = kind;
    }
    buf_append(&p->text, text, len);
}

static enum chat_event_kind text_kind(const struct chat_parser *p)
{
    return p->state == IN_REASONING ? CHAT_REASONING : CHAT_CONTENT;
}

static void put_space(struct chat_parser *p)
{
    if (p->space.len) {
        parser_put(p, text_kind(p), p->space.data, p->space.len);
        buf_clear(&p->space);
    }
}

void parser_drop_space(struct chat_parser *p)
{
    p->nomem = p->nomem || p->space.failed;
    buf_clear(&p->space);
}

/* White space is held back, as it may stand before a mark; a long run is text. */
void parser_text(struct chat_parser *p, char c)
{
    if (is_space(c)) {
        if (!p->trim) {
            buf_putc(&p->space, c);
            if (p->space.len > SPACE_BYTES) {
                put_space(p);
            }
        }
        return;
    }
    put_space(p);
    parser_put(p, text_kind(p), &c, 1);
    p->had_content = p->had_content || p->state == IN_CONTENT;
    p->trim = false;
    p->fresh = false;
}

/* ---- calls ---- */

static bool name_is_valid(const char *name)
{
    if (!*name) {
        return false;
    }
    for (; *name; name++) {
        if ((unsigned char)*name <= ' ' || strchr("<>{}()[]\"'`\\=,;", *name)) {
            return false;
        }
    }
    return true;
}

/* An id that an earlier call has is none. */
static const char *new_id(struct chat_parser *p, const char *id)
{
    if (!id || !*id) {
        return NULL;
    }
    uint64_t hash = name_hash(id, strlen(id));
    for (int32_t i = 0; i < p->n_ids; i++) {
        if (p->ids[i] == hash) {
            return NULL;
        }
    }
    p->ids[p->n_ids++] = hash;
    return id;
}

bool call_begin(struct chat_parser *p, const char *name, const char *id)
{
    /* What needs no mark, or stands in reasoning, is a call only of a tool that exists. */
    bool known = p->state == IN_BODY && (p->bare || p->body_from == IN_REASONING);

    p->tool = tools_find(p->tools, name);
    if (p->n_calls == MAX_CALLS || !name_is_valid(name) || (known && p->tool < 0)) {
        return false;
    }
    parser_drop_space(p);
    parser_flush(p, true);
    p->n_calls++;
    p->committed = true;
    p->open = true;
    p->n_params = 0;
    buf_clear(&p->raw);
    if (!p->nomem) {
        report(p, &(struct chat_event){.kind = CHAT_CALL,
                                       .call = p->n_calls - 1,
                                       .name = name,
                                       .id = new_id(p, id)});
    }
    p->kind = CHAT_ARGUMENTS;
    return true;
}

void call_arguments(struct chat_parser *p, const char *text, size_t len)
{
    parser_put(p, CHAT_ARGUMENTS, text, len);
}

void call_end(struct chat_parser *p)
{
    parser_flush(p, true);
    p->open = false;
    buf_clear(&p->raw);
    if (!p->nomem) {
        report(p, &(struct chat_event){.kind = CHAT_CALL_END, .call = p->n_calls - 1});
    }
}

void call_break(struct chat_parser *p)
{
    parser_flush(p, true);
    p->open = false;
    buf_clear(&p->raw);
}

/* ---- bodies ---- */

static void body_begin(struct chat_parser *p, const char *mark, size_t len, bool bare)
{
    p->body_from = p->state;
    p->state = IN_BODY;
    p->committed = p->open = p->in_list = false;
    p->as_object = false;
    p->bare = bare;
    p->step = p->sub = 0;
    p->in_section = p->f->section_open && strcmp(p->f->section_open, mark) == 0;
    p->n_hold = 0;
    buf_clear(&p->raw);
    buf_append(&p->raw, mark, len);
    p->raw_mark = len;
    body_reset(p);
}

void body_reset(struct chat_parser *p)
{
    buf_clear(&p->word);
    buf_clear(&p->value);
    p->name[0] = p->id[0] = '\0';
    p->has_name = p->has_id = p->has_value = false;
    p->nested = 0;
    memset(&p->scan, 0, sizeof(p->scan));
}

/* The calls are over; what follows is content, also where they began in reasoning. */
static void body_over(struct chat_parser *p)
{
    p->state = IN_CONTENT;
    p->fresh = true;
    p->trim = !p->had_content;
    p->n_hold = 0;
    buf_clear(&p->raw);
    body_reset(p);
}

/* This was no call: its first mark is text, the rest is looked through anew. */
static void body_give_back(struct chat_parser *p)
{
    struct buf raw = p->raw;
    size_t mark = MIN(p->raw_mark, raw.len);
    bool all = raw.len > CANDIDATE_BYTES + MARK_BYTES;

    buf_init(&p->raw, TEXT_MAX);
    p->nomem = p->nomem || raw.failed;
    p->state = p->body_from;
    if (p->committed) {
        p->state = IN_CONTENT;
        p->fresh = true;
        p->trim = !p->had_content;
    }
    p->n_hold = 0;
    body_reset(p);
    for (size_t i = 0; i < raw.len; i++) {
        if (i < mark || all) {
            parser_text(p, raw.data[i]);
        } else {
            parser_byte(p, raw.data[i]);
        }
    }
    buf_release(&raw);
}

static enum body_rc body_byte(struct chat_parser *p, char c)
{
    switch (p->as_object ? BODY_OBJECT : p->f->body) {
    case BODY_OBJECT:
        return body_object_byte(p, c);
    case BODY_NAMED:
        return body_named_byte(p, c);
    case BODY_TAGGED:
        return body_tagged_byte(p, c);
    case BODY_LITERAL:
        return body_literal_byte(p, c);
    default:
        return BODY_NOT;
    }
}

static void in_body(struct chat_parser *p, char c)
{
    if (!p->open) {
        buf_putc(&p->raw, c);
    }
    enum body_rc rc = body_byte(p, c);
    if (rc == BODY_MORE && !p->open && p->raw.len > CANDIDATE_BYTES && !p->has_value) {
        rc = BODY_NOT;
    }
    p->nomem = p->nomem || p->raw.failed || p->word.failed || p->value.failed;
    if (rc == BODY_NOT) {
        body_give_back(p);
    } else if (rc == BODY_END) {
        body_over(p);
    } else if (rc == BODY_BEFORE) {
        /* What was held as a possible mark is text too. */
        char rest[MARK_BYTES + 1];
        size_t n = (size_t)p->n_hold;
        memcpy(rest, p->hold, n);
        if (!n) {
            rest[n++] = c;
        }
        body_over(p);
        for (size_t i = 0; i < n; i++) {
            parser_byte(p, rest[i]);
        }
    }
}

/* ---- marks ---- */

enum mark_rc parser_mark(const struct chat_parser *p, const char *const *mark, int32_t n,
                         int32_t *ret)
{
    enum mark_rc rc = MARK_NO;

    for (int32_t i = 0; i < n; i++) {
        if (!mark[i] || strncmp(mark[i], p->hold, (size_t)p->n_hold) != 0) {
            continue;
        }
        if (!mark[i][p->n_hold]) {
            *ret = i;
            return MARK_WHOLE;
        }
        rc = MARK_PART;
    }
    return rc;
}

enum {
    M_THINK_OPEN,
    M_THINK_CLOSE,
    M_THINK_EMPTY,
    M_LABEL,
    M_SECTION,
    M_CALL,
    M_CALL_TOO,
    M_CLOSE,
    N_MARKS = M_CLOSE + 3 + FORMAT_MARKS
};

/* The marks that count where the parser is. */
static void marks_here(const struct chat_parser *p, const char *mark[N_MARKS])
{
    const struct chat_format *f = p->f;
    bool reasoning = p->state == IN_REASONING;
    bool calls = p->calls_on && (!reasoning || f->think_calls) && p->n_calls < MAX_CALLS;

    memset(mark, 0, N_MARKS * sizeof(*mark));
    if (p->fresh || (f->think_anywhere && !reasoning)) {
        mark[M_THINK_OPEN] = f->think_open;
    }
    if (reasoning || p->fresh || f->think_anywhere) {
        mark[M_THINK_CLOSE] = f->think_close;
    }
    if (reasoning && p->fresh) {
        mark[M_THINK_EMPTY] = f->think_empty;
        mark[M_LABEL] = f->think_label;
    }
    if (calls) {
        mark[M_SECTION] = f->section_open;
        mark[M_CALL] = f->call_open;
        mark[M_CALL_TOO] = f->open_too;
    }
    if (!reasoning && p->n_calls && p->fresh) {
        mark[M_CLOSE] = f->section_close;
        mark[M_CLOSE + 1] = f->call_close;
        mark[M_CLOSE + 2] = f->close_too;
    }
    for (int32_t i = 0; !reasoning && i < FORMAT_MARKS; i++) {
        mark[M_CLOSE + 3 + i] = f->ignored[i];
    }
}

static void at_mark(struct chat_parser *p, int32_t which, const char *mark)
{
    p->n_hold = 0;
    if (which >= M_SECTION && which <= M_CALL_TOO) {
        /* A name's mark without the mark of a call before it: as good as none. */
        body_begin(p, mark, strlen(mark), p->f->name_open && strcmp(mark, p->f->name_open) == 0);
        return;
    }
    if (which >= M_CLOSE || which == M_LABEL) {
        return;
    }
    bool reasoning = p->state == IN_REASONING;
    if (which == M_THINK_OPEN || reasoning || p->fresh) {
        parser_drop_space(p);
        p->fresh = p->trim = true;
    }
    p->state = which == M_THINK_OPEN ? IN_REASONING : IN_CONTENT;
}

static void in_text(struct chat_parser *p, char c)
{
    const char *mark[N_MARKS];
    int32_t which;

    p->hold[p->n_hold++] = c;
    while (p->n_hold) {
        marks_here(p, mark);
        enum mark_rc rc = parser_mark(p, mark, N_MARKS, &which);
        if (rc == MARK_WHOLE) {
            at_mark(p, which, mark[which]);
            return;
        }
        if (rc == MARK_PART) {
            return;
        }
        char first = p->hold[0], rest[MARK_BYTES];
        int32_t n = --p->n_hold;
        memmove(p->hold, p->hold + 1, (size_t)n);
        if (!p->calls_on || !p->fresh || p->state != IN_CONTENT || !p->f->bare ||
            first != p->f->bare || p->n_calls == MAX_CALLS) {
            parser_text(p, first);
            continue;
        }
        memcpy(rest, p->hold, (size_t)n);
        body_begin(p, "", 0, true);
        p->raw_mark = 1;
        in_body(p, first);
        for (int32_t i = 0; i < n; i++) {
            parser_byte(p, rest[i]);
        }
        return;
    }
}

void parser_byte(struct chat_parser *p, char c)
{
    if (p->state == IN_BODY) {
        in_body(p, c);
    } else if (p->state == IN_HARMONY) {
        harmony_byte(p, c);
    } else {
        in_text(p, c);
    }
}

/* ---- the parser ---- */

int chat_parser_new(struct chat_parser **ret, const struct chat_format *f,
                    const struct chat_tools *tools, bool reasoning, struct err *e)
{
    struct chat_parser *p = calloc(1, sizeof(*p));
    int32_t n_tools = tools ? tools->n : 0;

    if (!p || !(p->params = calloc((size_t)n_tools + 1, sizeof(*p->params)))) {
        free(p);
        return err_nomem(e, "a parser of an answer");
    }
    p->f = f;
    p->tools = tools;
    p->calls_on = f->body != BODY_NONE && n_tools > 0 && tools->choice != TOOL_NONE;
    p->fresh = true;
    p->trim = reasoning;
    p->tool = -1;
    p->state = f->body == BODY_HARMONY         ? IN_HARMONY
               : reasoning && f->think_close ? IN_REASONING
                                               : IN_CONTENT;
    if (p->state == IN_HARMONY && reasoning) {
        p->step = HARMONY_REASONING;
    }
    struct buf *bufs[] = {&p->text, &p->space, &p->raw, &p->word, &p->value};
    for (size_t i = 0; i < ARRAY_LEN(bufs); i++) {
        buf_init(bufs[i], TEXT_MAX);
    }
    *ret = p;
    return 0;
}

void chat_parser_free(struct chat_parser *p)
{
    if (!p) {
        return;
    }
    for (int32_t i = 0; p->tools && i < p->tools->n; i++) {
        free(p->params[i].param);
    }
    free(p->params);
    buf_release(&p->text);
    buf_release(&p->space);
    buf_release(&p->raw);
    buf_release(&p->word);
    buf_release(&p->value);
    free(p);
}

int chat_parser_feed(struct chat_parser *p, const char *text, size_t len, chat_event_fn *fn,
                     void *arg)
{
    p->fn = fn;
    p->fn_arg = arg;
    for (size_t i = 0; i < len && !p->nomem; i++) {
        parser_byte(p, text[i]);
    }
    parser_flush(p, false);
    return p->nomem ? ERR_NOMEM : 0;
}

int chat_parser_end(struct chat_parser *p, chat_event_fn *fn, void *arg)
{
    p->fn = fn;
    p->fn_arg = arg;
    if (p->state == IN_HARMONY) {
        harmony_end(p);
    } else if (p->state == IN_BODY && !p->open && !p->committed) {
        p->state = p->body_from;
        for (size_t i = 0; i < p->raw.len; i++) {
            parser_text(p, p->raw.data[i]);
        }
    } else if (p->state != IN_BODY) {
        for (int32_t i = 0; i < p->n_hold; i++) {
            parser_text(p, p->hold[i]);
        }
    }
    if (p->state != IN_BODY && !(p->fresh && p->n_calls)) {
        put_space(p);
    }
    p->n_hold = 0;
    parser_flush(p, true);
    return p->nomem ? ERR_NOMEM : 0;
}

int32_t chat_parser_calls(const struct chat_parser *p)
{
    return p->n_calls;
}

size_t chat_parser_bytes(const struct chat_parser *p)
{
    size_t bytes = sizeof(*p) + p->text.cap + p->space.cap + p->raw.cap + p->word.cap + p->value.cap;

    for (int32_t i = 0; p->tools && i < p->tools->n; i++) {
        bytes += sizeof(p->params[i]) + (size_t)p->params[i].cap * sizeof(*p->params[i].param);
    }
    return bytes;
}
