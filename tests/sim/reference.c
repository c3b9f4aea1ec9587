/* What each request gives alone, without blocks, batches or an engine: loops over whole
 * contexts. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/language.h"
#include "tests/sim/scenario.h"
#include "tests/sim/toy.h"

static bool listed(const int32_t *list, int32_t n, int32_t token)
{
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == token) {
            return true;
        }
    }
    return false;
}

static void context_logprobs(const struct scenario *s, const struct sim_request *r,
                             const int32_t *out, int32_t n_out, float *raw)
{
    uint64_t h = toy_start();

    for (int32_t i = 0; i < r->n_prompt; i++) {
        h = toy_read(h, r->prompt[i]);
    }
    for (int32_t i = 0; i < n_out; i++) {
        h = toy_read(h, out[i]);
    }
    toy_logprobs(h, s->config.vocab, raw);
}

static int32_t occurrences(const int32_t *list, int32_t n, int32_t token)
{
    int32_t count = 0;

    for (int32_t i = 0; i < n; i++) {
        count += list[i] == token;
    }
    return count;
}

static bool completes_bad_word(const struct sim_request *r, const int32_t *out, int32_t n_out,
                               int32_t token)
{
    for (int32_t w = 0; w < r->n_words; w++) {
        const int32_t *word = r->word + r->word_first[w];
        int32_t before = r->word_first[w + 1] - r->word_first[w] - 1;
        bool match = word[before] == token && before <= n_out;
        for (int32_t i = 0; match && i < before; i++) {
            match = out[n_out - before + i] == word[i];
        }
        if (match) {
            return true;
        }
    }
    return false;
}

/* Where a text is in the request's language. */
static uint64_t place_of(const struct sim_request *r, const int32_t *out, int32_t n_out)
{
    uint64_t place = language_start(r->language);

    for (int32_t i = 0; i < n_out; i++) {
        place = language_read(place, out[i]);
    }
    return place;
}

/* Whether nothing may follow a text in the request's language, or nothing but an end
 * that is not wanted. */
static bool is_sentence(const struct sim_request *r, const struct sim_choice *c)
{
    return r->language && language_ended(place_of(r, c->token, c->n));
}

static bool banned(const struct scenario *s, const struct sim_request *r, const int32_t *out,
                   int32_t n_out, int32_t token)
{
    if (r->n_allowed > 0 && !listed(r->allowed, r->n_allowed, token)) {
        return true;
    }
    if (n_out < r->min_tokens &&
        (listed(r->stop_token, r->n_stop_token, token) ||
         (!r->ignore_eos && listed(s->config.eos, s->config.n_eos, token)))) {
        return true;
    }
    if (r->language && (!language_allows(place_of(r, out, n_out), token, &s->config) ||
                        (r->ignore_eos && listed(s->config.eos, s->config.n_eos, token)))) {
        return true;
    }
    return completes_bad_word(r, out, n_out, token);
}

/* raw: as the model gives them; logit: after all that the request asks for. */
static void next_logits(const struct scenario *s, const struct sim_request *r, const int32_t *out,
                        int32_t n_out, float *raw, float *logit)
{
    context_logprobs(s, r, out, n_out, raw);
    for (int32_t t = 0; t < s->config.vocab; t++) {
        bool in_prompt = occurrences(r->prompt, r->n_prompt, t) > 0;
        logit[t] = toy_penalise(raw[t], occurrences(out, n_out, t), in_prompt, r->presence,
                                r->frequency, r->repetition);
        float bias = 0;
        for (int32_t i = 0; i < r->n_bias; i++) {
            bias += r->bias[i].token == t ? r->bias[i].bias : 0;
        }
        logit[t] += bias;
        if (banned(s, r, out, n_out, t)) {
            logit[t] = -INFINITY;
        }
    }
}

int reference_finish(const struct scenario *s, const struct sim_request *r, int32_t token,
                     int32_t n, int32_t *stop_token)
{
    *stop_token = -1;
    if (n > r->min_tokens && !r->ignore_eos && listed(s->config.eos, s->config.n_eos, token)) {
        return FINISH_STOP;
    }
    if (n > r->min_tokens && listed(r->stop_token, r->n_stop_token, token)) {
        *stop_token = token;
        return FINISH_STOP;
    }
    return n == r->max_tokens ? FINISH_LENGTH : FINISH_NONE;
}

static void run_sample(const struct scenario *s, const struct sim_request *r, int32_t index,
                       struct sim_choice *c)
{
    float raw[TOY_MAX_VOCAB], logit[TOY_MAX_VOCAB];

    *c = (struct sim_choice){.finish = r->max_tokens == 0 ? FINISH_LENGTH : FINISH_NONE,
                             .stop_token = -1};
    while (c->finish == FINISH_NONE) {
        if (is_sentence(r, c)) {
            c->finish = FINISH_STOP;
            return;
        }
        if (r->language_fails && r->language && language_fails(place_of(r, c->token, c->n))) {
            c->finish = FINISH_IMPOSSIBLE;
            return;
        }
        next_logits(s, r, c->token, c->n, raw, logit);
        struct toy_sampling how = {r->temperature,           r->top_p,          r->min_p, r->top_k,
                                   seq_seed(r->seed, index), r->n_prompt + c->n};
        int32_t t = toy_sample(logit, s->config.vocab, &how);
        if (t < 0) {
            c->finish = FINISH_IMPOSSIBLE;
            return;
        }
        c->logprob[c->n] = raw[t];
        c->token[c->n++] = t;
        c->finish = reference_finish(s, r, t, c->n, &c->stop_token);
    }
}

/* ---- beams, over whole texts ---- */

const char *reference_stop(const struct sim_request *r, const struct sim_choice *c)
{
    const char *longest = NULL;

    for (int32_t i = 0; i < r->n_stop && c->n > r->min_tokens; i++) {
        int32_t len = (int32_t)strlen(r->stop[i]);
        bool match = len <= c->n;
        for (int32_t k = 0; match && k < len; k++) {
            match = c->token[c->n - len + k] == r->stop[i][k];
        }
        if (match && (!longest || strlen(longest) < (size_t)len)) {
            longest = r->stop[i];
        }
    }
    return longest;
}

bool reference_impossible(const struct scenario *s, const struct sim_request *request)
{
    struct sim_request free_one = *request; /* what a language bans is not known at submit */
    const struct sim_request *r = &free_one;

    free_one.language = 0;
    for (int32_t t = 0; t < s->config.vocab; t++) {
        bool biased = false;

        for (int32_t i = 0; i < r->n_bias; i++) {
            biased = biased || (r->bias[i].token == t && r->bias[i].bias == -INFINITY);
        }
        if (!biased && !banned(s, r, NULL, 0, t)) {
            return false;
        }
    }
    return r->max_tokens > 0;
}

struct text {
    struct sim_choice c;
    double cum, score;
};

struct option {
    double cum;
    int32_t from, token;
    float logit;
};

static int by_cum(const void *a, const void *b)
{
    double x = ((const struct option *)a)->cum, y = ((const struct option *)b)->cum;

    return x < y ? 1 : x > y ? -1 : 0;
}

static int by_score(const void *a, const void *b)
{
    double x = ((const struct text *)a)->score, y = ((const struct text *)b)->score;

    return x < y ? 1 : x > y ? -1 : 0;
}

static struct text longer(const struct text *t, const struct option *o)
{
    struct text x = *t;

    x.cum = o->cum;
    x.c.logprob[x.c.n] = o->logit;
    x.c.token[x.c.n++] = o->token;
    return x;
}

/* All candidates of all live texts, best first. Returns how many. */
static int32_t options(const struct scenario *s, const struct sim_request *r,
                       const struct text *live, int32_t n_live, struct option *ret)
{
    float raw[TOY_MAX_VOCAB], logit[TOY_MAX_VOCAB];
    int32_t n = 0;

    for (int32_t i = 0; i < n_live; i++) {
        if (is_sentence(r, &live[i].c)) {
            continue;
        }
        next_logits(s, r, live[i].c.token, live[i].c.n, raw, logit);
        for (int32_t t = 0; t < s->config.vocab; t++) {
            if (logit[t] != -INFINITY) {
                ret[n++] = (struct option){live[i].cum + (double)logit[t], i, t, logit[t]};
            }
        }
    }
    qsort(ret, (size_t)n, sizeof(*ret), by_cum);
    return n;
}

static bool search_over(const struct sim_request *r, const struct text *live, int32_t n_live,
                        const struct text *done, int32_t n_done)
{
    if (n_live == 0) {
        return true;
    }
    if (n_done < r->beam_width) {
        return false;
    }
    int32_t length = r->early_stopping == 2 && r->length_penalty > 0 ? r->max_tokens : live[0].c.n;
    return r->early_stopping == 1 ||
           live[0].cum / pow(length, (double)r->length_penalty) <= done[r->beam_width - 1].score;
}

/* No text has ended and none can continue: the tokens are those on which all live ones
 * agree. */
static void run_dry(const struct sim_request *r, const struct text *live, int32_t n_live,
                    struct sim_choice *ret)
{
    struct sim_choice c = live[0].c;

    for (int32_t i = 1; i < n_live; i++) {
        for (int32_t k = 0; k < c.n; k++) {
            c.n = c.token[k] == live[i].c.token[k] ? c.n : k;
        }
    }
    c.finish = FINISH_IMPOSSIBLE;
    for (int32_t i = 0; i < r->n; i++) {
        ret[i] = c;
    }
}

/* The texts of a beam search; max_tokens is at least 1. False: two candidates tie, so
 * that their order is not defined. */
static bool run_beams(const struct scenario *s, const struct sim_request *r, struct sim_choice *ret)
{
    struct text live[SIM_WIDTH] = {{.c.stop_token = -1}}, next[SIM_WIDTH], done[3 * SIM_WIDTH];
    struct option option[SIM_WIDTH * TOY_MAX_VOCAB];
    int32_t n_live = 1, n_done = 0, k = r->beam_width;

    do {
        int32_t n = options(s, r, live, n_live, option), n_next = 0;
        for (int32_t i = 0; i < n_live; i++) {
            if (is_sentence(r, &live[i].c)) {
                done[n_done] = live[i];
                done[n_done].c.finish = FINISH_STOP;
                done[n_done++].score =
                    live[i].cum / pow(MAX(live[i].c.n, 1), (double)r->length_penalty);
            }
        }
        if (n == 0 && n_done == 0) {
            run_dry(r, live, n_live, ret);
            return true;
        }
        for (int32_t i = 0; i < n; i++) {
            int32_t stop_token = -1;
            struct text x = longer(&live[option[i].from], &option[i]);
            x.c.finish = reference_finish(s, r, option[i].token, x.c.n, &stop_token);
            x.c.stop_token = stop_token;
            if (reference_stop(r, &x.c)) {
                x.c.finish = FINISH_STOP;
            }
            x.score = x.cum / pow(x.c.n, (double)r->length_penalty);
            if (i > 0 && i <= 3 * k && option[i].cum == option[i - 1].cum) {
                return false;
            }
            if (x.c.finish != FINISH_NONE && i < k) {
                done[n_done++] = x;
            } else if (x.c.finish == FINISH_NONE && n_next < k) {
                next[n_next++] = x;
            }
        }
        qsort(done, (size_t)n_done, sizeof(*done), by_score);
        n_done = MIN(n_done, k);
        n_live = n_next;
        memcpy(live, next, sizeof(live));
    } while (!search_over(r, live, n_live, done, n_done));
    for (int32_t i = 0; i < r->n; i++) {
        ret[i] = done[MIN(i, n_done - 1)].c;
    }
    for (int32_t i = 1; i < n_done; i++) {
        if (done[i].score == done[i - 1].score) {
            return false;
        }
    }
    return true;
}

bool reference_run(const struct scenario *s, const struct sim_request *r, struct sim_choice *ret)
{
    if (r->beam_width > 0 && r->max_tokens > 0) {
        return run_beams(s, r, ret);
    }
    for (int32_t i = 0; i < r->best_of; i++) {
        run_sample(s, r, i, &ret[i]);
    }
    return true;
}

float reference_score(const struct scenario *s, const struct sim_request *r, int32_t position)
{
    float raw[TOY_MAX_VOCAB];
    struct sim_request shorter = *r;

    shorter.n_prompt = position;
    context_logprobs(s, &shorter, NULL, 0, raw);
    return raw[r->prompt[position]];
}
