/* See format.h: calls that are JSON objects, {"name": …, "arguments": {…}}, one after
 * another or in a list. Members come in any order: arguments before the name are kept
 * until it is known. An object of OpenAI's shape, with the call in a member "function",
 * is read too. */
#include <stdlib.h>
#include <string.h>

#include "models/chat/format/format.h"

enum {
    O_BETWEEN, /* before the first object or behind one */
    O_FIRST,   /* behind the brace: a key or the end */
    O_KEY,     /* behind a comma */
    O_IN_KEY,
    O_COLON,
    O_VALUE, /* before a value */
    O_TEXT,  /* inside the string of a name or id */
    O_SKIP,  /* inside a value without meaning */
    O_KEEP,  /* inside arguments that cannot be reported yet, or that are a string */
    O_STREAM,
    O_NEXT, /* behind a value */
};
enum { KEY_OTHER, KEY_NAME, KEY_ARGUMENTS, KEY_ID, KEY_FUNCTION, KEY_TYPE };

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static char key_kind(const struct chat_parser *p)
{
    static const struct {
        const char *name;
        char kind;
    } KEYS[] = {{"name", KEY_NAME},
                {"tool_name", KEY_NAME},
                {"function_name", KEY_NAME},
                {"arguments", KEY_ARGUMENTS},
                {"parameters", KEY_ARGUMENTS},
                {"id", KEY_ID},
                {"tool_call_id", KEY_ID},
                {"call_id", KEY_ID},
                {"function", KEY_FUNCTION},
                {"type", KEY_TYPE}};

    for (size_t i = 0; i < ARRAY_LEN(KEYS); i++) {
        if (strcmp(p->word.data ? p->word.data : "", KEYS[i].name) == 0) {
            return KEYS[i].kind;
        }
    }
    return KEY_OTHER;
}

/* The text of the JSON string in `word`, which lacks its opening quote. */
static bool take_string(struct chat_parser *p, char ret[NAME_BYTES])
{
    struct err e = {0};
    struct json j;
    struct buf text;
    size_t len;

    buf_init(&text, 2 * NAME_BYTES);
    buf_putc(&text, '"');
    buf_append(&text, p->word.data, p->word.len);
    if (text.failed) {
        buf_release(&text);
        return false;
    }
    json_init(&j, text.data, text.len, "a call", &e);
    bool ok = json_read_string(&j, ret, NAME_BYTES, &len);
    buf_release(&text);
    return ok;
}

/* Report the arguments that were kept: an object, or a string that holds one. */
static bool call_kept(struct chat_parser *p)
{
    const char *text = p->value.len ? p->value.data : "{}";
    size_t len = p->value.len ? p->value.len : 2;
    char *decoded = NULL;

    if (p->value.failed) {
        return false;
    }
    if (text[0] == '"') {
        struct err e = {0};
        struct json j;

        decoded = malloc(len + 1);
        json_init(&j, text, len, "arguments", &e);
        if (!decoded || !json_read_string(&j, decoded, len + 1, &len)) {
            free(decoded);
            return false;
        }
        text = decoded;
    }
    if (len == 0 || (len == 4 && memcmp(text, "null", 4) == 0)) {
        text = "{}";
        len = 2;
    }
    bool ok = text[0] == '{' && json_scan_all(text, len) &&
              call_begin(p, p->name, p->has_id ? p->id : NULL);
    if (ok) {
        call_arguments(p, text, len);
        call_end(p);
        p->has_name = false;
    }
    free(decoded);
    return ok;
}

/* ---- members ---- */

static enum body_rc in_key(struct chat_parser *p, char c)
{
    if (c != '"' || (p->word.len && p->word.data[p->word.len - 1] == '\\')) {
        buf_putc(&p->word, c);
        return p->word.len < NAME_BYTES ? BODY_MORE : BODY_NOT;
    }
    p->step = O_COLON;
    p->key = key_kind(p);
    if (p->f->name_key && !p->has_name && p->word.len) {
        memcpy(p->name, p->word.data, p->word.len + 1);
        p->has_name = true;
        p->key = KEY_ARGUMENTS;
    }
    /* An answer that is JSON has other members than a call. */
    return p->bare && p->key == KEY_OTHER ? BODY_NOT : BODY_MORE;
}

static enum body_rc stream_byte(struct chat_parser *p, char c)
{
    bool control = (unsigned char)c < 0x20 && json_scan_in_string(&p->scan);
    enum json_scan_rc rc = json_scan_byte(&p->scan, c);
    struct buf *kept = &p->value;

    if (p->step == O_STREAM) {
        buf_clear(kept);
    }
    if (rc == SCAN_MORE || rc == SCAN_DONE) {
        if (control) {
            buf_json_escape(kept, &c, 1);
        } else {
            buf_putc(kept, c);
        }
    }
    if (p->step == O_STREAM) {
        call_arguments(p, kept->data, kept->len);
    }
    if (rc == SCAN_MORE) {
        return BODY_MORE;
    }
    if (rc == SCAN_BAD) {
        if (p->step == O_STREAM) {
            call_break(p);
            return BODY_BEFORE;
        }
        return BODY_NOT;
    }
    if (p->step == O_STREAM) {
        call_end(p);
        p->has_name = false;
        buf_clear(kept);
    } else {
        p->has_value = true;
    }
    p->step = O_NEXT;
    return rc == SCAN_BEFORE ? body_object_byte(p, c) : BODY_MORE;
}

static enum body_rc begin_arguments(struct chat_parser *p, char c)
{
    memset(&p->scan, 0, sizeof(p->scan));
    buf_clear(&p->value);
    p->step = O_KEEP;
    if (p->has_name && c == '{' && !p->f->late_id) {
        if (!call_begin(p, p->name, p->has_id ? p->id : NULL)) {
            return BODY_NOT;
        }
        p->step = O_STREAM;
    }
    return stream_byte(p, c);
}

static enum body_rc begin_value(struct chat_parser *p, char c)
{
    if (is_space(c)) {
        return BODY_MORE;
    }
    buf_clear(&p->word);
    switch (p->key) {
    case KEY_ARGUMENTS:
        return begin_arguments(p, c);
    case KEY_FUNCTION:
        if (c == '{' && p->nested < 4) {
            p->nested++;
            p->step = O_FIRST;
            return BODY_MORE;
        }
        p->key = KEY_NAME;
        /* fall through */
    case KEY_NAME:
    case KEY_ID:
        if (c == '"') {
            p->step = O_TEXT;
            return BODY_MORE;
        }
        if (p->key == KEY_NAME) {
            return BODY_NOT;
        }
        /* fall through */
    default:
        memset(&p->scan, 0, sizeof(p->scan));
        p->step = O_SKIP;
        return body_object_byte(p, c);
    }
}

static enum body_rc in_text(struct chat_parser *p, char c)
{
    bool escaped = p->sub;

    buf_putc(&p->word, c);
    p->sub = c == '\\' && !escaped;
    if (c != '"' || escaped) {
        return p->word.len < NAME_BYTES ? BODY_MORE : BODY_NOT;
    }
    p->sub = 0;
    p->step = O_NEXT;
    bool is_name = p->key == KEY_NAME;
    if (!take_string(p, is_name ? p->name : p->id)) {
        return is_name ? BODY_NOT : BODY_MORE;
    }
    p->has_name = p->has_name || is_name;
    p->has_id = p->has_id || !is_name;
    /* The arguments may have come first; an id may still come. */
    return BODY_MORE;
}

static enum body_rc object_end(struct chat_parser *p)
{
    if (p->nested) {
        p->nested--;
        p->step = O_NEXT;
        return BODY_MORE;
    }
    /* Without a mark, an object without arguments is an answer in JSON. */
    if (p->has_name && ((p->bare && !p->has_value) || !call_kept(p))) {
        return BODY_NOT;
    }
    if (!p->committed) {
        return BODY_NOT;
    }
    body_reset(p);
    p->step = O_BETWEEN;
    return BODY_MORE;
}

static enum body_rc in_object(struct chat_parser *p, char c)
{
    if (is_space(c)) {
        return BODY_MORE;
    }
    if (c == '"' && p->step != O_NEXT) {
        p->step = O_IN_KEY;
        buf_clear(&p->word);
        return BODY_MORE;
    }
    if (c == '}' && p->step != O_KEY) {
        return object_end(p);
    }
    if (c == ',' && p->step == O_NEXT) {
        p->step = O_KEY;
        return BODY_MORE;
    }
    return p->committed && !p->has_name ? BODY_BEFORE : BODY_NOT;
}

/* ---- between objects ---- */

static enum body_rc between(struct chat_parser *p, char c)
{
    const char *marks[] = {p->f->section_close, p->f->call_close, p->f->close_too,
                           p->f->call_open,     p->f->open_too,   p->f->section_open};
    int32_t which;

    if (p->n_hold || !(is_space(c) || c == '[' || c == ']' || c == '{' || c == ',' || c == ';')) {
        if (p->bare || p->n_hold >= MARK_BYTES - 1) {
            return p->committed ? BODY_BEFORE : BODY_NOT;
        }
        p->hold[p->n_hold++] = c;
        enum mark_rc rc = parser_mark(p, marks, ARRAY_LEN(marks), &which);
        if (rc == MARK_PART) {
            return BODY_MORE;
        }
        if (rc == MARK_NO || (!p->committed && which < 3)) {
            return p->committed ? BODY_BEFORE : BODY_NOT;
        }
        p->n_hold = 0;
        bool over = which == 0 || (which < 3 && !p->in_section);
        return over ? BODY_END : BODY_MORE;
    }
    if (c == '{') {
        p->step = O_FIRST;
    } else if (c == '[') {
        bool twice = p->in_list || p->committed;
        p->in_list = true;
        return twice ? (p->committed ? BODY_BEFORE : BODY_NOT) : BODY_MORE;
    } else if (c == ']') {
        bool closed = p->in_list && p->committed;
        p->in_list = false;
        if (!closed) {
            return p->committed ? BODY_BEFORE : BODY_NOT;
        }
        bool marked = p->f->section_close || p->f->call_close;
        return p->bare || p->as_object || !marked ? BODY_END : BODY_MORE;
    } else if (!is_space(c) && !p->committed) {
        return BODY_NOT;
    }
    return BODY_MORE;
}

enum body_rc body_object_byte(struct chat_parser *p, char c)
{
    enum json_scan_rc rc;

    switch (p->step) {
    case O_BETWEEN:
        return between(p, c);
    case O_IN_KEY:
        return in_key(p, c);
    case O_COLON:
        p->step = c == ':' ? O_VALUE : O_COLON;
        return c == ':' || is_space(c) ? BODY_MORE : BODY_NOT;
    case O_VALUE:
        return begin_value(p, c);
    case O_TEXT:
        return in_text(p, c);
    case O_SKIP:
        rc = json_scan_byte(&p->scan, c);
        if (rc == SCAN_MORE) {
            return BODY_MORE;
        }
        p->step = O_NEXT;
        return rc == SCAN_DONE ? BODY_MORE : rc == SCAN_BEFORE ? in_object(p, c) : BODY_NOT;
    case O_KEEP:
    case O_STREAM:
        return stream_byte(p, c);
    default:
        return in_object(p, c);
    }
}
