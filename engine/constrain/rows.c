/* Rows: sets of items, completed and predicted (Earley 1970). */
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/automaton.h"

/* ---- the items of a step ---- */

/* Work of an item that is new, for it is sorted and looked up later; and of so many
 * items that most are not in a cache of the processor, for each put beside them. */
enum { NEW_WORK = 2, MANY_ITEMS = 4096 };

static bool same_item(const struct item *a, const struct item *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

static uint32_t hash_item(const struct item *i)
{
    uint64_t w[2];

    _Static_assert(sizeof(w) == sizeof(*i), "an item is two words");
    memcpy(w, i, sizeof(w));
    uint64_t h = (w[0] ^ (w[1] << 32 | w[1] >> 32)) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 29 ^ w[1]) * 0xff51afd7ed558ccdu;
    return (uint32_t)(h >> 32);
}

void items_begin(struct automaton *a)
{
    a->n_work = 0;
    a->completed = false;
    if (a->in_work.size > 0) {
        memset(a->in_work.slot, 0, (size_t)a->in_work.size * sizeof(*a->in_work.slot));
    }
}

static bool enlarge_work_table(struct automaton *a)
{
    struct index_table *t = &a->in_work;
    int32_t size = t->size ? t->size * 2 : 64;
    int32_t *slot = budget_alloc(&a->budget, (size_t)size * sizeof(*slot));

    if (!slot) {
        return false;
    }
    for (int32_t i = 0; i < a->n_work; i++) {
        uint32_t at = hash_item(&a->work[i]) & (uint32_t)(size - 1);
        while (slot[at]) {
            at = (at + 1) & (uint32_t)(size - 1);
        }
        slot[at] = i + 1;
    }
    budget_free(&a->budget, t->slot, (size_t)t->size * sizeof(*slot));
    *t = (struct index_table){slot, size};
    return true;
}

/* Add an item that is not there yet. */
static void put(struct automaton *a, struct item i)
{
    if (!budget_work(&a->budget, 1 + a->n_work / MANY_ITEMS) ||
        !budget_grow(&a->budget, &a->work, &a->cap_work, (int64_t)a->n_work + 1,
                     sizeof(*a->work)) ||
        (a->n_work * 2 >= a->in_work.size && !enlarge_work_table(a))) {
        return;
    }
    uint32_t mask = (uint32_t)(a->in_work.size - 1), at = hash_item(&i) & mask;
    for (; a->in_work.slot[at]; at = (at + 1) & mask) {
        if (same_item(&a->work[a->in_work.slot[at] - 1], &i)) {
            return;
        }
    }
    budget_work(&a->budget, NEW_WORK);
    a->work[a->n_work++] = i;
    a->in_work.slot[at] = a->n_work;
}

static const struct cfg_rule *repetition(const struct cfg *g, int32_t dot)
{
    int32_t end = g->rhs[dot] < 0 ? g->rhs[dot] : g->rhs[dot + 1];

    if (end >= 0) {
        return NULL;
    }
    const struct cfg_rule *r = &g->rule[END_OF(end)];
    return r->repeats && g->rhs[dot] >= 0 ? r : NULL;
}

static bool at_end(const struct cfg *g, const struct item *i)
{
    return g->rhs[i->dot] < 0;
}

/* Behind the symbol that the item waits for. A repetition that may go on stays; its end
 * is put beside it (see step_item). */
static struct item advanced(const struct cfg *g, struct item i)
{
    const struct cfg_rule *r = repetition(g, i.dot);

    if (!r) {
        i.dot++;
    } else if (r->max < 0) {
        i.count = MIN(i.count + 1, r->min);
    } else if (++i.count >= r->max) {
        i.count = 0;
        i.dot++;
    }
    return i;
}

void items_add(struct automaton *a, struct item i)
{
    put(a, i);
}

/* The first of a row's items that wait for a symbol. */
static int32_t find_waits(const struct automaton *a, const struct row *row, int32_t symbol)
{
    int32_t lo = row->first_wait, hi = row->first_wait + row->n_waits;

    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (a->wait[mid].symbol < symbol) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

void items_advance(struct automaton *a, int32_t row, int32_t symbol)
{
    const struct row *r = &a->row[row];
    int32_t end = r->first_wait + r->n_waits;

    for (int32_t i = find_waits(a, r, symbol); i < end && a->wait[i].symbol == symbol; i++) {
        put(a, advanced(a->cfg, a->wait[i].item));
    }
}

/* What follows of an item at once: its rule is complete, or what it waits for may be
 * empty. `predicted` items are complete before anything was read, which their rule's
 * being nullable says already. */
static void step_item(struct automaton *a, struct item i)
{
    const struct cfg *g = a->cfg;
    const struct cfg_rule *r = repetition(g, i.dot);

    if (r && i.count >= r->min) {
        put(a, (struct item){i.dot + 1, 0, i.row, i.rule});
    } else if (!r && !at_end(g, &i) && cfg_nullable(g, &a->rx, g->rhs[i.dot])) {
        i.dot++;
        put(a, i);
    }
    if (at_end(g, &i) && i.row == ROOT_ROW) {
        a->completed = true;
    } else if (at_end(g, &i) && i.row >= 0) {
        items_advance(a, i.row, g->n_terms + i.rule);
    }
}

/* ---- rows ---- */

static int by_item(const void *x, const void *y)
{
    const struct item *a = x, *b = y;

    if (a->dot != b->dot) {
        return a->dot < b->dot ? -1 : 1;
    }
    if (a->count != b->count) {
        return a->count < b->count ? -1 : 1;
    }
    if (a->row != b->row) {
        return a->row < b->row ? -1 : 1;
    }
    return (a->rule > b->rule) - (a->rule < b->rule);
}

static int by_symbol(const void *x, const void *y)
{
    const struct waiting *a = x, *b = y;

    if (a->symbol != b->symbol) {
        return a->symbol < b->symbol ? -1 : 1;
    }
    return by_item(&a->item, &b->item);
}

static uint32_t hash_row(const struct automaton *a, int32_t row)
{
    return hash_words(a->item + a->row[row].first_item,
                      (size_t)a->row[row].n_items * sizeof(*a->item));
}

static bool enlarge_rows(struct automaton *a)
{
    struct index_table *t = &a->rows;
    int32_t size = t->size ? t->size * 2 : 64;
    int32_t *slot = budget_alloc(&a->budget, (size_t)size * sizeof(*slot));

    if (!slot) {
        return false;
    }
    for (int32_t i = 0; i < a->n_rows; i++) {
        uint32_t at = hash_row(a, i) & (uint32_t)(size - 1);
        while (slot[at]) {
            at = (at + 1) & (uint32_t)(size - 1);
        }
        slot[at] = i + 1;
    }
    budget_free(&a->budget, t->slot, (size_t)t->size * sizeof(*slot));
    *t = (struct index_table){slot, size};
    return true;
}

static void predict(struct automaton *a, int32_t rule)
{
    const struct cfg_rule *r = &a->cfg->rule[rule];

    if (a->mark[rule] == a->generation) {
        return;
    }
    a->mark[rule] = a->generation;
    a->returns[rule] = (struct item){.dot = -1};
    for (int32_t k = 0; k < r->n; k++) {
        int32_t dot = a->cfg->start[r->first + k];
        if (a->cfg->rhs[dot] >= 0) {
            put(a, (struct item){dot, 0, OWN_ROW, rule});
        }
    }
}

/* Gather the items that wait, from those of a->work on: what they wait for is
 * predicted, and what may be empty is skipped in what was predicted. */
static void close_row(struct automaton *a)
{
    const struct cfg *g = a->cfg;

    a->n_new_waits = 0;
    a->generation++;
    for (int32_t i = 0; i < a->n_work && !a->budget.failed; i++) {
        struct item item = a->work[i];
        if (at_end(g, &item)) {
            continue;
        }
        int32_t symbol = g->rhs[item.dot];
        if (!budget_grow(&a->budget, &a->waits, &a->cap_new_waits, (int64_t)a->n_new_waits + 1,
                         sizeof(*a->waits))) {
            return;
        }
        a->waits[a->n_new_waits++] = (struct waiting){symbol, item};
        if (symbol >= g->n_terms) {
            predict(a, symbol - g->n_terms);
        }
        if (item.row == OWN_ROW && !repetition(g, item.dot) && cfg_nullable(g, &a->rx, symbol)) {
            item.dot++;
            put(a, item);
        }
    }
}

/* Where each predicted rule returns to: this row; or, where one item alone waits for it
 * and ends with it, where that item's rule returns to. */
static void find_returns(struct automaton *a)
{
    const struct cfg *g = a->cfg;

    for (int32_t i = 0; i < a->n_new_waits; i++) {
        int32_t rule = a->waits[i].symbol - g->n_terms;
        if (rule >= 0) {
            struct item *to = &a->returns[rule];
            struct item after = advanced(g, a->waits[i].item);
            bool only = to->dot < 0 && at_end(g, &after);
            *to = (struct item){only ? 1 : 0, 0, after.row, after.rule};
        }
    }
    for (int32_t i = 0; i < a->n_new_waits; i++) {
        struct item *item = &a->waits[i].item;
        int32_t links = 0;
        while (item->row == OWN_ROW && a->returns[item->rule].dot == 1 && links++ < g->n_rules) {
            *item = (struct item){item->dot, item->count, a->returns[item->rule].row,
                                  a->returns[item->rule].rule};
        }
        if (item->row == OWN_ROW) {
            item->row = a->n_rows;
        }
    }
}

/* The lexer's state of the terminals among a->waits, which are sorted by symbol. */
static int32_t start_of_terminals(struct automaton *a)
{
    lexer_begin(&a->lexer);
    for (int32_t i = 0; i < a->n_new_waits && a->waits[i].symbol < a->cfg->n_terms; i++) {
        int32_t term = a->waits[i].symbol;
        if (i == 0 || a->waits[i - 1].symbol != term) {
            lexer_add(&a->lexer, term, a->cfg->term[term]);
        }
    }
    return lexer_intern(&a->lexer);
}

/* Add the row whose items are item[n_items ..): its number, or CONFIG_FULL. */
static int32_t add_row(struct automaton *a, int32_t n, uint32_t hash)
{
    struct row r = {a->n_items, n, a->n_waits, 0, 0};

    close_row(a);
    find_returns(a);
    r.n_waits = a->n_new_waits;
    if (!budget_grow(&a->budget, &a->wait, &a->cap_waits, (int64_t)a->n_waits + r.n_waits,
                     sizeof(*a->wait)) ||
        !budget_grow(&a->budget, &a->row, &a->cap_rows, (int64_t)a->n_rows + 1, sizeof(*a->row)) ||
        (a->n_rows * 2 >= a->rows.size && !enlarge_rows(a))) {
        return CONFIG_FULL;
    }
    qsort(a->waits, (size_t)r.n_waits, sizeof(*a->waits), by_symbol);
    r.lex = start_of_terminals(a);
    if (a->budget.failed) {
        return CONFIG_FULL;
    }
    memcpy(a->wait + a->n_waits, a->waits, (size_t)r.n_waits * sizeof(*a->waits));
    a->n_waits += r.n_waits;
    a->n_items += n;
    a->row[a->n_rows] = r;
    uint32_t mask = (uint32_t)(a->rows.size - 1), at = hash & mask;
    while (a->rows.slot[at]) {
        at = (at + 1) & mask;
    }
    a->rows.slot[at] = a->n_rows + 1;
    return a->n_rows++;
}

int32_t items_row(struct automaton *a)
{
    int32_t n = 0;

    for (int32_t i = 0; i < a->n_work && !a->budget.failed; i++) {
        step_item(a, a->work[i]);
    }
    for (int32_t i = 0; i < a->n_work; i++) {
        if (!at_end(a->cfg, &a->work[i])) {
            a->work[n++] = a->work[i];
        }
    }
    if (n == 0 && !a->budget.failed) {
        return ROOT_ROW;
    }
    if (!budget_grow(&a->budget, &a->item, &a->cap_items, (int64_t)a->n_items + n,
                     sizeof(*a->item))) {
        return CONFIG_FULL;
    }
    qsort(a->work, (size_t)n, sizeof(*a->work), by_item);
    memcpy(a->item + a->n_items, a->work, (size_t)n * sizeof(*a->work));
    uint32_t hash = hash_words(a->work, (size_t)n * sizeof(*a->work));
    uint32_t mask = a->rows.size > 0 ? (uint32_t)(a->rows.size - 1) : 0;
    for (uint32_t at = hash & mask; a->rows.size > 0 && a->rows.slot[at]; at = (at + 1) & mask) {
        const struct row *r = &a->row[a->rows.slot[at] - 1];
        if (r->n_items == n &&
            memcmp(a->item + r->first_item, a->work, (size_t)n * sizeof(*a->work)) == 0) {
            return a->rows.slot[at] - 1;
        }
    }
    bool completed = a->completed;
    items_begin(a);
    a->completed = completed;
    for (int32_t i = 0; i < n; i++) {
        put(a, a->item[a->n_items + i]);
    }
    return add_row(a, n, hash);
}
