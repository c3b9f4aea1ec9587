/* Derivatives, and whether anything matches at all. */
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/rx/rx.h"

static void emit(struct rx *r, rx_id x)
{
    if (x && x != RX_ID_NEVER &&
        budget_grow(r->budget, &r->out, &r->cap_out, (int64_t)r->n_out + 1, sizeof(*r->out))) {
        r->out[r->n_out++] = x;
    }
}

/* The same concatenation with no concatenation on its left. */
static rx_id lean_right(struct rx *r, rx_id x)
{
    rx_id top = x;

    if (r->node[x].c) {
        return r->node[x].c;
    }
    while (x && r->node[r->node[x].a].kind == RX_CONCAT) {
        struct rx_node left = r->node[r->node[x].a];
        rx_id rest = rx_make_concat(r, left.b, r->node[x].b);
        x = rx_make_concat(r, left.a, rest);
    }
    r->node[top].c = x;
    return x;
}

static bool starts_with(const struct rx *r, const struct rx_node *n, int32_t symbol)
{
    if (symbol >= r->n_classes) {
        return n->kind == RX_TOKEN && n->a == symbol - r->n_classes;
    }
    int byte = r->byte_of[symbol];
    return n->kind == RX_SET && r->set[n->a].bit[byte / 32] >> (byte % 32) & 1;
}

/* starts_with, noted: symbols of which all answers are the same have one derivative. */
static bool looks_at(struct rx *r, const struct rx_node *n, int32_t symbol)
{
    bool there = starts_with(r, n, symbol);

    if (r->noting && n->kind == RX_SET) {
        for (int i = 0; i < 8; i++) {
            uint32_t in = r->classes_in[n->a].bit[i];
            r->alike.bit[i] &= there ? in : ~in;
        }
    }
    return there;
}

/* Whether x is one byte or token, and not this one: what follows need not be made. */
static bool starts_otherwise(struct rx *r, rx_id x, int32_t symbol)
{
    const struct rx_node *n = &r->node[x];

    return (n->kind == RX_SET || n->kind == RX_TOKEN) && !looks_at(r, n, symbol);
}

/* Emit the derivative of x followed by `rest`. Recursion is bounded by the height. */
static void derive(struct rx *r, rx_id x, int32_t symbol, rx_id rest)
{
    while (x && rest && budget_work(r->budget, 1)) {
        struct rx_node n = r->node[x];
        switch ((enum rx_kind)n.kind) {
        case RX_SET:
        case RX_TOKEN:
            if (looks_at(r, &n, symbol)) {
                emit(r, rest);
            }
            return;
        case RX_CONCAT:
            x = lean_right(r, x);
            n = r->node[x];
            if (starts_otherwise(r, n.a, symbol)) {
                return;
            }
            derive(r, n.a, symbol, rx_make_concat(r, n.b, rest));
            if (!rx_has(r, n.a, RX_NULLABLE)) {
                return;
            }
            x = n.b;
            break;
        case RX_OR:
            derive(r, n.b, symbol, rest);
            x = n.a;
            break;
        case RX_REPEAT: {
            if (starts_otherwise(r, n.a, symbol)) {
                return;
            }
            int32_t min = MAX(n.b - 1, 0), max = n.c < 0 ? -1 : n.c - 1;
            rest = rx_make_concat(r, rx_make_repeat(r, n.a, min, max), rest);
            x = n.a;
            break;
        }
        case RX_AND: {
            rx_id left = rx_derived(r, n.a, symbol);
            rx_id both =
                rx_make_and(r, left, left == RX_ID_NEVER ? left : rx_derived(r, n.b, symbol));
            emit(r, rx_make_concat(r, both, rest));
            return;
        }
        case RX_NOT:
            emit(r, rx_make_concat(r, rx_make_not(r, rx_derived(r, n.a, symbol)), rest));
            return;
        case RX_NONE:
        case RX_EMPTY:
        case RX_NEVER:
            return;
        }
    }
}

void rx_derive(struct rx *r, rx_id x, int32_t symbol)
{
    derive(r, x, symbol, RX_ID_EMPTY);
}

void rx_first(struct rx *r, rx_id x, struct byte_set *ret)
{
    while (x && budget_work(r->budget, 1)) {
        struct rx_node n = r->node[x];
        switch ((enum rx_kind)n.kind) {
        case RX_SET:
            for (int i = 0; i < 8; i++) {
                ret->bit[i] |= r->classes_in[n.a].bit[i];
            }
            return;
        case RX_CONCAT:
            rx_first(r, n.a, ret);
            x = rx_has(r, n.a, RX_NULLABLE) ? n.b : 0;
            break;
        case RX_OR:
            rx_first(r, n.b, ret);
            x = n.a;
            break;
        case RX_REPEAT:
        case RX_AND:
            x = n.a;
            break;
        case RX_NOT:
            memset(ret, 0xff, sizeof(*ret));
            return;
        case RX_TOKEN:
        case RX_NONE:
        case RX_EMPTY:
        case RX_NEVER:
            return;
        }
    }
}

static int by_id(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

    return (x > y) - (x < y);
}

static rx_id join_derivatives(struct rx *r, rx_id x, int32_t symbol)
{
    int32_t base = r->n_out;
    rx_id all = RX_ID_NEVER;

    derive(r, x, symbol, RX_ID_EMPTY);
    if (r->n_out - base > 1) {
        qsort(r->out + base, (size_t)(r->n_out - base), sizeof(*r->out), by_id);
    }
    for (int32_t i = base; i < r->n_out; i++) {
        if (i == base || r->out[i] != r->out[i - 1]) {
            all = rx_make_or(r, all, r->out[i]);
        }
    }
    r->n_out = base;
    return r->budget->failed ? 0 : all;
}

static void narrow(struct byte_set *s, const struct byte_set *by)
{
    for (int i = 0; i < 8; i++) {
        s->bit[i] &= by->bit[i];
    }
}

/* The operands of an intersection are few where their pairs are many (those of a
 * pattern with a bounded length, say), so their derivatives are kept, with what was
 * noted. */
rx_id rx_derived(struct rx *r, rx_id x, int32_t symbol)
{
    if (!r->frozen || symbol >= r->n_classes) {
        return join_derivatives(r, x, symbol);
    }
    if (!r->known && !(r->known = budget_alloc(r->budget, RX_KNOWN * sizeof(*r->known)))) {
        return 0;
    }
    uint32_t at = ((uint32_t)x * 0x9e3779b1u ^ (uint32_t)symbol * 0x85ebca6bu) >> 20;
    struct rx_known *k = &r->known[at];
    if (k->x != x || k->symbol != symbol) {
        struct byte_set outer = r->alike;
        bool noting = r->noting;
        memset(&r->alike, 0xff, sizeof(r->alike));
        r->noting = true;
        rx_id to = join_derivatives(r, x, symbol);
        *k = (struct rx_known){to ? x : 0, to, symbol, r->alike};
        r->alike = outer;
        r->noting = noting;
        if (!to) {
            return 0;
        }
    }
    if (r->noting) {
        narrow(&r->alike, &k->alike);
    }
    return budget_work(r->budget, 1) ? k->to : 0;
}

/* ---- liveness ---- */

/* What the parts say: 1 live, 0 dead, -1 the derivatives must say. A node whose search
 * is under way counts as dead: a text that is found only through it has a shorter one.
 * */
static int from_parts(struct rx *r, rx_id x)
{
    struct rx_node n = r->node[x];

    if (n.flags & (RX_PLAIN | RX_LIVE | RX_NULLABLE)) {
        return 1;
    }
    if (n.flags & (RX_DEAD | RX_SEEN)) {
        return 0;
    }
    if (n.kind == RX_OR) {
        return rx_live(r, n.b) || rx_live(r, n.a);
    }
    if (n.kind == RX_REPEAT) {
        return rx_live(r, n.a);
    }
    if (n.kind == RX_CONCAT) {
        x = lean_right(r, x); /* it may move the nodes */
        n = r->node[x];
        return rx_live(r, n.a) && rx_live(r, n.b);
    }
    return -1;
}

/* Which of two in the stack is tried first: the one that may be nearer to its end. */
static bool before(const struct rx *r, int32_t a, int32_t b)
{
    uint32_t x = r->node[r->seen[a].x].least, y = r->node[r->seen[b].x].least;

    return x != y ? x < y : a < b;
}

/* The heap of a search is r->heap[base ..); its children of i are 2 i + 1 and 2 i +
 * 2. */
static void heap_push(struct rx *r, int32_t base, int32_t at)
{
    int32_t *heap = r->heap + base, i = r->n_heap++ - base;

    for (; i > 0 && before(r, at, heap[(i - 1) / 2]); i = (i - 1) / 2) {
        heap[i] = heap[(i - 1) / 2];
    }
    heap[i] = at;
}

static int32_t heap_pop(struct rx *r, int32_t base)
{
    int32_t *heap = r->heap + base, n = --r->n_heap - base, first = heap[0], at = heap[n], i = 0;

    for (int32_t child; (child = 2 * i + 1) < n; i = child) {
        child += child + 1 < n && before(r, heap[child + 1], heap[child]);
        if (before(r, at, heap[child])) {
            break;
        }
        heap[i] = heap[child];
    }
    heap[i] = at;
    return first;
}

/* Put a node on the stack, and into the heap that begins at `base`. */
static bool visit(struct rx *r, rx_id x, int32_t from, int32_t base)
{
    if (!budget_grow(r->budget, &r->seen, &r->cap_seen, (int64_t)r->n_seen + 1, sizeof(*r->seen)) ||
        !budget_grow(r->budget, &r->heap, &r->cap_heap, (int64_t)r->n_heap + 1, sizeof(*r->heap))) {
        return false;
    }
    r->node[x].flags |= RX_SEEN;
    r->seen[r->n_seen++] = (struct rx_sought){x, from};
    heap_push(r, base, r->n_seen - 1);
    return true;
}

/* What leads to a text has one, too. */
static void note_live(struct rx *r, int32_t at)
{
    for (; at >= 0 && !r->budget->failed; at = r->seen[at].from) {
        r->node[r->seen[at].x].flags |= RX_LIVE;
    }
}

/* Whether a derivative of r->seen[at] is known to have a text; the others are put on
 * the stack. Symbols that lead to the same are tried once. */
static bool derivatives_live(struct rx *r, int32_t at, int32_t base)
{
    struct byte_set done = {0};
    rx_id x = r->seen[at].x;

    for (int32_t symbol = 0; symbol < rx_symbols(r); symbol++) {
        bool class = r->frozen && symbol < r->n_classes;
        if (class && done.bit[symbol / 32] >> (symbol % 32) & 1) {
            continue;
        }
        memset(&r->alike, 0xff, sizeof(r->alike));
        r->noting = class;
        rx_id next = rx_derived(r, x, symbol);
        for (int i = 0; class && i < 8; i++) {
            done.bit[i] |= r->alike.bit[i];
        }
        int known = next ? from_parts(r, next) : 1;
        if (known > 0 || (known < 0 && !visit(r, next, at, base))) {
            return true;
        }
    }
    return false;
}

/* Search the derivatives of what is in the heap for one that has a text. */
static bool search(struct rx *r, int32_t base)
{
    struct byte_set outer = r->alike;
    bool noting = r->noting, found = false;

    while (r->n_heap > base && !found) {
        int32_t at = heap_pop(r, base);
        found = derivatives_live(r, at, base);
        if (found) {
            note_live(r, at);
        }
    }
    r->n_heap = base;
    r->alike = outer;
    r->noting = noting;
    return found;
}

/* Within another search what was not found live stays part of that one. What was found
 * is noted at the node, so that expressions of many parts are not searched again. */
bool rx_live(struct rx *r, rx_id x)
{
    int known = x ? from_parts(r, x) : 1;
    int32_t base = r->n_seen;

    if (known >= 0) {
        if (!r->budget->failed && (known || base == 0)) {
            r->node[x].flags |= known ? RX_LIVE : RX_DEAD;
        }
        return known;
    }
    rx_classify(r);
    bool live = !visit(r, x, -1, r->n_heap) || search(r, r->n_heap - 1);
    if (!live && base > 0) {
        return false;
    }
    for (int32_t i = base; i < r->n_seen; i++) {
        uint8_t *flags = &r->node[r->seen[i].x].flags;
        *flags = (uint8_t)((*flags & ~RX_SEEN) | (live ? 0 : RX_DEAD));
    }
    r->n_seen = base;
    if (live && !r->budget->failed) {
        r->node[x].flags |= RX_LIVE;
    }
    return live;
}
