/* Masks of configs that count are bounded by those of others.
 *
 * Under a bound of a text's length, or of the words in it, each character leads to a
 * config of its own. Which tokens may come next is mostly the same for all of them: a
 * bound matters near its end. With fewer repetitions allowed an expression matches some
 * of its texts, with any number it matches those and more; the tokens that may come
 * next are fewer and more likewise. Concatenation, union, intersection and repetition
 * keep that order. (Complements do not and are left as they are.) Two configs with such
 * bounds so have masks within and around that of a config, and what both say holds for
 * it. The lower ones are bounded by powers of two, so that few are shared by many. */
#include "engine/constrain/masks/mask.h"

enum {
    LEAST_COUNT = 4,   /* a bound below it stays */
    NODES_MOST = 64,   /* of an expression that are looked at; what lies behind stays */
    REACH_BYTES = 8,   /* counts that begin behind so many bytes stay */
    READINGS_MOST = 32 /* in a config; one of more has no bounds */
};

struct bounding {
    struct rx *rx;
    bool lower;
    int nodes; /* that may still be looked at */
};

static int32_t floor_count(int32_t n)
{
    return n < LEAST_COUNT ? n : (int32_t)(1u << (31 - __builtin_clz((uint32_t)n)));
}

static rx_id bounded_repeat(struct bounding *b, rx_id x, const struct rx_node *n)
{
    int32_t most = b->lower ? floor_count(n->c) : -1;

    if (n->c < LEAST_COUNT || (b->lower && most < n->b)) {
        return x;
    }
    return rx_make_repeat(b->rx, n->a, n->b, most);
}

/* The expression with other bounds, of the counts that begin within `reach` bytes. */
static rx_id bounded(struct bounding *b, rx_id x, int32_t reach)
{
    const struct rx_node n = b->rx->node[x]; /* nodes move as others are made */

    if (b->nodes-- <= 0) {
        return x;
    }
    switch ((enum rx_kind)n.kind) {
    case RX_REPEAT:
        return bounded_repeat(b, x, &n);
    case RX_CONCAT: {
        int32_t behind = reach - (int32_t)b->rx->node[n.a].least;
        rx_id left = bounded(b, n.a, reach);
        rx_id right = behind > 0 ? bounded(b, n.b, behind) : n.b;
        return left == n.a && right == n.b ? x : rx_make_concat(b->rx, left, right);
    }
    case RX_OR:
    case RX_AND: {
        rx_id left = bounded(b, n.a, reach), right = bounded(b, n.b, reach);
        if (left == n.a && right == n.b) {
            return x;
        }
        return n.kind == RX_OR ? rx_make_or(b->rx, left, right) : rx_make_and(b->rx, left, right);
    }
    case RX_NONE:
    case RX_EMPTY:
    case RX_NEVER:
    case RX_SET:
    case RX_TOKEN:
    case RX_NOT:
        break;
    }
    return x;
}

static int32_t bounded_state(struct automaton *a, int32_t lex, bool lower)
{
    int32_t first = a->lexer.state[lex].first, n = a->lexer.state[lex].n;

    lexer_begin(&a->lexer);
    for (int32_t i = first; i < first + n && !a->budget.failed; i++) {
        struct bounding b = {&a->rx, lower, NODES_MOST};
        struct reading of = a->lexer.reading[i];
        of.x = bounded(&b, of.x, REACH_BYTES);
        if (!a->budget.failed && rx_live(&a->rx, of.x)) {
            lexer_add(&a->lexer, of.term, of.x);
        }
    }
    return lexer_intern(&a->lexer);
}

static int32_t bounded_config(struct automaton *a, int32_t config, bool lower)
{
    const struct config *c = config_at(a, config);

    a->n_next = 0;
    for (int32_t i = c->first; i < c->first + c->n && !a->budget.failed; i++) {
        struct entry of = a->entry[i];
        entry_add(a, of.row, bounded_state(a, of.lex, lower));
    }
    a->completed = c->complete;
    return config_intern(a);
}

static bool few_readings(const struct automaton *a, const struct config *c)
{
    int32_t n = 0;

    for (int32_t i = c->first; i < c->first + c->n && n <= READINGS_MOST; i++) {
        n += a->lexer.state[a->entry[i].lex].n;
    }
    return n <= READINGS_MOST;
}

static void find_bounds(struct stepper *s, int32_t config)
{
    struct automaton *a = s->a;
    struct config *c = config_at(a, config);
    int32_t low = CONFIG_DEAD, high = CONFIG_DEAD;

    pthread_mutex_lock(&a->lock);
    a->budget.work = 0;
    if (!a->budget.failed && few_readings(a, c)) {
        low = bounded_config(a, config, true);
        high = low > 0 && low != config ? bounded_config(a, config, false) : CONFIG_DEAD;
        if (a->budget.failed) {
            automaton_failure(a); /* a mask needs no bounds; steps say why it has none */
            low = CONFIG_DEAD;
        }
    }
    s->work -= STEP_LEAST + a->budget.work;
    pthread_mutex_unlock(&a->lock);
    atomic_store_explicit(&c->high, high, memory_order_relaxed);
    atomic_store_explicit(&c->low, low > 0 && low != config && high > 0 ? low : CONFIG_DEAD,
                          memory_order_release);
}

bool config_bounds(struct stepper *s, int32_t config, int32_t *ret_low, int32_t *ret_high)
{
    struct config *c = config_at(s->a, config);

    if (atomic_load_explicit(&c->low, memory_order_acquire) == CONFIG_UNKNOWN) {
        if (s->work <= 0) {
            s->paused = true;
            return false;
        }
        find_bounds(s, config);
    }
    *ret_low = atomic_load_explicit(&c->low, memory_order_acquire);
    *ret_high = atomic_load_explicit(&c->high, memory_order_relaxed);
    return *ret_low > 0;
}
