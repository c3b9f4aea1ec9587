/* Latencies and throughput of a GPU server in virtual time, to try scheduling rules
 * without a GPU: the real scheduler, look-ahead of one, and streams that send their
 * next request when one is answered, or requests that all come at once. A request takes
 * a while from the client to the engine, and at the start the client sends one after
 * another. A step takes as long as on an H200 with the shape of Llama-3.1-8B: products
 * by rows, under load, the rest by tokens, logits rows and context. Results do not
 * depend on the load of the machine.
 *
 *     build/tests/bench/streams_sim [--streams N] [--requests N] [--prompt N] [--tokens N]
 *                                   [--itl-ms N] [--quantum N] [--workload FILE] [--steps FILE]
 *
 * A workload has one line "PROMPT OUTPUT" per request (scripts/make-workload). --steps
 * writes one line per step: its end in ms, tokens, decodes, running and waiting groups,
 * and its length in ms.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sched/decode/decode.h"
#include "tests/sim/rig.h"

enum { STREAMS_MAX = 4096, REQUESTS_MAX = 1 << 16, SAMPLES = 20000, DEPTH = 1, LAYERS = 32 };

/* Microseconds of a layer's four products, by rows. */
static const struct point {
    double rows, us;
} PRODUCTS[] = {{1, 104},     {64, 108},    {128, 130},   {256, 188},   {512, 335},
                {768, 484},   {1024, 619},  {1025, 780},  {1280, 789},  {1281, 940},
                {1536, 973},  {1537, 1080}, {1792, 1141}, {1793, 1235}, {2048, 1264},
                {2304, 1440}, {2560, 1565}, {3072, 1886}, {4096, 2511}, {8192, 5010}};

/* The cost model that the start-up measurement finds on such a device. */
static const struct step_cost COST = {.fixed_us = 5028, .token_us = 14.58};

struct options {
    int32_t streams, requests, prompt, tokens, itl_ms, quantum;
    const char *workload, *steps;
};

struct client {
    struct request request;
    _Atomic int32_t stop_at;
    int64_t first_us, last_us; /* first_us 0: no token yet */
    int64_t ask_us;            /* when its next request comes to the engine */
    bool busy;
};

struct spread {
    int32_t *us;
    int32_t n;
};

struct run {
    struct sched *sched;
    struct sched_config config;
    struct plan plan[DEPTH + 1];
    /* of the steps in flight; free_us: when the last of them ends */
    int64_t begin_us[DEPTH + 1], end_us[DEPTH + 1], free_us;
    uint64_t launched, committed;
    struct delta_out out;
    int64_t now_us;
    int64_t idle_us;       /* of the device, between two steps */
    struct client *client; /* [STREAMS_MAX] */
    int32_t (*length)[2];  /* [REQUESTS_MAX] prompt, output */
    int32_t n_streams, n_requests, n_asked, n_ended;
    int64_t n_tokens;
    struct spread itl, ttft; /* [all outputs], [n_requests] */
    FILE *steps;             /* of --steps; NULL: none */
};

static void die(const char *what)
{
    fprintf(stderr, "streams_sim: %s\n", what);
    exit(1);
}

/* ---- the device ---- */

static double products_us(double rows)
{
    size_t i = 1;

    while (i + 1 < ARRAY_LEN(PRODUCTS) && PRODUCTS[i].rows < rows) {
        i++;
    }
    const struct point *a = &PRODUCTS[i - 1], *b = &PRODUCTS[i];
    return a->us + (b->us - a->us) * (rows - a->rows) / (b->rows - a->rows);
}

static int64_t step_us(const struct plan *p)
{
    const double FIXED = 840, TOKEN = 1.95, LOGITS = 1.75, CONTEXT = 0.0305,
                 PROMPT_CONTEXT = 0.0006;
    enum { FREE_LOGITS = 200 }; /* rows that cost nothing: the head's weights are read anyway */
    double us = FIXED + LAYERS * products_us(p->n_tokens) + TOKEN * p->n_tokens +
                LOGITS * MAX(p->n_logits - FREE_LOGITS, 0);

    for (int32_t i = 0; i < p->n_items; i++) {
        const struct plan_item *it = &p->item[i];
        us += it->n == 1 ? it->first * CONTEXT : it->n * (it->first + it->n / 2.0) * PROMPT_CONTEXT;
    }
    return (int64_t)us;
}

/* ---- requests ---- */

/* From the client's last token to the engine, with the client's next request on its
 * way; and from one request of the client to the next. */
enum { RETURN_US = 400, SEND_US = 25 };
/* The host's work on a step before its first kernel runs. */
enum { LAUNCH_US = 50 };

static void ask(struct run *r, struct client *c)
{
    static int32_t prompt[LIMIT_BATCHED_TOKENS];
    struct group *g;
    struct err e;
    const int32_t *length = r->length[r->n_asked++];

    *c = (struct client){.busy = true, .ask_us = c->ask_us};
    c->request.params = rig_params();
    c->request.params.max_tokens = length[1];
    c->request.params.ignore_eos = true;
    c->request.prompt = prompt;
    c->request.n_prompt = length[0];
    c->request.arrival_us = c->ask_us;
    c->request.user = c;
    c->request.stop_at = &c->stop_at;
    atomic_init(&c->stop_at, INT32_MAX);
    if (group_new(&g, &c->request, NULL, &r->config, &e) < 0) {
        die(e.text);
    }
    if (sched_add(r->sched, g, r->now_us) < 0) {
        die("the queue is full");
    }
}

static void add(struct spread *s, int64_t us)
{
    s->us[s->n++] = (int32_t)us;
}

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    struct run *r = CONTAINER_OF(out, struct run, out);
    struct client *c = d->request->user;

    (void)g;
    if (d->kind == DELTA_TOKEN) {
        if (c->first_us == 0) {
            add(&r->ttft, r->now_us - c->request.arrival_us);
            c->first_us = r->now_us;
        } else {
            add(&r->itl, r->now_us - c->last_us);
        }
        c->last_us = r->now_us;
        r->n_tokens++;
    } else if (d->kind == DELTA_END) {
        c->busy = false;
        c->ask_us = r->now_us + RETURN_US;
        r->n_ended++;
    }
}

/* ---- the loop, as engine/loop/loop.c has it ---- */

static void commit(struct run *r)
{
    static int32_t token[SAMPLES];
    static float logprob[SAMPLES];
    uint64_t i = r->committed++ % (DEPTH + 1);
    struct plan *p = &r->plan[i];
    struct results results = {
        .step = p->step, .n_samples = p->n_samples, .token = token, .logprob = logprob};
    struct sched_counts c;
    int64_t us = r->end_us[i] - r->begin_us[i];

    r->now_us = MAX(r->now_us, r->end_us[i]);
    sched_counts(r->sched, &c);
    if (r->steps) {
        fprintf(r->steps, "%.3f %d %d %d %d %.3f\n", (double)r->now_us * 1e-3, p->n_tokens,
                p->n_decode, c.running_groups, c.waiting_groups, (double)us * 1e-3);
    }
    sched_observe(r->sched, p, us);
    decode_commit(r->sched, p, &results, r->now_us, &r->out);
}

static void take_requests(struct run *r)
{
    for (int32_t i = 0; i < r->n_streams && r->n_asked < r->n_requests; i++) {
        if (!r->client[i].busy && r->client[i].ask_us <= r->now_us) {
            ask(r, &r->client[i]);
        }
    }
}

static void launch(struct run *r, struct plan *p, uint64_t i)
{
    bool after_another = r->free_us > 0;
    int64_t begin_us = MAX(r->free_us, r->now_us + LAUNCH_US);

    r->idle_us += after_another ? begin_us - r->free_us : 0;
    r->begin_us[i] = begin_us;
    r->free_us = r->end_us[i] = begin_us + step_us(p);
    r->launched++;
}

static void turn(struct run *r)
{
    enum { IDLE_US = 50 };

    take_requests(r);
    uint64_t i = r->launched % (DEPTH + 1);
    int32_t n = sched_plan(r->sched, r->now_us, &r->plan[i]);
    if (n > 0) {
        launch(r, &r->plan[i], i);
    }
    if (r->launched - r->committed > (n > 0 ? DEPTH : 0)) {
        commit(r);
    } else if (n == 0) {
        r->now_us += IDLE_US;
    }
    decode_reap(r->sched, &r->out);
}

static void run(struct run *r, const struct options *o)
{
    struct err e;

    r->config = (struct sched_config){.n_blocks = 49152,
                                      .block_size = 16,
                                      .vocab = 1000,
                                      .max_len = 32768,
                                      .max_num_seqs = 1024,
                                      .max_num_batched_tokens = 8192,
                                      .max_logits = 2048,
                                      .max_waiting = REQUESTS_MAX,
                                      .preemption = PREEMPT_RECOMPUTE,
                                      .step_quantum = o->quantum,
                                      .target_itl_us = o->itl_ms * 1000,
                                      .cost = COST};
    if (sched_new(&r->sched, &r->config, &e) < 0) {
        die(e.text);
    }
    for (int32_t i = 0; i <= DEPTH; i++) {
        if (plan_init(&r->plan[i], &r->config, &e) < 0) {
            die(e.text);
        }
    }
    r->out.emit = on_delta;
    while (r->n_ended < r->n_requests) {
        turn(r);
    }
    while (r->committed < r->launched) {
        decode_abandon(r->sched, &r->plan[r->committed++ % (DEPTH + 1)]);
    }
    sched_free(r->sched);
    for (int32_t i = 0; i <= DEPTH; i++) {
        plan_release(&r->plan[i]);
    }
}

/* ---- the report ---- */

static int by_value(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

    return (x > y) - (x < y);
}

static void tell(const char *name, struct spread *s)
{
    double sum = 0;

    if (s->n == 0) {
        return;
    }
    qsort(s->us, (size_t)s->n, sizeof(*s->us), by_value);
    for (int32_t i = 0; i < s->n; i++) {
        sum += s->us[i] * 1e-3;
    }
    printf("%-8s mean %8.2f p50 %8.2f p90 %8.2f p99 %8.2f max %8.2f\n", name, sum / s->n,
           s->us[s->n / 2] * 1e-3, s->us[(int64_t)s->n * 9 / 10] * 1e-3,
           s->us[(int64_t)s->n * 99 / 100] * 1e-3, s->us[s->n - 1] * 1e-3);
}

/* ---- options ---- */

static void read_workload(struct run *r, const char *path)
{
    char line[256];
    FILE *f = fopen(path, "r");

    if (!f) {
        die("cannot read the workload");
    }
    while (r->n_requests < REQUESTS_MAX && fgets(line, sizeof(line), f)) {
        int32_t *length = r->length[r->n_requests];
        if (line[0] != '#' && sscanf(line, "%d %d", &length[0], &length[1]) == 2) {
            r->n_requests++;
        }
    }
    fclose(f);
    r->n_streams = MIN(r->n_requests, STREAMS_MAX);
}

static void prepare(struct run *r, const struct options *o)
{
    r->client = calloc(STREAMS_MAX, sizeof(*r->client));
    r->length = calloc(REQUESTS_MAX, sizeof(*r->length));
    if (!r->client || !r->length) {
        die("no memory");
    }
    r->n_streams = MIN(o->streams, STREAMS_MAX);
    for (; !o->workload && r->n_requests < MIN(o->requests, REQUESTS_MAX); r->n_requests++) {
        r->length[r->n_requests][0] = o->prompt, r->length[r->n_requests][1] = o->tokens;
    }
    if (o->workload) {
        read_workload(r, o->workload);
    }
    for (int32_t i = 0; i < r->n_streams; i++) {
        r->client[i].ask_us = o->workload ? 1 : 1 + i * SEND_US;
    }
    int64_t n = 1;
    for (int32_t i = 0; i < r->n_requests; i++) {
        n += r->length[i][1];
    }
    r->ttft.us = calloc((size_t)r->n_requests + 1, sizeof(int32_t));
    r->itl.us = calloc((size_t)n, sizeof(int32_t));
    r->steps = o->steps ? fopen(o->steps, "w") : NULL;
    if (!r->ttft.us || !r->itl.us || (o->steps && !r->steps)) {
        die("no memory, or the steps' file cannot be written");
    }
}

int main(int argc, char **argv)
{
    struct options o = {256, 1024, 512, 128, 54, 1024, NULL, NULL};
    const struct {
        const char *name;
        int32_t *number;
        const char **text;
    } table[] = {{"--streams", &o.streams, NULL},   {"--requests", &o.requests, NULL},
                 {"--prompt", &o.prompt, NULL},     {"--tokens", &o.tokens, NULL},
                 {"--itl-ms", &o.itl_ms, NULL},     {"--quantum", &o.quantum, NULL},
                 {"--workload", NULL, &o.workload}, {"--steps", NULL, &o.steps}};

    for (int i = 1; i + 1 < argc; i += 2) {
        for (size_t k = 0; k < ARRAY_LEN(table); k++) {
            if (strcmp(argv[i], table[k].name) == 0) {
                if (table[k].number) {
                    *table[k].number = MAX(atoi(argv[i + 1]), 0);
                } else {
                    *table[k].text = argv[i + 1];
                }
            }
        }
    }
    struct run r = {0};
    prepare(&r, &o);
    run(&r, &o);
    printf("%.0f tok/s, %.2f s, %llu steps, %.1f ms idle\n",
           (double)r.n_tokens * 1e6 / (double)MAX(r.now_us, 1), (double)r.now_us * 1e-6,
           (unsigned long long)r.launched, (double)r.idle_us * 1e-3);
    tell("ttft_ms", &r.ttft);
    tell("itl_ms", &r.itl);
    if (r.steps) {
        fclose(r.steps);
    }
    free(r.client);
    free(r.length);
    free(r.ttft.us);
    free(r.itl.us);
    return 0;
}
