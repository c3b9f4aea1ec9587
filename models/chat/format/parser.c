/* See chat_format.h and format.h: answers byte by byte. This file looks for marks in
 * content and reasoning, and leads to the bodies, which read what is between a call's
 * marks. */
#include <stdlib.h>
#include <string.h>

#include "models/chat/format/format.h"

#define TEXT_MAX ((size_t)1 << 30)

/* ---- bodies ---- */

static void body_begin(struct chat_parser *p, const char *mark, size_t len, bool bare)
{
    p->body_from = p->state;
    p->state = IN_BODY;
    p->committed = p->open = p->in_list = p->broken = false;
    p->as_object = false;
    p->bare = bare;
    p->step = p->sub = 0;
    p->in_section = p->f->section_open && strcmp(p->f->section_open, mark) == 0;
    p->n_hold = 0;
    buf_clear(&p->raw);
    buf_append(&p->raw, mark, len);
    p->raw_mark = len;
    p->n_empty = 0;
    body_reset(p);
}

void body_reset(struct chat_parser *p)
{
    buf_clear(&p->word);
    buf_clear(&p->value);
    p->name[0] = p->id[0] = '\0';
    p->has_name = p->has_id = p->has_value = false;
    p->line = p->next_key = false;
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

/* What is left of a call whose arguments are invalid is dropped, up to the next mark
 * that ends calls; without such marks it is content. */
static enum body_rc broken_byte(struct chat_parser *p, char c)
{
    const char *marks[] = {p->f->call_close, p->f->section_close, p->f->close_too};
    int32_t which;

    if (!marks[0] && !marks[1]) {
        return BODY_BEFORE;
    }
    p->hold[p->n_hold++] = c;
    while (p->n_hold) {
        enum mark_rc rc = parser_mark(p, marks, ARRAY_LEN(marks), &which);
        if (rc == MARK_WHOLE) {
            p->n_hold = 0;
            return BODY_END;
        }
        if (rc == MARK_PART) {
            break;
        }
        memmove(p->hold, p->hold + 1, (size_t)--p->n_hold);
    }
    return BODY_MORE;
}

/* A body of nothing but white space is dropped with its marks. What may be the closing
 * mark is read by the body only when it turns out to be none. */
static enum mark_rc empty_byte(struct chat_parser *p)
{
    const char *marks[] = {p->f->call_close, p->f->section_close, p->f->close_too};
    size_t at = p->raw_mark;

    if (p->committed || p->bare || p->raw.failed) {
        return MARK_NO;
    }
    while (at < p->raw.len && strchr(" \n\r\t", p->raw.data[at])) {
        at++;
    }
    const size_t len = p->raw.len - at;
    for (size_t i = 0; len && i < ARRAY_LEN(marks); i++) {
        if (marks[i] && len <= strlen(marks[i]) && memcmp(marks[i], p->raw.data + at, len) == 0) {
            return marks[i][len] ? MARK_PART : MARK_WHOLE;
        }
    }
    return MARK_NO;
}

/* The next byte of a body, behind those that were no closing mark. */
static enum body_rc next_byte(struct chat_parser *p, char c)
{
    enum body_rc rc = BODY_MORE;

    for (size_t n = p->n_empty; n && rc == BODY_MORE; n--) {
        rc = body_byte(p, p->raw.data[p->raw.len - 1 - n]);
    }
    p->n_empty = 0;
    return rc == BODY_MORE ? body_byte(p, c) : rc;
}

static void in_body(struct chat_parser *p, char c)
{
    bool broken = p->broken;

    if (!p->open && !broken) {
        buf_putc(&p->raw, c);
        enum mark_rc empty = empty_byte(p);
        if (empty == MARK_PART) {
            p->n_empty++;
            return;
        }
        if (empty == MARK_WHOLE) {
            enum parser_state from = p->body_from;
            parser_keep_gap(p);
            body_over(p);
            p->state = from;
            return;
        }
    }
    enum body_rc rc = broken ? broken_byte(p, c) : next_byte(p, c);
    if (p->broken && !broken) {
        p->n_hold = 0;
        rc = broken_byte(p, c);
    }
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
    M_THINK_BARE,
    M_THINK_CLOSE,
    M_THINK_EMPTY,
    M_LABEL,
    M_SECTION,
    M_CALL,
    M_CALL_TOO,
    M_CLOSE,
    M_TAG = M_CLOSE + 3,
    M_IGNORED,
    N_MARKS = M_IGNORED + FORMAT_MARKS
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
    if (p->fresh && !reasoning && !p->had_content && !p->n_calls) {
        mark[M_THINK_BARE] = f->think_label; /* models leave the mark before it out */
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
    mark[M_TAG] = f->ignored_tag;
    for (int32_t i = 0; (!reasoning || f->ignored_tag) && i < FORMAT_MARKS; i++) {
        mark[M_IGNORED + i] = f->ignored[i];
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
        p->n_tag = which == M_TAG ? MARK_BYTES : 0;
        return;
    }
    bool reasoning = p->state == IN_REASONING;
    bool opens = which == M_THINK_OPEN || which == M_THINK_BARE;
    if (opens || reasoning || p->fresh) {
        parser_keep_gap(p);
        p->fresh = true;
        p->trim = opens || !p->had_content;
    }
    p->state = opens ? IN_REASONING : IN_CONTENT;
}

static void in_text(struct chat_parser *p, char c)
{
    const char *mark[N_MARKS];
    int32_t which;

    if (p->n_tag) {
        p->n_tag = c == '>' ? 0 : p->n_tag - 1;
        return;
    }
    if (!p->n_hold && !p->begins[(unsigned char)c]) {
        parser_text(p, c);
        return;
    }
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

/* The bytes with which a mark in text begins, whatever the state. */
static void find_begins(struct chat_parser *p)
{
    const struct chat_format *f = p->f;
    const char *marks[] = {f->think_open,   f->think_close,   f->think_empty, f->think_label,
                           f->section_open, f->section_close, f->call_open,   f->call_close,
                           f->open_too,     f->close_too,     f->ignored_tag};

    for (size_t i = 0; i < ARRAY_LEN(marks); i++) {
        p->begins[marks[i] ? (unsigned char)marks[i][0] : 0] = true;
    }
    for (int32_t i = 0; i < FORMAT_MARKS && f->ignored[i]; i++) {
        p->begins[(unsigned char)f->ignored[i][0]] = true;
    }
    p->begins[(unsigned char)f->bare] = true;
}

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
    find_begins(p);
    p->state = f->body == BODY_HARMONY       ? IN_HARMONY
               : reasoning && f->think_close ? IN_REASONING
                                             : IN_CONTENT;
    if (p->state == IN_HARMONY && reasoning) {
        p->step = HARMONY_REASONING;
    }
    struct buf *bufs[] = {&p->text, &p->space, &p->gap, &p->raw, &p->word, &p->value};
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
    buf_release(&p->gap);
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

/* Whether the answer ended inside the label of its reasoning. */
static bool at_label(const struct chat_parser *p)
{
    const char *label = p->f->think_label;

    return label && p->n_hold && p->state == IN_REASONING && p->fresh &&
           strncmp(label, p->hold, (size_t)p->n_hold) == 0;
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
    } else if (p->state != IN_BODY && !at_label(p)) {
        for (int32_t i = 0; i < p->n_hold; i++) {
            parser_text(p, p->hold[i]);
        }
    }
    if (p->state != IN_BODY && !(p->fresh && p->n_calls)) {
        parser_put_space(p);
    }
    p->n_hold = 0;
    parser_flush(p, true);
    return p->nomem ? ERR_NOMEM : 0;
}

bool chat_parser_reasoning(const struct chat_parser *p)
{
    return p->state == IN_REASONING || (p->state == IN_HARMONY && harmony_reasoning(p));
}

int32_t chat_parser_calls(const struct chat_parser *p)
{
    return p->n_calls;
}

size_t chat_parser_bytes(const struct chat_parser *p)
{
    size_t bytes = sizeof(*p) + p->text.cap + p->space.cap + p->gap.cap + p->raw.cap + p->word.cap +
                   p->value.cap;

    for (int32_t i = 0; p->tools && i < p->tools->n; i++) {
        bytes += sizeof(p->params[i]) + (size_t)p->params[i].cap * sizeof(*p->params[i].param);
    }
    return bytes;
}
