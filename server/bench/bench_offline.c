/* `quire bench offline`: the engine in this process, with all requests submitted at
 * once.
 *
 * Decode speed is the mean step interval while the whole batch decodes, without the
 * first HEAD_STEPS and the last TAIL_STEPS steps. A step ends when the output thread
 * flushes. So the window opens with the flush after which every sequence has more than
 * HEAD_STEPS tokens, and closes with the last flush before a sequence has only
 * TAIL_STEPS to go. If the requests do not all run at once (a workload of different
 * lengths), there is no such window, and only the figures of the whole job are
 * reported.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/base/wait.h"
#include "config/settings/settings.h"
#include "engine/engine.h"
#include "server/bench/bench.h"

extern char **environ;

enum { HEAD_STEPS = 8, TAIL_STEPS = 2 };

struct offline_run;

struct offline_request {
    struct offline_run *run;
    int32_t max_tokens;
    int32_t *n_tokens; /* [choices] tokens received, part of run->n_tokens */
    int64_t decode_us; /* from the first token to the last */
};

/* The engine's sums at one moment, of which two make what lies between. */
struct host_mark {
    uint64_t steps;
    double host_s, device_s, masks_s;
};

static struct host_mark mark_host(const struct engine *engine)
{
    const struct engine_stats *s = engine_stats(engine);

    return (struct host_mark){atomic_load(&s->steps), atomic_load(&s->step_host_s.sum),
                              atomic_load(&s->step_device_s.sum),
                              atomic_load(&s->step_masks_s.sum)};
}

/* During a run only the output thread writes this; the main thread reads the fields
 * under `lock`. After the last flush the main thread owns it again. */
struct offline_run {
    struct sink sink;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t n_ended;                 /* requests that have ended */
    int32_t n_flushed;               /* n_ended at the last flush; under lock */
    int64_t tokens_flushed;          /* `tokens` at the last flush; under lock */
    struct offline_request *request; /* [n] */
    int32_t *n_tokens;               /* [n * choices] tokens received */
    int32_t n, choices;              /* requests, and choices of each */
    int64_t start_us, end_us;        /* submission, end of the last request */
    int32_t n_begun, n_past_head;    /* sequences with at least 1, HEAD_STEPS + 1 tokens */
    bool nearly_done;                /* some sequence has at most TAIL_STEPS to go */
    int64_t tokens;                  /* received, of all sequences */
    int64_t all_begun_us;            /* when every sequence had a token; 0: not yet */
    /* The decode window: its times, and `tokens` at these times. */
    int64_t window_from_us, window_to_us, window_from, window_to;
    struct host_mark window_from_host, window_to_host;
    const struct engine *engine;
    int64_t completion_tokens; /* from the usage of ended requests */
    int64_t decode_us;         /* of all requests, from the first token to the last */
    struct bench_schemas schemas;
    bool constrained; /* this run is, each request by a schema */
    struct latency_hist ttft;
    char error[256]; /* the first error; "": none */
};

/* ---- the sink ---- */

static void on_output(struct sink *s, const struct output *o)
{
    struct offline_run *r = CONTAINER_OF(s, struct offline_run, sink);
    struct offline_request *q = o->request->user;

    if (o->error && !r->error[0]) {
        snprintf(r->error, sizeof(r->error), "%s", o->error);
    }
    if (o->choice >= 0 && !o->prompt && o->n_tokens > 0) {
        int32_t *n = &q->n_tokens[o->choice];
        int32_t before = *n;
        *n += o->n_tokens;
        r->tokens += o->n_tokens;
        if (before == 0 && ++r->n_begun == r->n * r->choices) {
            r->all_begun_us = clock_us();
        }
        if (before == 0 && o->choice == 0) {
            latency_hist_add(&r->ttft, clock_us() - r->start_us);
        }
        r->n_past_head += before <= HEAD_STEPS && *n > HEAD_STEPS;
        r->nearly_done |= *n >= q->max_tokens - TAIL_STEPS;
    }
    if (o->last) {
        r->completion_tokens += o->usage.completion_tokens;
        q->decode_us = o->request->course.decode_us;
        r->decode_us += q->decode_us;
        r->n_ended++;
        r->end_us = clock_us();
    }
}

/* Tokens whose text is not complete yet are held back, so the window begins and ends
 * where tokens came out. */
static void note_window(struct offline_run *r)
{
    if (r->n_past_head < r->n * r->choices || r->nearly_done || r->tokens == r->window_to) {
        return;
    }
    r->window_to_us = clock_us();
    r->window_to = r->tokens;
    r->window_to_host = mark_host(r->engine);
    if (r->window_from_us == 0) {
        r->window_from_us = r->window_to_us;
        r->window_from = r->tokens;
        r->window_from_host = r->window_to_host;
    }
}

/* Publish the counts to the main thread. */
static void on_flush(struct sink *s)
{
    struct offline_run *r = CONTAINER_OF(s, struct offline_run, sink);

    note_window(r);
    pthread_mutex_lock(&r->lock);
    r->n_flushed = r->n_ended;
    r->tokens_flushed = r->tokens;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* ---- one run ---- */

static int run_init(struct offline_run *r, const struct bench_load *l, int32_t choices,
                    struct err *e)
{
    r->n = l->n;
    r->choices = choices;
    r->n_ended = r->n_flushed = r->n_begun = r->n_past_head = 0;
    r->nearly_done = false;
    r->decode_us = 0;
    r->tokens = r->tokens_flushed = r->completion_tokens = 0;
    r->window_from = r->window_to = 0;
    r->window_from_host = r->window_to_host = (struct host_mark){0};
    r->start_us = r->end_us = r->all_begun_us = r->window_from_us = r->window_to_us = 0;
    r->ttft = (struct latency_hist){.n = 0};
    free(r->request);
    free(r->n_tokens);
    r->request = calloc((size_t)l->n, sizeof(*r->request));
    r->n_tokens = calloc((size_t)l->n * (size_t)choices, sizeof(*r->n_tokens));
    return r->request && r->n_tokens ? 0 : err_nomem(e, "the run");
}

/* Request i of a constrained run is under schema i, or beyond the last from the first
 * on. */
static int add_grammar(struct gen_params *p, const struct offline_run *r,
                       const struct engine *engine, int32_t i, struct err *e)
{
    int32_t k = r->constrained ? i % r->schemas.n : 0;
    struct err why = {0};

    if (!r->constrained) {
        return 0;
    }
    int rc = engine_grammar_new(engine, GRAMMAR_JSON_SCHEMA, r->schemas.text[k],
                                strlen(r->schemas.text[k]), NULL, &p->grammar, &why);
    return rc < 0 ? err_set(e, rc, "schema %d: %s", k + 1, why.text) : 0;
}

static int make_request(struct request **ret, struct engine *engine, const struct bench_options *o,
                        const struct offline_run *r, const struct bench_load *l, int32_t i,
                        int32_t max_tokens, int32_t *prompt, struct err *e)
{
    struct gen_params p;

    gen_params_init(&p, engine);
    p.max_tokens = max_tokens;
    p.temperature = (float)o->temperature;
    p.top_p = (float)o->top_p;
    p.top_k = (int32_t)o->top_k;
    p.min_p = 0;
    p.repetition_penalty = 1;
    p.n = (int32_t)o->n;
    p.best_of = p.n;
    p.beam_width = (int32_t)o->beam_width;
    p.ignore_eos = !o->stop_at_eos;
    p.seed = (uint64_t)o->seed + (uint64_t)i;
    bench_load_prompt(l, i, prompt);
    int rc = add_grammar(&p, r, engine, i, e);
    return rc < 0 ? rc : request_new(ret, &p, prompt, l->item[i].n_prompt, e);
}

/* Wait for all requests; the progress bar counts tokens. */
static void wait_all(struct offline_run *r, const char *what, int64_t tokens)
{
    pthread_mutex_lock(&r->lock);
    while (r->n_flushed < r->n) {
        char text[96];
        snprintf(text, sizeof(text), "%s: %lld of %lld tokens, %d of %d requests", what,
                 (long long)r->tokens_flushed, (long long)tokens, r->n_flushed, r->n);
        bench_progress(MIN((double)r->tokens_flushed / (double)tokens, 1), text);
        wait_until(&r->changed, &r->lock, clock_us() + 1000000);
    }
    pthread_mutex_unlock(&r->lock);
}

/* `most_tokens` > 0 limits every output (warm-up). */
static int run_once(struct offline_run *r, struct engine *engine, const struct bench_options *o,
                    const struct bench_load *l, int32_t most_tokens, struct err *e)
{
    int rc = run_init(r, l, (int32_t)o->n, e);
    r->engine = engine;
    struct request **q = calloc((size_t)l->n, sizeof(*q));
    int32_t *prompt = malloc((size_t)l->max_prompt * sizeof(*prompt));

    if (rc == 0 && (!q || !prompt)) {
        rc = err_nomem(e, "the requests");
    }
    int64_t tokens = 0;
    for (int32_t i = 0; rc == 0 && i < l->n; i++) {
        int32_t max_tokens =
            most_tokens > 0 ? MIN(most_tokens, l->item[i].max_tokens) : l->item[i].max_tokens;
        r->request[i] =
            (struct offline_request){r, max_tokens, r->n_tokens + (int64_t)i * r->choices, 0};
        tokens += (int64_t)max_tokens * r->choices;
        rc = make_request(&q[i], engine, o, r, l, i, max_tokens, prompt, e);
        if (rc == 0) {
            q[i]->user = &r->request[i];
        }
    }
    r->start_us = clock_us();
    for (int32_t i = 0; rc == 0 && i < l->n; i++) {
        q[i]->arrival_us = r->start_us;
    }
    if (rc == 0) {
        rc = engine_submit_all(engine, q, l->n, e);
    }
    if (rc == 0) {
        wait_all(r, most_tokens > 0 ? "warm-up" : "offline", tokens);
    }
    for (int32_t i = 0; q && i < l->n; i++) {
        request_unref(q[i]);
    }
    free(q);
    free(prompt);
    if (rc == 0 && r->error[0]) {
        rc = err_set(e, ERR_DEVICE, "a request failed: %s", r->error);
    }
    return rc;
}

/* ---- the report ---- */

static void report_run(struct bench_report *p, const struct offline_run *r,
                       const struct bench_load *l)
{
    double wall_s = (double)(r->end_us - r->start_us) * 1e-6;
    double prefill_s = (double)(r->all_begun_us - r->start_us) * 1e-6;
    double window_s = (double)(r->window_to_us - r->window_from_us) * 1e-6;
    double window_tokens = (double)(r->window_to - r->window_from);
    int32_t batch = r->n * r->choices;

    bench_report_number(p, "requests", l->n, "");
    bench_report_number(p, "prompt_tokens", (double)l->prompt_tokens, "");
    bench_report_number(p, "output_tokens", (double)r->completion_tokens, "");
    bench_report_number(p, "wall_s", wall_s, "s");
    bench_report_number(p, "output_tok_s", (double)r->completion_tokens / wall_s,
                        "tokens/s, whole job");
    bench_report_number(p, "total_tok_s",
                        (double)(l->prompt_tokens + r->completion_tokens) / wall_s,
                        "tokens/s, including prompts");
    if (r->all_begun_us > 0) {
        bench_report_number(p, "prefill_s", prefill_s, "s until every request has its first token");
        bench_report_number(p, "prefill_tok_s", (double)l->prompt_tokens / prefill_s,
                            "prompt tokens/s until then");
    }
    bench_report_latency(p, "ttft_ms", &r->ttft);
    if (window_tokens > 0) {
        bench_report_number(p, "decode_tok_s", window_tokens / window_s,
                            "tokens/s while the whole batch decodes");
        bench_report_number(p, "decode_step_ms", window_s / (window_tokens / batch) * 1e3,
                            "ms per step, mean");
        bench_report_number(p, "decode_steps", window_tokens / batch, "steps measured");
    }
    if (r->window_to_host.steps > r->window_from_host.steps) {
        double steps = (double)(r->window_to_host.steps - r->window_from_host.steps);
        double host_s = r->window_to_host.host_s - r->window_from_host.host_s;
        bench_report_number(p, "decode_step_host_us", host_s / steps * 1e6,
                            "us of the engine's thread per such step");
    }
}

/* The share of values beyond 5 ms. */
static double slow_masks(const struct hist *h)
{
    uint64_t slow = 0, all = 0;

    for (int i = 0; i <= h->n_bounds; i++) {
        uint64_t n = atomic_load(&h->count[i]);
        all += n;
        slow += i > 0 && h->bound[i - 1] >= 0.005 ? n : 0;
    }
    return all > 0 ? (double)slow / (double)all : 0;
}

static void report_host(struct bench_report *p, const struct engine *engine,
                        const struct host_mark *before)
{
    struct host_mark now = mark_host(engine);
    double steps = (double)(now.steps - before->steps);
    const struct engine_stats *s = engine_stats(engine);

    bench_report_number(p, "steps", steps, "");
    bench_report_number(p, "step_host_us", (now.host_s - before->host_s) / steps * 1e6,
                        "us of the engine's thread per step");
    if (now.device_s > before->device_s) {
        bench_report_number(p, "step_device_us", (now.device_s - before->device_s) / steps * 1e6,
                            "us of the device per step");
    }
    if (now.masks_s > before->masks_s) {
        bench_report_number(p, "step_masks_us", (now.masks_s - before->masks_s) / steps * 1e6,
                            "us from a step's tokens to its masks, beside the device");
        bench_report_number(p, "slow_masks", slow_masks(&s->step_masks_s),
                            "of all steps, whose masks took 5 ms or more");
    }
    bench_report_number(
        p, "preemptions",
        (double)(atomic_load(&s->preempt_recompute) + atomic_load(&s->preempt_swap)), "");
}

/* Tokens a second while the whole batch decodes; 0: it never does. */
static double decode_speed(const struct offline_run *r)
{
    int64_t us = r->window_to_us - r->window_from_us;

    return us > 0 ? (double)(r->window_to - r->window_from) * 1e6 / (double)us : 0;
}

/* Requests decode one after another where max-num-seqs is 1. */
static void report_script(struct bench_report *p, const struct engine *engine,
                          const struct offline_run *r)
{
    const struct engine_stats *s = engine_stats(engine);

    bench_report_number(p, "request_decode_s", (double)r->decode_us * 1e-6,
                        "from first tokens to last, all requests together");
    for (int32_t i = 0; i < r->n; i++) {
        bench_report_add(p, "request_decode_ms", (double)r->request[i].decode_us * 1e-3);
    }
    bench_report_number(p, "drafts", (double)atomic_load(&s->drafts), "verified");
    bench_report_number(p, "draft_tokens", (double)atomic_load(&s->draft_tokens), "of these");
}

/* Tokens of drafts that held. */
static uint64_t accepted_tokens(const struct engine_stats *s)
{
    uint64_t accepted = 0;

    for (int32_t i = 0; i < LIMIT_DRAFT; i++) {
        accepted += atomic_load(&s->accepted_tokens[i]);
    }
    return accepted;
}

/* A run under schemas against the same requests without. With `--speculate grammar` the
 * drafts are the tokens that a schema forces. */
static void report_schemas(struct bench_report *p, const struct engine *engine,
                           const struct offline_run *r, double free_speed, uint64_t accepted)
{
    double speed = decode_speed(r), n = (double)(accepted_tokens(engine_stats(engine)) - accepted);

    bench_report_number(p, "schemas", r->schemas.n, "");
    bench_report_number(p, "free_decode_tok_s", free_speed, "tokens/s without schemas");
    if (free_speed > 0) {
        bench_report_number(p, "constrained_to_free", speed / free_speed,
                            "times, while the whole batch decodes");
    }
    bench_report_number(p, "forced_tokens", n, "of the constrained run, taken as drafts");
}

/* A run with drafts against the same requests without. */
static void report_drafts(struct bench_report *p, const struct engine *engine, double plain,
                          double drafted)
{
    const struct engine_stats *s = engine_stats(engine);
    uint64_t drafts = atomic_load(&s->drafts), accepted = accepted_tokens(s);

    bench_report_number(p, "plain_decode_tok_s", plain, "tokens/s without drafts");
    if (plain > 0) {
        bench_report_number(p, "speedup", drafted / plain, "times, while the whole batch decodes");
    }
    bench_report_number(p, "drafts", (double)drafts, "verified");
    bench_report_number(p, "draft_tokens", (double)atomic_load(&s->draft_tokens), "of these");
    if (drafts > 0) {
        bench_report_number(p, "accepted_per_draft", (double)accepted / (double)drafts, "tokens");
    }
}

static void report_engine(struct bench_report *p, const struct engine *engine, double ready_s)
{
    struct engine_info info;

    engine_info(engine, &info);
    bench_report_text(p, "model", info.model_name);
    bench_report_text(p, "device", info.device);
    bench_report_text(p, "dtype", info.dtype);
    bench_report_number(p, "ready_s", ready_s, "s to open the engine");
}

/* ---- the command ---- */

static int settings_of(struct settings *ret, int argc, char **argv, int32_t n_requests,
                       struct err *e)
{
    bool help = false;
    int rc = settings_load(ret, argc, argv, environ, &help, e);

    if (rc == 0) {
        ret->max_queue = MAX(ret->max_queue, n_requests);
    }
    if (rc == 0 && ret->target_itl_ms == 0) {
        ret->target_itl_ms = -1; /* latency does not matter here */
    }
    return rc;
}

static int add_scripts(struct engine *engine, const struct bench_load *l, struct err *e)
{
    int rc = 0;

    for (int32_t i = 0; i < l->n && rc == 0; i++) {
        const struct bench_item *it = &l->item[i];
        rc = engine_script(engine, it->prompt, it->n_prompt, it->answer, it->max_tokens, e);
    }
    return rc;
}

/* The runs in front of the measured one: to warm up, and for what it is compared
 * with. */
static int run_before(struct offline_run *r, struct engine *engine, const struct bench_options *o,
                      const struct bench_load *load, struct err *e)
{
    struct bench_load warm = *load;
    int rc = o->script ? add_scripts(engine, load, e) : 0;

    sleep((unsigned)o->settle);
    warm.seed = ~load->seed; /* different prompts: the measured run must not hit the cache */
    if (rc == 0 && o->warmup > 0 && !o->script) {
        rc = run_once(r, engine, o, &warm, (int32_t)o->warmup, e);
    }
    r->constrained = o->schemas != NULL;
    if (rc == 0 && o->warmup > 0 && o->schemas) {
        rc = run_once(r, engine, o, &warm, (int32_t)o->warmup, e);
    }
    r->constrained = false;
    /* For --acceptance: the answers that are drafted from then on. */
    if (rc == 0 && (o->acceptance >= 0 || o->schemas)) {
        rc = run_once(r, engine, o, load, 0, e);
    }
    return rc;
}

static int measure(struct offline_run *r, struct engine *engine, struct bench_options *o,
                   double ready_s, struct err *e)
{
    struct engine_info info;
    struct bench_load load;
    struct bench_report *p = NULL;

    engine_info(engine, &info);
    if (o->vocab == 0) {
        o->vocab = info.vocab;
    }
    int rc = bench_load_make(&load, o, e);
    if (rc < 0) {
        return rc;
    }
    rc = run_before(r, engine, o, &load, e);
    r->constrained = o->schemas != NULL;
    double plain = decode_speed(r);
    struct host_mark before = mark_host(engine);
    uint64_t accepted = accepted_tokens(engine_stats(engine));
    if (rc == 0) {
        rc = run_once(r, engine, o, &load, 0, e);
    }
    if (rc == 0) {
        rc = bench_report_new(&p, "offline", o, e);
    }
    bench_progress_end();
    if (rc == 0) {
        report_engine(p, engine, ready_s);
        report_run(p, r, &load);
        report_host(p, engine, &before);
        if (o->script) {
            report_script(p, engine, r);
        }
        if (o->acceptance >= 0) {
            report_drafts(p, engine, plain, decode_speed(r));
        }
        if (o->schemas) {
            report_schemas(p, engine, r, plain, accepted);
        }
        rc = bench_report_write(p, stdout, o, e);
    }
    bench_report_free(p);
    bench_load_release(&load);
    return rc;
}

int bench_offline(const struct bench_options *given, int argc, char **argv, struct err *e)
{
    struct bench_options o = *given;
    struct settings s;
    struct engine *engine;

    if (o.requests == 0 && !o.workload && !o.script) {
        o.requests = 64;
    }
    o.seed = MAX(o.seed, 0);
    struct offline_run r = {.sink = {on_output, on_flush}};
    int rc = o.schemas ? bench_schemas_read(&r.schemas, o.schemas, e) : 0;
    if (rc == 0) {
        rc = settings_of(&s, argc, argv, o.requests ? (int32_t)o.requests : 1 << 16, e);
    }
    if (rc < 0) {
        bench_schemas_release(&r.schemas);
        return rc;
    }
    log_setup(s.log_format, LOG_WARN);
    pthread_mutex_init(&r.lock, NULL);
    wait_init(&r.changed);
    int64_t start_us = clock_us();
    rc = engine_open(&engine, &s, &r.sink, e);
    if (rc == 0) {
        double ready_s = (double)(clock_us() - start_us) * 1e-6;
        float acceptance = (float)o.acceptance;
        rc = o.acceptance >= 0 ? engine_replay(engine, &acceptance, 1, e) : 0;
        rc = rc == 0 ? measure(&r, engine, &o, ready_s, e) : rc;
        engine_free(engine);
    }
    settings_release(&s);
    bench_schemas_release(&r.schemas);
    free(r.request);
    free(r.n_tokens);
    pthread_mutex_destroy(&r.lock);
    pthread_cond_destroy(&r.changed);
    return rc;
}
