/* The engine's host time per step: N sequences decode on the null executor with a
 * delay; all is real except for the model and HTTP.
 *
 *     build/tests/bench/engine_step [steps [running]]
 *
 * One line each for 1, 256 and 1024 running: the engine thread's own time per step
 * (engine_stats.step_host_s: plan, pack, launch, commit, deltas, without the wait), in
 * all and in the best twentieth of the run, which other processes disturbed least, and
 * the output thread's processor time per token. Then 256 sequences of 4096 tokens, all
 * of different ids, with and without penalties, and 256 that share their prompt. With
 * `running`, only the lines of so many.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine_state.h"

static atomic_llong n_pieces, n_last, output_cpu_ns;

static void emit(struct sink *s, const struct output *o)
{
    (void)s;
    atomic_fetch_add_explicit(&n_pieces, o->choice >= 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&n_last, o->last, memory_order_relaxed);
}

static void flush(struct sink *s)
{
    (void)s;
    struct timespec ts;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    atomic_store_explicit(&output_cpu_ns, ts.tv_sec * 1000000000LL + ts.tv_nsec,
                          memory_order_relaxed);
}

/* The null executor with waits as long as a device's, so that the output thread keeps
 * up as it does in service. */
struct delayed {
    struct executor base;
    struct executor *inner;
    int64_t pause_us;
};

static int delayed_launch(struct executor *x, const struct batch *b, struct err *e)
{
    struct delayed *p = CONTAINER_OF(x, struct delayed, base);

    return p->inner->launch(p->inner, b, e);
}

static int delayed_wait(struct executor *x, struct results *ret, struct err *e)
{
    struct delayed *p = CONTAINER_OF(x, struct delayed, base);

    nanosleep(&(struct timespec){.tv_nsec = p->pause_us * 1000}, NULL);
    return p->inner->wait(p->inner, ret, e);
}

static void delayed_free(struct executor *x)
{
    struct delayed *p = CONTAINER_OF(x, struct delayed, base);

    p->inner->free(p->inner);
    free(p);
}

static void die(const struct err *e)
{
    fprintf(stderr, "%s\n", e->text);
    exit(1);
}

/* The load: the number of sequences and the length of their prompts. */
struct load {
    int32_t n_running, n_prompt;
    bool penalties;
    bool shared; /* all have the same prompt */
};

enum { VOCAB = 151936, PARTS = 20 };

static struct engine *open_engine(struct sink *sink, int64_t pause_us)
{
    struct settings s = {
        .block_size = 16, .max_queue = 2048, .step_timeout = 60, .prefix_cache = true};
    struct delayed *p = calloc(1, sizeof(*p));
    struct tokenizer *t;
    struct engine *engine;
    struct err e;

    s.max_model_len = 8192;
    s.kv_blocks = 1 << 19;
    if (!p || null_open(&p->inner, &s, &e) < 0 || tokenizer_open_bytes(&t, &e) < 0) {
        die(&e);
    }
    p->pause_us = pause_us;
    p->inner->info.vocab = VOCAB; /* of prompts; its output tokens are bytes */
    p->base = (struct executor){.info = p->inner->info,
                                .launch = delayed_launch,
                                .wait = delayed_wait,
                                .free = delayed_free};
    if (engine_open_on(&engine, &s, &p->base, t, sink, &e) < 0) {
        die(&e);
    }
    return engine;
}

static void submit(struct engine *engine, const struct load *l, int32_t max_tokens)
{
    static int32_t prompt[4096];

    for (int32_t i = 0; i < l->n_running; i++) {
        struct gen_params p;
        struct request *r;
        struct err e;
        for (int32_t k = 0; k < l->n_prompt; k++) {
            prompt[k] = ((l->shared ? 0 : i * 31) + k * 7) % VOCAB;
        }
        gen_params_init(&p, engine);
        p.max_tokens = max_tokens;
        p.seed = (uint64_t)i;
        p.repetition_penalty = l->penalties ? 1.1f : 1;
        p.frequency_penalty = l->penalties ? 0.2f : 0;
        if (request_new(&r, &p, prompt, l->n_prompt, &e) < 0 || engine_submit(engine, r, &e) < 0) {
            die(&e);
        }
        request_unref(r);
    }
}

static void measure(const struct load *l, int32_t n_steps)
{
    int32_t n_running = l->n_running;
    struct sink sink = {.emit = emit, .flush = flush};
    struct engine *e = open_engine(&sink, n_running >= 1024 ? 500 : n_running >= 256 ? 200 : 50);
    const struct engine_stats *s = engine_stats(e);

    submit(e, l, n_steps + 400);
    while (atomic_load(&s->running) < n_running || atomic_load(&s->steps) < 200) {
        usleep(1000);
    }
    uint64_t steps = 0;
    double host_us = 0, least_us = INFINITY;
    long long pieces = atomic_load(&n_pieces), cpu = atomic_load(&output_cpu_ns);
    for (int32_t i = 0; i < PARTS; i++) {
        uint64_t first = atomic_load(&s->steps);
        double us = atomic_load(&s->step_host_s.sum) * 1e6;
        while (atomic_load(&s->steps) < first + (uint64_t)(n_steps / PARTS)) {
            usleep(1000);
        }
        uint64_t n = atomic_load(&s->steps) - first;
        us = atomic_load(&s->step_host_s.sum) * 1e6 - us;
        steps += n;
        host_us += us;
        least_us = MIN(least_us, us / (double)n);
    }
    pieces = atomic_load(&n_pieces) - pieces;
    cpu = atomic_load(&output_cpu_ns) - cpu;
    printf("running %5d x %4d%-15s  host %7.1f us a step, at best %7.1f   output %6.0f ns of "
           "processor a token\n",
           n_running, l->n_prompt,
           l->penalties ? " with penalties"
           : l->shared  ? " shared"
                        : "",
           host_us / (double)steps, least_us, (double)cpu / (double)pieces);
    engine_free(e);
}

int main(int argc, char **argv)
{
    int32_t n_steps = argc > 1 ? atoi(argv[1]) : 4000, only = argc > 2 ? atoi(argv[2]) : 0;
    static const struct load loads[] = {{.n_running = 1, .n_prompt = 100},
                                        {.n_running = 256, .n_prompt = 100},
                                        {.n_running = 1024, .n_prompt = 100},
                                        {.n_running = 256, .n_prompt = 4096},
                                        {.n_running = 256, .n_prompt = 4096, .penalties = true},
                                        {.n_running = 256, .n_prompt = 4096, .shared = true}};

    for (size_t i = 0; i < ARRAY_LEN(loads); i++) {
        if (only == 0 || loads[i].n_running == only) {
            measure(&loads[i], MIN(n_steps, loads[i].n_prompt > 1000 ? 3000 : 7000));
        }
    }
    return 0;
}
