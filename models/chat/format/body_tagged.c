/* See format.h: calls with a parameter between tags each. A value is text: where the
 * schema says string it is reported as it comes, else it is kept until its end and read
 * by its types. */
#include <string.h>

#include "models/chat/format/format.h"

enum {
    T_BEGIN, /* before the mark of a name */
    T_NAME,
    T_NEXT, /* between parameters */
    T_KEY,
    T_TYPED,
    T_OPEN, /* before the mark of a value */
    T_TEXT, /* inside a string */
    T_KEEP, /* inside another value */
    T_AFTER /* behind a call */
};

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool ends_with(const struct buf *b, const char *end)
{
    size_t len = strlen(end);

    return b->len >= len && memcmp(b->data + b->len - len, end, len) == 0;
}

/* ---- the call ---- */

static enum body_rc begin(struct chat_parser *p)
{
    const char *name = p->word.data ? p->word.data : "";
    size_t from = strspn(name, " \n\r\t\""), len = strlen(name + from);

    while (len && strchr(" \n\r\t\"", name[from + len - 1])) {
        len--;
    }
    if (len >= sizeof(p->name)) {
        return BODY_NOT;
    }
    memcpy(p->name, name + from, len);
    p->name[len] = '\0';
    if (!call_begin(p, p->name, NULL)) {
        return BODY_NOT;
    }
    p->step = T_NEXT;
    return BODY_MORE;
}

static void end_call(struct chat_parser *p)
{
    call_arguments(p, p->n_params ? "}" : "{}", p->n_params ? 1 : 2);
    call_end(p);
    body_reset(p);
    p->step = T_AFTER;
}

static enum body_rc name_byte(struct chat_parser *p, char c)
{
    const struct chat_format *f = p->f;

    if (!f->name_close && (c == '\n' || c == '<')) {
        enum body_rc rc = begin(p);
        return rc == BODY_MORE && c == '<' ? body_tagged_byte(p, c) : rc;
    }
    buf_putc(&p->word, c);
    if (f->name_close && ends_with(&p->word, f->name_close)) {
        p->word.len -= strlen(f->name_close);
        p->word.data[p->word.len] = '\0';
        return begin(p);
    }
    bool text = f->name_close && (c == '\n' || c == '<');
    return text || p->word.len >= NAME_BYTES ? BODY_NOT : BODY_MORE;
}

/* ---- a parameter ---- */

static void put_key(struct chat_parser *p)
{
    const char *key = p->word.data ? p->word.data : "";
    size_t from = strspn(key, " \n\r\t"), len = strlen(key + from);
    char name[NAME_BYTES];

    while (len && is_space(key[from + len - 1])) {
        len--;
    }
    len = MIN(len, sizeof(name) - 1);
    memcpy(name, key + from, len);
    name[len] = '\0';
    buf_clear(&p->value);
    buf_puts(&p->value, p->n_params++ ? ", \"" : "{\"");
    buf_json_escape(&p->value, name, len);
    buf_puts(&p->value, "\": ");
    call_arguments(p, p->value.data, p->value.len);
    buf_clear(&p->value);
    const struct param_table *params = call_params(p);
    p->types = params ? param_table_types(params, name) : 0;
}

static void begin_value(struct chat_parser *p)
{
    bool text = p->types == PARAM_STRING || (!p->types && !p->f->untyped_json);

    p->step = text ? T_TEXT : T_KEEP;
    p->newlines = 0;
    p->sub = 0;
    if (text) {
        call_arguments(p, "\"", 1);
    }
}

/* The key in `word` is whole. */
static void begin_param(struct chat_parser *p)
{
    put_key(p);
    buf_clear(&p->word);
    p->step = p->f->typed ? T_TYPED : p->f->value_open ? T_OPEN : T_TEXT;
    if (p->step == T_TEXT) {
        begin_value(p);
    }
}

static enum body_rc key_byte(struct chat_parser *p, char c)
{
    buf_putc(&p->word, c);
    if (ends_with(&p->word, p->f->key_close)) {
        p->word.len -= strlen(p->f->key_close);
        p->word.data[p->word.len] = '\0';
        begin_param(p);
    } else if (p->word.len >= NAME_BYTES) {
        call_break(p);
        return BODY_END;
    }
    return BODY_MORE;
}

static enum body_rc typed_byte(struct chat_parser *p, char c)
{
    buf_putc(&p->word, c);
    if (ends_with(&p->word, p->f->typed)) {
        p->types = strncmp(p->word.data, "true", 4) == 0 ? PARAM_STRING : PARAM_ANY;
        begin_value(p);
    } else if (p->word.len >= NAME_BYTES) {
        call_break(p);
        return BODY_END;
    }
    return BODY_MORE;
}

/* A byte of a value that is no part of its closing mark. The first newline, and the
 * last, may belong to the tags. */
static void value_byte(struct chat_parser *p, char c)
{
    char text[8];
    struct buf out = {.max = 64};

    if (p->f->lines && !p->sub) {
        p->sub = 1;
        if (c == '\n') {
            return;
        }
    }
    if (p->step == T_KEEP) {
        buf_putc(&p->value, c);
        return;
    }
    if (p->newlines) {
        call_arguments(p, "\\n", 2);
        p->newlines = 0;
    }
    if (p->f->lines && c == '\n') {
        p->newlines = 1;
    } else if ((unsigned char)c < 0x80 && (c < ' ' || c == '"' || c == '\\' || c == 0x7f)) {
        buf_json_escape(&out, &c, 1);
        size_t n = MIN(out.len, sizeof(text));
        memcpy(text, out.data, n);
        buf_release(&out);
        call_arguments(p, text, n);
    } else {
        call_arguments(p, &c, 1);
    }
}

static enum body_rc in_value(struct chat_parser *p, char c);

static void value_end(struct chat_parser *p)
{
    struct buf out;
    size_t len = p->value.len;

    if (p->step == T_TEXT) {
        call_arguments(p, "\"", 1);
    } else {
        if (p->f->lines && len && p->value.data[len - 1] == '\n') {
            len--;
        }
        buf_init(&out, 8 * len + 64);
        value_put(&out, p->value.data ? p->value.data : "", len, p->types, p->f->untyped_json);
        p->nomem = p->nomem || out.failed;
        call_arguments(p, out.data, out.len);
        buf_release(&out);
        buf_clear(&p->value);
    }
    p->step = T_NEXT;
}

/* Whether the mark of a key, at this place of a value, may begin the next parameter:
 * models forget the mark that closes a value. Text that is held to a grammar may hold
 * the mark of a key, and closes each value. */
static bool key_may_follow(const struct chat_parser *p)
{
    const struct chat_tools *t = p->tools;
    bool line = p->step == T_TEXT ? p->newlines > 0
                                  : p->value.len && p->value.data[p->value.len - 1] == '\n';

    return p->f->lines && line && p->tool >= 0 && t->choice == TOOL_AUTO &&
           !t->tool[p->tool].strict;
}

/* A byte behind the mark of a key inside a value. Only a parameter of the tool ends the
 * value; anything else is its text. */
static enum body_rc next_key_byte(struct chat_parser *p, char c)
{
    const struct param_table *params = call_params(p);

    buf_putc(&p->word, c);
    if (ends_with(&p->word, p->f->key_close)) {
        size_t len = p->word.len - strlen(p->f->key_close);
        p->word.data[len] = '\0';
        p->next_key = false;
        if (params && param_table_has(params, p->word.data)) {
            p->word.len = len;
            value_end(p);
            begin_param(p);
            return BODY_MORE;
        }
        p->word.data[len] = p->f->key_close[0];
    } else if (c != '<' && c != '\n' && p->word.len < NAME_BYTES && !p->word.failed) {
        return BODY_MORE;
    }
    p->next_key = false;
    for (const char *at = p->f->key_open; *at; at++) {
        value_byte(p, *at);
    }
    for (size_t i = 0; i + 1 < p->word.len; i++) {
        value_byte(p, p->word.data[i]);
    }
    buf_clear(&p->word);
    return in_value(p, c);
}

static enum body_rc in_value(struct chat_parser *p, char c)
{
    const char *marks[] = {p->f->value_close, p->f->key_open};
    int32_t which;

    if (p->next_key) {
        return next_key_byte(p, c);
    }
    if (!p->n_hold && c != marks[0][0]) {
        value_byte(p, c);
        return BODY_MORE;
    }
    if (!p->n_hold) {
        p->line = key_may_follow(p);
    }
    p->hold[p->n_hold++] = c;
    while (p->n_hold) {
        enum mark_rc rc = parser_mark(p, marks, p->line ? 2 : 1, &which);
        if (rc == MARK_PART) {
            break;
        }
        if (rc == MARK_WHOLE) {
            p->n_hold = 0;
            p->next_key = which == 1;
            if (which == 0) {
                value_end(p);
            }
            break;
        }
        p->line = false;
        value_byte(p, p->hold[0]);
        memmove(p->hold, p->hold + 1, (size_t)--p->n_hold);
    }
    return BODY_MORE;
}

/* ---- between tags ---- */

enum { M_KEY, M_VALUE, M_NAME, M_NAME_END, M_CALL_CLOSE, M_CLOSE_TOO, M_SECTION, M_CALL, M_TOO };

static enum body_rc at_tag(struct chat_parser *p, int32_t which)
{
    bool inside = p->step == T_NEXT;

    buf_clear(&p->word);
    switch (which) {
    case M_KEY:
        p->step = T_KEY;
        return BODY_MORE;
    case M_VALUE:
        begin_value(p);
        return BODY_MORE;
    default:
        break;
    }
    if (inside) {
        end_call(p);
    }
    switch (which) {
    case M_NAME:
        p->step = T_NAME;
        return BODY_MORE;
    case M_NAME_END:
        return BODY_MORE;
    case M_CALL:
    case M_TOO:
        p->step = p->f->name_open ? T_BEGIN : T_NAME;
        return BODY_MORE;
    case M_SECTION:
        return BODY_END;
    default:
        p->step = T_AFTER;
        return p->in_section ? BODY_MORE : BODY_END;
    }
}

/* The tags that may come, white space between them. */
static enum body_rc between(struct chat_parser *p, char c)
{
    const struct chat_format *f = p->f;
    bool next = p->step == T_NEXT, begin = p->step == T_BEGIN, after = p->step == T_AFTER;
    const char *marks[] = {
        [M_KEY] = next ? f->key_open : NULL,
        [M_VALUE] = p->step == T_OPEN ? f->value_open : NULL,
        [M_NAME] = p->step != T_OPEN ? f->name_open : NULL,
        [M_NAME_END] = next || after ? f->name_end : NULL,
        [M_CALL_CLOSE] = next || after ? f->call_close : NULL,
        [M_CLOSE_TOO] = next || after ? f->close_too : NULL,
        [M_SECTION] = next || after ? f->section_close : NULL,
        [M_CALL] = after || (begin && p->in_section) ? f->call_open : NULL,
        [M_TOO] = after ? f->open_too : NULL,
    };
    int32_t which;

    if (!p->n_hold && is_space(c)) {
        return BODY_MORE;
    }
    p->hold[p->n_hold++] = c;
    while (p->n_hold) {
        enum mark_rc rc = parser_mark(p, marks, ARRAY_LEN(marks), &which);
        if (rc == MARK_PART) {
            return BODY_MORE;
        }
        if (rc == MARK_WHOLE) {
            p->n_hold = 0;
            return at_tag(p, which);
        }
        if (!p->open) {
            return p->committed ? BODY_BEFORE : BODY_NOT;
        }
        /* Text between the tags of a call has no meaning. */
        memmove(p->hold, p->hold + 1, (size_t)--p->n_hold);
    }
    return BODY_MORE;
}

enum body_rc body_tagged_byte(struct chat_parser *p, char c)
{
    if (p->step == T_BEGIN && !p->in_section && p->raw.len == p->raw_mark + 1 && !p->n_hold &&
        (!p->f->name_open || p->bare)) {
        p->step = T_NAME;
    }
    switch (p->step) {
    case T_NAME:
        return name_byte(p, c);
    case T_KEY:
        return key_byte(p, c);
    case T_TYPED:
        return typed_byte(p, c);
    case T_TEXT:
    case T_KEEP:
        return in_value(p, c);
    default:
        return between(p, c);
    }
}
