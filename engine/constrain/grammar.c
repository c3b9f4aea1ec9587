#include "engine/constrain/grammar.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"

/* Memory of the states that are cached with a grammar. When it is used up, sequences go
 * on in a new automaton, and the old one is freed with its last sequence. */
#define STATES_BYTES ((size_t)32 << 20)

void grammar_limits_init(struct grammar_limits *l)
{
    *l = (struct grammar_limits){.text_bytes = LIMIT_GRAMMAR_BYTES,
                                 .depth = 128,
                                 .items = 200000,
                                 .bytes = (size_t)16 << 20,
                                 .work = 1400000};
}

static int report(struct grammar_builder *b, struct err *e)
{
    const struct grammar_limits *l = &b->limits;
    const char *limit = b->budget.limit;

    if (b->err.code != 0) {
        *e = b->err;
        return e->code;
    }
    if (b->budget.failed == ERR_NOMEM) {
        return err_nomem(e, "a grammar");
    }
    if (strcmp(limit, "items") == 0) {
        return err_set(e, ERR_INVALID, "the grammar has more than %d nodes", l->items);
    }
    if (strcmp(limit, "memory") == 0) {
        return err_set(e, ERR_INVALID, "compiling the grammar takes more than %zu bytes", l->bytes);
    }
    if (strcmp(limit, "depth") == 0) {
        return err_set(e, ERR_INVALID, "the grammar's expressions nest too deep");
    }
    return err_set(e, ERR_INVALID, "compiling the grammar takes more than %lld steps",
                   (long long)l->work);
}

static struct grammar *make(struct grammar_builder *b, sym_id start, int *ret_rc)
{
    struct grammar *g = calloc(1, sizeof(*g));
    size_t held;

    if (!g) {
        *ret_rc = ERR_NOMEM;
        return NULL;
    }
    atomic_init(&g->refs, 1);
    g->vocab = b->vocab;
    pthread_mutex_init(&g->lock, NULL);
    *ret_rc = ERR_INVALID;
    if (cfg_compile(&g->cfg, b, start)) {
        bool frozen = rx_freeze(&b->rx);
        held = rx_held(&b->rx);
        *ret_rc = b->budget.failed || !frozen
                      ? ERR_INVALID
                      : automaton_new(&g->automaton, b->vocab, &g->cfg, &b->rx, held, STATES_BYTES);
    }
    if (*ret_rc != 0) {
        grammar_unref(g);
        return NULL;
    }
    return g;
}

int grammar_build_end(struct grammar **ret, struct grammar_builder *b, sym_id start, struct err *e)
{
    struct grammar *g = NULL;
    struct err ignored;
    int rc = 0;

    e = e ? e : &ignored;
    if (!start) {
        grammar_build_fail(b, ERR_INVALID, "the grammar has no start");
    }
    if (!grammar_build_failed(b)) {
        g = make(b, start, &rc);
    }
    if (b->limits.used) {
        *b->limits.used = b->budget.work + (g ? g->automaton->budget.work : 0);
    }
    if (grammar_build_failed(b)) {
        rc = report(b, e);
    } else if (rc == ERR_NOMEM) {
        err_nomem(e, "a grammar");
    } else if (rc != 0) {
        rc = err_set(e, ERR_INVALID, "the grammar is too large for its states");
    }
    grammar_build_abandon(b);
    if (rc == 0) {
        *ret = g;
    }
    return rc;
}

static sym_id build(struct grammar_builder *b, enum grammar_kind kind, const char *text, size_t len)
{
    switch (kind) {
    case GRAMMAR_JSON_OBJECT:
        return json_object_build(b);
    case GRAMMAR_JSON_SCHEMA:
        return json_schema_build(b, text, len);
    case GRAMMAR_REGEX:
        return sym_terminal(b, rx_parse(b, text, len, false));
    case GRAMMAR_CHOICE:
        return choice_build(b, text, len);
    case GRAMMAR_LARK:
        return lark_build(b, text, len);
    }
    return 0;
}

int grammar_new(struct grammar **ret, const struct constrain_vocab *v, enum grammar_kind kind,
                const char *text, size_t len, const struct grammar_limits *l, struct err *e)
{
    struct grammar_builder *b;

    if (len > l->text_bytes) {
        return err_set(e, ERR_INVALID, "the grammar has %zu bytes, at most %zu are taken", len,
                       l->text_bytes);
    }
    int rc = grammar_build_begin(&b, v, l, e);
    return rc != 0 ? rc : grammar_build_end(ret, b, build(b, kind, text, len), e);
}

struct grammar *grammar_ref(struct grammar *g)
{
    atomic_fetch_add(&g->refs, 1);
    return g;
}

void grammar_unref(struct grammar *g)
{
    if (!g || atomic_fetch_sub(&g->refs, 1) != 1) {
        return;
    }
    automaton_unref(g->automaton);
    cfg_release(&g->cfg);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

size_t grammar_bytes(const struct grammar *g)
{
    struct grammar *mine = (struct grammar *)g;
    struct automaton *a = grammar_automaton(mine);
    size_t bytes = sizeof(*g) + automaton_bytes(a);

    automaton_unref(a);
    return bytes;
}

struct automaton *grammar_automaton(struct grammar *g)
{
    pthread_mutex_lock(&g->lock);
    struct automaton *a = g->automaton;
    atomic_fetch_add(&a->refs, 1);
    pthread_mutex_unlock(&g->lock);
    return a;
}

int grammar_renew(struct grammar *g, struct automaton *full, struct automaton **ret)
{
    struct automaton *fresh;
    int rc = 0;

    pthread_mutex_lock(&g->lock);
    if (g->automaton == full) {
        rc = automaton_renew(&fresh, full);
        if (rc == 0) {
            automaton_unref(g->automaton);
            g->automaton = fresh;
        }
    }
    if (rc == 0) {
        *ret = g->automaton;
        atomic_fetch_add(&g->automaton->refs, 1);
    }
    pthread_mutex_unlock(&g->lock);
    return rc;
}
