/* Speculation at acceptances that are given: throughput and latency with drafts beside
 * those without, in one process.
 *
 *     build/tests/bench/acceptance [streams=1,8,64] [input=256] [output=128] [rounds=1]
 *         [steps=0] CURVE... -- [settings of quire serve]
 *
 * For each number of streams the requests run once for their answers, which are what is
 * drafted from then on, and once with each curve, for what a device sets up when a size
 * is new. Then they run `rounds` times with each curve, right behind or before a run
 * without drafts. A CURVE is a chance for all drafts (0.8), one for each place of a draft
 * in its step (0.8,0.8,0.7), or lengths, the tokens that a step gives with 1, 2, 3 ...
 * drafts, from which the chances follow (al:1.78,2.38,2.83). With a draft model it drafts
 * as when serving, and its tokens are replaced.
 *
 * A line gives tokens a second while all requests decode, without and with drafts, and
 * their ratio, the median of the rounds; milliseconds a token of a stream; tokens and
 * drafts a step and sequence; and for a step what the host and the device take, without
 * and with drafts. steps=1 prints at the end what steps of so many rows take by the cost
 * model and as learned.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/wait.h"
#include "config/settings/settings.h"
#include "engine/engine_state.h"
#include "engine/sched/sched_impl.h"

extern char **environ;

enum { MOST_CURVES = 16, MOST_STREAMS = 16, MOST_ROUNDS = 64, HEAD_TOKENS = 8, TAIL_TOKENS = 9 };

struct curve {
    const char *text;
    float chance[LIMIT_DRAFT];
    int32_t n;
};

struct options {
    int32_t streams[MOST_STREAMS], n_streams;
    struct curve curve[MOST_CURVES];
    int32_t n_curves, input, output, rounds, steps;
};

/* Counters of the engine. */
struct mark {
    double steps, host_s, device_s, verified, drafts, accepted;
};

/* One run of some requests. */
struct run {
    struct sink sink;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t n, output; /* requests, and the tokens of each */
    int32_t *n_tokens; /* [n] */
    int32_t n_begun, n_ended, n_flushed;
    bool near_end;
    int64_t tokens, from, from_us, to, to_us; /* of the window in which all decode */
    const struct engine *engine;
    struct mark from_mark, to_mark; /* of the same */
};

/* What a run showed, or the sum of several. */
struct figures {
    double speed, host_us, device_us, verified, drafts, accepted;
    double round[MOST_ROUNDS]; /* the speed of each */
    int32_t n;                 /* of them */
};

static void check(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "acceptance: %s\n", e->text);
        exit(1);
    }
}

/* ---- options ---- */

/* Numbers with commas between them; exits at anything else. */
static int32_t numbers(const char *text, int32_t most, float *ret)
{
    int32_t n = 0;
    char *end = NULL;

    do {
        ret[n++] = strtof(text, &end);
        if (end == text || (*end != '\0' && *end != ',')) {
            fprintf(stderr, "acceptance: '%s' are no numbers\n", text);
            exit(2);
        }
        text = end + 1;
    } while (*end == ',' && n < most);
    return n;
}

static int32_t whole_numbers(const char *text, int32_t *ret)
{
    float number[MOST_STREAMS];
    int32_t n = numbers(text, MOST_STREAMS, number);

    for (int32_t i = 0; i < n; i++) {
        ret[i] = MAX((int32_t)number[i], 1);
    }
    return n;
}

/* Of lengths: draft i is reached and holds by the chance length[i] - length[i - 1]. */
static void read_curve(struct curve *c, const char *text)
{
    float length[LIMIT_DRAFT], before = 1, reached = 1;

    c->text = text;
    if (strncmp(text, "al:", 3) != 0) {
        c->n = numbers(text, LIMIT_DRAFT, c->chance);
        return;
    }
    c->n = numbers(text + 3, LIMIT_DRAFT, length);
    for (int32_t i = 0; i < c->n; i++) {
        float holds = MIN(MAX(length[i] - before, 0), reached);
        c->chance[i] = reached > 0 ? holds / reached : 0;
        before = length[i];
        reached = holds;
    }
}

static void read_options(struct options *o, int argc, char **argv)
{
    int32_t one[MOST_STREAMS];

    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strncmp(argv[i], "streams=", 8) == 0) {
            o->n_streams = whole_numbers(argv[i] + 8, o->streams);
        } else if (strncmp(argv[i], "input=", 6) == 0) {
            whole_numbers(argv[i] + 6, one);
            o->input = one[0];
        } else if (strncmp(argv[i], "output=", 7) == 0) {
            whole_numbers(argv[i] + 7, one);
            o->output = MAX(one[0], HEAD_TOKENS + TAIL_TOKENS + 16);
        } else if (strncmp(argv[i], "rounds=", 7) == 0) {
            whole_numbers(argv[i] + 7, one);
            o->rounds = MIN(one[0], MOST_ROUNDS);
        } else if (strncmp(argv[i], "steps=", 6) == 0) {
            whole_numbers(argv[i] + 6, one);
            o->steps = argv[i][6] != '0';
        } else if (o->n_curves < MOST_CURVES) {
            read_curve(&o->curve[o->n_curves++], argv[i]);
        }
    }
}

/* ---- a run ---- */

static struct mark mark_of(const struct engine *engine)
{
    const struct engine_stats *s = engine_stats(engine);
    struct mark m = {.steps = (double)atomic_load(&s->steps),
                     .host_s = atomic_load(&s->step_host_s.sum),
                     .device_s = atomic_load(&s->step_device_s.sum),
                     .verified = (double)atomic_load(&s->drafts),
                     .drafts = (double)atomic_load(&s->draft_tokens)};

    for (int32_t i = 0; i < LIMIT_DRAFT; i++) {
        m.accepted += (double)atomic_load(&s->accepted_tokens[i]);
    }
    return m;
}

static void on_output(struct sink *s, const struct output *o)
{
    struct run *r = CONTAINER_OF(s, struct run, sink);
    int32_t *n = o->request->user;

    if (o->error) {
        fprintf(stderr, "acceptance: %s\n", o->error);
        exit(1);
    }
    if (o->choice >= 0 && !o->prompt && o->n_tokens > 0) {
        r->n_begun += *n <= HEAD_TOKENS && *n + o->n_tokens > HEAD_TOKENS;
        *n += o->n_tokens;
        r->tokens += o->n_tokens;
        r->near_end = r->near_end || *n > r->output - TAIL_TOKENS;
    }
    r->n_ended += o->last;
}

static void on_flush(struct sink *s)
{
    struct run *r = CONTAINER_OF(s, struct run, sink);

    if (r->n_begun == r->n && !r->near_end) {
        r->to_us = clock_us();
        r->to = r->tokens;
        r->to_mark = mark_of(r->engine);
        r->from_mark = r->from_us == 0 ? r->to_mark : r->from_mark;
        r->from_us = r->from_us == 0 ? r->to_us : r->from_us;
        r->from = r->from_us == r->to_us ? r->to : r->from;
    }
    pthread_mutex_lock(&r->lock);
    r->n_flushed = r->n_ended;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* Request i of n; others for each n, whose steps may round otherwise. */
static struct request *new_request(const struct engine *engine, const struct options *o, int32_t n,
                                   int32_t i)
{
    struct engine_info info;
    struct gen_params p;
    struct request *q;
    struct err e;
    int32_t *prompt = malloc((size_t)o->input * sizeof(*prompt));
    uint64_t word = ((uint64_t)n << 32 | (uint64_t)i) * 0x9e3779b97f4a7c15u + 1;

    if (!prompt) {
        exit(1);
    }
    engine_info(engine, &info);
    for (int32_t k = 0; k < o->input; k++) {
        word = word * 6364136223846793005u + 1442695040888963407u;
        prompt[k] = (int32_t)((word >> 33) % (uint64_t)info.vocab);
    }
    gen_params_init(&p, engine);
    p.max_tokens = o->output;
    p.temperature = 0;
    p.ignore_eos = true;
    p.seed = (uint64_t)i + 1;
    check(request_new(&q, &p, prompt, o->input, &e), &e);
    free(prompt);
    return q;
}

static void run_once(struct run *r, struct engine *engine, const struct options *o, int32_t n)
{
    struct request **q = calloc((size_t)n, sizeof(struct request *));
    struct err e;

    r->n_tokens = calloc((size_t)n, sizeof(*r->n_tokens));
    if (!q || !r->n_tokens) {
        exit(1);
    }
    r->n = n;
    r->output = o->output;
    r->n_begun = r->n_ended = r->n_flushed = 0;
    r->near_end = false;
    r->tokens = r->from = r->to = r->from_us = r->to_us = 0;
    for (int32_t i = 0; i < n; i++) {
        q[i] = new_request(engine, o, n, i);
        q[i]->user = &r->n_tokens[i];
        q[i]->arrival_us = clock_us();
    }
    check(engine_submit_all(engine, q, n, &e), &e);
    pthread_mutex_lock(&r->lock);
    while (r->n_flushed < n) {
        wait_until(&r->changed, &r->lock, clock_us() + 1000000);
    }
    pthread_mutex_unlock(&r->lock);
    for (int32_t i = 0; i < n; i++) {
        request_unref(q[i]);
    }
    free(q);
    free(r->n_tokens);
}

/* ---- figures ---- */

/* Runs n requests with a curve (NULL: without drafts) and adds what was seen. */
static void measure(struct run *r, struct engine *engine, const struct options *o, int32_t n,
                    const struct curve *c, struct figures *sum)
{
    struct err e;

    check(engine_replay(engine, c ? c->chance : NULL, c ? c->n : 0, &e), &e);
    run_once(r, engine, o, n);
    struct mark a = r->from_mark, b = r->to_mark;
    double steps = MAX(b.steps - a.steps, 1), us = (double)(r->to_us - r->from_us);
    double speed = us > 0 ? (double)(r->to - r->from) * 1e6 / us : NAN;
    sum->round[sum->n++ % MOST_ROUNDS] = speed;
    sum->speed += speed;
    sum->host_us += (b.host_s - a.host_s) / steps * 1e6;
    sum->device_us += (b.device_s - a.device_s) / steps * 1e6;
    sum->verified += b.verified - a.verified;
    sum->drafts += b.drafts - a.drafts;
    sum->accepted += b.accepted - a.accepted;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Of the rounds' ratios. */
static double median_ratio(const struct figures *off, const struct figures *on)
{
    double ratio[MOST_ROUNDS];

    for (int32_t i = 0; i < on->n; i++) {
        ratio[i] = on->round[i] / off->round[i];
    }
    qsort(ratio, (size_t)on->n, sizeof(*ratio), by_size);
    return (ratio[on->n / 2] + ratio[(on->n - 1) / 2]) / 2;
}

static void print_line(int32_t n, int32_t rounds, const char *curve, const struct figures *off,
                       const struct figures *on)
{
    double verified = MAX(on->verified, 1);

    printf("%4d %8.1f %8.1f %6.3f %7.3f %7.3f %5.2f %5.2f %7.0f %7.0f %7.0f %7.0f  %s\n", n,
           off->speed / rounds, on->speed / rounds, median_ratio(off, on),
           1e3 * n * rounds / off->speed, 1e3 * n * rounds / on->speed, 1 + on->accepted / verified,
           on->drafts / verified, off->host_us / rounds, on->host_us / rounds,
           off->device_us / rounds, on->device_us / rounds, curve);
    fflush(stdout);
}

/* Without drafts and with each curve, in turn. */
static void measure_streams(struct run *r, struct engine *engine, const struct options *o,
                            int32_t n)
{
    struct figures unused = {0}, off[MOST_CURVES] = {{0}}, on[MOST_CURVES] = {{0}};

    measure(r, engine, o, n, NULL, &unused); /* for the answers */
    for (int32_t i = 0; i < o->n_curves; i++) {
        measure(r, engine, o, n, &o->curve[i], &unused);
    }
    for (int32_t k = 0; k < o->rounds; k++) {
        for (int32_t i = 0; i < o->n_curves; i++) {
            for (int32_t turn = 0; turn < 2; turn++) {
                bool drafts = (turn + k + i) % 2 != 0;
                measure(r, engine, o, n, drafts ? &o->curve[i] : NULL, drafts ? &on[i] : &off[i]);
            }
        }
    }
    for (int32_t i = 0; i < o->n_curves; i++) {
        print_line(n, o->rounds, o->curve[i].text, &off[i], &on[i]);
    }
}

/* What the scheduler has learned of steps that only decode; nothing runs. */
static void print_steps(const struct engine *engine)
{
    const struct step_pace *p = &engine->sched->pace;
    const struct step_cost *c = &engine->sched->c.cost;

    printf("rows, steps seen; us by the cost model, as learned\n");
    for (int32_t n = 1, before = -1; n <= 256; n++) {
        int32_t size = step_size(n);
        if (size != before && p->n_seen[size] > 0) {
            printf("%4d %7d %8.0f %8.0f\n", n, p->n_seen[size], step_model_us(c, n),
                   step_pace_us(p, c, n));
        }
        before = size;
    }
}

int main(int argc, char **argv)
{
    struct options o = {
        .streams = {1, 8, 64}, .n_streams = 3, .input = 256, .output = 128, .rounds = 1};
    struct run r = {.sink = {on_output, on_flush}};
    struct settings s;
    struct engine *engine;
    struct err e;
    bool help = false;
    int first = 1;

    while (first < argc && strcmp(argv[first], "--") != 0) {
        first++;
    }
    read_options(&o, argc, argv);
    if (o.n_curves == 0) {
        fprintf(stderr,
                "usage: acceptance [streams=1,8,64] [input=N] [output=N] [rounds=N] [steps=1] "
                "CURVE... -- [settings of quire serve]\n");
        return 2;
    }
    check(settings_load(&s, MAX(argc - first - 1, 0), argv + MIN(first + 1, argc), environ, &help,
                        &e),
          &e);
    s.target_itl_ms = s.target_itl_ms == 0 ? -1 : s.target_itl_ms; /* latency does not matter */
    log_setup(s.log_format, LOG_WARN);
    pthread_mutex_init(&r.lock, NULL);
    wait_init(&r.changed);
    check(engine_open(&engine, &s, &r.sink, &e), &e);
    r.engine = engine;
    printf("streams tok/s off, on, ratio; ms a token off, on; a step's tokens, drafts; host us a "
           "step off, on; device us off, on\n");
    for (int32_t i = 0; i < o.n_streams; i++) {
        measure_streams(&r, engine, &o, o.streams[i]);
    }
    if (o.steps) {
        print_steps(engine);
    }
    engine_free(engine);
    settings_release(&s);
    pthread_mutex_destroy(&r.lock);
    pthread_cond_destroy(&r.changed);
    return 0;
}
