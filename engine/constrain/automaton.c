#include "engine/constrain/automaton.h"

#include <stdlib.h>
#include <string.h>

enum {
    MASK_BYTES = 4 << 20, /* of the masks that are kept */
    STEP_WORK = 3 << 18,  /* units of work in one step, which cannot be interrupted */
};

/* ---- configs ---- */

static int by_entry(const void *x, const void *y)
{
    const struct entry *a = x, *b = y;

    if (a->row != b->row) {
        return a->row < b->row ? -1 : 1;
    }
    return (a->lex > b->lex) - (a->lex < b->lex);
}

static uint32_t hash_config(const struct entry *entry, int32_t n, bool complete)
{
    return hash_words(entry, (size_t)n * sizeof(*entry)) * 2 + complete;
}

static bool enlarge_configs(struct automaton *a)
{
    struct index_table *t = &a->configs;
    int32_t size = t->size ? t->size * 2 : 64;
    int32_t *slot = budget_alloc(&a->budget, (size_t)size * sizeof(*slot));

    if (!slot) {
        return false;
    }
    for (int32_t i = 1; i < a->n_configs; i++) {
        const struct config *c = config_at(a, i);
        uint32_t at = hash_config(a->entry + c->first, c->n, c->complete) & (uint32_t)(size - 1);
        while (slot[at]) {
            at = (at + 1) & (uint32_t)(size - 1);
        }
        slot[at] = i + 1;
    }
    budget_free(&a->budget, t->slot, (size_t)t->size * sizeof(*slot));
    *t = (struct index_table){slot, size};
    return true;
}

/* Room for config number n_configs. */
static bool reserve_config(struct automaton *a)
{
    int32_t k = a->n_configs / CHUNK;

    if (k >= MAX_CHUNKS) {
        return budget_fail(&a->budget, ERR_FULL, "states");
    }
    if (!atomic_load_explicit(&a->chunk[k], memory_order_relaxed)) {
        struct config *c = budget_alloc(&a->budget, CHUNK * sizeof(*c));
        if (!c) {
            return false;
        }
        atomic_store_explicit(&a->chunk[k], c, memory_order_release);
    }
    if (!atomic_load_explicit(&a->edges[k], memory_order_relaxed)) {
        _Atomic(int32_t) *edges =
            budget_alloc(&a->budget, (size_t)CHUNK * (size_t)a->n_symbols * sizeof(*edges));
        if (!edges) {
            return false;
        }
        atomic_store_explicit(&a->edges[k], edges, memory_order_release);
    }
    return true;
}

static int32_t add_config(struct automaton *a, int32_t n, uint32_t hash)
{
    if (!reserve_config(a) ||
        !budget_grow(&a->budget, &a->entry, &a->cap_entries, (int64_t)a->n_entries + n,
                     sizeof(*a->entry)) ||
        (a->n_configs * 2 >= a->configs.size && !enlarge_configs(a))) {
        return CONFIG_FULL;
    }
    struct config *c = config_at(a, a->n_configs);
    c->first = a->n_entries;
    c->n = n;
    c->complete = a->completed;
    atomic_init(&c->slot, -1);
    if (n > 0) {
        memcpy(a->entry + a->n_entries, a->next, (size_t)n * sizeof(*a->entry));
    }
    a->n_entries += n;
    uint32_t mask = (uint32_t)(a->configs.size - 1), at = hash & mask;
    while (a->configs.slot[at]) {
        at = (at + 1) & mask;
    }
    a->configs.slot[at] = a->n_configs + 1;
    return a->n_configs++;
}

int32_t config_intern(struct automaton *a)
{
    int32_t n = 0;

    if (a->budget.failed) {
        return CONFIG_FULL;
    }
    if (a->n_next == 0 && !a->completed) {
        return CONFIG_DEAD;
    }
    if (a->n_next > 1) {
        qsort(a->next, (size_t)a->n_next, sizeof(*a->next), by_entry);
    }
    for (int32_t i = 0; i < a->n_next; i++) {
        if (n == 0 || by_entry(&a->next[i], &a->next[n - 1]) != 0) {
            a->next[n++] = a->next[i];
        }
    }
    uint32_t hash = hash_config(a->next, n, a->completed);
    uint32_t mask = a->configs.size > 0 ? (uint32_t)(a->configs.size - 1) : 0;
    for (uint32_t at = hash & mask; a->configs.size > 0 && a->configs.slot[at];
         at = (at + 1) & mask) {
        const struct config *c = config_at(a, a->configs.slot[at] - 1);
        if (c->n == n && c->complete == a->completed &&
            (n == 0 || memcmp(a->entry + c->first, a->next, (size_t)n * sizeof(*a->next)) == 0)) {
            return a->configs.slot[at] - 1;
        }
    }
    return add_config(a, n, hash);
}

/* ---- steps ---- */

void entry_add(struct automaton *a, int32_t row, int32_t lex)
{
    if (lex &&
        budget_grow(&a->budget, &a->next, &a->cap_next, (int64_t)a->n_next + 1, sizeof(*a->next))) {
        a->next[a->n_next++] = (struct entry){row, lex};
    }
}

/* What is read on behind a symbol; where terminals may end there, their row's items
 * advance. */
static void step_entry(struct automaton *a, struct entry e, int32_t symbol, struct byte_set *alike)
{
    const struct lex_step *step = lexer_step(&a->lexer, e.lex, symbol);

    if (!step || !budget_work(&a->budget, 1)) {
        return;
    }
    for (int i = 0; i < 8; i++) {
        alike->bit[i] &= step->alike.bit[i];
    }
    entry_add(a, e.row, step->to);
    for (int32_t i = 0; i < step->n_end; i++) {
        items_advance(a, e.row, a->lexer.end[step->first_end + i]);
    }
}

static int32_t make_step(struct automaton *a, int32_t config, int32_t symbol,
                         struct byte_set *alike)
{
    const struct config *c = config_at(a, config);

    a->n_next = 0;
    memset(alike, 0xff, sizeof(*alike));
    items_begin(a);
    for (int32_t i = 0; i < c->n && !a->budget.failed; i++) {
        step_entry(a, a->entry[c->first + i], symbol, alike);
    }
    if (a->n_work > 0 && !a->budget.failed) {
        int32_t row = items_row(a);
        if (row >= 0) {
            entry_add(a, row, a->row[row].lex);
        }
    }
    return config_intern(a);
}

int32_t automaton_failure(struct automaton *a)
{
    if (a->budget.failed == ERR_FULL && a->budget.max_work > 0 &&
        a->budget.work > a->budget.max_work) {
        a->budget.failed = 0;
        return CONFIG_WORK;
    }
    return a->budget.failed == ERR_NOMEM ? CONFIG_NOMEM : CONFIG_FULL;
}

/* The edges of the symbol and of those that no part of the config tells from it. */
static void set_edges(struct automaton *a, int32_t config, int32_t symbol, int32_t to,
                      const struct byte_set *alike)
{
    _Atomic(int32_t) *edges = edges_of(a, config);

    atomic_store_explicit(edges + symbol, to, memory_order_release);
    for (int32_t i = 0; symbol < a->rx.n_classes && i < a->rx.n_classes; i++) {
        if (alike->bit[i / 32] >> (i % 32) & 1) {
            atomic_store_explicit(edges + i, to, memory_order_release);
        }
    }
}

int32_t automaton_step(struct stepper *s, int32_t config, int32_t symbol)
{
    struct automaton *a = s->a;
    struct byte_set alike;
    int32_t to;

    if (s->work <= 0) {
        s->paused = true;
        return CONFIG_PAUSED;
    }
    pthread_mutex_lock(&a->lock);
    _Atomic(int32_t) *edge = edges_of(a, config) + symbol;
    to = atomic_load_explicit(edge, memory_order_relaxed);
    if (to == CONFIG_UNKNOWN) {
        a->budget.work = 0;
        to = a->budget.failed ? CONFIG_FULL : make_step(a, config, symbol, &alike);
        if (a->budget.failed) {
            to = automaton_failure(a);
            if (to == CONFIG_WORK) { /* it would take as much again */
                atomic_store_explicit(edges_of(a, config) + symbol, to, memory_order_release);
            }
        } else {
            set_edges(a, config, symbol, to, &alike);
        }
        s->work -= STEP_LEAST + a->budget.work;
    }
    pthread_mutex_unlock(&a->lock);
    return to;
}

/* ---- life ---- */

static void start(struct automaton *a)
{
    const struct cfg_rule *r = &a->cfg->rule[0];

    a->n_next = 0;
    a->n_configs = 1;
    items_begin(a);
    for (int32_t k = 0; k < r->n; k++) {
        items_add(a, (struct item){a->cfg->start[r->first + k], 0, ROOT_ROW, 0});
    }
    a->completed = r->nullable;
    int32_t row = a->n_work > 0 ? items_row(a) : ROOT_ROW;
    if (row >= 0) {
        entry_add(a, row, a->row[row].lex);
    }
    config_intern(a);
}

static void set_up_masks(struct automaton *a)
{
    size_t size = (size_t)a->vocab->words * sizeof(*a->masks);

    a->n_slots = (int32_t)MIN(MAX(MASK_BYTES / MAX(size, 1), 8), 1024);
    a->slot = calloc((size_t)a->n_slots, sizeof(*a->slot));
    a->masks = malloc((size_t)a->n_slots * MAX(size, 1));
    if (!a->slot || !a->masks) {
        budget_fail(&a->budget, ERR_NOMEM, NULL);
    }
}

static void automaton_free(struct automaton *a)
{
    for (int32_t i = 0; i < MAX_CHUNKS && atomic_load(&a->chunk[i]); i++) {
        free(atomic_load(&a->chunk[i]));
        free((void *)atomic_load(&a->edges[i]));
    }
    lexer_release(&a->lexer);
    rx_release(&a->rx);
    free(a->row);
    free(a->item);
    free(a->wait);
    free(a->entry);
    free(a->rows.slot);
    free(a->configs.slot);
    free(a->work);
    free(a->in_work.slot);
    free(a->next);
    free(a->waits);
    free(a->mark);
    free(a->returns);
    free(a->slot);
    free(a->masks);
    pthread_mutex_destroy(&a->lock);
    pthread_mutex_destroy(&a->mask_lock);
    free(a);
}

static int set_up(struct automaton **ret, struct automaton *a)
{
    size_t n_rules = (size_t)a->cfg->n_rules;

    a->mark = budget_alloc(&a->budget, n_rules * sizeof(*a->mark));
    a->returns = budget_alloc(&a->budget, n_rules * sizeof(*a->returns));
    a->n_symbols = rx_symbols(&a->rx);
    a->n_compiled = a->rx.n_nodes;
    if (a->mark && a->returns && lexer_init(&a->lexer, &a->rx, &a->budget)) {
        start(a);
        set_up_masks(a);
    }
    int rc = a->budget.failed;
    if (rc != 0) {
        automaton_free(a);
        return rc;
    }
    *ret = a;
    return 0;
}

static struct automaton *allocate(const struct constrain_vocab *v, const struct cfg *cfg,
                                  size_t bytes)
{
    struct automaton *a = calloc(1, sizeof(*a));

    if (a) {
        pthread_mutex_init(&a->lock, NULL);
        pthread_mutex_init(&a->mask_lock, NULL);
        atomic_init(&a->refs, 1);
        a->vocab = v;
        a->cfg = cfg;
        a->budget =
            (struct budget){.max_bytes = bytes, .max_items = INT32_MAX, .max_work = STEP_WORK};
    }
    return a;
}

int automaton_new(struct automaton **ret, const struct constrain_vocab *v, const struct cfg *cfg,
                  struct rx *rx, size_t held, size_t bytes)
{
    struct automaton *a = allocate(v, cfg, bytes);

    if (!a) {
        return ERR_NOMEM;
    }
    a->rx = *rx;
    a->rx.budget = &a->budget;
    a->budget.bytes = held;
    *rx = (struct rx){0};
    return set_up(ret, a);
}

int automaton_renew(struct automaton **ret, struct automaton *of)
{
    struct automaton *a = allocate(of->vocab, of->cfg, of->budget.max_bytes);

    if (!a) {
        return ERR_NOMEM;
    }
    pthread_mutex_lock(&of->lock);
    bool ok = rx_copy(&a->rx, &of->rx, of->n_compiled, &a->budget);
    pthread_mutex_unlock(&of->lock);
    if (!ok) {
        int rc = a->budget.failed;
        automaton_free(a);
        return rc;
    }
    return set_up(ret, a);
}

void automaton_unref(struct automaton *a)
{
    if (a && atomic_fetch_sub(&a->refs, 1) == 1) {
        automaton_free(a);
    }
}

size_t automaton_bytes(struct automaton *a)
{
    pthread_mutex_lock(&a->lock);
    size_t bytes = a->budget.bytes;
    pthread_mutex_unlock(&a->lock);
    pthread_mutex_lock(&a->mask_lock);
    size_t kept = (size_t)a->n_kept;
    pthread_mutex_unlock(&a->mask_lock);
    return sizeof(*a) + bytes + kept * (size_t)a->vocab->words * sizeof(*a->masks);
}
