/* The cache is a list, the grammar used last in front. It holds a reference to each,
 * and drops the last ones when there are too many or when together they are too large:
 * a grammar grows while it is used, by the states cached with it. */
#include "engine/grammars.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* GRAMMAR_WORK: what a grammar takes beside its steps, in their units. */
enum { CACHED_GRAMMARS = 128, WALK_MASK_WORK = MASK_WORK_MOST, GRAMMAR_WORK = 2000 };
#define CACHED_BYTES ((size_t)128 << 20)

struct cached {
    struct cached *next; /* used before this one */
    struct grammar *grammar;
    enum grammar_kind kind;
    size_t len;  /* of `text` */
    char text[]; /* that it was compiled from */
};

struct grammars {
    const struct tokenizer *tokenizer;
    struct constrain_tokens tokens;
    pthread_mutex_t lock;          /* guards the rest */
    struct constrain_vocab *vocab; /* NULL: not made yet */
    struct cached *first;
};

_Static_assert((int)MASK_UNFINISHED == (int)CONSTRAINT_UNFINISHED, "jobs would not know it");

const struct constraint_ops grammar_ops = {
    .fork = constraint_fork,
    .free = constraint_free,
    .mask = constraint_mask,
    .accept = constraint_accept,
    .settle = constraint_settle,
    .ended = constraint_ended,
    .forced = constraint_forced,
};

/* ---- the vocabulary ---- */

static const char *bytes_of(const void *arg, int32_t id, size_t *ret_len)
{
    const struct grammars *g = arg;

    *ret_len = 0;
    return id < tokenizer_vocab_size(g->tokenizer) ? tokenizer_bytes(g->tokenizer, id, ret_len)
                                                   : "";
}

static bool is_special(const void *arg, int32_t id)
{
    const struct grammars *g = arg;

    return id < tokenizer_vocab_size(g->tokenizer) && tokenizer_is_special(g->tokenizer, id);
}

static int encode(const void *arg, const char *text, size_t len, int32_t **ret_ids, int32_t *ret_n)
{
    const struct grammars *g = arg;
    struct token_list ids = {0};
    struct err e;
    int rc = tokenizer_encode(g->tokenizer, text, len, false, INT32_MAX, &ids, &e);

    if (rc < 0) {
        token_list_release(&ids);
        return rc;
    }
    *ret_ids = ids.id;
    *ret_n = ids.n;
    return 0;
}

/* Under `lock`. */
static int make_vocab(struct grammars *g, struct err *e)
{
    return g->vocab ? 0 : constrain_vocab_new(&g->vocab, &g->tokens, e);
}

/* ---- the cache ---- */

static void cached_free(struct cached *c)
{
    grammar_unref(c->grammar);
    free(c);
}

/* A reference to a cached grammar, which becomes the first of the list; NULL: there is
 * none. Under `lock`. */
static struct grammar *find(struct grammars *g, enum grammar_kind kind, const char *text,
                            size_t len)
{
    for (struct cached **at = &g->first, *c; (c = *at) != NULL; at = &c->next) {
        if (c->kind == kind && c->len == len && memcmp(c->text, text, len) == 0) {
            *at = c->next;
            c->next = g->first;
            g->first = c;
            return grammar_ref(c->grammar);
        }
    }
    return NULL;
}

/* Takes the last ones that are too many out of the list. Under `lock`. */
static struct cached *cut(struct grammars *g)
{
    struct cached **at = &g->first;
    size_t n_bytes = 0;

    for (int32_t n = 0; *at; n++, at = &(*at)->next) {
        n_bytes += grammar_bytes((*at)->grammar) + (*at)->len;
        if (n == CACHED_GRAMMARS || (n > 0 && n_bytes > CACHED_BYTES)) {
            break;
        }
    }
    struct cached *rest = *at;
    *at = NULL;
    return rest;
}

/* Keeps a grammar that was compiled; without memory for that it is compiled again. */
static void keep(struct grammars *g, enum grammar_kind kind, const char *text, size_t len,
                 struct grammar *made)
{
    struct cached *c = malloc(sizeof(*c) + len);

    if (!c) {
        return;
    }
    *c = (struct cached){.grammar = grammar_ref(made), .kind = kind, .len = len};
    memcpy(c->text, text, len);
    pthread_mutex_lock(&g->lock);
    c->next = g->first;
    g->first = c;
    struct cached *rest = cut(g);
    pthread_mutex_unlock(&g->lock);
    for (struct cached *next; rest; rest = next) {
        next = rest->next;
        cached_free(rest);
    }
}

int grammars_get(struct grammars *g, enum grammar_kind kind, const char *text, size_t len,
                 int64_t *work, struct grammar **ret, struct err *e)
{
    struct grammar_limits limits;
    int64_t used = 0;

    grammar_limits_init(&limits);
    limits.used = &used;
    limits.work = work ? MIN(limits.work, MAX(*work, 1)) : limits.work;
    pthread_mutex_lock(&g->lock);
    int rc = make_vocab(g, e);
    struct grammar *found = rc == 0 ? find(g, kind, text, len) : NULL;
    pthread_mutex_unlock(&g->lock);
    if (rc < 0 || found) {
        *ret = rc == 0 ? found : *ret;
        return rc;
    }
    rc = grammar_new(ret, g->vocab, kind, text, len, &limits, e);
    if (work) {
        *work -= used + GRAMMAR_WORK;
    }
    if (rc == 0) {
        keep(g, kind, text, len, *ret);
    }
    return rc;
}

/* ---- walking through a text ---- */

/* Counts what may follow. False: `rc` says why not, or the walk is out of time. */
static bool count_allowed(struct constraint *c, uint32_t *mask, int32_t words,
                          struct grammar_walk *w, int *rc)
{
    int32_t n = 0;

    if (w->n >= w->most || clock_us() > w->until_us) {
        w->end = WALK_TIME;
        return false;
    }
    int64_t work = WALK_MASK_WORK;
    *rc = constraint_mask(c, mask, &work);
    if (*rc == CONSTRAINT_UNFINISHED) {
        w->end = WALK_TIME;
        return false;
    }
    if (*rc == ERR_UNSUPPORTED) { /* nothing may follow, of a model without an end */
        memset(mask, 0, (size_t)words * sizeof(*mask));
        *rc = 0;
    }
    for (int32_t i = 0; *rc == 0 && i < words; i++) {
        n += __builtin_popcount(mask[i]);
    }
    if (*rc == 0) {
        w->allowed[w->n_allowed++] = n;
    }
    return *rc == 0;
}

int grammars_walk(struct grammar *g, int32_t vocab, const int32_t *id, int32_t n,
                  struct grammar_walk *ret, struct err *e)
{
    int32_t words = mask_words(vocab);
    uint32_t *mask = calloc((size_t)words, sizeof(*mask));
    struct constraint *c = NULL;
    int rc = mask ? constraint_new(&c, g, e) : err_nomem(e, "a mask");

    ret->n = ret->n_allowed = 0;
    ret->end = WALK_WHOLE;
    while (rc == 0 && count_allowed(c, mask, words, ret, &rc) && ret->n < n) {
        int64_t work = WALK_MASK_WORK;
        int taken = constraint_accept(c, id[ret->n], &work);
        if (taken != 0) {
            ret->end = taken == CONSTRAINT_UNFINISHED ? WALK_TIME : WALK_REFUSED;
            break;
        }
        constraint_settle(c);
        ret->n++;
    }
    ret->complete = rc == 0 && constraint_complete(c);
    if (rc < 0 && !e->code) {
        err_set(e, rc, "the grammar's masks reached a limit");
    }
    constraint_free(c);
    free(mask);
    return rc;
}

/* ---- open and free ---- */

int grammars_open(struct grammars **ret, const struct tokenizer *t, const struct sched_config *c,
                  struct err *e)
{
    struct grammars *g = calloc(1, sizeof(*g));

    if (!g) {
        return err_nomem(e, "grammars");
    }
    g->tokenizer = t;
    g->tokens = (struct constrain_tokens){.n = c->vocab,
                                          .n_eos = c->n_eos,
                                          .eos = c->eos,
                                          .bytes = bytes_of,
                                          .special = is_special,
                                          .encode = encode,
                                          .arg = g};
    pthread_mutex_init(&g->lock, NULL);
    *ret = g;
    return 0;
}

void grammars_free(struct grammars *g)
{
    if (!g) {
        return;
    }
    for (struct cached *c = g->first, *next; c; c = next) {
        next = c->next;
        cached_free(c);
    }
    constrain_vocab_free(g->vocab);
    pthread_mutex_destroy(&g->lock);
    free(g);
}
