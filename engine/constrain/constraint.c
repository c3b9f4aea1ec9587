/* The state of one sequence: a config of the automaton, and those before the tokens
 * that may still be taken back. */
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/grammar.h"
#include "engine/constrain/masks/mask.h"

enum {
    AFTER_END = 0,          /* in place of a config: an end-of-sequence token was accepted */
    MAX_FORCED_BYTES = 512, /* of text that is forced at once */
    FORCED_WORK = 50000,    /* to find it */
    MOVE_WORK = 20000,      /* charged for another automaton */
};

struct constraint {
    struct grammar *grammar; /* a reference */
    struct automaton *a;     /* a reference: what the configs belong to */
    int32_t *path;           /* [n] configs; the last is the present one; owned */
    int32_t n, cap;          /* 1 + the tokens that may be taken back; room */
};

static int32_t present(const struct constraint *c)
{
    return c->path[c->n - 1];
}

static int make(struct constraint **ret, struct grammar *g, struct automaton *a,
                const int32_t *path, int32_t n, struct err *e)
{
    struct constraint *c = calloc(1, sizeof(*c));
    int32_t *copy = malloc((size_t)n * sizeof(*copy));

    if (!c || !copy) {
        automaton_unref(a);
        free(c);
        free(copy);
        return err_nomem(e, "the state of a constrained sequence");
    }
    memcpy(copy, path, (size_t)n * sizeof(*copy));
    *c = (struct constraint){grammar_ref(g), a, copy, n, n};
    *ret = c;
    return 0;
}

int constraint_new(struct constraint **ret, struct grammar *g, struct err *e)
{
    const int32_t start = 1;

    return make(ret, g, grammar_automaton(g), &start, 1, e);
}

int constraint_fork(struct constraint **ret, const struct constraint *c, struct err *e)
{
    atomic_fetch_add(&c->a->refs, 1);
    return make(ret, c->grammar, c->a, c->path, c->n, e);
}

void constraint_free(struct constraint *c)
{
    if (c) {
        automaton_unref(c->a);
        grammar_unref(c->grammar);
        free(c->path);
        free(c);
    }
}

size_t constraint_bytes(const struct constraint *c)
{
    return sizeof(*c) + (size_t)c->cap * sizeof(*c->path);
}

/* ---- a full automaton ---- */

static int failure(int32_t config)
{
    switch (config) {
    case CONFIG_NOMEM:
        return ERR_NOMEM;
    case CONFIG_PAUSED:
        return CONSTRAINT_UNFINISHED;
    default:
        return ERR_FULL;
    }
}

/* Go on in an automaton with room. */
static int move(struct constraint *c, struct stepper *s)
{
    struct automaton *to;
    int32_t *path = malloc((size_t)c->n * sizeof(*path));
    int rc = path ? grammar_renew(c->grammar, c->a, &to) : ERR_NOMEM;

    if (rc != 0) {
        free(path);
        return rc;
    }
    for (int32_t i = 0; i < c->n && rc == 0; i++) {
        path[i] = c->path[i] == AFTER_END ? AFTER_END : automaton_import(to, c->a, c->path[i]);
        rc = path[i] < 0 ? failure(path[i]) : 0;
    }
    if (rc != 0) {
        automaton_unref(to);
        free(path);
        return rc;
    }
    automaton_unref(c->a);
    free(c->path);
    c->a = s->a = to;
    s->work -= MOVE_WORK;
    c->path = path;
    c->cap = c->n;
    return 0;
}

/* Whether to try again after a failed step: in a new automaton, once. */
static bool again(struct constraint *c, struct stepper *s, int32_t *failed, bool *moved)
{
    if (*failed != CONFIG_FULL || *moved) {
        return false;
    }
    *moved = true;
    int rc = move(c, s);
    if (rc == ERR_NOMEM) {
        *failed = CONFIG_NOMEM;
    }
    return rc == 0;
}

/* ---- tokens ---- */

static bool is_eos(const struct constraint *c, int32_t token)
{
    const struct constrain_vocab *v = c->grammar->vocab;

    return token >= 0 && token < v->n && mask_has(v->eos, token);
}

static int32_t after(struct constraint *c, int32_t token, int64_t *work)
{
    struct stepper s = {c->a, *work, false};
    bool moved = false;
    int32_t to;

    if (present(c) == AFTER_END) {
        return is_eos(c, token) ? AFTER_END : CONFIG_DEAD;
    }
    do {
        to = config_after(&s, present(c), token);
    } while (to < 0 && again(c, &s, &to, &moved));
    *work = s.work;
    if (to == CONFIG_DEAD && is_eos(c, token) && config_at(c->a, present(c))->complete) {
        return AFTER_END;
    }
    return to;
}

int constraint_mask(struct constraint *c, uint32_t *mask, int64_t *work)
{
    const struct constrain_vocab *v = c->grammar->vocab;
    struct stepper s = {c->a, *work, false};
    bool moved = false;
    int32_t failed;

    if (present(c) == AFTER_END) {
        memcpy(mask, v->eos, (size_t)v->words * sizeof(*mask));
        return 0;
    }
    do {
        failed = mask_of(&s, present(c), mask);
    } while (failed < 0 && again(c, &s, &failed, &moved));
    *work = s.work;
    if (failed < 0) {
        return failure(failed);
    }
    for (int32_t i = 0; i < v->words; i++) {
        if (mask[i] != 0) {
            return 0;
        }
    }
    return ERR_UNSUPPORTED;
}

bool constraint_allows(struct constraint *c, int32_t token)
{
    int64_t work = INT64_MAX;

    return after(c, token, &work) >= 0;
}

int constraint_accept(struct constraint *c, int32_t token, int64_t *work)
{
    int32_t to = after(c, token, work);

    if (to < 0) {
        return to == CONFIG_DEAD ? ERR_INVALID : failure(to);
    }
    if (c->n == c->cap) {
        int32_t cap = c->cap + MAX(c->cap / 2, 4);
        int32_t *path = realloc(c->path, (size_t)cap * sizeof(*path));
        if (!path) {
            return ERR_NOMEM;
        }
        c->path = path;
        c->cap = cap;
    }
    c->path[c->n++] = to;
    return 0;
}

void constraint_rollback(struct constraint *c, int32_t n)
{
    c->n = MAX(c->n - n, 1);
}

void constraint_settle(struct constraint *c)
{
    c->path[0] = present(c);
    c->n = 1;
}

bool constraint_complete(const struct constraint *c)
{
    return present(c) == AFTER_END || config_at(c->a, present(c))->complete;
}

int constraint_ended(struct constraint *c, int64_t *work)
{
    struct stepper s = {c->a, *work, false};

    if (present(c) == AFTER_END) {
        return 1;
    }
    bool ends = config_ends(&s, present(c));
    *work = s.work;
    return s.paused ? CONSTRAINT_UNFINISHED : ends;
}

/* ---- forced tokens ---- */

/* The only byte that may follow, or -1; *ret_token: the only token, named by the
 * grammar, or -1. */
static int forced_byte(struct stepper *s, int32_t config, int32_t *ret_config, int32_t *ret_token)
{
    struct automaton *a = s->a;
    int byte = -1, n = 0;

    *ret_token = -1;
    if (config_at(a, config)->complete) {
        return -1;
    }
    for (int b = 0; b < 256 && n < 2; b++) {
        int32_t to = automaton_next(s, config, symbol_of_byte(a, (uint8_t)b));
        n += to != CONFIG_DEAD;
        if (to > 0) {
            byte = b;
            *ret_config = to;
        }
    }
    for (int32_t k = 0; k < a->rx.n_tokens && n < 2; k++) {
        int32_t to = automaton_next(s, config, a->rx.n_classes + k);
        n += to != CONFIG_DEAD;
        if (to > 0) {
            *ret_token = a->rx.token[k];
        }
    }
    if (n != 1) {
        *ret_token = -1;
        return -1;
    }
    return *ret_token >= 0 ? -1 : byte;
}

/* Whether a token begins with the text and goes on. */
static bool extends(const struct constrain_vocab *v, const char *text, size_t len)
{
    const struct trie *t = &v->trie[TRIE_ALL];
    int32_t i = 0, end = t->n;

    for (size_t at = 0; at < len; at++) {
        while (i < end && t->node[i].byte != (uint8_t)text[at]) {
            i = (int32_t)t->node[i].end;
        }
        if (i >= end) {
            return false;
        }
        end = (int32_t)t->node[i].end;
        i++;
    }
    return i < end;
}

/* The tokens of a forced text that the model's encoding makes of it whatever follows:
 * those behind which, and in which, no longer token could have begun. */
static int32_t canonical(const struct constrain_vocab *v, const char *text, size_t len,
                         const int32_t *id, int32_t n, int32_t max)
{
    size_t at = 0;
    int32_t kept = 0;

    for (int32_t i = 0; i < n; i++) {
        bool there = id[i] >= 0 && id[i] < v->n && !v->special[id[i]] && v->len[id[i]] > 0 &&
                     v->len[id[i]] <= len - at &&
                     memcmp(v->text + v->at[id[i]], text + at, v->len[id[i]]) == 0;
        if (!there) {
            return 0;
        }
        at += v->len[id[i]];
    }
    if (at != len) {
        return 0;
    }
    for (at = 0; kept < MIN(n, max) && !extends(v, text + at, len - at); kept++) {
        at += v->len[id[kept]];
    }
    return kept;
}

int32_t constraint_forced(struct constraint *c, int32_t *ret, int32_t max)
{
    const struct constrain_vocab *v = c->grammar->vocab;
    struct stepper s = {c->a, FORCED_WORK, false};
    char text[MAX_FORCED_BYTES];
    int32_t config = present(c), token = -1, n_ids = 0, kept = 0, *ids = NULL;
    size_t len = 0;

    if (config == AFTER_END || max <= 0) {
        return 0;
    }
    while (len < sizeof(text)) {
        int byte = forced_byte(&s, config, &config, &token);
        if (byte < 0) {
            break;
        }
        text[len++] = (char)byte;
    }
    if (len == 0 && token >= 0) {
        ret[0] = token;
        return 1;
    }
    if (len == 0 || !v->encode || v->encode(v->arg, text, len, &ids, &n_ids) != 0) {
        return 0;
    }
    kept = canonical(v, text, len, ids, n_ids, max);
    if (kept > 0) {
        memcpy(ret, ids, (size_t)kept * sizeof(*ret));
    }
    free(ids);
    return kept;
}
