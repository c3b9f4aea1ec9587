#include "tests/sim/rig.h"

#include "engine/sched/decode/stops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(bool ok, const char *what)
{
    if (ok) {
        return;
    }
    fprintf(stderr, "rig: %s\n", what);
    abort();
}

void rig_config(struct sched_config *ret)
{
    *ret = (struct sched_config){.n_blocks = 64,
                                 .block_size = 4,
                                 .vocab = 100,
                                 .max_len = 128,
                                 .max_num_seqs = 8,
                                 .max_num_batched_tokens = 32,
                                 .max_logits = 16,
                                 .max_waiting = RIG_REQUESTS,
                                 .preemption = PREEMPT_RECOMPUTE,
                                 .eos = {99},
                                 .n_eos = 1};
}

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    struct rig *r = CONTAINER_OF(out, struct rig, out);
    struct rig_request *q = d->request->user;

    (void)g;
    must(r->n_deltas < RIG_DELTAS && !q->ended, "a delta too many");
    r->delta[r->n_deltas++] = *d;
    if (d->kind == DELTA_END) {
        q->ended = true;
        q->group = NULL;
    }
}

void rig_open(struct rig *r, const struct sched_config *c)
{
    struct err e;

    *r = (struct rig){.config = *c, .token = 7, .now_us = 1, .out.emit = on_delta};
    r->request = calloc(RIG_REQUESTS, sizeof(*r->request));
    r->delta = calloc(RIG_DELTAS, sizeof(*r->delta));
    must(r->request && r->delta, "no memory");
    must(sched_new(&r->sched, c, &e) == 0 && packer_new(&r->packer, c, &e) == 0, "cannot start");
    must(plan_init(&r->plan[0], c, &e) == 0 && plan_init(&r->plan[1], c, &e) == 0, "cannot plan");
}

void rig_close(struct rig *r)
{
    sched_free(r->sched);
    packer_free(r->packer);
    plan_release(&r->plan[0]);
    plan_release(&r->plan[1]);
    for (int32_t i = 0; i < r->n_requests; i++) {
        free(r->request[i].request.prompt);
        stop_set_free(r->request[i].stops);
    }
    free(r->request);
    free(r->delta);
}

struct gen_params rig_params(void)
{
    return (struct gen_params){.max_tokens = 16,
                               .n = 1,
                               .best_of = 1,
                               .length_penalty = 1,
                               .top_p = 1,
                               .repetition_penalty = 1,
                               .n_logprobs = -1,
                               .n_prompt_logprobs = -1};
}

struct gen_params rig_tokens(int32_t n)
{
    struct gen_params p = rig_params();

    p.max_tokens = n;
    return p;
}

struct rig_request *rig_add(struct rig *r, struct gen_params p, int32_t first, int32_t n_prompt)
{
    struct err e = {0};

    must(r->n_requests < RIG_REQUESTS, "too many requests");
    struct rig_request *q = &r->request[r->n_requests++];
    q->request.params = p;
    q->request.seed = p.seed;
    q->request.prompt = malloc((size_t)n_prompt * sizeof(int32_t));
    must(q->request.prompt != NULL, "no memory");
    q->request.n_prompt = n_prompt;
    for (int32_t i = 0; i < n_prompt; i++) {
        q->request.prompt[i] = (first + i) % 90;
    }
    q->request.arrival_us = r->now_us;
    q->request.user = q;
    q->request.tenant = r->tenant;
    q->request.weight = r->weight;
    q->request.stop_at = q->stop_at;
    for (int32_t i = 0; i < LIMIT_CHOICES; i++) {
        atomic_init(&q->stop_at[i], INT32_MAX);
    }
    must(stop_set_new(&q->stops, p.stop, p.stop_len, p.n_stop, &e) == 0, e.text);
    q->request.stops = q->stops;
    int rc = group_new(&q->group, &q->request, NULL, &r->config, &e);
    must(rc == 0, e.text);
    must(sched_add(r->sched, q->group, r->now_us) == 0, "the queue is full");
    return q;
}

static void check(struct rig *r, const struct plan *p)
{
    const char *wrong = sched_check(r->sched, p);

    must(!wrong, wrong ? wrong : "");
}

int32_t rig_plan(struct rig *r)
{
    struct plan *p = &r->plan[r->launched % 2];
    int32_t n = sched_plan(r->sched, r->now_us, p);

    check(r, p);
    if (n > 0) {
        pack_batch(r->packer, p, &r->batch);
        r->launched++;
    }
    return n;
}

/* The sequence whose logits a sampling row reads. */
static const struct seq *seq_of_row(const struct rig *r, int32_t row)
{
    const struct plan *p = &r->plan[r->committed % 2];
    int32_t i = 0;

    while (i + 1 < p->n_items && p->item[i + 1].sample_first <= row) {
        i++;
    }
    return p->item[i].seq;
}

static void answer(struct rig *r, struct results *ret)
{
    static int32_t token[64], top[64 * RIG_TOPS];
    static float logprob[64], top_logprob[64 * RIG_TOPS];
    int32_t n = r->batch.n_samples;

    must(n <= 64, "too many rows");
    for (int32_t i = 0; i < n; i++) {
        token[i] = r->answer ? r->answer(r, &r->batch.sample[i]) : r->token;
        logprob[i] = -1;
        for (int32_t k = 0; k < RIG_TOPS; k++) { /* the k-th best has the id plus k */
            top[i * RIG_TOPS + k] = token[i] < 0 ? -1 : (token[i] + k) % 100;
            top_logprob[i * RIG_TOPS + k] = -1 - (float)k;
        }
        if (r->tops) {
            r->tops(r, seq_of_row(r, i), top + i * RIG_TOPS, top_logprob + i * RIG_TOPS);
        }
    }
    *ret = (struct results){.step = r->batch.step,
                            .n_samples = n,
                            .top_stride = RIG_TOPS,
                            .token = token,
                            .logprob = logprob,
                            .top_token = top,
                            .top_logprob = top_logprob};
}

void rig_commit(struct rig *r)
{
    struct results results;

    must(r->launched == r->committed + 1, "the rig commits the step it planned last");
    answer(r, &results);
    decode_commit(r->sched, &r->plan[r->committed++ % 2], &results, r->now_us, &r->out);
    decode_reap(r->sched, &r->out);
    check(r, NULL);
}

bool rig_step(struct rig *r)
{
    r->now_us += 1000;
    if (rig_plan(r) > 0) {
        rig_commit(r);
        return true;
    }
    decode_reap(r->sched, &r->out);
    return false;
}

int32_t rig_run(struct rig *r, int32_t most)
{
    int32_t n = 0;

    while (n < most && rig_step(r)) {
        n++;
    }
    return n;
}

int rig_close_empty(struct rig *r)
{
    struct sched_counts c;

    rig_run(r, 1000);
    sched_counts(r->sched, &c);
    int32_t held =
        c.blocks_used + c.host_blocks_used + c.running_seqs + c.waiting_groups + c.swapped_groups;
    rig_close(r);
    return held == 0 ? 0 : -1;
}

const struct plan_item *rig_item(const struct rig *r, const struct rig_request *q, int32_t choice)
{
    const struct plan *p = &r->plan[(r->launched - 1) % 2];

    for (int32_t i = 0; i < p->n_items; i++) {
        if (q->group && p->item[i].seq == &q->group->seq[choice]) {
            return &p->item[i];
        }
    }
    return NULL;
}

int32_t rig_count(const struct rig *r, const struct rig_request *q, int32_t kind, int32_t choice)
{
    int32_t n = 0;

    for (int32_t i = 0; i < r->n_deltas; i++) {
        n += r->delta[i].request == &q->request && r->delta[i].kind == kind &&
             r->delta[i].choice == choice;
    }
    return n;
}

const struct delta *rig_finish(const struct rig *r, const struct rig_request *q, int32_t choice)
{
    for (int32_t i = 0; i < r->n_deltas; i++) {
        if (r->delta[i].request == &q->request && r->delta[i].kind == DELTA_FINISH &&
            r->delta[i].choice == choice) {
            return &r->delta[i];
        }
    }
    return NULL;
}
