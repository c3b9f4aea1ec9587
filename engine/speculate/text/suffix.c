#include "engine/speculate/text/suffix.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "engine/speculate/text/followers.h"
#include "engine/speculate/text/store.h"

enum {
    CATCH_UP = 2048,  /* tokens that are indexed in one call */
    LAST_TOKENS = 64, /* that are counted when an answer ends */
    ROOT_TOKENS = 8,  /* of a prompt's end, remembered before its answer */
    LEAST_WINDOW = 256,
    LENGTHS = 6, /* classes of matches by length */
    QUICK = 16,  /* drafts that the rates of a sequence are a mean of */
    SLOW = 128,  /* and those of all */
    FIRST = 8,   /* that the rates at start count as */
    RECENT = 32, /* tokens whose guesses tell how well a sequence is guessed */
};

/* Behind a draft that is less likely to hold no followers are looked for. */
static const float LEAST = 1.0f / 64;

/* The chance that a draft holds when those before it do, by where the match was found
 * and by its length. */
struct rates {
    float own[LENGTHS], store[LENGTHS];
    int32_t n_own[LENGTHS], n_store[LENGTHS]; /* drafts seen, up to SLOW */
};

/* What is known of one sequence that drafts. */
struct state {
    uint64_t order; /* of its group */
    int32_t index;  /* in its group */
    bool taken;
    struct ngram_index text; /* of its prompt and answer */
    uint64_t scope;
    struct rates rates;
    /* The match behind the first n_matched tokens, and what followed it. */
    int32_t n_matched;
    struct ngram_match match;
    bool from_store;          /* where it was found */
    int32_t first;            /* token; -1: no match */
    int32_t n_first;          /* drafts of the step that verifies that are the match's */
    int32_t hint, store_hint; /* where the next one may go on; -1: nowhere */
    /* What most often follows there; the first n_counted tokens are counted. */
    struct follow_context context;
    struct follow_guess guess;
    int32_t n_counted;
    float held, expected; /* guesses of late that were right, and by their chances */
    int32_t next;         /* in the list of free states */
};

struct suffix_drafts {
    struct draft_source base;
    struct suffix_config c;
    struct store store;
    struct followers followers;
    struct rates rates;  /* of all sequences */
    struct state *state; /* [n_seqs + 1] from 1 */
    int32_t free;        /* the first free state; 0: none */
    int32_t window;      /* tokens of a sequence that are found again; a power of two */
    int32_t *memory;     /* [n_seqs, window * 2] chains, heads and pairs */
};

static struct suffix_drafts *suffix_of(struct draft_source *base)
{
    return CONTAINER_OF(base, struct suffix_drafts, base);
}

static struct ngram_text text_of(const struct seq *q)
{
    return (struct ngram_text){.first = q->group->request->prompt,
                               .rest = q->out,
                               .n_first = q->group->n_prompt,
                               .mask = UINT32_MAX};
}

static int32_t n_known(const struct seq *q)
{
    return q->group->n_prompt + q->n_out;
}

/* ---- states ---- */

static uint64_t scope_of(const struct suffix_drafts *d, const struct group *g)
{
    const char *salt = g->request->params.cache_salt;

    return salt ? XXH3_64bits_withSeed(salt, strnlen(salt, LIMIT_PREFIX_SALT_BYTES), d->c.secret)
                : 0;
}

/* The state of a sequence, if it still has one. */
static struct state *state_of(struct suffix_drafts *d, const struct seq *q)
{
    struct state *s = &d->state[q->draft_state];

    return q->draft_state > 0 && s->taken && s->order == q->group->order && s->index == q->index
               ? s
               : NULL;
}

/* The same, or a new one; NULL: all are taken. */
static struct state *state_for(struct suffix_drafts *d, struct seq *q)
{
    struct state *s = state_of(d, q);
    int64_t longest = (int64_t)q->group->n_prompt + q->group->max_tokens;
    uint32_t heads = LEAST_WINDOW / 2;

    if (s || d->free == 0) {
        return s;
    }
    q->draft_state = d->free;
    s = &d->state[q->draft_state];
    d->free = s->next;
    while (heads < (uint32_t)d->window / 2 && heads < longest) {
        heads *= 2;
    }
    ngram_clear(&s->text, heads - 1);
    s->order = q->group->order;
    s->index = q->index;
    s->taken = true;
    s->scope = scope_of(d, q->group);
    s->rates = d->rates;
    s->n_matched = -1;
    s->hint = s->store_hint = -1;
    s->first = -1;
    s->context.n = 0;
    s->n_counted = -1;
    s->held = s->expected = 0;
    return s;
}

static void give_state(struct suffix_drafts *d, struct seq *q)
{
    struct state *s = state_of(d, q);

    if (s) {
        s->taken = false;
        s->next = d->free;
        d->free = q->draft_state;
    }
    q->draft_state = 0;
}

/* ---- how likely drafts hold ---- */

static int32_t class_of(int32_t length)
{
    return length <= 2    ? 0
           : length <= 4  ? 1
           : length <= 7  ? 2
           : length <= 12 ? 3
           : length <= 20 ? 4
                          : 5;
}

static float *rate_in(struct rates *r, const struct state *s)
{
    return (s->from_store ? r->store : r->own) + class_of(s->match.length);
}

static int32_t *seen_in(struct rates *r, const struct state *s)
{
    return (s->from_store ? r->n_store : r->n_own) + class_of(s->match.length);
}

/* A token of the current match was right, or was not. Both rates are means of what was
 * seen last; that of the sequence moves faster, that of all does at first. */
static void learn(struct suffix_drafts *d, struct state *s, bool held)
{
    float *of_seq = rate_in(&s->rates, s), *of_all = rate_in(&d->rates, s);
    int32_t *n = seen_in(&d->rates, s);

    *n = MIN(*n + 1, SLOW - FIRST);
    *of_seq += ((float)held - *of_seq) / QUICK;
    *of_all += ((float)held - *of_all) / (float)(FIRST + *n);
}

/* ---- matches ---- */

/* Index what is known of the sequence; false: more is left than one call may do. */
static bool catch_up(struct state *s, const struct ngram_text *t, int32_t end)
{
    for (int32_t i = 0; i < CATCH_UP && s->text.n < end; i++) {
        ngram_add(&s->text, t, 0);
    }
    return s->text.n == end;
}

static void find_match(struct suffix_drafts *d, struct state *s, const struct seq *q)
{
    struct ngram_text t = text_of(q);
    int32_t end = n_known(q), on = end - MAX(s->n_matched, 0);

    struct ngram_match own = ngram_find(&s->text, &t, 0, &t, end, s->hint < 0 ? -1 : s->hint + on);
    struct ngram_match store = {0, 0};
    if (own.length < NGRAM_LONGEST) {
        store =
            store_find(&d->store, s->scope, &t, end, s->store_hint < 0 ? -1 : s->store_hint + on);
    }
    s->hint = own.length > 0 ? own.position : -1;
    s->store_hint = store.length > 0 ? store.position : -1;
    s->from_store = store.length > own.length;
    s->match = s->from_store ? store : own;
    if (s->match.length > 0) {
        struct ngram_text from = s->from_store ? store_text(&d->store) : t;
        s->first = ngram_token(&from, s->match.position);
    }
}

/* ---- followers ---- */

/* How much likelier guesses are to hold in this sequence than in all. */
static float fit_of(const struct state *s)
{
    const float DOUBT = 2;

    return (s->held + DOUBT) / (s->expected + DOUBT);
}

static float guess_chance(const struct state *s, const struct follow_guess *g)
{
    const float MOST = 0.97f;

    return MIN(g->chance * fit_of(s), MOST);
}

/* Count the tokens of the answer up to `end`; false: more is left than one call may
 * do. */
static bool count_up(struct suffix_drafts *d, struct state *s, const struct seq *q, int32_t end)
{
    struct ngram_text t = text_of(q);

    if (s->n_counted < 0) {
        s->n_counted = q->group->n_prompt;
        for (int32_t i = MAX(s->n_counted - FOLLOW_TOKENS, 0); i < s->n_counted; i++) {
            follow_push(&s->context, ngram_token(&t, i));
        }
    }
    for (int32_t i = 0; i < CATCH_UP && s->n_counted < end; i++) {
        int32_t token = ngram_token(&t, s->n_counted++);
        followers_add(&d->followers, s->scope, &s->context, token);
        follow_push(&s->context, token);
    }
    return s->n_counted == end;
}

/* The token behind the first n_matched has come: whether it is the one that was
 * expected, be it drafted or not. */
static void check_guesses(struct suffix_drafts *d, struct state *s, int32_t token)
{
    const float WEIGHT = 1.0f / RECENT;

    if (s->first >= 0) {
        learn(d, s, s->first == token);
    }
    if (s->guess.chance > 0) {
        s->held += (float)(s->guess.token == token) - WEIGHT * s->held;
        s->expected += s->guess.chance - WEIGHT * s->expected;
    }
}

/* What may follow the known tokens. */
static void look(struct suffix_drafts *d, struct state *s, const struct seq *q)
{
    struct ngram_text t = text_of(q);
    int32_t end = n_known(q);

    if (s->n_matched == end) {
        return;
    }
    if (s->n_matched >= 0) {
        check_guesses(d, s, ngram_token(&t, s->n_matched));
    }
    s->match.length = 0;
    s->first = -1;
    s->guess.chance = 0;
    if (!count_up(d, s, q, end) || !catch_up(s, &t, end)) {
        return;
    }
    find_match(d, s, q);
    s->guess = followers_guess(&d->followers, s->scope, &s->context);
    s->n_matched = end;
}

/* ---- the source ---- */

static float expect(struct draft_source *base, struct seq *q)
{
    struct suffix_drafts *d = suffix_of(base);
    struct state *s = state_for(d, q);

    if (!s) {
        return 0;
    }
    look(d, s, q);
    float match = s->match.length > 0 ? *rate_in(&s->rates, s) : 0,
          guess = guess_chance(s, &s->guess);
    float p = MAX(match, guess);
    return p / (1.0625f - p); /* p + p^2 + …, at most 16 */
}

/* The tokens that follow a match in the sequence's own text; behind its end they are
 * those drafted. */
static int32_t own_tokens(const struct seq *q, int32_t position, int32_t most, int32_t *token)
{
    struct ngram_text t = text_of(q);
    int32_t period = n_known(q) - position;

    for (int32_t i = 0; i < most; i++) {
        token[i] = i < period ? ngram_token(&t, position + i) : token[i - period];
    }
    return most;
}

static int32_t store_tokens(const struct store *s, int32_t position, int32_t most, int32_t *token)
{
    struct ngram_text t = store_text(s);
    int32_t n = 0;

    while (n < most && position + n < s->index.n && ngram_token(&t, position + n) != STORE_END) {
        token[n] = ngram_token(&t, position + n);
        n++;
    }
    return n;
}

/* From n tokens of the match in token[], and what usually follows: at each place the
 * likelier one, and behind the first guess no more of the match. */
static int32_t choose_tokens(struct suffix_drafts *d, struct state *s, int32_t n, int32_t most,
                             int32_t *token, float *prob)
{
    struct follow_context c = s->context;
    struct follow_guess g = s->guess;
    float match = n > 0 ? *rate_in(&s->rates, s) : 0, all = 1;
    int32_t i = 0;

    for (s->n_first = n; i < most; i++) {
        float chance = guess_chance(s, &g);
        if (i < s->n_first && match >= chance) {
            chance = match;
        } else if (chance > 0) {
            s->n_first = MIN(s->n_first, i);
            token[i] = g.token;
        } else {
            break;
        }
        prob[i] = all *= chance;
        follow_push(&c, token[i]);
        g = all > LEAST ? followers_guess(&d->followers, s->scope, &c)
                        : (struct follow_guess){0, 0};
    }
    return i;
}

static int32_t draft(struct draft_source *base, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    struct suffix_drafts *d = suffix_of(base);
    struct state *s = state_for(d, q);

    if (!s) {
        return 0;
    }
    look(d, s, q);
    int32_t n = s->match.length == 0 ? 0
                : s->from_store      ? store_tokens(&d->store, s->match.position, most, token)
                                     : own_tokens(q, s->match.position, most, token);
    return choose_tokens(d, s, n, most, token, prob);
}

/* The first draft is learned from when the token is known. */
static void verified(struct draft_source *base, struct seq *q, int32_t n, int32_t n_accepted)
{
    struct suffix_drafts *d = suffix_of(base);
    struct state *s = state_of(d, q);

    for (int32_t i = 1; s && i < MIN(MIN(n, n_accepted + 1), s->n_first); i++) {
        learn(d, s, i < n_accepted);
    }
}

static void ended(struct draft_source *base, struct group *g)
{
    struct suffix_drafts *d = suffix_of(base);

    for (int32_t i = 0; i < g->n_seqs; i++) {
        struct seq *q = &g->seq[i];
        struct ngram_text t = text_of(q);
        if (q->n_out > 0) {
            store_add(&d->store, scope_of(d, g), &t, MAX(g->n_prompt - ROOT_TOKENS, 0), n_known(q));
        }
        struct state *s = state_of(d, q);
        if (s) {
            int32_t from = MAX(s->n_counted, g->n_prompt);
            count_up(d, s, q, MIN(n_known(q), from + LAST_TOKENS));
        }
        give_state(d, q);
    }
}

/* ---- start and stop ---- */

/* The most tokens a sequence, a power of two, that fit into the memory for all. */
static int32_t window_of(const struct suffix_config *c)
{
    int64_t most = c->bytes / (8 * (int64_t)c->n_seqs);
    int32_t n = LEAST_WINDOW;

    while (n < c->max_len && 2 * (int64_t)n <= most) {
        n *= 2;
    }
    return n;
}

/* Drafts are first taken to hold as often as they do on average. */
static void first_rates(struct rates *r)
{
    static const float OWN[LENGTHS] = {0.25f, 0.5f, 0.6f, 0.7f, 0.8f, 0.9f},
                       STORE[LENGTHS] = {0.2f, 0.3f, 0.4f, 0.6f, 0.8f, 0.9f};

    memcpy(r->own, OWN, sizeof(OWN));
    memcpy(r->store, STORE, sizeof(STORE));
}

int suffix_open(struct suffix_drafts **ret, const struct suffix_config *c, struct err *e)
{
    struct suffix_drafts *d = calloc(1, sizeof(*d));

    if (!d) {
        return err_nomem(e, "drafts");
    }
    d->base = (struct draft_source){
        .expect = expect, .draft = draft, .verified = verified, .ended = ended};
    d->c = *c;
    d->window = window_of(c);
    first_rates(&d->rates);
    size_t ints = (size_t)d->window * 2;
    d->state = calloc((size_t)c->n_seqs + 1, sizeof(*d->state));
    d->memory = calloc((size_t)c->n_seqs * ints, sizeof(*d->memory)); /* touched where needed */
    if (!d->state || !d->memory || store_init(&d->store, c->store_tokens, e) < 0) {
        suffix_free(d);
        return err_nomem(e, "drafts");
    }
    if (followers_init(&d->followers, c->follower_sets, e) < 0) {
        suffix_free(d);
        return ERR_NOMEM;
    }
    for (int32_t i = 1; i <= c->n_seqs; i++) {
        struct state *s = &d->state[i];
        s->text.next = d->memory + (size_t)(i - 1) * ints;
        s->text.head = s->text.next + d->window;
        s->text.pair = s->text.head + d->window / 2;
        s->text.window = d->window;
        s->next = i < c->n_seqs ? i + 1 : 0;
    }
    d->free = 1;
    *ret = d;
    return 0;
}

void suffix_free(struct suffix_drafts *d)
{
    if (!d) {
        return;
    }
    store_release(&d->store);
    followers_release(&d->followers);
    free(d->state);
    free(d->memory);
    free(d);
}

struct draft_source *suffix_source(struct suffix_drafts *d)
{
    return &d->base;
}
