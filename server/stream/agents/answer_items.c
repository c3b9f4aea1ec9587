/* Items out of events, and the head of a named event. */
#include "server/stream/agents/answer_items.h"

#include "config/base/limits.h"

void answer_items_init(struct answer_items *s)
{
    *s = (struct answer_items){0};
    buf_init(&s->space, LIMIT_RESPONSE_BYTES);
}

void answer_items_release(struct answer_items *s)
{
    buf_release(&s->space);
}

static bool is_space(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (text[i] != ' ' && text[i] != '\n' && text[i] != '\r' && text[i] != '\t') {
            return false;
        }
    }
    return true;
}

int answer_items_close(struct answer_items *s, const struct item_writer *w, struct buf *b,
                       void *state, bool cut)
{
    int rc = s->kind == ITEM_NONE ? 0 : w->close(b, state, cut);

    s->kind = ITEM_NONE;
    return rc;
}

static int open_item(struct answer_items *s, const struct item_writer *w, struct buf *b,
                     void *state, enum item_kind kind, const struct answer_event *event)
{
    int rc = answer_items_close(s, w, b, state, false);

    s->kind = kind;
    s->n++;
    return rc ? rc : w->open(b, state, event);
}

/* Text of the answer or of its reasoning. */
static int add_text(struct answer_items *s, const struct item_writer *w, struct buf *b, void *state,
                    enum item_kind kind, const struct answer_event *event)
{
    int rc = 0;

    if (event->len == 0) {
        return 0;
    }
    if (s->kind != kind && s->waiting != kind) {
        buf_clear(&s->space);
        s->waiting = kind;
    }
    if (s->kind != kind && is_space(event->text, event->len)) {
        return buf_append(&s->space, event->text, event->len);
    }
    if (s->kind != kind) {
        rc = open_item(s, w, b, state, kind, event);
        if (!rc && s->space.len) {
            rc = w->piece(b, state, s->space.data, s->space.len);
        }
        buf_clear(&s->space);
    }
    return rc ? rc : w->piece(b, state, event->text, event->len);
}

int answer_items_event(struct answer_items *s, const struct item_writer *w, struct buf *b,
                       void *state, const struct answer_event *event)
{
    switch (event->kind) {
    case ANSWER_CONTENT:
        return add_text(s, w, b, state, ITEM_TEXT, event);
    case ANSWER_REASONING:
        return add_text(s, w, b, state, ITEM_REASONING, event);
    case ANSWER_CALL:
        buf_clear(&s->space);
        return open_item(s, w, b, state, ITEM_CALL, event);
    case ANSWER_ARGUMENTS:
        return s->kind == ITEM_CALL && event->len ? w->piece(b, state, event->text, event->len) : 0;
    default:
        return s->kind == ITEM_CALL ? answer_items_close(s, w, b, state, false) : 0;
    }
}

int put_named_event(struct buf *b, const char *name)
{
    return buf_printf(b, "event: %s\ndata: {\"type\":\"%s\"", name, name);
}
