#include "engine/constrain/lexer.h"

#include <stdlib.h>
#include <string.h>

enum {
    MANY_READINGS = 8,
    LEX_RESTS = 1 << 12,       /* rests that are kept, */
    LEFT_MAX = 16 * LEX_RESTS, /* and what is left in them */
};

uint32_t hash_words(const void *words, size_t bytes)
{
    uint64_t h = bytes * 0x9e3779b97f4a7c15u;
    const char *at = words;
    uint32_t w;

    for (; bytes >= sizeof(w); bytes -= sizeof(w), at += sizeof(w)) {
        memcpy(&w, at, sizeof(w));
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return (uint32_t)(h ^ (h >> 29));
}

bool lexer_init(struct lexer *l, struct rx *rx, struct budget *b)
{
    l->rx = rx;
    l->budget = b;
    l->n_states = 1;
    return budget_grow(b, &l->state, &l->cap_states, 16, sizeof(*l->state));
}

void lexer_release(struct lexer *l)
{
    for (int32_t i = 1; i < l->n_states && l->state; i++) {
        free(l->state[i].edge);
        free(l->state[i].begins);
    }
    free(l->state);
    free(l->reading);
    free(l->step);
    free(l->end);
    free(l->rest);
    free(l->left);
    free(l->states.slot);
    free(l->next);
    *l = (struct lexer){0};
}

/* ---- states ---- */

static int by_reading(const void *x, const void *y)
{
    const struct reading *a = x, *b = y;

    if (a->term != b->term) {
        return a->term < b->term ? -1 : 1;
    }
    return (a->x > b->x) - (a->x < b->x);
}

static uint32_t hash_readings(const struct reading *of, int32_t n)
{
    return hash_words(of, (size_t)n * sizeof(*of));
}

static bool enlarge_table(struct lexer *l)
{
    struct index_table *t = &l->states;
    int32_t size = t->size ? t->size * 2 : 64;
    int32_t *slot = budget_alloc(l->budget, (size_t)size * sizeof(*slot));

    if (!slot) {
        return false;
    }
    for (int32_t i = 1; i < l->n_states; i++) {
        const struct lex_state *s = &l->state[i];
        uint32_t at = hash_readings(l->reading + s->first, s->n) & (uint32_t)(size - 1);
        while (slot[at]) {
            at = (at + 1) & (uint32_t)(size - 1);
        }
        slot[at] = i + 1;
    }
    budget_free(l->budget, t->slot, (size_t)t->size * sizeof(*slot));
    *t = (struct index_table){slot, size};
    return true;
}

static int32_t add_state(struct lexer *l, int32_t n, uint32_t hash)
{
    if (!budget_grow(l->budget, &l->reading, &l->cap_readings, (int64_t)l->n_readings + n,
                     sizeof(*l->reading)) ||
        !budget_grow(l->budget, &l->state, &l->cap_states, (int64_t)l->n_states + 1,
                     sizeof(*l->state)) ||
        (l->n_states * 2 >= l->states.size && !enlarge_table(l))) {
        return 0;
    }
    int32_t *edge = budget_alloc(l->budget, (size_t)rx_symbols(l->rx) * sizeof(*edge));
    if (!edge) {
        return 0;
    }
    l->state[l->n_states] = (struct lex_state){l->n_readings, n, edge, NULL};
    memcpy(l->reading + l->n_readings, l->next, (size_t)n * sizeof(*l->reading));
    l->n_readings += n;
    uint32_t mask = (uint32_t)(l->states.size - 1), at = hash & mask;
    while (l->states.slot[at]) {
        at = (at + 1) & mask;
    }
    l->states.slot[at] = l->n_states + 1;
    return l->n_states++;
}

void lexer_begin(struct lexer *l)
{
    l->n_next = 0;
}

void lexer_add(struct lexer *l, int32_t term, rx_id x)
{
    if (budget_grow(l->budget, &l->next, &l->cap_next, (int64_t)l->n_next + 1, sizeof(*l->next))) {
        l->next[l->n_next++] = (struct reading){term, x};
    }
}

int32_t lexer_intern(struct lexer *l)
{
    int32_t n = 0;

    if (l->n_next == 0 || l->budget->failed) {
        return 0;
    }
    if (l->n_next > 1) {
        qsort(l->next, (size_t)l->n_next, sizeof(*l->next), by_reading);
    }
    for (int32_t i = 0; i < l->n_next; i++) {
        if (n == 0 || by_reading(&l->next[i], &l->next[n - 1]) != 0) {
            l->next[n++] = l->next[i];
        }
    }
    uint32_t hash = hash_readings(l->next, n);
    uint32_t mask = l->states.size > 0 ? (uint32_t)(l->states.size - 1) : 0;
    for (uint32_t at = hash & mask; l->states.size > 0 && l->states.slot[at];
         at = (at + 1) & mask) {
        const struct lex_state *s = &l->state[l->states.slot[at] - 1];
        if (s->n == n &&
            memcmp(l->reading + s->first, l->next, (size_t)n * sizeof(*l->next)) == 0) {
            return l->states.slot[at] - 1;
        }
    }
    return add_state(l, n, hash);
}

/* ---- steps ---- */

/* Adds what is left of a terminal behind a symbol; whether it may end there. */
static bool derive(struct lexer *l, struct reading of, int32_t symbol)
{
    struct rx *r = l->rx;
    int32_t base = r->n_out;
    bool ended = false;

    r->noting = symbol < r->n_classes;
    rx_derive(r, of.x, symbol);
    r->noting = false;
    int32_t end = r->n_out; /* liveness puts its own above */
    for (int32_t i = base; i < end && !l->budget->failed; i++) {
        rx_id x = r->out[i];
        ended |= rx_has(r, x, RX_NULLABLE);
        if (x != RX_ID_EMPTY && rx_live(r, x)) {
            lexer_add(l, of.term, x);
        }
    }
    r->n_out = base;
    return ended;
}

/* Keeps what derive added from l->next[from] on. */
static void keep_rest(struct lexer *l, struct lex_rest *k, struct lex_rest found, int32_t from)
{
    int32_t n = l->n_next - from;

    if (l->n_left + n > LEFT_MAX) {
        memset(l->rest, 0, LEX_RESTS * sizeof(*l->rest));
        l->n_left = 0;
    }
    if (n > LEFT_MAX ||
        !budget_grow(l->budget, &l->left, &l->cap_left, (int64_t)l->n_left + n, sizeof(*l->left))) {
        return;
    }
    found.first = l->n_left;
    found.n = n;
    for (int32_t i = 0; i < n; i++) {
        l->left[l->n_left++] = l->next[from + i].x;
    }
    *k = found;
}

/* derive, of a state of many readings, which it shares with others. */
static bool derive_known(struct lexer *l, struct reading of, int32_t symbol)
{
    struct byte_set outer = l->rx->alike;

    if (!l->rest && !(l->rest = budget_alloc(l->budget, LEX_RESTS * sizeof(*l->rest)))) {
        return false;
    }
    uint32_t at = ((uint32_t)of.x * 0x9e3779b1u ^ (uint32_t)symbol * 0x85ebca6bu) >> 20;
    struct lex_rest *k = &l->rest[at], found = {.x = of.x, .symbol = symbol};
    if (k->x == of.x && k->symbol == symbol) {
        for (int32_t i = 0; i < k->n; i++) {
            lexer_add(l, of.term, l->left[k->first + i]);
        }
        found = *k;
    } else {
        int32_t from = l->n_next;
        memset(&l->rx->alike, 0xff, sizeof(l->rx->alike));
        found.ended = derive(l, of, symbol);
        found.alike = l->rx->alike;
        if (!l->budget->failed) {
            keep_rest(l, k, found, from);
        }
    }
    for (int i = 0; i < 8; i++) {
        l->rx->alike.bit[i] = outer.bit[i] & found.alike.bit[i];
    }
    return found.ended && budget_work(l->budget, 1);
}

/* What is left of a terminal behind a symbol, and whether it may end there. */
static void read_on(struct lexer *l, struct reading of, int32_t symbol, bool many)
{
    bool ended = many ? derive_known(l, of, symbol) : derive(l, of, symbol);

    if (ended &&
        budget_grow(l->budget, &l->end, &l->cap_end, (int64_t)l->n_end + 1, sizeof(*l->end))) {
        l->end[l->n_end++] = of.term;
    }
}

/* Of many readings few go on by a symbol: which may is asked once. */
static void find_begins(struct lexer *l, struct lex_state *s)
{
    s->begins = budget_alloc(l->budget, (size_t)s->n * sizeof(*s->begins));
    for (int32_t i = 0; s->begins && i < s->n; i++) {
        rx_first(l->rx, l->reading[s->first + i].x, &s->begins[i]);
    }
}

/* Whether reading i ends with this symbol, which is noted for those that are alike. */
static bool goes_no_further(struct lexer *l, const struct lex_state *s, int32_t i, int32_t symbol)
{
    if (!s->begins || symbol >= l->rx->n_classes) {
        return false;
    }
    const uint32_t *begins = s->begins[i].bit;
    if (begins[symbol / 32] >> (symbol % 32) & 1) {
        return false;
    }
    for (int k = 0; k < 8; k++) {
        l->rx->alike.bit[k] &= ~begins[k];
    }
    return true;
}

static const struct lex_step *make_step(struct lexer *l, int32_t s, int32_t symbol)
{
    struct rx *r = l->rx;
    struct lex_step made = {.first_end = l->n_end};
    struct lex_state *of = &l->state[s];

    if (of->n >= MANY_READINGS && !of->begins) {
        find_begins(l, of);
    }
    lexer_begin(l);
    memset(&r->alike, 0xff, sizeof(r->alike));
    for (int32_t i = 0; i < of->n && !l->budget->failed; i++) {
        if (!goes_no_further(l, of, i, symbol)) {
            read_on(l, l->reading[of->first + i], symbol, of->begins);
        }
    }
    made.alike = r->alike;
    made.to = lexer_intern(l);
    made.n_end = l->n_end - made.first_end;
    if (!budget_grow(l->budget, &l->step, &l->cap_steps, (int64_t)l->n_steps + 1,
                     sizeof(*l->step))) {
        l->n_end = made.first_end;
        return NULL;
    }
    l->step[l->n_steps++] = made;
    int32_t *edge = l->state[s].edge;
    edge[symbol] = l->n_steps;
    for (int32_t i = 0; symbol < r->n_classes && i < r->n_classes; i++) {
        if (made.alike.bit[i / 32] >> (i % 32) & 1) {
            edge[i] = l->n_steps;
        }
    }
    return &l->step[l->n_steps - 1];
}

const struct lex_step *lexer_step(struct lexer *l, int32_t s, int32_t symbol)
{
    int32_t at = l->state[s].edge[symbol];

    return at ? &l->step[at - 1] : make_step(l, s, symbol);
}
