/* Starts and stops the engine, and answers questions about its state. Starting builds
 * what the first step needs, in order of dependency:
 *
 *     model directory ─► configuration ─► tokenizer, executor (weights, KV pool)
 *                     ─► step costs ─► scheduler, packer ─► pinned prefixes ─► threads
 *
 * Tokenizer and chat template are read in a thread of their own beside the weights.
 * The engine's thread is in loop.c, submission in submit.c. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <xxhash.h>

#include "config/base/log.h"
#include "engine/drafts.h"
#include "engine/engine_state.h"
#include "engine/loop/cost.h"
#include "engine/model_path.h"
#include "engine/pinned_prefixes.h"
#include "engine/smoothed.h"
#include "engine/stats.h"
#include "models/chat/chat_template.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/tokenizer/fim.h"

/* ---- start ---- */

static void defaults_none(struct generation_defaults *d)
{
    *d = (struct generation_defaults){__builtin_nanf(""), __builtin_nanf(""), __builtin_nanf(""),
                                      __builtin_nanf(""), -1};
}

/* A model with random weights needs no tokenizer files. */
static int open_tokenizer(struct engine *e, const struct settings *s, const struct model_config *c,
                          struct err *err)
{
    if (s->load_format == LOAD_DUMMY && !gguf_is_file(e->model_path) &&
        !model_file_exists(e->model_path, "tokenizer.json")) {
        return tokenizer_open_dummy(&e->tokenizer, c->vocab, err);
    }
    int32_t n = 0;
    int rc = tokenizer_open(&e->tokenizer, e->model_path, err);
    rc = rc < 0 ? rc : tokenizer_limit(e->tokenizer, c->vocab, &n, err);
    if (rc == 0 && n > 0) {
        log_event(LOG_WARN, "added tokens without logits are taken for text", LOG_I64("tokens", n),
                  LOG_I64("vocab_size", c->vocab));
    }
    return rc;
}

/* An explicit load_format must match the files. */
static int check_format(const struct settings *s, const char *path, struct err *err)
{
    if (s->load_format == LOAD_GGUF && !gguf_is_file(path)) {
        return err_set_param(err, ERR_INVALID, "load_format",
                             "load_format gguf: the model is neither a GGUF file nor a directory "
                             "that has one and no config.json");
    }
    if (s->load_format == LOAD_SAFETENSORS && gguf_is_file(path)) {
        return err_set_param(err, ERR_INVALID, "load_format",
                             "load_format safetensors: the model is a file, not a directory");
    }
    return 0;
}

/* An unusable chat template is only logged; the model is then served without chat. */
static int open_chat(struct engine *e, const struct settings *s, struct err *err)
{
    int rc = chat_template_open(&e->chat, e->model_path, e->tokenizer, err);
    const char *missing = rc == 0 ? chat_template_missing(e->chat) : NULL;

    if (rc == 0 && s->generic_tools) {
        rc = chat_template_add_tools(&e->chat, err);
    }
    rc = rc ? rc : engine_chat_open(e, s->chat_format, err);

    if (missing) {
        log_event(chat_template_broken(e->chat) ? LOG_WARN : LOG_INFO, "no chat",
                  LOG_STR("reason", missing));
    }
    return rc;
}

/* What a thread needs to open what texts are read with, and what came of it. */
struct text_opener {
    struct engine *e;
    const struct settings *s;
    const struct model_config *c;
    struct err err;
    int rc;
};

static void *open_text(void *arg)
{
    struct text_opener *o = arg;

    o->rc = open_tokenizer(o->e, o->s, o->c, &o->err);
    if (o->rc == 0) {
        o->rc = open_chat(o->e, o->s, &o->err);
    }
    return NULL;
}

/* Whether weights may be read while the tokenizer is. A draft model is compared with
 * the tokenizer before, and ranks are forked, in which only this thread goes on. */
static bool reads_beside(const struct settings *s)
{
    return !s->draft_model && s->tensor_parallel_size <= 1 && s->pipeline_parallel_size <= 1;
}

/* Tokenizer, chat template and executor; an error of the tokenizer goes first. */
static int open_parts(struct engine *e, const struct settings *s, const struct model_config *c,
                      struct err *err)
{
    struct text_opener text = {.e = e, .s = s, .c = c};
    pthread_t thread;
    bool beside = reads_beside(s) && pthread_create(&thread, NULL, open_text, &text) == 0;

    if (!beside) {
        open_text(&text);
    }
    /* without the thread, text.rc is known here */
    int rc = beside || text.rc == 0 ? engine_open_executors(e, s, c, err) : 0;
    if (beside) {
        pthread_join(thread, NULL);
    }
    if (text.rc < 0) {
        if (err) {
            *err = text.err;
        }
        return text.rc;
    }
    return rc;
}

/* The model's name, after where it was found. */
static int set_name(struct engine *e, const struct settings *s, struct err *err)
{
    e->model_name =
        s->served_model_name ? strdup(s->served_model_name) : model_path_name(e->model_path);
    return e->model_name ? 0 : err_nomem(err, "the model's name");
}

/* Opens the tokenizer and the executor, and reads the model's end-of-sequence tokens
 * and sampling defaults. */
static int open_model(struct engine *e, const struct settings *s, struct err *err)
{
    if (is_null_model(s->model)) {
        if (s->draft_model) {
            return err_set_param(err, ERR_UNSUPPORTED, "draft_model",
                                 "draft_model: the null model has none");
        }
        e->model_path = strdup("null");
        if (!e->model_path) {
            return err_nomem(err, "the model's name");
        }
        int rc = tokenizer_open_bytes(&e->tokenizer, err);
        return rc < 0 ? rc : null_open(&e->executor, s, err);
    }
    struct model_config c;
    int rc = model_path_find(&e->model_path, s->model, MODEL_SERVED, err);
    if (rc == 0) {
        rc = check_format(s, e->model_path, err);
    }
    if (rc == 0) {
        rc = set_name(e, s, err);
    }
    if (rc == 0) {
        rc = smoothed_find(&e->model_path, s, err);
    }
    if (rc == 0) {
        rc = model_config_read(&c, &e->defaults, e->model_path, err);
    }
    if (rc == 0 && c.head.kind != HEAD_NONE) {
        rc = err_set_param(err, ERR_UNSUPPORTED, "model",
                           "model: %s is a draft head; name it by draft_model, beside its model",
                           c.architecture);
    }
    if (rc == 0) {
        rc = open_parts(e, s, &c, err);
    }
    if (rc < 0) {
        return rc;
    }
    if (s->generation_config && strcmp(s->generation_config, "none") == 0) {
        defaults_none(&e->defaults);
    }
    e->skips_vision = c.wrapped;
    e->config.n_eos = c.n_eos;
    memcpy(e->config.eos, c.eos, sizeof(e->config.eos));
    int32_t eos = tokenizer_eos(e->tokenizer);
    if (c.n_eos == 0 && eos >= 0) {
        e->config.eos[e->config.n_eos++] = eos;
    }
    return 0;
}

static int64_t to_us(double seconds)
{
    return (int64_t)(seconds * 1e6);
}

static int configure(struct engine *e, const struct settings *s, struct err *err)
{
    const struct executor_info *x = &e->executor->info;
    struct sched_config *c = &e->config;

    if (x->depth < 0 || x->depth > ENGINE_MAX_DEPTH) {
        return err_set(err, ERR_UNSUPPORTED, "an executor of depth %d; 0 to %d are allowed",
                       x->depth, ENGINE_MAX_DEPTH);
    }
    c->n_blocks = x->n_blocks;
    c->n_host_blocks = x->n_host_blocks;
    c->block_size = x->block_size;
    c->n_kv_groups = executor_kv_groups(x);
    memcpy(c->kv_window, x->kv_window, sizeof(c->kv_window));
    c->kv_chunked = x->kv_chunked;
    c->kv_window_align = x->kv_window_align;
    c->snapshot_distance = x->snapshot_distance;
    c->vocab = x->vocab;
    c->max_len = x->max_len;
    c->tokenizer = e->tokenizer;
    c->max_num_seqs = x->max_num_seqs;
    c->max_num_batched_tokens = x->max_num_batched_tokens;
    c->max_logits = x->max_samples;
    c->max_waiting = (int32_t)s->max_queue + x->max_num_seqs;
    c->preemption = s->preemption;
    c->policy = s->policy;
    c->kv_policy = s->kv_policy;
    c->prefix_cache = s->prefix_cache && s->kv_policy == KV_PAGED;
    c->step_quantum = x->step_quantum;
    c->target_itl_us =
        s->target_itl_ms == 0 ? x->target_itl_us : MAX((int64_t)(s->target_itl_ms * 1e3), 0);
    c->shared_itl_us = s->policy != POLICY_FAIR ? 0
                       : s->target_itl_ms == 0  ? x->shared_itl_us
                                                : c->target_itl_us;
    c->queue_timeout_us = to_us(s->queue_timeout);
    c->request_timeout_us = to_us(s->request_timeout);
    e->step_timeout_us = to_us(s->step_timeout);
    e->max_queue = s->max_queue;
    if (getrandom(&c->secret, sizeof(c->secret), 0) != (ssize_t)sizeof(c->secret)) {
        return err_set(err, ERR_IO, "getrandom gave no seed");
    }
    return 0;
}

static int measure(struct executor *x, const char *what, struct step_cost *c, struct err *err)
{
    int rc = cost_measure(x, clock_us, c, err);

    if (rc == 0) {
        log_event(LOG_INFO, what, LOG_F64("fixed_us", c->fixed_us),
                  LOG_F64("token_us", c->token_us), LOG_F64("context_us", c->context_us),
                  LOG_F64("swap_block_us", c->swap_block_us), LOG_F64("row_us", c->row_us),
                  LOG_F64("many_row_us", c->many_row_us));
    }
    return rc;
}

/* Measures step costs only if a setting needs them. QUIRE_STEP_COSTS=unknown leaves
 * them unknown, for tests whose results must not depend on the speed of a machine. */
static int measure_costs(struct engine *e, struct err *err)
{
    struct sched_config *c = &e->config;
    const char *wanted = getenv("QUIRE_STEP_COSTS");

    if (wanted && strcmp(wanted, "unknown") == 0) {
        return 0;
    }
    if (c->target_itl_us == 0 && !(c->preemption == PREEMPT_AUTO && c->n_host_blocks > 0) &&
        e->max_draft == 0) {
        return 0;
    }
    int rc = measure(e->executor, "step costs", &c->cost, err);
    if (rc == 0 && e->draft_executor) {
        rc = measure(e->draft_executor, "step costs of the draft model", &e->draft_cost, err);
    }
    /* a shorter step would spend most of its time reading the weights */
    if (rc == 0 && c->shared_itl_us > 0) {
        c->shared_itl_us = MAX(c->shared_itl_us, (int64_t)(2 * c->cost.fixed_us));
    }
    return rc;
}

static int open_core(struct engine *e, struct sink *sink, struct err *err)
{
    int rc = sched_new(&e->sched, &e->config, err);

    if (rc == 0) {
        e->config.group_bytes = sched_config(e->sched)->group_bytes;
        rc = engine_drafts_open(e, err);
    }
    if (rc == 0) {
        rc = packer_new(&e->packer, &e->config, err);
    }
    for (int32_t i = 0; rc == 0 && i <= e->executor->info.depth; i++) {
        rc = plan_init(&e->plan[i], &e->config, err);
    }
    if (rc == 0 && e->executor->masks) {
        rc = masks_open(&e->masks, e->executor, &e->config, e->max_draft > 0,
                        &e->stats.step_masks_s, err);
    }
    if (rc == 0 && e->executor->masks) {
        rc = grammars_open(&e->grammars, e->tokenizer, &e->config, err);
    }
    if (rc == 0) {
        rc = inbox_init(&e->inbox, e->max_queue, err);
    }
    if (rc == 0) {
        rc = reaper_open(&e->reaper, err);
    }
    if (rc < 0) {
        return rc;
    }
    struct output_processor proc = {.tokenizer = e->tokenizer,
                                    .sink = sink,
                                    .stats = &e->stats,
                                    .inbox = &e->inbox,
                                    .reaper = &e->reaper,
                                    .active = &e->active,
                                    .tenant_active = e->tenant_active};
    /* Each sampling row of a step makes one delta with top log-probabilities; each
     * sequence may end, each prompt begin. */
    e->step_cells =
        OUTPUT_DELTA_CELLS * (int64_t)e->config.max_logits + 2 * (int64_t)e->config.max_num_seqs;
    int64_t steps = e->executor->info.depth + 2,
            portions = 2 * OUTPUT_DELTA_CELLS * (int64_t)ENGINE_PORTION;
    return output_open(&e->output, &proc, steps * e->step_cells + portions, err);
}

/* The system_fingerprint: a hash of version, model name, data type and kind of
 * device. */
static void make_fingerprint(struct engine *e)
{
    const struct executor_info *x = &e->executor->info;
    XXH64_hash_t h = XXH64(QUIRE_VERSION, sizeof(QUIRE_VERSION), 0);

    h = XXH64(e->model_name, strlen(e->model_name), h);
    h = XXH64(x->dtype, strlen(x->dtype), h);
    h = XXH64(x->kv_dtype, strlen(x->kv_dtype), h);
    h = XXH64(x->device, strcspn(x->device, ":"), h);
    snprintf(e->fingerprint, sizeof(e->fingerprint), "fp_%010llx",
             (unsigned long long)h & 0xffffffffffULL);
}

static int start(struct engine *e, const struct settings *s, struct sink *sink, struct err *err)
{
    e->sink = sink;
    int rc = configure(e, s, err);
    if (rc == 0) {
        engine_set_speculation(e, s);
        rc = measure_costs(e, err);
    }
    if (rc == 0) {
        rc = open_core(e, sink, err);
    }
    if (rc == 0) {
        rc = pinned_prefixes_compute(e, s, err);
    }
    if (rc == 0 && !e->model_name) {
        rc = set_name(e, s, err);
    }
    if (rc < 0) {
        return rc;
    }
    make_fingerprint(e);
    e->created = time(NULL);
    atomic_store(&e->state, HEALTH_READY);
    if (pthread_create(&e->thread, NULL, engine_main, e) != 0) {
        return err_set(err, ERR_IO, "cannot start the engine's thread");
    }
    e->thread_started = true;
    pthread_setname_np(e->thread, "quire-engine");
    return 0;
}

static struct engine *engine_new(void)
{
    struct engine *e = aligned_alloc(64, (sizeof(*e) + 63) / 64 * 64);

    if (!e) {
        return NULL;
    }
    memset(e, 0, sizeof(*e));
    e->inbox.wake.fd = -1;
    e->reaper.wake.fd = -1;
    defaults_none(&e->defaults);
    engine_stats_init(&e->stats);
    kv_feed_init(&e->kv_feed);
    return e;
}

static void log_ready(const struct engine *e)
{
    const struct sched_config *c = &e->config;

    log_event(LOG_INFO, "engine ready", LOG_STR("model", e->model_name),
              LOG_STR("device", e->executor->info.device),
              LOG_STR("dtype", e->executor->info.dtype),
              LOG_STR("kv_cache_dtype", e->executor->info.kv_dtype),
              LOG_I64("kv_bytes_per_token", executor_token_bytes(&e->executor->info)),
              LOG_I64("blocks", c->n_blocks), LOG_I64("host_blocks", c->n_host_blocks),
              LOG_I64("block_size", c->block_size), LOG_I64("kv_groups", sched_kv_groups(c)),
              LOG_I64("max_model_len", c->max_len), LOG_I64("max_num_seqs", c->max_num_seqs),
              LOG_I64("max_num_batched_tokens", c->max_num_batched_tokens));
}

int engine_open(struct engine **ret, const struct settings *s, struct sink *sink, struct err *err)
{
    struct engine *e = engine_new();
    int rc = e ? open_model(e, s, err) : err_nomem(err, "the engine");

    if (rc == 0) {
        rc = start(e, s, sink, err);
    }
    if (rc < 0) {
        engine_free(e);
        return rc;
    }
    log_ready(e);
    *ret = e;
    return 0;
}

bool engine_opening_is_slow(void)
{
    return smoothed_running();
}

void engine_opening_stop(void)
{
    smoothed_stop();
}

int engine_open_on(struct engine **ret, const struct settings *s, struct executor *x,
                   struct tokenizer *t, struct sink *sink, struct err *err)
{
    struct engine *e = engine_new();

    if (!e) {
        x->free(x);
        tokenizer_free(t);
        return err_nomem(err, "the engine");
    }
    e->executor = x;
    e->tokenizer = t;
    e->model_path = strdup("given");
    int rc = e->model_path ? start(e, s, sink, err) : err_nomem(err, "the engine");
    if (rc < 0) {
        engine_free(e);
        return rc;
    }
    *ret = e;
    return 0;
}

void engine_free(struct engine *e)
{
    if (!e) {
        return;
    }
    if (e->thread_started) {
        atomic_store(&e->stopping, true);
        inbox_mark(&e->inbox);
        pthread_join(e->thread, NULL);
    }
    output_free(e->output);
    reaper_close(&e->reaper);
    sched_free(e->sched);
    engine_drafts_close(e);
    packer_free(e->packer);
    masks_free(e->masks);
    grammars_free(e->grammars);
    for (size_t i = 0; i < ARRAY_LEN(e->plan); i++) {
        plan_release(&e->plan[i]);
    }
    if (e->draft_executor) { /* it reads what the model's keeps */
        e->draft_executor->free(e->draft_executor);
    }
    if (e->executor) {
        e->executor->free(e->executor);
    }
    free(e->draft_path);
    tokenizer_free(e->tokenizer);
    chat_template_free(e->chat);
    inbox_release(&e->inbox);
    kv_feed_release(&e->kv_feed);
    free(e->model_name);
    free(e->model_path);
    free(e);
}

/* ---- state ---- */

void engine_drain(struct engine *e)
{
    int ready = HEALTH_READY;

    if (atomic_compare_exchange_strong(&e->state, &ready, HEALTH_DRAINING)) {
        inbox_close(&e->inbox);
    }
}

int64_t engine_active(const struct engine *e)
{
    return atomic_load(&e->active);
}

enum engine_health engine_health(const struct engine *e)
{
    enum engine_health h = atomic_load(&e->state);
    int64_t since = atomic_load_explicit(&e->busy_since, memory_order_relaxed);
    bool stalled = since > 0 && e->step_timeout_us > 0 && clock_us() - since > e->step_timeout_us;

    return stalled && h != HEALTH_DEAD ? HEALTH_STALLED : h;
}

const char *engine_health_name(enum engine_health h)
{
    static const char *const name[] = {"starting", "ready", "draining", "stalled", "dead"};

    return name[h];
}

const char *engine_death(const struct engine *e)
{
    return atomic_load(&e->state) == HEALTH_DEAD ? e->death : "";
}

uint64_t engine_heartbeat(const struct engine *e)
{
    return atomic_load_explicit(&e->heartbeat, memory_order_relaxed);
}

const struct engine_stats *engine_stats(const struct engine *e)
{
    return &e->stats;
}

void engine_info(const struct engine *e, struct engine_info *ret)
{
    const struct executor_info *x = &e->executor->info;

    *ret = (struct engine_info){
        .model_name = e->model_name,
        .model_path = e->model_path,
        .fingerprint = e->fingerprint,
        .device = x->device,
        .dtype = x->dtype,
        .kv_dtype = x->kv_dtype,
        .kv_token_bytes = executor_token_bytes(x),
        .created = e->created,
        .max_model_len = x->max_len,
        .vocab = x->vocab,
        .token_text_bytes = (int64_t)tokenizer_most_text(e->tokenizer),
        .block_size = x->block_size,
        .n_blocks = x->n_blocks,
        .n_ranks = MAX(x->n_ranks, 1),
        .n_host_blocks = x->n_host_blocks,
        .max_num_seqs = x->max_num_seqs,
        .max_num_batched_tokens = x->max_num_batched_tokens,
    };
}

bool engine_rank_up(const struct engine *e, int32_t rank)
{
    struct executor *x = e->executor;

    return x->ranks_up ? x->ranks_up(x) >> rank & 1 : engine_health(e) != HEALTH_DEAD;
}

void engine_fim(const struct engine *e, struct engine_fim *ret)
{
    struct fim f;

    *ret = (struct engine_fim){.end = -1, .bos = tokenizer_bos(e->tokenizer)};
    if (!fim_find(e->tokenizer, &f)) {
        return;
    }
    ret->there = true;
    ret->prefix = f.prefix;
    ret->suffix = f.suffix;
    ret->middle = f.middle;
    ret->end = f.end;
}

/* ---- tokenizer ---- */

int engine_encode(const struct engine *e, const char *text, size_t len, bool add_special,
                  int32_t max_tokens, int32_t **ret_ids, int32_t *ret_n, struct err *err)
{
    struct token_list ids = {0};
    int rc = tokenizer_encode(e->tokenizer, text, len, add_special, max_tokens, &ids, err);

    if (rc < 0) {
        token_list_release(&ids);
        return rc;
    }
    *ret_ids = ids.id;
    *ret_n = ids.n;
    return 0;
}

int engine_decode(const struct engine *e, const int32_t *ids, int32_t n, bool skip_special,
                  struct buf *out, struct err *err)
{
    return tokenizer_decode(e->tokenizer, ids, n, skip_special, out, err);
}

const char *engine_token_bytes(const struct engine *e, int32_t id, size_t *ret_len)
{
    return tokenizer_bytes(e->tokenizer, id, ret_len);
}

int engine_grammar_new(const struct engine *e, enum grammar_kind kind, const char *text, size_t len,
                       int64_t *work, struct grammar **ret, struct err *err)
{
    return e->grammars ? grammars_get(e->grammars, kind, text, len, work, ret, err)
                       : err_set(err, ERR_UNSUPPORTED, "this device cannot constrain its output");
}

int engine_grammar_walk(const struct engine *e, struct grammar *g, const int32_t *id, int32_t n,
                        struct grammar_walk *ret, struct err *err)
{
    return grammars_walk(g, e->config.vocab, id, n, ret, err);
}
