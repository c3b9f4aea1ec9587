/* The time to first token of a tenant that sends one request a second while another
 * tenant floods the server, in virtual time: the real scheduler, look-ahead of one, and
 * a device whose step takes fixed + tokens * per_token + context * per_context. Results
 * do not depend on the load of the machine. tests/bench/fairness measures the same with
 * a real server.
 *
 *     build/tests/bench/fair_sim [--seconds N] [--flood N] [--prompt N] [--tokens N]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/launch_delay.h"
#include "engine/sched/decode/decode.h"
#include "tests/sim/rig.h"

enum { FLOOD_MAX = 4096, CALM_MAX = 4096, SAMPLES = 20000, DEPTH = 1, CALM_TOKENS = 32 };

struct machine {
    const char *name;
    int32_t max_num_seqs, budget, n_blocks, target_itl_us, shared_itl_us;
    struct step_cost cost;
};

static const struct machine MACHINES[] = {
    {"CPU, 0.1 B",
     64,
     512,
     8192,
     50000,
     50000,
     {.fixed_us = 4000, .token_us = 400, .context_us = 0.02}},
    /* an H200: tests/bench/records */
    {"GPU, 8 B",
     1024,
     8192,
     65536,
     40000,
     9000,
     {.fixed_us = 4700, .token_us = 17, .context_us = 0.03}},
};

struct client {
    struct request request;
    _Atomic int32_t stop_at;
    int64_t arrival_us, first_us; /* first_us 0: no token yet */
    bool busy;
};

struct run {
    const struct machine *m;
    struct sched *sched;
    struct sched_config config;
    struct plan plan[DEPTH + 1];
    /* when each step in flight ends; when the device is free */
    int64_t end_us[DEPTH + 1], free_us;
    uint64_t launched, committed;
    struct launch_delay pace;
    struct delta_out out;
    int64_t now_us;
    struct client *flood, *calm; /* [FLOOD_MAX], [CALM_MAX] */
    int32_t n_flood, n_calm, n_asked;
    int32_t n_prompt, n_tokens;
    int64_t flood_tokens;
};

static void die(const char *what)
{
    fprintf(stderr, "fair_sim: %s\n", what);
    exit(1);
}

static void ask(struct run *r, struct client *c, int32_t tenant, int64_t arrival_us)
{
    static int32_t prompt[LIMIT_BATCHED_TOKENS];
    struct group *g;
    struct err e;

    *c = (struct client){.arrival_us = arrival_us, .busy = true};
    c->request.params = rig_params();
    c->request.params.max_tokens = tenant == 1 ? r->n_tokens : CALM_TOKENS;
    c->request.params.ignore_eos = true;
    c->request.prompt = prompt;
    c->request.n_prompt = r->n_prompt;
    c->request.arrival_us = arrival_us;
    c->request.user = c;
    c->request.tenant = tenant;
    c->request.stop_at = &c->stop_at;
    atomic_init(&c->stop_at, INT32_MAX);
    if (group_new(&g, &c->request, NULL, &r->config, &e) < 0) {
        die(e.text);
    }
    if (sched_add(r->sched, g, r->now_us) < 0) {
        die("the queue is full");
    }
}

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    struct run *r = CONTAINER_OF(out, struct run, out);
    struct client *c = d->request->user;

    (void)g;
    if (d->kind == DELTA_TOKEN) {
        r->flood_tokens += d->request->tenant == 1;
        if (c->first_us == 0) {
            c->first_us = r->now_us;
        }
    } else if (d->kind == DELTA_END) {
        c->busy = false;
    }
}

static int64_t step_us(const struct run *r, const struct plan *p)
{
    const struct step_cost *k = &r->m->cost;
    double us = k->fixed_us;

    for (int32_t i = 0; i < p->n_items; i++) {
        us += p->item[i].n * k->token_us + (double)p->item[i].first * k->context_us;
    }
    return (int64_t)us;
}

static void commit(struct run *r)
{
    static int32_t token[SAMPLES];
    static float logprob[SAMPLES];
    uint64_t i = r->committed++ % (DEPTH + 1);
    struct plan *p = &r->plan[i];
    struct results results = {
        .step = p->step, .n_samples = p->n_samples, .token = token, .logprob = logprob};

    r->now_us = MAX(r->now_us, r->end_us[i]);
    launch_delay_ended(&r->pace, r->now_us);
    decode_commit(r->sched, p, &results, r->now_us, &r->out);
}

static void take_requests(struct run *r)
{
    for (int32_t i = 0; i < r->n_flood; i++) {
        if (!r->flood[i].busy) {
            ask(r, &r->flood[i], 1, r->now_us);
        }
    }
    for (; r->n_asked < r->n_calm && (int64_t)r->n_asked * 1000000 + 500000 <= r->now_us;
         r->n_asked++) {
        ask(r, &r->calm[r->n_asked], 2, (int64_t)r->n_asked * 1000000 + 500000);
    }
}

/* One turn of the loop, as in engine/loop/loop.c. */
static void turn(struct run *r)
{
    take_requests(r);
    if (sched_is_shared(r->sched, r->now_us)) {
        r->now_us += launch_delay_hold_us(&r->pace, r->now_us);
        take_requests(r);
    }
    uint64_t i = r->launched % (DEPTH + 1);
    int32_t n = sched_plan(r->sched, r->now_us, &r->plan[i]);
    if (n > 0) {
        r->free_us = MAX(r->free_us, r->now_us) + step_us(r, &r->plan[i]);
        r->end_us[i] = r->free_us;
        launch_delay_launched(&r->pace, r->now_us, r->plan[i].estimate_us);
        r->launched++;
    }
    if (r->launched - r->committed > (n > 0 ? DEPTH : 0)) {
        commit(r);
    } else if (n == 0) { /* idle until the next arrival */
        r->now_us = MAX(r->now_us + 1, (int64_t)r->n_asked * 1000000 + 500000);
    }
    decode_reap(r->sched, &r->out);
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

/* The p99 of the calm tenant's time to first token, in ms. */
static double run(struct run *r, const char *name, int policy)
{
    static int64_t ttft[CALM_MAX];
    struct sched_counts counts;
    struct err e;

    r->config = (struct sched_config){.n_blocks = r->m->n_blocks,
                                      .block_size = 16,
                                      .vocab = 1000,
                                      .max_len = 32768,
                                      .max_num_seqs = r->m->max_num_seqs,
                                      .max_num_batched_tokens = r->m->budget,
                                      .max_logits = 2 * r->m->max_num_seqs,
                                      .max_waiting = FLOOD_MAX + CALM_MAX,
                                      .preemption = PREEMPT_RECOMPUTE,
                                      .policy = policy,
                                      .target_itl_us = r->m->target_itl_us,
                                      .shared_itl_us = r->m->shared_itl_us,
                                      .cost = r->m->cost};
    if (sched_new(&r->sched, &r->config, &e) < 0) {
        die(e.text);
    }
    for (int32_t i = 0; i <= DEPTH; i++) {
        if (plan_init(&r->plan[i], &r->config, &e) < 0) {
            die(e.text);
        }
    }
    r->out.emit = on_delta;
    while (r->n_asked < r->n_calm || r->calm[r->n_calm - 1].busy) {
        turn(r);
    }
    for (int32_t i = 0; i < r->n_calm; i++) {
        ttft[i] = r->calm[i].first_us - r->calm[i].arrival_us;
    }
    qsort(ttft, (size_t)r->n_calm, sizeof(*ttft), by_value);
    sched_counts(r->sched, &counts);
    double p99 = (double)ttft[r->n_calm * 99 / 100] / 1e3;
    printf("%-12s %-12s ttft_ms p50 %8.1f p99 %8.1f   flood %7.0f tok/s, %llu preemptions\n",
           r->m->name, name, (double)ttft[r->n_calm / 2] / 1e3, p99,
           (double)r->flood_tokens / ((double)r->now_us / 1e6),
           (unsigned long long)counts.preempt_recompute);
    while (r->committed < r->launched) {
        decode_abandon(r->sched, &r->plan[r->committed++ % (DEPTH + 1)]);
    }
    sched_free(r->sched);
    for (int32_t i = 0; i <= DEPTH; i++) {
        plan_release(&r->plan[i]);
    }
    return p99;
}

static double measure(const struct machine *m, const char *name, int policy, int32_t n_flood,
                      const int32_t *o)
{
    struct run r = {.m = m,
                    .n_flood = n_flood,
                    .n_calm = MIN(o[0], CALM_MAX),
                    .n_prompt = o[2],
                    .n_tokens = o[3]};

    r.flood = calloc(FLOOD_MAX, sizeof(*r.flood));
    r.calm = calloc(CALM_MAX, sizeof(*r.calm));
    if (!r.flood || !r.calm) {
        die("no memory");
    }
    double p99 = run(&r, name, policy);
    free(r.flood);
    free(r.calm);
    return p99;
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"--seconds", "--flood", "--prompt", "--tokens"};
    int32_t option[] = {300, 2000, 512, 128};

    for (int i = 1; i + 1 < argc; i += 2) {
        for (size_t k = 0; k < ARRAY_LEN(names); k++) {
            if (strcmp(argv[i], names[k]) == 0) {
                option[k] = MAX(atoi(argv[i + 1]), 1);
            }
        }
    }
    option[1] = MIN(option[1], FLOOD_MAX);
    for (size_t i = 0; i < ARRAY_LEN(MACHINES); i++) {
        double alone = measure(&MACHINES[i], "alone", POLICY_FCFS, 0, option);
        double fcfs = measure(&MACHINES[i], "flood, fcfs", POLICY_FCFS, option[1], option);
        double fair = measure(&MACHINES[i], "flood, fair", POLICY_FAIR, option[1], option);
        printf("%-12s p99 against alone: fcfs %.1f, fair %.2f\n", MACHINES[i].name, fcfs / alone,
               fair / alone);
    }
    return 0;
}
