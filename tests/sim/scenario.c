#include "tests/sim/scenario.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/tokenizer/tokenizer.h"
#include "tests/sim/toy.h"

/* Ids are characters. One for all runs. */
static const struct tokenizer *tokenizer(void)
{
    static struct tokenizer *t;
    struct err e;

    if (!t && tokenizer_open_bytes(&t, &e) < 0) {
        fprintf(stderr, "scenario: %s\n", e.text);
        exit(1);
    }
    return t;
}

static void random_config(struct scenario *s, struct rng *r)
{
    struct sched_config *c = &s->config;
    static const int32_t sizes[] = {1, 2, 3, 4, 4, 8, 16};

    c->block_size = sizes[rng_range(r, 0, (int32_t)ARRAY_LEN(sizes) - 1)];
    c->vocab = rng_range(r, 3, 40);
    c->tokenizer = tokenizer();
    c->max_len = SIM_PROMPT + SIM_OUTPUT;
    int32_t full = (int32_t)div_ceil(c->max_len, c->block_size);
    c->n_blocks = rng_range(r, MAX(full / 2, 2), rng_chance(r, 70) ? full * 3 / 2 + 1 : full * 5);
    c->n_host_blocks = rng_chance(r, 30) ? 0 : rng_range(r, 1, c->n_blocks);
    c->max_num_seqs = rng_chance(r, 20) ? rng_range(r, 1, 4) : rng_range(r, 4, 12);
    c->max_num_batched_tokens = c->max_num_seqs + rng_range(r, 0, rng_chance(r, 40) ? 6 : 60);
    c->max_logits = c->max_num_seqs + rng_range(r, 1, 12);
    c->max_waiting = SIM_REQUESTS;
    c->group_bytes = (int64_t)1 << 20;
    c->preemption = rng_range(r, PREEMPT_AUTO, PREEMPT_RECOMPUTE);
    if (c->preemption == PREEMPT_SWAP) {
        c->n_host_blocks = MAX(c->n_host_blocks, 1);
    }
    c->policy = rng_chance(r, 50) ? POLICY_FCFS : rng_chance(r, 30) ? POLICY_PRIORITY : POLICY_FAIR;
    c->prefix_cache = rng_chance(r, 70);
    c->cost = (struct step_cost){100, 10, 0.1, rng_range(r, 1, 60), 12, 11};
    c->target_itl_us = rng_chance(r, 20) ? rng_range(r, 100, 400) : 0;
    c->queue_timeout_us = rng_chance(r, 10) ? rng_range(r, 1, 40) * 1000 : 0;
    c->request_timeout_us = rng_chance(r, 10) ? rng_range(r, 5, 80) * 1000 : 0;
    c->secret = rng_next(r);
    c->n_eos = rng_chance(r, 50) ? 0 : rng_range(r, 1, 2);
    for (int32_t i = 0; i < c->n_eos; i++) {
        c->eos[i] = rng_range(r, 0, c->vocab - 1);
    }
    c->hash_bits = rng_chance(r, 20) ? rng_range(r, 1, 3) : 0;
    s->depth = rng_chance(r, 20) ? 0 : rng_chance(r, 75) ? 1 : 2;
    s->fail_at = rng_chance(r, 3) ? (uint64_t)rng_range(r, 2, 30) : 0;
    if (c->policy == POLICY_FAIR) {
        c->shared_itl_us = rng_chance(r, 50) ? rng_range(r, 100, 400) : 0;
    }
}

/* The next turn of a conversation: another request's prompt and its answer, and a
 * little more. Returns the tokens of both, as far as there is room. */
static int32_t random_turn(const struct scenario *s, struct sim_request *q,
                           const struct sim_request *o, struct rng *r)
{
    struct sim_choice answer[SIM_WIDTH];

    if (!reference_run(s, o, answer)) {
        return 0;
    }
    int32_t n = MIN(o->n_prompt + answer[0].n, SIM_PROMPT - 1);
    memcpy(q->prompt, o->prompt, (size_t)o->n_prompt * sizeof(*q->prompt));
    if (n > o->n_prompt) {
        memcpy(q->prompt + o->n_prompt, answer[0].token,
               (size_t)(n - o->n_prompt) * sizeof(*q->prompt));
    }
    q->n_prompt = rng_range(r, n + 1, SIM_PROMPT);
    return MIN(n, q->n_prompt);
}

/* Prompts of a run often have a common prefix, and some go on from another's answer. */
static void random_prompt(const struct scenario *s, struct sim_request *q, int32_t n_others,
                          struct rng *r)
{
    const struct sim_request *others = s->request;
    int32_t kept = 0, vocab = s->config.vocab;

    q->n_prompt = rng_range(r, 1, rng_chance(r, 60) ? 16 : SIM_PROMPT);
    if (n_others > 0 && rng_chance(r, 25)) {
        const struct sim_request *o = &others[rng_range(r, 0, n_others - 1)];
        kept = o->n_prompt < SIM_PROMPT ? random_turn(s, q, o, r) : 0;
    } else if (n_others > 0 && rng_chance(r, 60)) {
        const struct sim_request *o = &others[rng_range(r, 0, n_others - 1)];
        kept = MIN(rng_chance(r, 50) ? o->n_prompt : rng_range(r, 0, o->n_prompt), q->n_prompt);
        memcpy(q->prompt, o->prompt, (size_t)kept * sizeof(*q->prompt));
    }
    for (int32_t i = kept; i < q->n_prompt; i++) {
        q->prompt[i] = rng_range(r, 0, vocab - 1);
    }
}

static void random_sampling(struct sim_request *q, struct rng *r)
{
    q->temperature = rng_chance(r, 40) ? 0 : (float)rng_range(r, 1, 20) / 10;
    q->top_p = rng_chance(r, 70) ? 1 : 0.5F;
    q->min_p = rng_chance(r, 70) ? 0 : 0.1F;
    q->top_k = rng_chance(r, 70) ? 0 : rng_range(r, 1, 9);
    q->seed = rng_next(r);
    q->repetition = 1;
    if (rng_chance(r, 25)) {
        q->presence = (float)rng_range(r, -4, 4) / 2;
        q->frequency = (float)rng_range(r, -4, 4) / 2;
        q->repetition = rng_chance(r, 50) ? 1 : 1.3F;
    }
    q->n_logprobs = rng_chance(r, 75) ? -1 : rng_range(r, 0, 3);
    q->n_prompt_logprobs = rng_chance(r, 85) ? -1 : rng_range(r, 0, 3);
    q->echo = rng_chance(r, 15);
}

static void random_lists(struct sim_request *q, int32_t vocab, struct rng *r)
{
    q->n_stop_token = rng_chance(r, 25) ? rng_range(r, 1, SIM_IDS) : 0;
    q->n_bias = rng_chance(r, 20) ? rng_range(r, 1, SIM_IDS) : 0;
    q->n_allowed = rng_chance(r, 8) ? rng_range(r, 1, SIM_IDS) : 0;
    for (int32_t i = 0; i < SIM_IDS; i++) {
        q->stop_token[i] = rng_range(r, 0, vocab - 1);
        q->bias[i] = (struct gen_bias){rng_range(r, 0, vocab - 1), (float)rng_range(r, -8, 8) / 2};
        if (q->bias[i].bias == -4) {
            q->bias[i].bias = -INFINITY;
        }
        q->allowed[i] = rng_range(r, 0, vocab - 1);
        q->word[i] = rng_range(r, 0, vocab - 1);
    }
    if (!rng_chance(r, 12)) {
        return;
    }
    /* one word of three tokens, or one of two and one of one, or ... */
    q->n_words = rng_range(r, 1, 2);
    q->word_first[1] = q->n_words == 1 ? rng_range(r, 1, SIM_IDS) : rng_range(r, 1, 2);
    q->word_first[2] = SIM_IDS;
}

static void random_width(struct sim_request *q, struct rng *r)
{
    q->n = q->best_of = 1;
    if (rng_chance(r, 30)) {
        q->best_of = rng_range(r, 2, SIM_WIDTH);
        q->n = rng_range(r, 1, q->best_of);
    }
    q->length_penalty = 1;
    if (rng_chance(r, 15)) {
        q->beam_width = q->best_of = rng_range(r, 1, SIM_WIDTH);
        q->n = rng_range(r, 1, q->beam_width);
        q->length_penalty = (float)rng_range(r, -2, 4) / 2;
        q->early_stopping = (int8_t)rng_range(r, 0, 2);
        q->temperature = 0;
    }
}

/* Only of beam searches: of samples the output side finds stop strings (text_stop). */
static void random_stops(struct sim_request *q, int32_t vocab, struct rng *r)
{
    if (q->beam_width == 0 || !rng_chance(r, 40)) {
        return;
    }
    q->n_stop = rng_range(r, 1, SIM_STOPS);
    for (int32_t i = 0; i < q->n_stop; i++) {
        for (int32_t k = rng_range(r, 1, 2); k > 0; k--) {
            q->stop[i][k - 1] = (char)rng_range(r, 1, vocab - 1);
        }
    }
}

static void random_request(struct scenario *s, int32_t i, struct rng *r)
{
    struct sim_request *q = &s->request[i];
    int32_t vocab = s->config.vocab;

    random_prompt(s, q, i, r);
    random_sampling(q, r);
    random_lists(q, vocab, r);
    random_width(q, r);
    random_stops(q, vocab, r);
    q->max_tokens = rng_range(r, 1, rng_chance(r, 30) ? 6 : SIM_OUTPUT);
    if (rng_chance(r, 4)) {
        q->max_tokens = 0;
        q->echo = true;
    }
    q->min_tokens = rng_chance(r, 20) ? rng_range(r, 0, q->max_tokens) : 0;
    q->ignore_eos = rng_chance(r, 30);
    q->include_stop = q->seed % 4 == 0;
    q->priority = rng_range(r, -2, 2);
    q->tenant = rng_range(r, 0, SIM_TENANTS - 1);
    q->weight = rng_chance(r, 70) ? 1 : (float)rng_range(r, 1, 40) / 10;
    q->salt = rng_chance(r, 15) ? rng_range(r, 1, 2) : 0;
    q->arrival =
        (i > 0 ? s->request[i - 1].arrival : 0) + (rng_chance(r, 50) ? 0 : rng_range(r, 0, 8));
    q->cancel = rng_chance(r, 10) ? rng_range(r, 1, 30) : 0;
    q->text_lag = rng_range(r, 0, 3);
    for (int32_t k = 0; k < SIM_WIDTH; k++) {
        q->text_stop[k] =
            rng_chance(r, 10) && q->max_tokens > 0 ? rng_range(r, 1, q->max_tokens) : 0;
    }
    q->yields = rng_chance(r, 25) && q->max_tokens > 0;
}

/* Small requests of two tenants that start together and need their next blocks in the
 * same step, with hardly a block left, just when the tenant with fewer slots submits
 * one more: blocks must be freed for many decodes after its prefill was planned. */
static void lockstep(struct scenario *s, struct rng *r)
{
    struct sched_config *c = &s->config;
    int32_t n_prompt = rng_range(r, 1, c->block_size), poor = rng_range(r, 2, 5),
            last = s->n_requests - 1;

    c->policy = POLICY_FAIR;
    c->n_blocks = MAX((int32_t)div_ceil(c->max_len, c->block_size),
                      s->n_requests + last / 2 - rng_range(r, 0, 1));
    c->max_num_seqs = SIM_REQUESTS;
    c->max_num_batched_tokens = SIM_REQUESTS * SIM_PROMPT;
    c->max_logits = c->max_num_seqs + 1;
    for (int32_t i = 0; i <= last; i++) {
        struct sim_request *q = &s->request[i];
        q->n_prompt = n_prompt;
        q->beam_width = q->n_stop = q->n_stop_token = q->cancel = q->min_tokens = 0;
        q->n = q->best_of = 1;
        q->max_tokens = SIM_OUTPUT;
        q->ignore_eos = true;
        q->weight = 1;
        q->tenant = i > last - poor;
        q->arrival = i < last ? 0 : c->block_size - n_prompt + rng_range(r, 0, 3);
        memset(q->text_stop, 0, sizeof(q->text_stop));
    }
}

/* Pin some blocks of the first prompt before the first turn. (Not if hashes collide:
 * then a block may have no entry.) */
static void random_pins(struct scenario *s, struct rng *r)
{
    struct sched_config *c = &s->config;
    int32_t most =
        MIN(s->request[0].n_prompt / c->block_size, c->n_blocks / (2 * sched_kv_groups(c)));

    if (c->preemption == PREEMPT_SWAP) {
        most = MIN(most, c->n_host_blocks / sched_kv_groups(c));
    }
    if (!c->prefix_cache || c->hash_bits > 0 || most < 1 || !rng_chance(r, 30)) {
        return;
    }
    int32_t n = rng_range(r, 1, most);
    if (sched_has_states(c)) { /* whole snapshots */
        n -= n % (c->snapshot_distance / c->block_size);
    }
    if (n == 0) {
        return;
    }
    s->n_pin = n * c->block_size;
    c->n_pinned = 0;
    for (int32_t k = 0; k < sched_kv_groups(c); k++) {
        c->n_pinned += n - window_first_block(sched_kv_window(c, k), s->n_pin);
    }
}

/* Requests that preempt each other for blocks, and beam searches, first in turn, that
 * take all the memory of groups: started groups must not wait for them. */
static void memory_deadlock(struct scenario *s, struct rng *r)
{
    struct sched_config *c = &s->config;
    int32_t n_small = MIN(rng_range(r, 2, 4), s->n_requests);

    c->policy = rng_chance(r, 50) ? POLICY_PRIORITY : POLICY_FAIR;
    c->n_blocks = (int32_t)div_ceil(c->max_len, c->block_size) + rng_range(r, 2, 8);
    c->max_started = 0;
    c->group_bytes = 2 * 4096;
    for (int32_t i = 0; i < s->n_requests; i++) {
        struct sim_request *q = &s->request[i];
        bool small = i < n_small;
        q->n_prompt = small ? rng_range(r, 20, 28) : rng_range(r, 1, 8);
        q->n = q->best_of = 1;
        q->beam_width = q->min_tokens = 0;
        q->max_tokens = SIM_OUTPUT;
        q->ignore_eos = true;
        q->n_stop = q->n_stop_token = q->cancel = 0;
        q->priority = small ? 1 : 0;
        q->tenant = !small;
        q->arrival = small ? 0 : rng_range(r, s->request[i - 1].arrival, SIM_OUTPUT);
        memset(q->text_stop, 0, sizeof(q->text_stop));
        if (!small && rng_chance(r, 60)) {
            q->beam_width = q->best_of = MIN(c->max_num_seqs, 2);
            q->n_logprobs = 3;
            q->temperature = 0;
        }
    }
}

/* delta_out.take grants few deltas a turn, and readers of requests fall behind. */
static void slow_reader(struct scenario *s, struct rng *r)
{
    s->portion = rng_chance(r, 60) ? 0 : rng_range(r, SIM_WIDTH + 1, 3 * SIM_WIDTH);
    for (int32_t i = 0; i < s->n_requests; i++) {
        struct sim_request *q = &s->request[i];
        if (!rng_chance(r, 15)) {
            continue;
        }
        q->park = rng_range(r, 1, 30);
        q->park_turns = rng_range(r, 1, 20);
        q->park_how = rng_range(r, PARK_ENDED, PARK_RUNNING);
    }
}

/* In some runs, some requests are constrained. */
static void languages(struct scenario *s, struct rng *r)
{
    int32_t percent = rng_chance(r, 60) ? 0 : rng_range(r, 20, 100);

    s->late_delivery = rng_chance(r, 50);
    for (int32_t i = 0; i < s->n_requests; i++) {
        struct sim_request *q = &s->request[i];
        bool bound = rng_chance(r, percent);
        q->language = bound ? rng_next(r) | 1 : 0;
        /* what beams had agreed on before depends on what the client has read */
        q->language_fails = rng_chance(r, 50) && q->beam_width == 0;
    }
}

/* Narrow searches under grammars whose tokens are banned here and there, so that some
 * end without a hypothesis, while so few deltas are granted that tokens on which the
 * beams agreed are not told yet. */
static void dry_searches(struct scenario *s, struct rng *r)
{
    enum { WIDTH = 2 };

    s->portion = WIDTH + 1;
    for (int32_t i = 0; i < s->n_requests; i++) {
        struct sim_request *q = &s->request[i];
        q->beam_width = q->best_of = rng_range(r, 1, WIDTH);
        q->n = rng_range(r, 1, q->beam_width);
        q->language = rng_next(r) | 1;
        q->language_fails = q->yields = false;
        q->n_bias = SIM_IDS;
        for (int32_t k = 0; k < SIM_IDS; k++) {
            q->bias[k] = (struct gen_bias){rng_range(r, 0, s->config.vocab - 1), -INFINITY};
        }
        q->temperature = 0;
        q->n_stop = q->n_stop_token = q->n_allowed = q->n_words = q->min_tokens = 0;
        q->n_logprobs = q->n_prompt_logprobs = -1;
        q->max_tokens = SIM_OUTPUT;
        q->ignore_eos = true;
        q->arrival = q->cancel = 0;
        memset(q->text_stop, 0, sizeof(q->text_stop));
    }
}

/* Several KV groups, most with a sliding window; the pool grows with them or hardly. */
static void random_kv_groups(struct scenario *s, struct rng *r)
{
    struct sched_config *c = &s->config;
    int32_t n = rng_range(r, 2, 4);

    if (c->kv_policy != KV_PAGED || !rng_chance(r, 50)) {
        return;
    }
    c->n_kv_groups = n;
    c->kv_window_align = rng_chance(r, 70) ? 0 : rng_range(r, 1, 8);
    for (int32_t k = 1; k < n; k++) {
        c->kv_window[k] =
            rng_chance(r, 15) ? 0 : rng_range(r, 1, rng_chance(r, 50) ? 6 : SIM_PROMPT);
    }
    int32_t most = c->n_blocks * n, host = c->n_host_blocks;
    c->n_blocks = rng_range(r, c->n_blocks + 1, most);
    c->n_host_blocks = host > 0 ? rng_range(r, host, host * n) : 0;
    c->n_host_blocks = MIN(c->n_host_blocks, c->n_blocks);
}

/* The windows are chunks, in most runs short ones, of which a text has several. */
static void random_chunks(struct scenario *s, struct rng *r)
{
    struct sched_config *c = &s->config;

    c->kv_chunked = c->n_kv_groups > 1 && rng_chance(r, 40);
    for (int32_t k = 1; k < c->n_kv_groups && c->kv_chunked && rng_chance(r, 70); k++) {
        c->kv_window[k] = c->block_size * rng_range(r, 1, 3);
    }
}

/* Some of the further KV groups hold states. */
static void random_states(struct scenario *s, struct rng *r)
{
    struct sched_config *c = &s->config;

    if (c->n_kv_groups < 2 || !rng_chance(r, 50)) {
        return;
    }
    for (int32_t k = 1; k < c->n_kv_groups; k++) {
        if (k == 1 || rng_chance(r, 60)) {
            c->kv_window[k] = KV_WINDOW_STATE;
        }
    }
    c->snapshot_distance = c->block_size * rng_range(r, 1, rng_chance(r, 50) ? 2 : 5);
}

/* In some runs tokens are drafted; in most of these rows cost next to nothing, so that
 * many are. */
static void drafts(struct scenario *s, struct rng *r)
{
    if (!rng_chance(r, 55)) {
        return;
    }
    s->only_forced = rng_chance(r, 25);
    s->timed = rng_chance(r, 50);
    s->max_draft = rng_chance(r, 50) ? rng_range(r, 1, 4) : rng_range(r, 1, LIMIT_DRAFT);
    if (rng_chance(r, 60)) {
        s->config.cost.fixed_us = 1000000;
        s->config.target_itl_us = 0;
    }
    if (rng_chance(r, 50)) {
        s->config.max_logits += rng_range(r, 0, 40);
        s->config.max_num_batched_tokens += rng_range(r, 0, 40);
    }
    for (int32_t i = 0; i < s->n_requests; i++) {
        s->request[i].draft_quality = rng_chance(r, 40) ? 100 : rng_range(r, 0, 100);
    }
    if (!s->only_forced && s->config.kv_policy == KV_PAGED && rng_chance(r, 40)) {
        s->draft_model = s->config.max_num_seqs * rng_range(r, 1, 6);
        s->draft_head = rng_chance(r, 50);
        s->draft_once = rng_chance(r, 30);
    }
}

void scenario_random(struct scenario *ret, uint64_t seed)
{
    struct rng r = {seed}, marching = {~seed}, reading = {seed ^ 0x5ead}, speaking = {seed ^ 0x1a9},
               windows = {seed ^ 0x31d0}, drafting = {seed ^ 0xd4af7}, states = {seed ^ 0x57a7},
               dry = {seed ^ 0xd121}, chunks = {seed ^ 0xc4a2};

    *ret = (struct scenario){.seed = seed};
    random_config(ret, &r);
    ret->n_requests = rng_range(&r, 1, SIM_REQUESTS);
    for (int32_t i = 0; i < ret->n_requests; i++) {
        random_request(ret, i, &r);
    }
    /* so little memory of groups that started ones may hold all of it */
    if (rng_chance(&marching, 30)) {
        ret->config.max_started = rng_range(&marching, 1, 6);
        ret->config.group_bytes = rng_range(&marching, 2, 12) * 4096;
    }
    if (rng_chance(&marching, 4)) {
        memory_deadlock(ret, &marching);
    } else if (rng_chance(&marching, 5)) {
        lockstep(ret, &marching);
    } else if (rng_chance(&marching, 8)) {
        ret->config.kv_policy = rng_range(&marching, KV_ORCA_MAX, KV_ORCA_ORACLE);
        ret->config.prefix_cache = false;
    }
    random_kv_groups(ret, &windows);
    random_chunks(ret, &chunks);
    random_states(ret, &states);
    random_pins(ret, &marching);
    slow_reader(ret, &reading);
    languages(ret, &speaking);
    if (rng_chance(&dry, 4)) {
        dry_searches(ret, &dry);
    }
    drafts(ret, &drafting);
}

void scenario_oracle(const struct scenario *s, struct oracle_config *ret)
{
    const struct sched_config *c = &s->config;

    *ret = (struct oracle_config){.vocab = c->vocab,
                                  .max_len = c->max_len,
                                  .n_blocks = c->n_blocks,
                                  .n_host_blocks = c->n_host_blocks,
                                  .block_size = c->block_size,
                                  .n_kv_groups = c->n_kv_groups,
                                  .max_num_seqs = c->max_num_seqs,
                                  .max_num_batched_tokens = c->max_num_batched_tokens,
                                  .max_samples = c->max_logits,
                                  .depth = s->depth};
    memcpy(ret->kv_window, c->kv_window, sizeof(ret->kv_window));
    ret->kv_chunked = c->kv_chunked;
}

void sim_request_params(const struct sim_request *r, char **stop, struct gen_params *ret)
{
    for (int32_t i = 0; i < r->n_stop; i++) {
        stop[i] = (char *)r->stop[i];
    }
    static char *const salts[] = {NULL, "one", "two"};
    *ret = (struct gen_params){.max_tokens = r->max_tokens,
                               .max_tokens_yields = r->yields,
                               .min_tokens = r->min_tokens,
                               .n = r->n,
                               .best_of = r->best_of,
                               .beam_width = r->beam_width,
                               .length_penalty = r->length_penalty,
                               .early_stopping = r->early_stopping,
                               .temperature = r->temperature,
                               .top_p = r->top_p,
                               .min_p = r->min_p,
                               .top_k = r->top_k,
                               .presence_penalty = r->presence,
                               .frequency_penalty = r->frequency,
                               .repetition_penalty = r->repetition,
                               .seed = r->seed,
                               .n_logprobs = r->n_logprobs,
                               .n_prompt_logprobs = r->n_prompt_logprobs,
                               .echo = r->echo,
                               .ignore_eos = r->ignore_eos,
                               .include_stop_str = r->include_stop,
                               .priority = r->priority,
                               .stop = stop,
                               .n_stop = r->n_stop,
                               .stop_token = (int32_t *)r->stop_token,
                               .n_stop_token = r->n_stop_token,
                               .bias = (struct gen_bias *)r->bias,
                               .n_bias = r->n_bias,
                               .allowed_token = (int32_t *)r->allowed,
                               .n_allowed = r->n_allowed,
                               .cache_salt = salts[r->salt]};
}

int32_t sim_choices(const struct sim_request *r)
{
    return r->beam_width > 0 ? r->n : r->best_of;
}

static void print_request(const struct sim_request *q, int32_t i, FILE *out)
{
    fprintf(out, "  request %d: arrival %d, prompt %d tokens [", i, q->arrival, q->n_prompt);
    for (int32_t k = 0; k < q->n_prompt; k++) {
        fprintf(out, "%s%d", k ? " " : "", q->prompt[k]);
    }
    fprintf(out,
            "], max_tokens %d%s, min_tokens %d, n %d, best_of %d, beam %d (length_penalty %g, "
            "early_stopping %d)\n",
            q->max_tokens, q->yields ? " (yields)" : "", q->min_tokens, q->n, q->best_of,
            q->beam_width, (double)q->length_penalty, q->early_stopping);
    fprintf(out,
            "    temperature %g, penalties %g %g %g, logprobs %d, prompt_logprobs %d, echo %d, "
            "ignore_eos %d, "
            "include_stop %d\n",
            (double)q->temperature, (double)q->presence, (double)q->frequency,
            (double)q->repetition, q->n_logprobs, q->n_prompt_logprobs, q->echo, q->ignore_eos,
            q->include_stop);
    fprintf(out,
            "    priority %d, tenant %d (weight %g), salt %d, %d stop ids, %d biases, %d allowed, "
            "%d words, cancel %d, "
            "text stops",
            q->priority, q->tenant, (double)q->weight, q->salt, q->n_stop_token, q->n_bias,
            q->n_allowed, q->n_words, q->cancel);
    for (int32_t k = 0; k < SIM_WIDTH; k++) {
        fprintf(out, " %d", q->text_stop[k]);
    }
    fprintf(out, " (lag %d), parked at %d for %d (%d)", q->text_lag, q->park, q->park_turns,
            q->park_how);
    for (int32_t k = 0; k < q->n_stop; k++) {
        fprintf(out, ", stop string [%d %d]", q->stop[k][0], q->stop[k][1]);
    }
    if (q->language) {
        fprintf(out, ", language %llx%s", (unsigned long long)q->language,
                q->language_fails ? " (fails)" : "");
    }
    if (q->draft_quality > 0) {
        fprintf(out, ", %d %% of drafts right", q->draft_quality);
    }
    fputc('\n', out);
}

void scenario_print(const struct scenario *s, FILE *out)
{
    const struct sched_config *c = &s->config;

    fprintf(out,
            "  %d blocks of %d (%d pinned), %d host blocks, %d seqs, %d batched tokens, %d logits "
            "rows, depth %d, "
            "vocab %d\n",
            c->n_blocks, c->block_size, c->n_pinned, c->n_host_blocks, c->max_num_seqs,
            c->max_num_batched_tokens, c->max_logits, s->depth, c->vocab);
    fprintf(out, "  windows of the KV groups:");
    for (int32_t k = 0; k < sched_kv_groups(c); k++) {
        fprintf(out, " %d", c->kv_window[k]);
    }
    fprintf(out, "%s, snapshots of states every %d tokens\n",
            c->kv_chunked ? ", which are chunks" : "", c->snapshot_distance);
    fprintf(
        out,
        "  preemption %d, policy %d, kv policy %d, prefix cache %d, target itl %lld, shared "
        "%lld us, timeouts %lld "
        "%lld us, NaN "
        "from step %llu, %d groups started at most, in %lld bytes, portion %d, late delivery %d, "
        "drafts of %d%s, by a %s in steps of %d%s\n",
        c->preemption, c->policy, c->kv_policy, c->prefix_cache, (long long)c->target_itl_us,
        (long long)c->shared_itl_us, (long long)c->queue_timeout_us,
        (long long)c->request_timeout_us, (unsigned long long)s->fail_at, c->max_started,
        (long long)c->group_bytes, s->portion, s->late_delivery, s->max_draft,
        s->only_forced ? " that are forced" : "", s->draft_head ? "head" : "model", s->draft_model,
        s->draft_once ? ", all at once" : "");
    for (int32_t i = 0; i < s->n_requests; i++) {
        if (!s->request[i].absent) {
            print_request(&s->request[i], i, out);
        }
    }
}
