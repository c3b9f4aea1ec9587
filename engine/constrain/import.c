/* Taking a config over into another automaton of the grammar: when one is full, its
 * sequences go on in a new one, with what their states need. */
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/automaton.h"

struct import {
    struct automaton *to, *from;
    int32_t *rx;  /* [nodes of from] 1 + the node of `to`, 0 not needed, -1 needed; owned */
    int32_t *row; /* [rows of from] likewise; owned */
};

static void need(int32_t *of, int32_t i)
{
    if (i >= 0 && of[i] == 0) {
        of[i] = -1;
    }
}

/* Parts have smaller numbers than what they are parts of. */
static void need_parts(struct import *m, int32_t i)
{
    const struct rx_node *n = &m->from->rx.node[i];

    if (i < m->from->n_compiled || n->kind <= RX_TOKEN) {
        return;
    }
    need(m->rx, n->a);
    if (n->kind == RX_CONCAT || n->kind == RX_OR || n->kind == RX_AND) {
        need(m->rx, n->b);
    }
}

static rx_id copy_node(struct import *m, int32_t i)
{
    const struct rx_node *n = &m->from->rx.node[i];
    struct rx *r = &m->to->rx;
    rx_id a = n->kind > RX_TOKEN ? m->rx[n->a] - 1 : 0;

    if (i < m->from->n_compiled) {
        return i;
    }
    switch ((enum rx_kind)n->kind) {
    case RX_CONCAT:
        return rx_make_concat(r, a, m->rx[n->b] - 1);
    case RX_OR:
        return rx_make_or(r, a, m->rx[n->b] - 1);
    case RX_AND:
        return rx_make_and(r, a, m->rx[n->b] - 1);
    case RX_NOT:
        return rx_make_not(r, a);
    case RX_REPEAT:
        return rx_make_repeat(r, a, n->b, n->c);
    case RX_NONE:
    case RX_EMPTY:
    case RX_NEVER:
    case RX_SET:
    case RX_TOKEN:
        break;
    }
    return i;
}

static void copy_nodes(struct import *m)
{
    for (int32_t i = m->from->rx.n_nodes - 1; i > 0; i--) {
        if (m->rx[i] != 0) {
            need_parts(m, i);
        }
    }
    for (int32_t i = 1; i < m->from->rx.n_nodes; i++) {
        if (m->rx[i] != 0) {
            m->rx[i] = copy_node(m, i) + 1;
        }
    }
}

static int32_t copy_row(struct import *m, const struct row *r)
{
    items_begin(m->to);
    for (int32_t i = 0; i < r->n_items; i++) {
        struct item item = m->from->item[r->first_item + i];
        item.row = item.row >= 0 ? m->row[item.row] - 1 : item.row;
        items_add(m->to, item);
    }
    return items_row(m->to);
}

static void copy_rows(struct import *m)
{
    const struct automaton *from = m->from;

    for (int32_t i = from->n_rows - 1; i >= 0; i--) {
        for (int32_t k = 0; m->row[i] != 0 && k < from->row[i].n_items; k++) {
            need(m->row, from->item[from->row[i].first_item + k].row);
        }
    }
    for (int32_t i = 0; i < from->n_rows && !m->to->budget.failed; i++) {
        if (m->row[i] != 0) {
            m->row[i] = copy_row(m, &from->row[i]) + 1;
        }
    }
}

static int32_t copy_state(struct import *m, int32_t lex)
{
    const struct lexer *from = &m->from->lexer;
    const struct lex_state *s = &from->state[lex];

    lexer_begin(&m->to->lexer);
    for (int32_t i = 0; i < s->n; i++) {
        const struct reading *of = &from->reading[s->first + i];
        lexer_add(&m->to->lexer, of->term, m->rx[of->x] - 1);
    }
    return lexer_intern(&m->to->lexer);
}

static int32_t copy_config(struct import *m, const struct config *c)
{
    struct automaton *to = m->to;
    const struct lexer *lexer = &m->from->lexer;
    const struct entry *entry = m->from->entry + c->first;

    for (int32_t i = 0; i < c->n; i++) {
        const struct lex_state *s = &lexer->state[entry[i].lex];
        for (int32_t k = 0; k < s->n; k++) {
            need(m->rx, lexer->reading[s->first + k].x);
        }
        need(m->row, entry[i].row);
    }
    copy_nodes(m);
    copy_rows(m);
    to->n_next = 0;
    for (int32_t i = 0; i < c->n && !to->budget.failed; i++) {
        entry_add(to, m->row[entry[i].row] - 1, copy_state(m, entry[i].lex));
    }
    to->completed = c->complete;
    return config_intern(to);
}

int32_t automaton_import(struct automaton *to, struct automaton *from, int32_t config)
{
    struct import m = {.to = to, .from = from};
    int32_t made = CONFIG_NOMEM;

    pthread_mutex_lock(&from->lock);
    pthread_mutex_lock(&to->lock);
    m.rx = calloc((size_t)from->rx.n_nodes + 1, sizeof(*m.rx));
    m.row = calloc((size_t)from->n_rows + 1, sizeof(*m.row));
    to->budget.work = 0;
    if (m.rx && m.row) {
        made = copy_config(&m, config_at(from, config));
    }
    pthread_mutex_unlock(&to->lock);
    pthread_mutex_unlock(&from->lock);
    free(m.rx);
    free(m.row);
    return made;
}
