/* See format.h: events are put together here, and calls begin and end. */
#include <string.h>

#include "config/base/utf8.h"
#include "models/chat/format/format.h"

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
    report(p,
           &(struct chat_event){
               .kind = p->kind, .text = p->text.data, .len = len, .call = MAX(p->n_calls - 1, 0)});
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

void parser_put_space(struct chat_parser *p)
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

void parser_keep_gap(struct chat_parser *p)
{
    if (p->had_content && p->state != IN_REASONING && p->gap.len < SPACE_BYTES) {
        buf_append(&p->gap, p->space.data, p->space.len);
        p->nomem = p->nomem || p->gap.failed;
    }
    parser_drop_space(p);
}

/* White space is held back, as it may stand before a mark; a long run is text. */
void parser_text(struct chat_parser *p, char c)
{
    if (is_space(c)) {
        if (!p->trim) {
            buf_putc(&p->space, c);
            if (p->space.len > SPACE_BYTES) {
                parser_put_space(p);
            }
        }
        return;
    }
    if (p->gap.len && p->state == IN_CONTENT) {
        parser_put(p, CHAT_CONTENT, p->gap.data, p->gap.len);
        buf_clear(&p->gap);
    }
    parser_put_space(p);
    parser_put(p, text_kind(p), &c, 1);
    p->had_content = p->had_content || p->state == IN_CONTENT;
    p->trim = false;
    p->fresh = false;
}

/* ---- calls ---- */

/* `spaces`: it may have some inside. */
static bool name_is_valid(const char *name, bool spaces)
{
    size_t len = strlen(name);

    if (!len || is_space(name[0]) || is_space(name[len - 1])) {
        return false;
    }
    for (; *name; name++) {
        if ((*name == ' ' && !spaces) || (unsigned char)*name < ' ' ||
            strchr("<>{}()[]\"'`\\=,;", *name)) {
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
    /* What needs no mark, or stands in reasoning, is a call only of a tool that
     * exists. */
    bool known = p->state == IN_BODY && (p->bare || p->body_from == IN_REASONING);

    p->tool = tools_find(p->tools, name);
    /* What a mark and a word open is meant as a call. */
    bool spaces = p->f->body == BODY_LITERAL && p->f->name_before;
    if (p->n_calls == MAX_CALLS || !name_is_valid(name, spaces) || (known && p->tool < 0)) {
        return false;
    }
    parser_keep_gap(p);
    parser_flush(p, true);
    p->n_calls++;
    p->committed = true;
    p->open = true;
    p->n_params = 0;
    buf_clear(&p->raw);
    if (!p->nomem) {
        report(p,
               &(struct chat_event){
                   .kind = CHAT_CALL, .call = p->n_calls - 1, .name = name, .id = new_id(p, id)});
    }
    p->kind = CHAT_ARGUMENTS;
    return true;
}

const struct param_table *call_params(struct chat_parser *p)
{
    if (p->tool < 0) {
        return NULL;
    }
    if (!p->params[p->tool].made) {
        int rc = param_table_make(&p->params[p->tool], &p->tools->tool[p->tool]);
        p->nomem = p->nomem || rc != 0;
    }
    return &p->params[p->tool];
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
    p->broken = true;
    parser_flush(p, true);
    p->open = false;
    buf_clear(&p->raw);
}

enum json_scan_rc call_json_byte(struct chat_parser *p, char c)
{
    bool control = (unsigned char)c < 0x20 && json_scan_in_string(&p->scan);
    enum json_scan_rc rc = json_scan_byte(&p->scan, c);

    if (rc == SCAN_BAD) {
        call_break(p);
        return rc;
    }
    if (control) {
        buf_clear(&p->value);
        buf_json_escape(&p->value, &c, 1);
        call_arguments(p, p->value.data, p->value.len);
    } else {
        call_arguments(p, &c, 1);
    }
    if (rc == SCAN_DONE) {
        call_end(p);
    }
    return rc;
}
