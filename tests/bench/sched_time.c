/* Host time of the scheduler per step, without a model: plan, pack and commit, medians
 * in microseconds on one core.
 *
 *     build/tests/bench/sched_time [--steps N]
 *
 * Steady state of decoding, with contexts of 500 tokens in blocks of 16 and look-ahead
 * as with an executor of depth 1. The last lines add waiting requests and cached
 * blocks, which must cost nothing: every operation is O(1) in them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine/sched/decode/decode.h"
#include "engine/sched/decode/pack.h"
#include "engine/sched/sched_impl.h"
#include "tests/sim/rig.h"
#include "tests/sim/toy.h"

enum { PROMPT = 500, OUTPUT = 3000, VOCAB = 32000, TOPS = 16 };

struct bench {
    const char *name;
    int32_t groups, width;
    bool beams;
    int32_t waiting, cached; /* requests in the queue, cached blocks */
};

static struct sched *sched;
static struct packer *packer;
static struct plan plan[2];
static struct delta_out out;
static struct rng rng = {1};
static int32_t *token, *top;
static float *logprob, *top_logprob;
static _Atomic int32_t stop_at[LIMIT_CHOICES];
static int64_t n_deltas;

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "sched_time: %s\n", what);
        exit(1);
    }
}

static void count_delta(struct delta_out *o, const struct group *g, const struct delta *d)
{
    (void)o, (void)g, (void)d;
    n_deltas++;
}

static void add(const struct sched_config *c, const struct bench *b, int32_t first)
{
    struct request *r = calloc(1, sizeof(*r)); /* kept until the process ends */
    struct group *g;
    struct err e;

    must(r != NULL, "no memory");
    r->params = rig_params();
    r->params.max_tokens = OUTPUT;
    r->params.n = r->params.best_of = b->width;
    r->params.beam_width = b->beams ? b->width : 0;
    r->params.temperature = b->beams ? 0 : 1;
    r->n_prompt = PROMPT;
    r->prompt = malloc(PROMPT * sizeof(int32_t));
    must(r->prompt != NULL, "no memory");
    for (int32_t i = 0; i < PROMPT; i++) {
        r->prompt[i] = (first * 31 + i) % VOCAB;
    }
    r->stop_at = stop_at;
    must(group_new(&g, r, NULL, c, &e) == 0, e.text);
    must(sched_add(sched, g, 0) == 0, "the queue is full");
}

static void fill_cache(int32_t n)
{
    struct prefix_chain chain;
    int32_t tokens[16] = {0}, *block = malloc((size_t)n * sizeof(*block));

    must(block != NULL, "no memory");
    prefix_start(&sched->prefix, &chain, "bench");
    for (int32_t i = 0; i < n; i++) {
        tokens[0] = i;
        block[i] = kvpool_take(&sched->pool);
        prefix_publish(&sched->prefix, &chain, block[i], tokens);
    }
    while (n-- > 0) {
        kvpool_unref(&sched->pool, block[n]);
    }
    free(block);
}

static void answer(const struct plan *p, struct results *ret)
{
    for (int32_t i = 0; i < p->n_samples; i++) {
        token[i] = rng_range(&rng, 1, VOCAB - 1);
        for (int32_t k = 0; k < TOPS; k++) {
            top[i * TOPS + k] = (token[i] + k) % VOCAB;
            top_logprob[i * TOPS + k] = -0.1F * (float)rng_range(&rng, 1, 50) - (float)k;
        }
    }
    *ret = (struct results){.step = p->step,
                            .n_samples = p->n_samples,
                            .top_stride = TOPS,
                            .token = token,
                            .logprob = logprob,
                            .top_token = top,
                            .top_logprob = top_logprob};
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *v, int32_t n)
{
    qsort(v, (size_t)n, sizeof(*v), by_value);
    return v[n / 2];
}

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void open_all(const struct bench *b, struct sched_config *c)
{
    struct err e = {0};
    int32_t seqs = b->groups * b->width, per_seq = (PROMPT + OUTPUT) / 16 + 2;

    *c = (struct sched_config){.n_blocks = seqs * per_seq + b->cached,
                               .block_size = 16,
                               .vocab = VOCAB,
                               .max_len = PROMPT + OUTPUT,
                               .max_num_seqs = seqs,
                               .max_num_batched_tokens = MAX(8192, seqs),
                               .max_logits = seqs + 64,
                               .max_waiting = b->groups + b->waiting + 1,
                               .preemption = PREEMPT_RECOMPUTE,
                               .prefix_cache = true};
    must(sched_new(&sched, c, &e) == 0 && packer_new(&packer, c, &e) == 0 &&
             plan_init(&plan[0], c, &e) == 0 && plan_init(&plan[1], c, &e) == 0,
         e.text);
    size_t rows = (size_t)c->max_logits;
    token = malloc(rows * sizeof(*token));
    logprob = calloc(rows, sizeof(*logprob));
    top = malloc(rows * TOPS * sizeof(*top));
    top_logprob = malloc(rows * TOPS * sizeof(*top_logprob));
    must(token && logprob && top && top_logprob, "no memory");
}

static void close_all(void)
{
    sched_free(sched);
    packer_free(packer);
    plan_release(&plan[0]);
    plan_release(&plan[1]);
    free(token);
    free(logprob);
    free(top);
    free(top_logprob);
}

static void run(const struct bench *b, int32_t steps)
{
    struct sched_config c;
    struct batch batch;
    struct results r;
    uint64_t launched = 0, committed = 0;
    double *plan_us = malloc((size_t)steps * sizeof(double)),
           *pack_us = malloc((size_t)steps * sizeof(double)),
           *commit_us = malloc((size_t)steps * sizeof(double));

    must(plan_us && pack_us && commit_us, "no memory");
    open_all(b, &c);
    if (b->cached > 0) {
        fill_cache(b->cached);
    }
    for (int32_t i = 0; i < b->groups + b->waiting; i++) {
        add(&c, b, i);
    }
    int32_t warm = b->groups * PROMPT / 4096 + 16, n = 0;
    for (int32_t i = 0; n < steps; i++) {
        double start = now_us();
        int32_t items = sched_plan(sched, 0, &plan[launched % 2]);
        double planned = now_us();
        if (items > 0) {
            pack_batch(packer, &plan[launched++ % 2], &batch);
        }
        double packed = now_us();
        double commit = 0;
        if (launched - committed > (items > 0 ? 1U : 0U)) {
            answer(&plan[committed % 2], &r);
            commit = now_us();
            decode_commit(sched, &plan[committed++ % 2], &r, 0, &out);
            commit = now_us() - commit;
        }
        if (i < warm) {
            continue;
        }
        /* Groups with beams wait for their candidates: they are planned in one turn and
         * committed in the next. */
        plan_us[n] = items > 0 ? planned - start : n > 0 ? plan_us[n - 1] : 0;
        pack_us[n] = items > 0 ? packed - planned : n > 0 ? pack_us[n - 1] : 0;
        commit_us[n] = commit > 0 ? commit : n > 0 ? commit_us[n - 1] : 0;
        n++;
    }
    double p = median(plan_us, steps), k = median(pack_us, steps), m = median(commit_us, steps);
    printf("%-40s plan %7.1f  pack %7.1f  commit %7.1f  plan and commit %7.1f us\n", b->name, p, k,
           m, p + m);
    fflush(stdout);
    close_all();
    free(plan_us);
    free(pack_us);
    free(commit_us);
}

/* In a process of its own, so that each run starts with a fresh heap. */
static void run_apart(const struct bench *b, int32_t steps)
{
    int status = 1;
    pid_t child = fork();

    must(child >= 0, "cannot fork");
    if (child == 0) {
        run(b, steps);
        exit(0);
    }
    must(waitpid(child, &status, 0) == child && status == 0, b->name);
}

int main(int argc, char **argv)
{
    int32_t steps = argc == 3 && strcmp(argv[1], "--steps") == 0 ? atoi(argv[2]) : 400;
    static const struct bench benches[] = {
        {"256 running", 256, 1, false, 0, 0},
        {"1024 running", 1024, 1, false, 0, 0},
        {"64 groups of 4 samples", 64, 4, false, 0, 0},
        {"256 beam searches of width 4", 256, 4, true, 0, 0},
        {"256 running, 100,000 waiting", 256, 1, false, 100000, 0},
        {"256 running, 1,000,000 cached blocks", 256, 1, false, 0, 1000000},
    };

    out.emit = count_delta;
    for (int32_t i = 0; i < LIMIT_CHOICES; i++) {
        atomic_init(&stop_at[i], INT32_MAX);
    }
    for (size_t i = 0; i < ARRAY_LEN(benches); i++) {
        run_apart(&benches[i], MAX(steps, 1));
    }
    return 0;
}
