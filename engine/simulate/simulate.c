/* The event loop of `quire simulate`, which runs a day of traffic in seconds.
 *
 * The scheduler, the block pool and commit are the production code; only the executor
 * is replaced by a formula (struct sim_options). They take time as an argument, so the
 * loop just adds it up. Tokens are not random: every sample has the same id, and a
 * request ends at its length; beams fork and die as recorded ones did. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sched/decode/decode.h"
#include "engine/simulate/simulate_impl.h"

enum { SAMPLE_EVERY = 16 };

/* A request from its arrival to its end. */
struct job {
    struct request request;
    struct sim_arrival a;
    struct group *group;
    struct reservation *reserved; /* [n_reserved] */
    int32_t n_reserved;
    int32_t tokens_out;
    struct beam_replay beams;
    double first_us;
    struct job *next; /* next in the queue outside the scheduler */
};

struct sim {
    const struct sim_options *o;
    struct sched_config config;
    struct sched *sched;
    struct plan plan;
    struct workload *workload;
    struct contiguous_alloc *contiguous; /* NULL: paged */
    struct sim_report report;
    struct delta_out out;
    struct job *first, *last; /* queue of requests that wait for a reservation */
    struct sim_arrival next;
    int more; /* 1: `next` has yet to arrive; 0: no more; < 0: error */
    double now_us;
    /* In the scheduler: requests; tokens reserved, asked for before rounding, and used
     * at their ends. */
    int64_t n_inside, reserved_slots, wanted_slots, needed_slots;
    /* tokens whose keys and values the last step's forks copy between reservations */
    double copied_tokens;
    uint64_t rng;
    int32_t *token, *top; /* [rows] sampled ids; [rows, stride] candidates */
    float *logprob, *top_logprob;
    int32_t stride; /* candidates a row */
    _Atomic int32_t stop_at[LIMIT_CHOICES];
};

/* ---- requests in ---- */

static void job_free(struct job *j)
{
    free(j->request.prompt);
    free(j->reserved);
    free(j);
}

static int32_t width_of(const struct sim_arrival *a)
{
    return MAX(a->n, a->beam);
}

static bool make_prompt(struct sim *s, struct job *j)
{
    int32_t n = j->a.prompt;

    j->request.n_prompt = n;
    j->request.prompt = malloc((size_t)n * sizeof(int32_t));
    if (!j->request.prompt) {
        return false;
    }
    workload_prompt(s->workload, j->request.prompt, n);
    return true;
}

static struct job *job_new(struct sim *s, const struct sim_arrival *a)
{
    struct job *j = calloc(1, sizeof(*j));

    if (!j) {
        return NULL;
    }
    j->a = *a;
    j->request.params = (struct gen_params){.max_tokens = a->output,
                                            .n = a->n,
                                            .best_of = width_of(a),
                                            .beam_width = a->beam,
                                            .length_penalty = 1,
                                            .temperature = a->beam > 0 ? 0 : 1,
                                            .top_p = 1,
                                            .repetition_penalty = 1,
                                            .n_logprobs = -1,
                                            .n_prompt_logprobs = -1,
                                            .ignore_eos = true};
    j->request.arrival_us = (int64_t)a->at_us;
    j->request.user = j;
    j->request.stop_at = s->stop_at;
    j->n_reserved = s->contiguous ? width_of(a) : 0;
    j->reserved = calloc((size_t)j->n_reserved + 1, sizeof(*j->reserved));
    if (j->reserved && make_prompt(s, j)) {
        return j;
    }
    job_free(j);
    return NULL;
}

static int arrive(struct sim *s, struct err *e)
{
    while (s->more > 0 && s->next.at_us <= s->now_us) {
        struct job *j = job_new(s, &s->next);
        if (!j) {
            return err_nomem(e, "a simulated request");
        }
        if (s->last) {
            s->last->next = j;
        } else {
            s->first = j;
        }
        s->last = j;
        s->more = workload_next(s->workload, &s->next, e);
    }
    return MIN(s->more, 0);
}

/* Reserves memory for all sequences of the request, or none. */
static bool reserve(struct sim *s, struct job *j)
{
    for (int32_t i = 0; i < j->n_reserved; i++) {
        if (contiguous_take(s->contiguous, j->a.prompt, j->a.output, &j->reserved[i])) {
            continue;
        }
        while (i-- > 0) {
            contiguous_give(s->contiguous, &j->reserved[i]);
        }
        return false;
    }
    for (int32_t i = 0; i < j->n_reserved; i++) {
        s->reserved_slots += j->reserved[i].size;
        s->wanted_slots += j->reserved[i].wanted;
        s->needed_slots += j->a.prompt + j->a.output;
    }
    return true;
}

static void release_reservations(struct sim *s, struct job *j)
{
    for (int32_t i = 0; i < j->n_reserved; i++) {
        s->reserved_slots -= j->reserved[i].size;
        s->wanted_slots -= j->reserved[i].wanted;
        s->needed_slots -= j->a.prompt + j->a.output;
        contiguous_give(s->contiguous, &j->reserved[i]);
    }
}

/* Moves waiting requests into the scheduler, in order. A static batch admits none until
 * it has ended. */
static int admit(struct sim *s, struct err *e)
{
    bool closed = s->o->manager == MANAGER_STATIC && s->n_inside > 0;

    while (s->first && !closed) {
        struct job *j = s->first;
        if (s->contiguous && !reserve(s, j)) {
            if (s->n_inside > 0) {
                return 0;
            }
            s->report.n_refused++; /* too large even for an empty memory */
        } else if (group_new(&j->group, &j->request, NULL, &s->config, e) < 0) {
            if (e->code != ERR_INVALID) {
                return e->code;
            }
            release_reservations(s, j);
            s->report.n_refused++;
        }
        s->first = j->next;
        if (!s->first) {
            s->last = NULL;
        }
        if (!j->group) {
            job_free(j);
            continue;
        }
        s->n_inside++;
        if (sched_add(s->sched, j->group, (int64_t)s->now_us) < 0) {
            return err_set(e, ERR_FULL, "the simulated queue is full");
        }
    }
    return 0;
}

/* ---- results ---- */

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    struct sim *s = CONTAINER_OF(out, struct sim, out);
    struct job *j = d->request->user;
    struct sim_report *r = &s->report;

    (void)g;
    if (d->kind == DELTA_TOKEN) {
        j->tokens_out++;
        if (j->first_us == 0) {
            j->first_us = s->now_us;
        }
        return;
    }
    if (d->kind != DELTA_END) {
        return;
    }
    double latency_s = (s->now_us - j->a.at_us) * 1e-6;
    r->latency_s[r->n_done] = latency_s;
    r->per_token_s[r->n_done] = latency_s / j->a.output;
    r->ttft_s[r->n_done++] = (j->first_us - j->a.at_us) * 1e-6;
    r->tokens_out += j->tokens_out;
    release_reservations(s, j);
    s->n_inside--;
    job_free(j);
}

/* ---- a step ---- */

static double step_us(const struct sim *s, const struct plan *p)
{
    const struct sim_options *o = s->o;
    double context = 0,
           copied = s->contiguous ? s->copied_tokens : (double)p->n_copy * o->block_size;
    int32_t requests = 0;

    for (int32_t i = 0; i < p->n_items; i++) { /* items of a group are adjacent */
        context += p->item[i].first;
        requests += i == 0 || p->item[i].seq->group != p->item[i - 1].seq->group;
    }
    context += 2 * copied; /* read and written */
    return o->overhead_us + requests * o->request_us + p->n_items * o->seq_us +
           fmax(o->weights_us, p->n_tokens * o->token_us) + context * o->context_us +
           (p->n_swap_in + p->n_swap_out) * o->swap_block_us;
}

/* Fills the beams' candidates; the items of a group are adjacent. Where each sequence
 * has a reservation of its own, a fork copies. */
static void answer(struct sim *s, const struct plan *p, struct results *ret)
{
    const struct group *before = NULL;

    s->copied_tokens = 0;
    for (int32_t i = 0; i < p->n_items; i++) {
        const struct plan_item *it = &p->item[i];
        const struct group *g = it->seq->group;
        double context = it->first + it->n;
        s->copied_tokens += MAX(it->n_sampled - 1, 0) * context;
        if (!g->beam || it->n_sampled == 0) {
            continue;
        }
        struct job *j = g->request->user;
        if (g != before) {
            beam_replay_step(&j->beams, g->width, &s->rng);
            s->copied_tokens += beam_replay_copies(&j->beams, g) * context;
        }
        before = g;
        size_t at = (size_t)it->sample_first * (size_t)s->stride;
        beam_replay_candidates(&j->beams, it->seq, s->stride, s->top + at, s->top_logprob + at);
    }
    *ret = (struct results){.step = p->step,
                            .n_samples = p->n_samples,
                            .top_stride = s->stride,
                            .token = s->token,
                            .logprob = s->logprob,
                            .top_token = s->top,
                            .top_logprob = s->top_logprob};
}

/* ---- memory use ---- */

struct holding {
    double live, entries, distinct,
        /* Tokens, block-table entries, distinct blocks, and slots of blocks without any
         * token yet. */
        unwritten;
};

static void hold_seq(struct sim *s, const struct seq *q, struct holding *h)
{
    int32_t size = s->o->block_size;

    h->entries += q->table[0].n_blocks;
    for (int32_t b = 0; b < q->table[0].n_blocks; b++) {
        int32_t filled = MIN(MAX(q->n_computed - b * size, 0), size),
                *mark = &s->sched->mark[q->table[0].block[b]];
        if (*mark > 0) {
            continue;
        }
        *mark = 1;
        h->distinct++;
        h->live += filled;
        h->unwritten += filled == 0 ? size : 0;
    }
}

static struct holding measure(struct sim *s)
{
    struct holding h = {0};

    for (const struct group *g = s->sched->running.first; g; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            if (g->seq[i].state == SEQ_LIVE) {
                hold_seq(s, &g->seq[i], &h);
            }
        }
    }
    for (const struct group *g = s->sched->running.first; g; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            for (int32_t b = 0; g->seq[i].state == SEQ_LIVE && b < g->seq[i].table[0].n_blocks;
                 b++) {
                s->sched->mark[g->seq[i].table[0].block[b]] = 0;
            }
        }
    }
    return h;
}

/* Adds the memory's use to the integrals, over `us` of time. */
static void observe(struct sim *s, double us)
{
    struct sim_report *r = &s->report;
    struct holding h = measure(s);
    double size = s->o->block_size, slots = s->o->slots, live = h.live;
    double reserved = h.unwritten, internal = h.distinct * size - h.live - h.unwritten,
           external = 0;

    if (s->contiguous) { /* each sequence holds its tokens, shared or not */
        live = 0;
        for (const struct group *g = s->sched->running.first; g; g = g->next) {
            for (int32_t i = 0; i < g->width; i++) {
                live += g->seq[i].state == SEQ_LIVE ? g->seq[i].n_computed : 0;
            }
        }
        reserved = fmax((double)s->needed_slots - live, 0);
        internal = (double)(s->wanted_slots - s->needed_slots);
        external = (double)(s->reserved_slots - s->wanted_slots);
        if (s->first) { /* a request waits: what is free is too fragmented for it */
            external = slots - live - reserved - internal;
        }
    }
    r->live_us += live * us;
    r->reserved_us += reserved * us;
    r->internal_us += internal * us;
    r->external_us += external * us;
    r->free_us += (slots - live - reserved - internal - external) * us;
    r->entries_us += h.entries * us;
    r->shared_us += (h.entries - h.distinct) * us;
    r->requests_us += s->sched->running.n * us;
    r->seqs_us += (s->config.max_num_seqs - s->sched->n_free_slots) * us;
    r->busy_us += us;
}

/* ---- the loop ---- */

static int run(struct sim *s, struct err *e)
{
    struct results results;
    double unseen_us = 0;

    while (s->more > 0 || s->first || s->n_inside > 0) {
        int rc = arrive(s, e);
        if (rc == 0) {
            rc = admit(s, e);
        }
        if (rc < 0) {
            return rc;
        }
        if (sched_plan(s->sched, (int64_t)s->now_us, &s->plan) == 0) {
            decode_reap(s->sched, &s->out);
            if (s->n_inside == 0 && !s->first && s->more > 0) {
                s->now_us = fmax(s->now_us, s->next.at_us);
            }
            continue;
        }
        double us = step_us(s, &s->plan);
        answer(s, &s->plan, &results);
        s->now_us += us;
        unseen_us += us;
        if (++s->report.steps % SAMPLE_EVERY == 0) {
            observe(s, unseen_us);
            unseen_us = 0;
        }
        decode_commit(s->sched, &s->plan, &results, (int64_t)s->now_us, &s->out);
        decode_reap(s->sched, &s->out);
    }
    s->report.time_us = s->now_us;
    sched_counts(s->sched, &s->report.counts);
    return 0;
}

static void configure(struct sim *s)
{
    const struct sim_options *o = s->o;
    /* With a contiguous manager the reservations bound memory; the block pool below
     * must never run out. */
    int32_t slots = s->contiguous ? o->max_num_seqs * (o->max_len + o->block_size) : o->slots;

    s->config =
        (struct sched_config){.n_blocks = slots / o->block_size,
                              .n_host_blocks = o->host_blocks,
                              .block_size = o->block_size,
                              .vocab = SIM_VOCAB,
                              .max_len = o->max_len,
                              .max_num_seqs = o->max_num_seqs,
                              .max_num_batched_tokens = o->max_num_batched_tokens,
                              .max_logits = o->max_num_seqs + 1,
                              .max_waiting = (int32_t)MIN(o->requests, INT32_MAX / 2),
                              .preemption = o->preemption,
                              .prefix_cache = o->prefix_cache && !s->contiguous,
                              .cost = {o->weights_us, o->token_us, o->context_us, o->swap_block_us},
                              .secret = o->seed};
}

static int simulate(struct sim *s, struct err *e)
{
    const struct sim_options *o = s->o;

    s->out.emit = on_delta;
    s->rng = o->seed ^ UINT64_C(0x5eed);
    s->stride = MAX(LIMIT_CANDIDATES / 8, 2 * o->beam);
    for (int32_t i = 0; i < LIMIT_CHOICES; i++) {
        atomic_init(&s->stop_at[i], INT32_MAX);
    }
    struct reserve_rule rule = {.policy = o->manager == MANAGER_STATIC ? KV_ORCA_MAX : o->manager,
                                .slots = o->slots,
                                .max_len = o->max_len,
                                .least = 1};
    int rc = workload_open(&s->workload, o, e);
    if (rc == 0 && o->manager != MANAGER_PAGED) {
        rc = contiguous_open(&s->contiguous, &rule, e);
    }
    if (rc == 0) {
        rc = report_open(&s->report, o->requests, e);
    }
    if (rc < 0) {
        return rc;
    }
    configure(s);
    rc = sched_new(&s->sched, &s->config, e);
    if (rc == 0) {
        rc = plan_init(&s->plan, &s->config, e);
    }
    if (rc < 0) {
        return rc;
    }
    size_t rows = (size_t)s->config.max_logits, tops = rows * (size_t)s->stride;
    s->token = malloc(rows * sizeof(*s->token));
    s->logprob = calloc(rows, sizeof(*s->logprob));
    s->top = malloc(tops * sizeof(*s->top));
    s->top_logprob = malloc(tops * sizeof(*s->top_logprob));
    if (!s->token || !s->logprob || !s->top || !s->top_logprob) {
        return err_nomem(e, "the simulated results");
    }
    for (size_t i = 0; i < rows; i++) {
        s->token[i] = SIM_TOKEN;
    }
    s->more = workload_next(s->workload, &s->next, e);
    if (s->more == 0 && o->trace) {
        return err_set_param(e, ERR_INVALID, "trace", "the trace '%s' has no requests", o->trace);
    }
    return s->more < 0 ? s->more : run(s, e);
}

static void sim_release(struct sim *s)
{
    workload_free(s->workload);
    contiguous_free(s->contiguous);
    report_release(&s->report);
    sched_free(s->sched);
    plan_release(&s->plan);
    free(s->token);
    free(s->logprob);
    free(s->top);
    free(s->top_logprob);
}

int simulate_once(const struct sim_options *o, struct sim_report *r, struct err *e)
{
    struct sim *s = calloc(1, sizeof(*s));

    if (!s) {
        return err_nomem(e, "the simulation");
    }
    s->o = o;
    int rc = simulate(s, e);
    *r = s->report;
    s->report = (struct sim_report){0};
    sim_release(s);
    free(s);
    return rc;
}
