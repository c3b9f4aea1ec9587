/* Stage 4 on the HTTP threads: a set of requests is validated, its groups and output
 * states are allocated, and then all of them are queued or none. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_state.h"

static int check_state(const struct engine *e, struct err *err)
{
    switch (atomic_load(&e->state)) {
    case HEALTH_READY:
        return 0;
    case HEALTH_DEAD:
        return err_set(err, ERR_DEVICE, "the device failed: %s", e->death);
    default:
        return err_set(err, ERR_DRAINING, "the server is shutting down");
    }
}

/* Checks what group_new does not; group_new refuses the rest (size, ids, widths). */
static int check_request(const struct request *r, struct err *err)
{
    const struct gen_params *p = &r->params;

    if (p->max_tokens < 0 || (p->max_tokens == 0 && !p->echo)) {
        return err_set_param(err, ERR_INVALID, "max_tokens",
                             "max_tokens is %d; at least 1, or 0 with echo", p->max_tokens);
    }
    if (p->n < 1 || p->best_of < p->n || p->best_of > LIMIT_CHOICES) {
        return err_set_param(err, ERR_INVALID, "n",
                             "n is %d and best_of %d; 1 <= n <= best_of <= %d is allowed", p->n,
                             p->best_of, LIMIT_CHOICES);
    }
    if (p->beam_width < 0 || p->beam_width > LIMIT_CHOICES ||
        (p->beam_width > 0 && p->n > p->beam_width)) {
        return err_set_param(err, ERR_INVALID, "beam_width",
                             "beam_width is %d and n %d; n <= beam_width <= %d is allowed",
                             p->beam_width, p->n, LIMIT_CHOICES);
    }
    return 0;
}

/* Appends the ids of one bad word, as it is or after a space, because a word in the
 * middle of a text is encoded with its space. */
static int add_word(const struct engine *e, struct word_list *w, struct token_list *ids,
                    const char *word, size_t len, bool spaced, struct err *err)
{
    char text[LIMIT_STOP_BYTES + 2];

    if (len == 0 || len > LIMIT_STOP_BYTES) {
        return err_set_param(err, ERR_INVALID, "bad_words",
                             "a word of %zu bytes; 1 to %d are allowed", len, LIMIT_STOP_BYTES);
    }
    text[0] = ' ';
    memcpy(text + 1, word, len);
    text[1 + len] = '\0';
    int32_t before = ids->n;
    int rc = tokenizer_encode(e->tokenizer, spaced ? text : text + 1, len + spaced, false,
                              LIMIT_BAD_WORD_TOKENS, ids, err);
    if (rc < 0) {
        err_prefix(err, "bad_words");
        if (err) {
            snprintf(err->param, sizeof(err->param), "bad_words");
        }
        return rc;
    }
    if (ids->n > before) {
        w->first[++w->n] = ids->n;
    }
    return 0;
}

/* Encodes the bad words once for all requests that share the parameters. */
static int encode_bad_words(const struct engine *e, struct shared_params *s, struct err *err)
{
    const struct gen_params *p = &s->params;
    struct token_list ids = {0};
    int rc = 0;

    if (p->n_bad_words == 0 || s->words) {
        return 0;
    }
    struct word_list *w = calloc(1, sizeof(*w));
    int32_t *first = calloc((size_t)p->n_bad_words * 2 + 1, sizeof(*first));
    if (!w || !first) {
        free(w);
        free(first);
        return err_nomem(err, "bad words");
    }
    w->first = first;
    for (int32_t i = 0; i < p->n_bad_words * 2 && rc == 0; i++) {
        const char *word = p->bad_word[i / 2];
        size_t len = p->bad_word_len ? (size_t)p->bad_word_len[i / 2] : strlen(word);
        rc = add_word(e, w, &ids, word, len, i % 2, err);
    }
    w->token = ids.id;
    if (rc < 0) {
        word_list_release(w);
        free(w);
        return rc;
    }
    s->words = w;
    return 0;
}

/* Of the first token's mask, some forty milliseconds: a grammar that needs more is
 * refused at once. */
enum { FIRST_MASK_WORK = 4000000 };

/* The mask of the first token, which the grammar keeps: here it delays nobody, while
 * the step that samples the first tokens of several choices has to wait for it. */
static int compute_first_mask(struct constraint *state, int32_t vocab, struct err *err)
{
    uint32_t *mask = calloc((size_t)mask_words(vocab), sizeof(*mask));
    int64_t work = FIRST_MASK_WORK;

    if (!mask) {
        return err_nomem(err, "a mask");
    }
    int rc = constraint_mask(state, mask, &work);
    free(mask);
    if (rc == CONSTRAINT_UNFINISHED || rc == ERR_FULL) {
        return err_set(err, ERR_INVALID,
                       "the grammar needs more work or memory for its first token than its limits "
                       "allow");
    }
    return 0; /* what else is wrong shows in that step */
}

/* The state at the start of the request's grammar, if it has one. */
static int start_constraint(const struct engine *e, struct group *g, struct err *err)
{
    struct grammar *grammar = g->request->params.grammar;
    struct constraint *state;

    if (!grammar) {
        return 0;
    }
    if (!e->masks) {
        return err_set(err, ERR_UNSUPPORTED, "this device cannot constrain its output");
    }
    int rc = constraint_new(&state, grammar, err);
    if (rc < 0) {
        return rc;
    }
    rc = compute_first_mask(state, e->config.vocab, err);
    if (rc < 0) {
        constraint_free(state);
        return rc;
    }
    return constraint_node_new(&g->first.constraint, &grammar_ops, state, err);
}

static void drop_group(struct group *g)
{
    if (g) {
        constraint_node_free(g->first.constraint);
    }
    group_free(g);
}

/* Allocates everything that a request needs before it starts, or nothing. */
static int prepare(struct engine *e, struct request *r, struct group **ret, struct err *err)
{
    int rc = check_request(r, err);

    if (rc == 0) {
        rc = encode_bad_words(e, r->shared, err);
    }
    if (rc == 0) {
        rc = group_new(ret, r, r->shared->words, &e->config, err);
    }
    if (rc < 0) {
        return rc;
    }
    rc = start_constraint(e, *ret, err);
    if (rc == 0) {
        rc = output_state_new(r, e->tokenizer, err);
    }
    if (rc < 0) {
        drop_group(*ret);
        *ret = NULL;
    }
    return rc;
}

static void unprepare(struct request *r, struct group *g)
{
    drop_group(g);
    output_state_free(r->output_state);
    r->output_state = NULL;
}

/* Under policy: fair a tenant may have no more requests in progress than max_num_seqs
 * plus the free places of the queue. So one flooding tenant takes half of the queue,
 * two take two thirds, and there is always room for another one. */
static int check_tenant_quota(const struct engine *e, int32_t tenant, int32_t n, struct err *err)
{
    int64_t left = e->max_queue - inbox_waiting(&e->inbox),
            under_way = atomic_load(&e->tenant_active[tenant]);

    if (e->config.policy != POLICY_FAIR || under_way + n <= e->config.max_num_seqs + left) {
        return 0;
    }
    return err_set(
        err, ERR_FULL,
        "this key has %lld requests in progress, its share of the queue; try again later",
        (long long)under_way);
}

static void count_active(struct engine *e, int32_t tenant, int32_t n)
{
    atomic_fetch_add(&e->active, n);
    atomic_fetch_add(&e->tenant_active[tenant], n);
}

int engine_check_capacity(const struct engine *e, int32_t tenant, int32_t n, struct err *err)
{
    int rc = check_state(e, err);

    if (rc == 0) {
        rc = check_tenant_quota(e, tenant, n, err);
    }
    return rc == 0 ? inbox_check(&e->inbox, n, err) : rc;
}

int engine_submit_all(struct engine *e, struct request **r, int32_t n, struct err *err)
{
    int32_t made = 0;
    struct group **g = calloc((size_t)n, sizeof(*g));
    int rc = g ? 0 : err_nomem(err, "a set of requests");

    if (rc == 0) {
        rc = engine_check_capacity(e, r[0]->tenant, n, err);
    }
    for (; rc == 0 && made < n; made++) {
        rc = prepare(e, r[made], &g[made], err);
    }
    if (rc == 0) {
        count_active(e, r[0]->tenant, n);
        for (int32_t i = 0; i < n; i++) {
            request_ref(r[i]);
        }
        rc = inbox_submit(&e->inbox, g, n, err);
        if (rc < 0) {
            count_active(e, r[0]->tenant, -n);
            for (int32_t i = 0; i < n; i++) {
                request_unref(r[i]);
            }
        }
    }
    for (int32_t i = 0; rc < 0 && i < made; i++) {
        unprepare(r[i], g[i]);
    }
    free(g);
    return rc;
}

int engine_submit(struct engine *e, struct request *r, struct err *err)
{
    return engine_submit_all(e, &r, 1, err);
}

void engine_expect(struct engine *e)
{
    inbox_expect(&e->inbox);
}

void engine_cancel(struct engine *e, struct request *r)
{
    atomic_store(&r->cancelled, true);
    inbox_mark(&e->inbox);
}

void engine_park(struct engine *e, struct request *r, enum request_parking how)
{
    enum request_parking before = (enum request_parking)atomic_exchange(&r->parked, (int)how);

    if (how < before) {
        inbox_mark(&e->inbox);
    }
}
