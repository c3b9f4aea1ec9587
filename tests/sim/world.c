/* Runs a scenario through scheduler, packer, oracle and commit as engine/loop/loop.c
 * does, and compares every delta with what the request gives alone. Checks all
 * invariants after each step. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/masks.h"
#include "engine/output/emit.h"
#include "engine/sched/decode/decode.h"
#include "engine/sched/decode/forced.h"
#include "engine/sched/decode/pack.h"
#include "engine/sched/decode/stops.h"
#include "engine/speculate/draft_model.h"
#include "engine/stats.h"
#include "tests/sim/drafts.h"
#include "tests/sim/language.h"
#include "tests/sim/many.h"
#include "tests/sim/scenario.h"
#include "tests/sim/toy.h"

enum { TURN_US = 1000, TURNS = 20000, SIM_TEXT = SIM_PROMPT + SIM_OUTPUT };

/* The output of a choice, as its client reads it. */
struct sim_said {
    char text[SIM_TEXT];
    int32_t offset[SIM_TEXT]; /* by token, an echoed prompt's too */
    int32_t len, n_tokens;
    int32_t finish, stop_token;
    const char *stop_string;
};

/* One request and what came back for it. */
struct journey {
    const struct sim_request *plan;
    struct sim_request less; /* `plan` with a lowered max_tokens */
    struct request request;
    char *stop[SIM_STOPS];
    struct stop_set *stops;
    struct word_list words;
    _Atomic int32_t stop_at[SIM_WIDTH];
    struct sim_choice got[SIM_WIDTH], want[SIM_WIDTH];
    struct sim_said said[SIM_WIDTH];
    int32_t stop_seen[SIM_WIDTH]; /* turn at which the text ended; 0: not yet */
    int32_t n_at_mark[SIM_WIDTH]; /* tokens committed when the engine was told */
    int32_t cancel_turn;
    int32_t n_scores;
    bool submitted, refused, ended, cancelled, tie;
};

struct world {
    const struct scenario *s;
    struct sim_totals *totals;
    struct executor *executor;
    struct sched *sched;
    struct packer *packer;
    struct plan plan[SIM_DEPTH + 1];
    struct mask_set set[SIM_DEPTH + 1]; /* likewise by launch */
    struct mask_job *jobs;              /* of all sets */
    uint64_t begun, delivered;          /* sets */
    int64_t states_before;              /* language_states, before the run */
    struct executor *draft_executor;    /* NULL: no draft model */
    struct draft_model *draft_model;
    struct sim_drafts drafts;
    struct forced_drafts forced;
    struct delta_out out;
    struct sink sink;
    struct output_processor output_processor;
    struct engine_stats stats;
    struct delta held; /* the last delta, which the end of its choice may follow */
    bool holds;
    int32_t portion_left; /* deltas still granted in this turn */
    struct journey journey[SIM_REQUESTS];
    uint64_t launched, committed;
    int32_t turn;
    char *why;
    size_t why_size;
};

#define FAIL(w, ...) ((void)((w)->why[0] ? 0 : snprintf((w)->why, (w)->why_size, __VA_ARGS__)))

static bool failed(const struct world *w)
{
    return w->why[0] != '\0';
}

/* ---- what comes back ---- */

static void on_token(struct world *w, struct journey *j, const struct delta *d)
{
    struct sim_choice *c = &j->got[d->choice];
    int32_t id = (int32_t)(j - w->journey);

    if (c->finish != FINISH_NONE || c->n >= j->plan->max_tokens) {
        FAIL(w, "request %d choice %d got a token after its end", id, d->choice);
        return;
    }
    c->logprob[c->n] = d->logprob;
    c->token[c->n++] = d->token;
    if (j->plan->text_stop[d->choice] == c->n) {
        j->stop_seen[d->choice] = w->turn;
    }
    if (j->plan->n_logprobs > 0 && j->plan->beam_width == 0) {
        int32_t n = MIN(j->plan->n_logprobs, w->s->config.vocab);
        if (d->n_top < n || d->top_logprob[0] < d->logprob) {
            FAIL(w, "request %d choice %d: top log-probabilities are missing or out of order", id,
                 d->choice);
        }
    }
}

static void on_prompt(struct world *w, struct journey *j, const struct delta *d)
{
    int32_t position = j->n_scores++, id = (int32_t)(j - w->journey);

    if (d->token != j->plan->prompt[position]) {
        FAIL(w, "request %d: prompt token %d is reported as %d", id, position, d->token);
    } else if (position == 0 ? !isnan(d->logprob)
                             : d->logprob != reference_score(w->s, j->plan, position)) {
        FAIL(w, "request %d: prompt token %d has a wrong log-probability", id, position);
    }
}

/* Leading tokens of its prompt that are pinned: they are found whatever the salt. */
static int32_t pinned_tokens(const struct world *w, const struct journey *j)
{
    int32_t n = 0, most = MIN(w->s->n_pin, j->plan->n_prompt);

    while (n < most && j->plan->prompt[n] == w->s->request[0].prompt[n]) {
        n++;
    }
    return n;
}

/* ---- what clients read ---- */

/* The echoed prompt before a choice's text. */
static void say_prompt(struct world *w, struct sim_said *said, const struct request *r)
{
    struct prompt_walk *walk;
    struct token_out t;
    struct buf text;

    buf_init(&text, SIM_TEXT);
    if (prompt_walk_new(&walk, r, NULL) < 0) {
        FAIL(w, "no memory for a prompt");
        return;
    }
    while (prompt_walk_next(walk, &t, &text) == 0) {
        if (r->params.echo) {
            said->offset[said->n_tokens++] = t.text_offset;
        }
    }
    if (text.len) {
        memcpy(said->text + said->len, text.data, text.len);
        said->len += (int32_t)text.len;
    }
    prompt_walk_free(walk);
    buf_release(&text);
}

static void on_output(struct sink *sink, const struct output *o)
{
    struct world *w = CONTAINER_OF(sink, struct world, sink);
    struct journey *j = o->request->user;

    if (o->choice < 0) {
        return;
    }
    struct sim_said *said = &j->said[o->choice];
    int32_t id = (int32_t)(j - w->journey), len = (int32_t)o->text_len;
    if (said->finish != FINISH_NONE || said->len + len > SIM_TEXT ||
        said->n_tokens + o->n_tokens > SIM_TEXT) {
        FAIL(w, "request %d choice %d: more is said than there is", id, o->choice);
        return;
    }
    if (o->prompt) {
        say_prompt(w, said, o->request);
        return;
    }
    memcpy(said->text + said->len, o->text, (size_t)len);
    said->len += len;
    for (int32_t i = 0; i < o->n_tokens; i++) {
        said->offset[said->n_tokens++] = o->token[i].text_offset;
    }
    said->finish = o->finish;
    said->stop_token = o->stop_token;
    said->stop_string = o->stop_string;
}

static void emit_held(struct world *w, const struct delta *next)
{
    if (w->holds && emit_delta(&w->output_processor, &w->held, next) < 2 && next) {
        w->held = *next;
    } else {
        w->holds = false;
    }
}

/* Pass a delta to the output side as its ring does, without top log-probabilities. */
static void say(struct world *w, const struct delta *d)
{
    struct delta bare = *d;

    bare.n_top = 0;
    if (w->holds) {
        emit_held(w, &bare);
    } else {
        w->held = bare;
        w->holds = true;
    }
}

static bool others_with_salt(const struct world *w, const struct journey *j)
{
    for (int32_t i = 0; i < w->s->n_requests; i++) {
        if (&w->journey[i] != j && w->journey[i].submitted &&
            w->journey[i].plan->salt == j->plan->salt) {
            return true;
        }
    }
    return false;
}

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    struct world *w = CONTAINER_OF(out, struct world, out);
    struct journey *j = d->request->user;
    int32_t id = (int32_t)(j - w->journey);

    (void)g;
    say(w, d);
    if (j->ended || d->choice >= sim_choices(j->plan)) {
        FAIL(w, "request %d: a delta after its end, or of a choice it does not have", id);
    } else if (d->kind == DELTA_TOKEN) {
        on_token(w, j, d);
    } else if (d->kind == DELTA_PROMPT) {
        on_prompt(w, j, d);
    } else if (d->kind == DELTA_FINISH) {
        if (j->got[d->choice].finish != FINISH_NONE) {
            FAIL(w, "request %d choice %d finished twice", id, d->choice);
        }
        j->got[d->choice].finish = d->finish;
        j->got[d->choice].stop_token = d->stop_token;
    } else {
        j->ended = true;
        w->totals->cached_tokens += d->cached_tokens;
        if (d->cached_tokens < 0 || d->cached_tokens >= j->plan->n_prompt) {
            FAIL(w, "request %d: %d cached tokens of %d", id, d->cached_tokens, j->plan->n_prompt);
        }
        bool alone = !others_with_salt(w, j);
        if (alone && d->cached_tokens > pinned_tokens(w, j)) {
            FAIL(w, "request %d reads the cache of another salt", id);
        }
        w->totals->pin_hits += alone && d->cached_tokens > 0;
        bool resumed = sched_has_states(&w->s->config) && d->cached_tokens > 0;
        w->totals->state_hits += resumed;
        w->totals->chunk_hits += w->s->config.kv_chunked && d->cached_tokens > 0;
        w->totals->state_tails += resumed && d->cached_tokens % w->s->config.block_size != 0;
    }
}

static bool take(struct delta_out *out, int32_t n)
{
    struct world *w = CONTAINER_OF(out, struct world, out);

    if (w->s->portion == 0) {
        return true;
    }
    if (n > w->portion_left) {
        return false;
    }
    w->portion_left -= n;
    return true;
}

/* ---- what goes in ---- */

static struct word_list words_of(const struct sim_request *r)
{
    return (struct word_list){(int32_t *)r->word, (int32_t *)r->word_first, r->n_words};
}

static int make_group(struct world *w, struct journey *j, struct group **ret, struct err *e)
{
    return group_new(ret, &j->request, &j->words, &w->s->config, e);
}

/* A default max_tokens was lowered to the most that fits: check that one more does not.
 * From here on the lowered one is expected. */
static void take_less(struct world *w, struct journey *j, int32_t max_tokens)
{
    struct gen_params *p = &j->request.params;
    struct group *g = NULL;
    struct err e = {0};

    w->totals->yielded++;
    p->max_tokens_yields = false;
    p->max_tokens = max_tokens + 1;
    if (make_group(w, j, &g, &e) == 0) {
        FAIL(w, "a default max_tokens became %d, and %d fits", max_tokens, max_tokens + 1);
        group_free(g);
    }
    p->max_tokens = max_tokens;
    j->less = *j->plan;
    j->less.max_tokens = max_tokens;
    j->plan = &j->less;
}

static void submit(struct world *w, struct journey *j)
{
    struct group *g = NULL;
    struct err e = {0};
    struct request *r = &j->request;

    j->submitted = true;
    sim_request_params(j->plan, j->stop, &r->params);
    r->seed = r->params.seed;
    r->prompt = (int32_t *)j->plan->prompt;
    r->n_prompt = j->plan->n_prompt;
    r->arrival_us = (int64_t)w->turn * TURN_US;
    r->user = j;
    r->tenant = j->plan->tenant;
    r->weight = j->plan->weight;
    r->stop_at = j->stop_at;
    atomic_init(&r->refs, 2); /* the journey's, and one that the last delta releases */
    for (int32_t i = 0; i < SIM_WIDTH; i++) {
        atomic_init(&j->stop_at[i], INT32_MAX);
    }
    bool impossible = reference_impossible(w->s, j->plan);
    j->words = words_of(j->plan);
    if (stop_set_new(&j->stops, r->params.stop, NULL, r->params.n_stop, &e) < 0) {
        FAIL(w, "stop_set_new: %s", e.text);
    }
    r->stops = j->stops;
    if (make_group(w, j, &g, &e) < 0) {
        if (e.code != ERR_INVALID && e.code != ERR_UNSUPPORTED) {
            FAIL(w, "group_new: %s", e.text);
        }
        if (strstr(e.text, "is banned") && !impossible) {
            FAIL(w, "request %d is possible, and refused: %s", (int32_t)(j - w->journey), e.text);
        }
        j->refused = j->ended = true;
        w->totals->refused++;
        return;
    }
    if (impossible) {
        FAIL(w, "request %d bans every token and is not refused", (int32_t)(j - w->journey));
    }
    if (j->plan->language) {
        g->first.constraint =
            language_node(j->plan->language, j->plan->language_fails, &w->s->config);
        w->totals->constrained++;
    }
    if (output_state_new(r, w->s->config.tokenizer, &e) < 0) {
        FAIL(w, "output_state_new: %s", e.text);
    }
    if (g->max_tokens != j->plan->max_tokens) {
        take_less(w, j, g->max_tokens);
    }
    j->tie = !reference_run(w->s, j->plan, j->want);
    w->totals->requests++;
    w->totals->beams += j->plan->beam_width > 1;
    if (sched_add(w->sched, g, (int64_t)w->turn * TURN_US) < 0) {
        FAIL(w, "sched_add refuses a request although the queue is not full");
    }
}

static void park(const struct world *w, struct journey *j)
{
    int32_t at = w->turn - j->plan->arrival;
    bool parked =
        j->plan->park > 0 && at >= j->plan->park && at < j->plan->park + j->plan->park_turns;

    atomic_store(&j->request.parked, parked ? j->plan->park_how : PARK_NONE);
}

static void set_stop_mark(struct journey *j, int32_t i)
{
    if (atomic_load(&j->stop_at[i]) == INT32_MAX) {
        j->n_at_mark[i] = j->got[i].n;
    }
    atomic_store(&j->stop_at[i], j->plan->text_stop[i]);
}

static void marks(struct world *w, struct journey *j)
{
    /* With a limited portion, each end of another request may take a turn. */
    int32_t ends = w->s->portion > 0 ? SIM_REQUESTS : 0;

    if (j->cancelled && w->turn > j->cancel_turn + SIM_DEPTH + 3 + ends) {
        FAIL(w, "request %d was cancelled and is still there", (int32_t)(j - w->journey));
    }
    if (j->plan->cancel > 0 && w->turn >= j->plan->arrival + j->plan->cancel && !j->cancelled) {
        j->cancelled = true;
        j->cancel_turn = w->turn;
        w->totals->cancelled++;
        atomic_store(&j->request.cancelled, true);
    }
    for (int32_t i = 0; i < SIM_WIDTH && j->plan->beam_width == 0; i++) {
        if (j->stop_seen[i] > 0 && w->turn >= j->stop_seen[i] + j->plan->text_lag) {
            set_stop_mark(j, i);
        }
    }
}

/* ---- one turn ---- */

static void check(struct world *w, const struct plan *p)
{
    const char *wrong = sched_check(w->sched, p);

    if (wrong) {
        FAIL(w, "turn %d: %s", w->turn, wrong);
    }
}

/* ---- masks ---- */

static struct mask_set *set_at(struct world *w, uint64_t launch)
{
    return &w->set[launch % (SIM_DEPTH + 1)];
}

/* The masks of the set begun last. */
static void deliver(struct world *w)
{
    struct mask_set *set = set_at(w, w->delivered++);
    const struct sched_config *c = &w->s->config;
    struct late_mask late[SIM_REQUESTS * SIM_WIDTH] = {{0}};
    uint32_t word[SIM_REQUESTS * SIM_WIDTH * ((TOY_MAX_VOCAB + 31) / 32)];
    int32_t words = mask_words(c->vocab);
    struct err e;

    for (int32_t i = 0; i < set->n; i++) {
        struct mask_job *j = &set->job[set->n - 1 - i]; /* in any order */
        if (!j->node) {
            continue;
        }
        mask_job_run(j, c, MASK_WORK_STEP, word + (ptrdiff_t)j->first * words);
        w->totals->late_masks += j->late;
        for (int32_t k = 0; k < j->n_masked; k++) {
            late[j->first + k].word = word + (ptrdiff_t)(j->first + k) * words;
        }
        w->totals->sentences += j->ended;
    }
    if (set->n > 0 && w->executor->masks(w->executor, set->step, late, set->n_masks, &e) < 0) {
        FAIL(w, "masks of step %llu: %s", (unsigned long long)set->step, e.text);
    }
}

static void begin_masks(struct world *w)
{
    while (w->begun < w->launched && w->begun <= w->committed) {
        mask_set_begin(set_at(w, w->begun++));
        if (!w->s->late_delivery) {
            deliver(w);
        }
    }
}

static void free_dropped(struct world *w)
{
    for (struct constraint_node *n = sched_take_dropped(w->sched), *next; n; n = next) {
        next = n->next;
        constraint_node_free(n);
    }
}

/* The step took some time, in stairs of four rows; now and then it was disturbed. */
static void observe(struct world *w, const struct plan *p)
{
    struct rng r = {w->s->seed ^ (p->step * 0x9e3779b97f4a7c15u)};
    int32_t us = w->s->config.cost.token_us > 0 && w->s->timed
                     ? 100 + 40 * ((p->n_tokens + 3) / 4) + rng_range(&r, 0, 20)
                     : 0;

    sched_observe(w->sched, p, rng_chance(&r, 5) ? 20 * (int64_t)us : us);
}

static void commit(struct world *w)
{
    struct results r;
    struct err e;

    while (w->delivered < w->begun) {
        deliver(w);
    }
    if (w->executor->wait(w->executor, &r, &e) < 0) {
        FAIL(w, "wait: %s", e.text);
        return;
    }
    mask_set_collect(w->sched, set_at(w, w->committed));
    check(w, NULL);
    observe(w, &w->plan[w->committed % (SIM_DEPTH + 1)]);
    decode_commit(w->sched, &w->plan[w->committed++ % (SIM_DEPTH + 1)], &r,
                  (int64_t)w->turn * TURN_US, &w->out);
    check(w, NULL);
    if (w->drafts.why[0]) {
        FAIL(w, "turn %d: %s", w->turn, w->drafts.why);
    }
    if (w->draft_model && draft_model_death(w->draft_model)) {
        FAIL(w, "turn %d: draft model: %s", w->turn, draft_model_death(w->draft_model));
    }
    begin_masks(w);
}

static void step(struct world *w)
{
    struct plan *p = &w->plan[w->launched % (SIM_DEPTH + 1)];
    struct batch b;
    struct err e;
    int32_t n = sched_plan(w->sched, (int64_t)w->turn * TURN_US, p);

    check(w, p);
    if (n > 0 && !failed(w)) {
        mask_set_plan(set_at(w, w->launched), p);
        w->launched++;
        w->totals->steps++;
        w->totals->tokens += p->n_tokens;
        w->totals->copies += p->n_copy;
        pack_batch(w->packer, p, &b);
        if (w->executor->launch(w->executor, &b, &e) < 0) {
            FAIL(w, "turn %d, step %llu: %s", w->turn, (unsigned long long)b.step, e.text);
        }
        if (b.n_late_mask != set_at(w, w->launched - 1)->n_masks) {
            FAIL(w, "turn %d: the packer numbers %d late masks", w->turn, b.n_late_mask);
        }
        begin_masks(w);
    }
    if (!failed(w) && w->launched - w->committed > (uint64_t)(n > 0 ? w->s->depth : 0)) {
        commit(w);
    }
    decode_reap(w->sched, &w->out);
    free_dropped(w);
    emit_held(w, NULL);
    check(w, NULL);
}

static bool all_ended(const struct world *w)
{
    for (int32_t i = 0; i < w->s->n_requests; i++) {
        if (!w->s->request[i].absent && !w->journey[i].ended) {
            return false;
        }
    }
    return w->launched == w->committed;
}

static void turn(struct world *w)
{
    w->turn++;
    for (int32_t i = 0; i < w->s->n_requests; i++) {
        struct journey *j = &w->journey[i];
        if (j->plan->absent) {
            continue;
        }
        if (!j->submitted && w->turn > j->plan->arrival) {
            submit(w, j);
        }
        if (j->submitted && !j->ended) {
            marks(w, j);
        }
        park(w, j);
    }
    w->portion_left = w->s->portion;
    step(w);
}

/* ---- the verdict ---- */

static bool same_tokens(const struct sim_choice *a, const struct sim_choice *b, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (a->token[i] != b->token[i] || a->logprob[i] != b->logprob[i]) {
            return false;
        }
    }
    return true;
}

/* Whether it was ended early: by its client, a time-out, or a NaN. */
static bool cut_short(const struct world *w, const struct journey *j, const struct sim_choice *got)
{
    const struct sched_config *c = &w->s->config;

    if (got->finish == FINISH_ABORT) {
        return j->cancelled || c->queue_timeout_us > 0 || c->request_timeout_us > 0;
    }
    return got->finish == FINISH_ERROR && w->s->fail_at > 0;
}

/* The text of a choice by its tokens, without the echo. Returns its length. For a
 * sample that a stop string has ended it includes tokens sampled before the engine was
 * told. */
static int32_t text_of(const struct world *w, const struct journey *j, const struct sim_choice *c,
                       char *ret, const char **ret_stop)
{
    const struct sim_request *r = j->plan;
    int32_t n = c->n, stop_token;
    bool by_token =
        n > 0 && reference_finish(w->s, r, c->token[n - 1], n, &stop_token) == FINISH_STOP;

    for (int32_t i = 0; i < n; i++) {
        ret[i] = (char)c->token[i];
    }
    *ret_stop = c->finish == FINISH_STOP && !by_token ? reference_stop(r, c) : NULL;
    int32_t cut = by_token ? 1 : *ret_stop ? (int32_t)strlen(*ret_stop) : 0;
    return r->include_stop ? n : n - cut;
}

/* The client's text is that of the engine's tokens. */
static void judge_said(struct world *w, struct journey *j, int32_t i)
{
    const struct sim_choice *got = &j->got[i];
    const struct sim_said *said = &j->said[i];
    char text[SIM_TEXT];
    const char *stop;
    int32_t id = (int32_t)(j - w->journey), echoed = j->plan->echo ? j->plan->n_prompt : 0;

    /* The report of a search may be dropped halfway: then a stop string was seen, but
     * not the end of the choice. */
    if (j->plan->beam_width > 0 && j->cancelled && got->finish == FINISH_ABORT) {
        return;
    }
    int32_t len = echoed + text_of(w, j, got, text + echoed, &stop);

    for (int32_t k = 0; k < echoed; k++) {
        text[k] = (char)j->plan->prompt[k];
    }
    if (said->len != len || memcmp(said->text, text, (size_t)len) != 0) {
        FAIL(w, "request %d choice %d: its text has %d characters and should have %d, or differs",
             id, i, said->len, len);
    }
    if (said->finish != got->finish || said->stop_token != (stop ? -1 : got->stop_token)) {
        FAIL(w, "request %d choice %d: its text ends by %d (stop id %d)", id, i, said->finish,
             said->stop_token);
    }
    if (stop ? !said->stop_string || strcmp(said->stop_string, stop) != 0
             : said->stop_string != NULL) {
        FAIL(w, "request %d choice %d: its text ends by another stop string", id, i);
    }
    if (said->n_tokens != echoed + got->n) {
        FAIL(w, "request %d choice %d: the text is that of %d tokens", id, i, said->n_tokens);
    }
    for (int32_t k = 0; k < said->n_tokens; k++) {
        if (said->offset[k] != MIN(k, len)) {
            FAIL(w, "request %d choice %d: token %d stands at %d", id, i, k, said->offset[k]);
        }
    }
}

static void judge_choice(struct world *w, struct journey *j, int32_t i)
{
    const struct sim_choice *got = &j->got[i], *want = &j->want[i];
    int32_t id = (int32_t)(j - w->journey), stop = j->plan->text_stop[i];

    if (got->n > want->n || !same_tokens(got, want, got->n)) {
        FAIL(w, "request %d choice %d differs from what it gives alone", id, i);
        return;
    }
    if (j->n_at_mark[i] > 0 && got->n > j->n_at_mark[i] + 1) {
        FAIL(w, "request %d choice %d went on after its text had ended", id, i);
    }
    if (cut_short(w, j, got)) {
        return;
    }
    if (got->n == want->n && got->finish == want->finish && got->stop_token == want->stop_token) {
        return;
    }
    if (j->stop_seen[i] > 0 && got->n >= stop && got->finish == FINISH_STOP) {
        return;
    }
    FAIL(w,
         "request %d choice %d ends after %d tokens by %d (stop id %d); alone after %d by %d (stop "
         "id %d)",
         id, i, got->n, got->finish, got->stop_token, want->n, want->finish, want->stop_token);
}

static void judge(struct world *w)
{
    struct sched_counts c;

    for (int32_t i = 0; i < w->s->n_requests; i++) {
        struct journey *j = &w->journey[i];
        if (j->plan->absent || j->refused || j->tie) {
            continue;
        }
        for (int32_t k = 0; k < sim_choices(j->plan); k++) {
            judge_choice(w, j, k);
        }
        for (int32_t k = 0; k < j->plan->n && j->plan->n == sim_choices(j->plan); k++) {
            judge_said(w, j, k);
        }
        bool scored =
            j->plan->n_prompt_logprobs >= 0 || (j->plan->echo && j->plan->n_logprobs >= 0);
        if (scored && j->got[0].finish != FINISH_ABORT && j->got[0].finish != FINISH_ERROR &&
            j->n_scores != j->plan->n_prompt) {
            FAIL(w, "request %d: %d prompt tokens of %d were scored", i, j->n_scores,
                 j->plan->n_prompt);
        }
    }
    if (language_states() > w->states_before) {
        FAIL(w, "at the end %lld states of grammars are left",
             (long long)(language_states() - w->states_before));
    }
    sched_counts(w->sched, &c);
    w->totals->state_runs += sched_has_states(&w->s->config);
    w->totals->chunk_runs += w->s->config.kv_chunked;
    w->totals->preempt_swap += (int64_t)c.preempt_swap;
    w->totals->swap_in_copied += (int64_t)c.swap_in_copied;
    w->totals->swap_in_found += (int64_t)c.swap_in_found;
    w->totals->preempt_recompute += (int64_t)c.preempt_recompute;
    if (c.blocks_used != w->s->config.n_pinned || c.host_blocks_used || c.running_seqs ||
        c.running_groups || c.waiting_groups || c.swapped_groups) {
        FAIL(w, "at the end %d blocks, %d host blocks, %d slots are still held", c.blocks_used,
             c.host_blocks_used, c.running_seqs);
    }
}

static void pass_over(struct delta_out *out, const struct group *g, const struct delta *d)
{
    (void)out, (void)g, (void)d;
}

static void run_to_end(struct world *w, struct delta_out *out)
{
    struct plan *p = &w->plan[0];
    struct results r;
    struct batch b;
    struct err e = {0};

    while (!failed(w) && sched_plan(w->sched, 0, p) > 0) {
        pack_batch(w->packer, p, &b);
        if (w->executor->launch(w->executor, &b, &e) < 0 ||
            w->executor->wait(w->executor, &r, &e) < 0) {
            FAIL(w, "pinning: %s", e.text);
        } else {
            decode_commit(w->sched, p, &r, 0, out);
        }
        decode_reap(w->sched, out);
        check(w, NULL);
    }
}

/* Pin a prefix as the engine pins those of the settings: a request without salt and
 * without output computes it. */
static void pin(struct world *w)
{
    struct delta_out out = {.emit = pass_over};
    _Atomic int32_t stop_at = INT32_MAX;
    struct request r = {
        .prompt = (int32_t *)w->s->request[0].prompt, .n_prompt = w->s->n_pin, .stop_at = &stop_at};
    struct group *g = NULL;
    struct err e = {0};

    r.params = (struct gen_params){.echo = true,
                                   .n = 1,
                                   .best_of = 1,
                                   .top_p = 1,
                                   .length_penalty = 1,
                                   .repetition_penalty = 1,
                                   .n_logprobs = -1,
                                   .n_prompt_logprobs = -1};
    if (group_new(&g, &r, NULL, &w->s->config, &e) < 0 || sched_add(w->sched, g, 0) < 0) {
        FAIL(w, "pinning: %s", e.text);
        return;
    }
    run_to_end(w, &out);
    int32_t n = failed(w) ? 0 : sched_pin(w->sched, r.prompt, r.n_prompt);
    if (!failed(w) && n != w->s->config.n_pinned) {
        FAIL(w, "%d blocks are pinned, not %d", n, w->s->config.n_pinned);
    }
}

/* ---- drafts ---- */

static const struct sim_choice *want_of(const struct seq *q, const struct sim_request **ret)
{
    const struct journey *j = q->group->request->user;

    if (!j || j->tie) {
        return NULL;
    }
    *ret = j->plan;
    return &j->want[q->index];
}

/* The draft model computes what the model does, in a cache of its own. */
static void open_draft_model(struct world *w)
{
    struct oracle_config oc;
    struct err e = {0};

    if (w->s->draft_model == 0) {
        return;
    }
    scenario_oracle(w->s, &oc);
    oc.n_kv_groups = 1;
    oc.n_host_blocks = 0;
    oc.max_num_batched_tokens = w->s->draft_model;
    oc.head_of = w->s->draft_head && w->s->n_ranks <= 1 ? w->executor : NULL;
    int rc = oracle_open(&w->draft_executor, &oc, &e);
    if (rc == 0) {
        struct draft_model_config c = {.executor = w->draft_executor,
                                       .vocab = oc.vocab,
                                       .max_draft = w->s->max_draft,
                                       .shift = oc.head_of != NULL,
                                       .mask_token = w->s->draft_once ? 0 : -1,
                                       .secret = w->s->seed,
                                       .now_us = clock_us};
        if (w->s->seed % 2 == 0) { /* what drafting takes counts */
            c.cost = w->s->config.cost;
            c.cost.fixed_us /= 20;
        }
        rc = draft_model_open(&w->draft_model, &c, &e);
    }
    if (rc < 0) {
        FAIL(w, "draft model: %s", e.text);
    }
}

static void speculate(struct world *w)
{
    open_draft_model(w);
    sim_drafts_init(&w->drafts, w->s, w->draft_model ? draft_model_source(w->draft_model) : NULL,
                    w->totals);
    w->drafts.want = want_of;
    forced_drafts_init(&w->forced, w->s->only_forced ? NULL : &w->drafts.base);
    bool drafts = w->s->max_draft > 0;
    for (int i = 0; i <= SIM_DEPTH; i++) {
        w->set[i].wants_forced = drafts;
        w->set[i].all_awaited = sched_kv_groups(&w->s->config) > 1;
    }
    if (drafts) {
        sched_speculate(w->sched, &w->forced.base, w->s->max_draft);
    }
}

static int open_world(struct world *w)
{
    struct oracle_config oc;
    struct err e = {0};

    scenario_oracle(w->s, &oc);
    oc.fail_at = w->s->fail_at;
    int rc = w->s->n_ranks > 1 ? many_open(&w->executor, &oc, w->s->n_ranks, w->s->n_stages, &e)
                               : oracle_open(&w->executor, &oc, &e);
    if (rc == 0) {
        rc = sched_new(&w->sched, &w->s->config, &e);
    }
    if (rc == 0) {
        rc = packer_new(&w->packer, &w->s->config, &e);
    }
    for (int i = 0; i <= SIM_DEPTH && rc == 0; i++) {
        rc = plan_init(&w->plan[i], &w->s->config, &e);
    }
    int32_t seqs = w->s->config.max_num_seqs;
    w->jobs = calloc((size_t)seqs * (SIM_DEPTH + 1), sizeof(*w->jobs));
    if (rc == 0 && !w->jobs) {
        rc = err_nomem(&e, "masks");
    }
    if (rc < 0) {
        FAIL(w, "start: %s", e.text);
        return rc;
    }
    for (int i = 0; i <= SIM_DEPTH; i++) {
        w->set[i].job = w->jobs + (ptrdiff_t)i * seqs;
    }
    speculate(w);
    w->out.emit = on_delta;
    w->sink.emit = on_output;
    engine_stats_init(&w->stats);
    w->output_processor = (struct output_processor){
        .tokenizer = w->s->config.tokenizer, .sink = &w->sink, .stats = &w->stats, .now_us = 1};
    w->out.take = take;
    for (int32_t i = 0; i < w->s->n_requests; i++) {
        w->journey[i].plan = &w->s->request[i];
    }
    if (w->s->n_pin > 0) {
        pin(w);
    }
    return 0;
}

int world_run(const struct scenario *s, struct sim_totals *t, char *why, size_t why_size)
{
    struct world w = {
        .s = s, .totals = t, .why = why, .why_size = why_size, .states_before = language_states()};

    why[0] = '\0';
    if (open_world(&w) == 0) {
        while (!failed(&w) && !all_ended(&w) && w.turn < TURNS) {
            turn(&w);
        }
        if (!failed(&w) && !all_ended(&w)) {
            FAIL(&w, "not at its end after %d turns", TURNS);
        }
        if (!failed(&w)) {
            judge(&w);
        }
    }
    t->runs++;
    t->forced += (int64_t)w.forced.drafted;
    t->forced_accepted += (int64_t)w.forced.accepted;
    for (int32_t i = 0; i < s->n_requests; i++) {
        output_state_free(w.journey[i].request.output_state);
        prompt_out_free(w.journey[i].request.prompt_out);
    }
    sched_free(w.sched);
    for (int32_t i = 0; i < s->n_requests; i++) {
        stop_set_free(w.journey[i].stops);
    }
    draft_model_free(w.draft_model);
    if (w.draft_executor) {
        w.draft_executor->free(w.draft_executor);
    }
    packer_free(w.packer);
    free(w.jobs);
    for (int i = 0; i <= SIM_DEPTH; i++) {
        plan_release(&w.plan[i]);
    }
    if (w.executor) {
        w.executor->free(w.executor);
    }
    return failed(&w) ? -1 : 0;
}
