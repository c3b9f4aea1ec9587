/* See format.h: calls as Python or Gemma write them, name(key='text') and
 * name{key:…}, in a list or one after another. */
#include <string.h>

#include "models/chat/format/format.h"

enum {
    P_BEGIN, /* before a name, in or before a list */
    P_NAME,
    P_ARGUMENTS,
    P_AFTER, /* behind a call */
};

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool name_char(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c && strchr("_-./:", c));
}

/* The name in `word` is whole: its call begins. */
static bool begin_call(struct chat_parser *p)
{
    const char *before = p->f->name_before, *name = p->word.data ? p->word.data : "";
    const char *word = name;

    if (before && strncmp(name, before, strlen(before)) == 0) {
        name += strlen(before);
    } else if (before && *name == ':') {
        name++; /* models leave the word before it out */
    }
    /* Without the word before it, text with spaces is none. */
    if (strlen(name) >= sizeof(p->name) || (name == word && strchr(name, ' '))) {
        return false;
    }
    memcpy(p->name, name, strlen(name) + 1);
    return call_begin(p, p->name, NULL);
}

static enum body_rc begin(struct chat_parser *p)
{
    if (!begin_call(p)) {
        return BODY_NOT;
    }
    literal_begin(&p->literal, p->f->close, p->f->equal, p->f->quote);
    if (p->f->quote) {
        p->literal.params = call_params(p);
    }
    call_arguments(p, "{", 1);
    buf_clear(&p->word);
    p->step = P_ARGUMENTS;
    return BODY_MORE;
}

static enum body_rc arguments_byte(struct chat_parser *p, char c)
{
    enum json_scan_rc rc = literal_byte(&p->literal, c, &p->value);

    call_arguments(p, p->value.data, p->value.len);
    p->nomem = p->nomem || p->value.failed;
    buf_clear(&p->value);
    if (rc == SCAN_MORE) {
        return BODY_MORE;
    }
    p->step = P_AFTER;
    if (rc == SCAN_DONE) {
        call_end(p);
        return BODY_MORE;
    }
    call_break(p);
    return BODY_BEFORE;
}

static enum body_rc at_close(struct chat_parser *p, char c)
{
    const char *marks[] = {p->f->call_close, p->f->section_close, p->f->close_too, p->f->call_open,
                           p->f->open_too};
    int32_t which;

    p->hold[p->n_hold++] = c;
    enum mark_rc rc = parser_mark(p, marks, ARRAY_LEN(marks), &which);
    if (rc == MARK_PART) {
        return BODY_MORE;
    }
    if (rc == MARK_WHOLE && p->committed) {
        p->n_hold = 0;
        p->step = P_BEGIN;
        return which < 3 ? BODY_END : BODY_MORE;
    }
    return p->committed ? BODY_BEFORE : BODY_NOT;
}

static enum body_rc between(struct chat_parser *p, char c)
{
    bool after = p->step == P_AFTER;

    if (p->n_hold) {
        return at_close(p, c);
    }
    if (is_space(c) || (after && c == ',')) {
        return BODY_MORE;
    }
    if (c == '[' && !after && !p->in_list && p->f->close == ')') {
        p->in_list = true;
        return BODY_MORE;
    }
    if (c == ']' && p->in_list) {
        p->in_list = false;
        bool marked = p->f->call_close || p->f->section_close;
        return !p->committed ? BODY_NOT : p->bare || !marked ? BODY_END : BODY_MORE;
    }
    if (name_char(c) && (!after || p->in_list || (!p->bare && p->f->close == ')'))) {
        buf_clear(&p->word);
        buf_putc(&p->word, c);
        p->step = P_NAME;
        return BODY_MORE;
    }
    if (p->bare) {
        return p->committed ? BODY_BEFORE : BODY_NOT;
    }
    return at_close(p, c);
}

/* A byte of a name. Where marks stand around each call, a name without the bracket of
 * arguments is a call without any; it may be none of a tool, of which the client then
 * can tell the model. */
static enum body_rc name_byte(struct chat_parser *p, char c)
{
    const char *end = p->f->name_before && !p->bare ? p->f->call_close : NULL;
    size_t len = end ? strlen(end) : 0;

    if (c == p->f->open) {
        return begin(p);
    }
    buf_putc(&p->word, c);
    if (len && p->word.len > len && memcmp(p->word.data + p->word.len - len, end, len) == 0) {
        p->word.len -= len;
        p->word.data[p->word.len] = '\0';
        if (!begin_call(p)) {
            return BODY_NOT;
        }
        call_arguments(p, "{}", 2);
        call_end(p);
        return BODY_END;
    }
    return (name_char(c) || len) && p->word.len < NAME_BYTES ? BODY_MORE : BODY_NOT;
}

enum body_rc body_literal_byte(struct chat_parser *p, char c)
{
    switch (p->step) {
    case P_NAME:
        return name_byte(p, c);
    case P_ARGUMENTS:
        return arguments_byte(p, c);
    default:
        return between(p, c);
    }
}
