/* Bodies of JSON strings: an expression with each character in its escaped forms.
 *
 * A body decodes to one text, so the forms of a union, a concatenation, an intersection
 * and a complement are those of the parts. */
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/builder.h"

struct body_map {
    struct grammar_builder *b;
    rx_id *of;           /* [n] the body of a node, or 0; the builder's */
    int32_t n;           /* nodes when the walk began */
    int32_t *stack;      /* parts of chains that are being walked, owned */
    int32_t depth, room; /* in use, and how many fit */
    rx_id any;           /* every body */
};

static rx_id body_of(struct body_map *m, rx_id x);

/* Of a node that stands for a set of characters. */
static rx_id escaped(struct grammar_builder *b, rx_id x)
{
    struct rx_chars *c = x > 0 ? &b->chars[b->chars_of[x] - 1] : NULL;

    if (c && !c->escaped) {
        c->escaped = rx_escaped(&b->rx, b->range + c->first, c->n);
    }
    return c ? c->escaped : 0;
}

/* ASCII bytes of a set; the others are parts of characters that are not known here and
 * stand for themselves. */
static rx_id body_of_set(struct body_map *m, const struct byte_set *s)
{
    struct code_range range[128];
    struct byte_set high = *s;
    int32_t n = 0;

    for (uint32_t c = 0; c < 128; c++) {
        if (s->bit[c / 32] >> (c % 32) & 1) {
            range[n++] = (struct code_range){c, c};
        }
    }
    memset(high.bit, 0, 4 * sizeof(high.bit[0]));
    return rx_make_or(&m->b->rx, rx_escaped(&m->b->rx, range, n), rx_make_set(&m->b->rx, &high));
}

/* The bodies of a chain's parts, joined: a concatenation leans to the right, a union to
 * the left, and either may be long. */
static rx_id body_of_chain(struct body_map *m, rx_id x, int kind)
{
    struct rx *r = &m->b->rx;
    int32_t base = m->depth;
    rx_id all = kind == RX_OR ? RX_ID_NEVER : RX_ID_EMPTY;

    for (;;) {
        struct rx_node n = r->node[x];
        bool chars = x < m->b->cap_chars_of && m->b->chars_of[x];
        bool more = n.kind == kind && !chars;
        if (!budget_grow(r->budget, &m->stack, &m->room, (int64_t)m->depth + 1,
                         sizeof(*m->stack))) {
            return 0;
        }
        m->stack[m->depth++] = !more ? x : kind == RX_OR ? n.b : n.a;
        if (!more) {
            break;
        }
        x = kind == RX_OR ? n.a : n.b;
    }
    while (m->depth > base) {
        rx_id part = body_of(m, m->stack[m->depth - 1]);
        m->depth--;
        all = kind == RX_OR ? rx_make_or(r, all, part) : rx_make_concat(r, part, all);
    }
    return all;
}

static rx_id make_body(struct body_map *m, rx_id x)
{
    struct rx *r = &m->b->rx;
    struct rx_node n = r->node[x];

    if (x < m->b->cap_chars_of && m->b->chars_of[x]) {
        return escaped(m->b, x);
    }
    switch ((enum rx_kind)n.kind) {
    case RX_SET:
        return body_of_set(m, &r->set[n.a]);
    case RX_CONCAT:
    case RX_OR:
        return body_of_chain(m, x, n.kind);
    case RX_AND:
        return rx_make_and(r, body_of(m, n.a), body_of(m, n.b));
    case RX_NOT:
        return rx_make_and(r, m->any, rx_make_not(r, body_of(m, n.a)));
    case RX_REPEAT:
        return rx_make_repeat(r, body_of(m, n.a), n.b, n.c);
    case RX_NONE:
    case RX_EMPTY:
    case RX_NEVER:
    case RX_TOKEN:
        break;
    }
    return x;
}

static rx_id body_of(struct body_map *m, rx_id x)
{
    if (!budget_work(m->b->rx.budget, 8) || x >= m->n) {
        return 0;
    }
    if (!m->of[x]) {
        m->of[x] = make_body(m, x);
    }
    return m->of[x];
}

/* Make room for the bodies of all nodes; they are kept from call to call. */
static bool make_room(struct grammar_builder *b)
{
    int32_t before = b->cap_body;

    if (!budget_grow(&b->budget, &b->body, &b->cap_body, b->rx.n_nodes, sizeof(*b->body))) {
        return false;
    }
    memset(b->body + before, 0, (size_t)(b->cap_body - before) * sizeof(*b->body));
    if (!b->any_body) {
        rx_id any_char = rx_class(b, NULL, 0, true);
        if (!any_char) {
            return false;
        }
        b->any_body = rx_make_repeat(&b->rx, escaped(b, any_char), 0, -1);
    }
    return b->any_body;
}

rx_id rx_json_body(struct grammar_builder *b, rx_id x)
{
    struct body_map m = {.b = b, .n = b->rx.n_nodes};
    rx_id body = 0;

    if (!x || b->budget.failed || !make_room(b)) {
        return 0;
    }
    m.of = b->body;
    m.any = b->any_body;
    body = body_of(&m, x);
    budget_free(&b->budget, m.stack, (size_t)m.room * sizeof(*m.stack));
    return b->budget.failed ? 0 : body;
}
