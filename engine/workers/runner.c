/* The executor of one rank: a model on a backend.
 *
 * A backend whose operations return before they are done (a GPU) is called on the
 * engine's thread: launch enqueues the step, wait waits for it. A backend that computes
 * inside its operations (the CPU) gets a thread of its own, so that the engine plans
 * step N+1 while step N is computed; a launch then only copies the batch. Two jobs are
 * used in rotation: a job is free again once its results were waited for, which depth 1
 * guarantees.
 *
 * As a stage of a pipeline it computes a step in micro-batches (microbatch.h) and waits
 * for each, on rank 0 always on the thread. The last stage's results are the answer;
 * those of other stages are void. */
#include "engine/workers/runner.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/workers/batch_copy.h"
#include "engine/workers/batch_wire.h"
#include "engine/workers/microbatch.h"

enum { N_JOBS = 2, N_GATHERED = 4, CPU_LOGITS_ROWS = 64, GPU_LOGITS_ROWS = 256 };

struct job {
    struct batch_copy batch;
    struct results results;
    struct err err;
    int rc;
};

struct runner {
    struct executor base;
    struct rank_place *place; /* NULL: the only rank */
    /* a draft model's, whose layers are all in one KV group; NULL: it is none */
    const struct model_config *target;
    struct backend *backend;
    struct model *model;
    enum dtype kv_dtype;    /* of keys and values */
    struct model_taps taps; /* hidden states that are kept for a draft head */
    /* Several stages: the micro-batch at work, and the results of step i in gathered[i
     * % N_GATHERED], which stay valid until the wait after next. */
    struct microbatch microbatch;
    struct gathered gathered[N_GATHERED];
    uint64_t n_computed, n_returned; /* steps */
    /* On a CPU or with several stages: the thread. */
    bool threaded;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;                         /* under `lock`, with the next three */
    uint64_t n_launched, n_done, n_waited; /* jobs */
    struct job job[N_JOBS];
};

/* ---- a step ---- */

static int run_batch(struct runner *r, const struct batch *b, struct err *e)
{
    struct backend *k = r->backend;
    int rc = k->ops->step_begin(k, b, e);

    if (rc < 0) {
        return rc;
    }
    model_step(r->model, b);
    return k->ops->step_end(k, e);
}

static int32_t n_stages(const struct runner *r)
{
    return r->place ? r->place->at.n_stages : 1;
}

/* Runs a step of several stages, one micro-batch after the other, waiting for each. */
static int run_microbatches(struct runner *r, const struct batch *b, struct err *e)
{
    struct gathered *g = &r->gathered[r->n_computed++ % N_GATHERED];
    struct batch micro;
    struct results got;
    int32_t n = microbatch_count(b, n_stages(r));
    int rc = microbatch_results_begin(g, b->step, b->n_samples, microbatch_results_stride(b), e);

    for (int32_t i = 0; i < n && rc == 0; i++) {
        rc = microbatch_split(&r->microbatch, b, i, n, &micro, e);
        if (rc == 0) {
            rc = run_batch(r, &micro, e);
        }
        if (rc == 0) {
            rc = r->backend->ops->step_wait(r->backend, &got, e);
        }
        if (rc == 0 && model_is_last(r->model)) {
            microbatch_results_add(g, micro.first_sample, &got);
        }
    }
    return rc;
}

static int run_step(struct runner *r, const struct batch *b, struct err *e)
{
    return n_stages(r) > 1 ? run_microbatches(r, b, e) : run_batch(r, b, e);
}

/* The results of the oldest step that were not returned yet. */
static int next_results(struct runner *r, struct results *ret, struct err *e)
{
    if (n_stages(r) == 1) {
        return r->backend->ops->step_wait(r->backend, ret, e);
    }
    if (r->n_returned == r->n_computed) {
        return err_set(e, ERR_INVALID, "no step to wait for");
    }
    *ret = r->gathered[r->n_returned++ % N_GATHERED].results;
    return 0;
}

static int direct_launch(struct executor *x, const struct batch *b, struct err *e)
{
    return run_step(CONTAINER_OF(x, struct runner, base), b, e);
}

static int64_t direct_launch_waits_us(struct executor *x)
{
    struct backend *b = CONTAINER_OF(x, struct runner, base)->backend;

    return b->ops->launch_waits_us(b);
}

static int direct_wait(struct executor *x, struct results *ret, struct err *e)
{
    return next_results(CONTAINER_OF(x, struct runner, base), ret, e);
}

/* ---- the same on a thread ---- */

static void *runner_main(void *arg)
{
    struct runner *r = arg;

    pthread_mutex_lock(&r->lock);
    for (;;) {
        while (!r->stopping && r->n_done == r->n_launched) {
            pthread_cond_wait(&r->changed, &r->lock);
        }
        if (r->stopping) {
            break;
        }
        struct job *j = &r->job[r->n_done % N_JOBS];
        pthread_mutex_unlock(&r->lock);
        j->rc = run_step(r, &j->batch.batch, &j->err);
        if (j->rc == 0) {
            j->rc = next_results(r, &j->results, &j->err);
        }
        pthread_mutex_lock(&r->lock);
        r->n_done++;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

static int threaded_launch(struct executor *x, const struct batch *b, struct err *e)
{
    struct runner *r = CONTAINER_OF(x, struct runner, base);
    /* only this thread writes n_launched */
    int rc = batch_copy_set(&r->job[r->n_launched % N_JOBS].batch, b, e);

    if (rc < 0) {
        return rc;
    }
    pthread_mutex_lock(&r->lock);
    r->n_launched++;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
    return 0;
}

static int threaded_wait(struct executor *x, struct results *ret, struct err *e)
{
    struct runner *r = CONTAINER_OF(x, struct runner, base);

    pthread_mutex_lock(&r->lock);
    while (r->n_done == r->n_waited) {
        pthread_cond_wait(&r->changed, &r->lock);
    }
    struct job *j = &r->job[r->n_waited++ % N_JOBS];
    pthread_mutex_unlock(&r->lock);
    if (j->rc < 0) {
        if (e) {
            *e = j->err;
        }
        return j->rc;
    }
    *ret = j->results;
    return 0;
}

/* ---- start and stop ---- */

/* Only the last stage samples. */
static int runner_masks(struct executor *x, uint64_t step, const struct late_mask *mask, int32_t n,
                        struct err *e)
{
    struct runner *r = CONTAINER_OF(x, struct runner, base);

    return model_is_last(r->model) ? r->backend->ops->masks(r->backend, step, mask, n, e) : 0;
}

static void runner_free(struct executor *x)
{
    struct runner *r = CONTAINER_OF(x, struct runner, base);

    if (x->masks) { /* a step may wait for its masks */
        x->masks(x, 0, NULL, 0, NULL);
    }
    if (r->threaded) {
        pthread_mutex_lock(&r->lock);
        r->stopping = true;
        pthread_cond_broadcast(&r->changed);
        pthread_mutex_unlock(&r->lock);
        pthread_join(r->thread, NULL);
    }
    if (r->backend) { /* before the model: it may read weights in the model's file */
        r->backend->ops->free(r->backend);
    }
    model_free(r->model);
    for (int i = 0; i < N_JOBS; i++) {
        batch_copy_release(&r->job[i].batch);
    }
    for (int i = 0; i < N_GATHERED; i++) {
        microbatch_results_release(&r->gathered[i]);
    }
    microbatch_release(&r->microbatch);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
    free(r);
}

static int32_t n_ranks(const struct runner *r)
{
    return r->place ? r->place->at.n_ranks : 1;
}

static int32_t local_world_size(const struct runner *r)
{
    return r->place ? r->place->local_world_size : 1;
}

/* Rows of the output head that are computed and sampled at a time. */
static int32_t max_logits(const struct executor_info *x, bool gpu)
{
    return MIN(x->max_samples, gpu ? GPU_LOGITS_ROWS : CPU_LOGITS_ROWS);
}

static bool is_last_stage(const struct runner *r)
{
    return !r->place || pipeline_is_last(&r->place->at);
}

static int limits_of(const struct runner *r, struct executor_info *x, const struct settings *s,
                     const struct model_config *c, bool gpu, struct err *e)
{
    return r->target ? runner_draft_limits(x, s, c, r->target, gpu, e)
                     : runner_limits(x, s, c, gpu, e);
}

/* Opens the named backend with the limits of its kind. */
static int open_backend(struct runner *r, const char *name, const struct settings *s,
                        const struct model_config *c, struct err *e)
{
    struct executor_info *x = &r->base.info;
    bool gpu = strcmp(name, "cpu") != 0;
    int rc = limits_of(r, x, s, c, gpu, e);

    if (rc < 0) {
        return rc;
    }
    struct backend_config config = {
        .threads = (int32_t)s->threads,
        .device = r->place ? r->place->local_rank : 0,
        .max_tokens = x->max_num_batched_tokens,
        .max_seqs = x->max_num_seqs,
        .max_samples = x->max_samples,
        .max_blocks_per_seq = (int32_t)div_ceil(x->max_len, x->block_size),
        .n_kv_groups = x->n_kv_groups,
        .vocab = x->vocab,
        .max_logits = is_last_stage(r) ? max_logits(x, gpu) : 0,
        .deterministic = s->deterministic,
        .comm = r->place ? r->place->comm : NULL,
        .pipeline = r->place ? r->place->pipeline : NULL,
        .local_rank = r->place ? r->place->local_rank : 0,
        .local_world_size = local_world_size(r),
    };
    return backend_open(&r->backend, name, &config, e);
}

static int choose_backend(struct runner *r, const struct settings *s, const struct model_config *c,
                          struct err *e)
{
    if (s->device != DEVICE_AUTO) {
        int rc = open_backend(r, s->device == DEVICE_CPU ? "cpu" : "cuda", s, c, e);
        if ((rc == ERR_UNSUPPORTED || rc == ERR_NOT_FOUND) && e && e->param[0] == '\0') {
            snprintf(e->param, sizeof(e->param), "device");
        }
        return rc;
    }
    struct executor_info on_cpu = r->base.info;
    int rc = limits_of(r, &on_cpu, s, c, false, e);
    if (rc < 0) { /* no matter of the device */
        return rc;
    }
    struct err why = {0};
    if (open_backend(r, "cuda", s, c, &why) == 0) {
        return 0;
    }
    log_event(LOG_INFO, "no GPU used", LOG_STR("because", why.text));
    return open_backend(r, "cpu", s, c, e);
}

void runner_choose_device(struct settings *s)
{
    struct backend *gpu = NULL;
    struct backend_config small = {.max_tokens = 1, .max_seqs = 1, .max_samples = 1};
    struct err why = {0};

    if (s->device != DEVICE_AUTO) {
        return;
    }
    if (backend_open(&gpu, "cuda", &small, &why) == 0) {
        gpu->ops->free(gpu);
    } else {
        log_event(LOG_INFO, "no GPU used", LOG_STR("because", why.text));
    }
    s->device = gpu ? DEVICE_CUDA : DEVICE_CPU;
}

enum dtype runner_dtype(const struct settings *s, const struct model_config *c)
{
    switch (s->dtype) {
    case DTYPE_BFLOAT16:
        return DTYPE_BF16;
    case DTYPE_FLOAT16:
        return DTYPE_F16;
    case DTYPE_FLOAT32:
        return DTYPE_F32;
    default:
        return c->dtype;
    }
}

/* Sets what becomes of a model of floats while it is loaded. */
static void set_quantise(struct model_options *o, const struct settings *s)
{
    static const struct {
        enum weight_format_id format;
        int32_t group;
        bool zeros;
    } ways[] = {[QUANTIZE_FP8] = {FORMAT_FP8, 0, false},
                [QUANTIZE_INT8] = {FORMAT_INT8, 0, false},
                [QUANTIZE_INT8_GROUPS] = {FORMAT_INT8, 128, false},
                [QUANTIZE_INT8_ASYMMETRIC] = {FORMAT_INT8, 0, true},
                [QUANTIZE_INT8_GROUPS_ASYMMETRIC] = {FORMAT_INT8, 128, true},
                [QUANTIZE_INT4] = {FORMAT_INT4, 128, true},
                [QUANTIZE_MXFP4] = {FORMAT_FP4, 32, false}};

    /* smoothed weights are those of a directory that is quantised already */
    if (s->quantization != QUANTIZE_NONE && s->quantization_smooth == 0) {
        o->quantise = weight_format_of(ways[s->quantization].format);
        o->quantise_group = ways[s->quantization].group;
        o->quantise_zeros = ways[s->quantization].zeros;
    }
}

/* Sets the type of keys and values. */
static int choose_kv_dtype(struct runner *r, const struct settings *s, const struct model_config *c,
                           const struct model_options *o, struct err *e)
{
    struct executor_info *x = &r->base.info;
    enum dtype act = backend_act_dtype(r->backend, o->dtype);

    r->kv_dtype = runner_kv_dtype(s, c, act);
    snprintf(x->kv_dtype, sizeof(x->kv_dtype), "%s", dtype_name(r->kv_dtype));
    if (r->backend->async && r->kv_dtype != act && dtype_bytes(r->kv_dtype) > 1) {
        return err_set_param(e, ERR_UNSUPPORTED, "kv_cache_dtype",
                             "kv_cache_dtype %s: on a GPU it is that of the activations, %s, or "
                             "one of 8 bits",
                             dtype_name(r->kv_dtype), dtype_name(act));
    }
    return 0;
}

/* Sets the layout of each KV group on this rank; all have as many layers. */
static void set_layouts(const struct runner *r, const struct model_config *c,
                        const struct model_options *o, struct kv_layout *layout)
{
    int32_t width = model_taps_width(&o->taps, c);

    model_kv_layouts(layout, c, o, r->base.info.block_size, r->kv_dtype);
    if (width > 0) {
        kv_layouts_add_hidden(layout, executor_kv_groups(&r->base.info), width,
                              backend_act_dtype(r->backend, o->dtype));
    }
}

/* Sets the layout of each KV group, and in x the sizes of their pools in the memory
 * that is free. */
static int size_pools(const struct runner *r, const struct settings *s,
                      const struct model_config *c, const struct model_options *o,
                      struct executor_info *x, struct kv_layout *layout, struct err *e)
{
    struct backend *k = r->backend;
    struct backend_memory memory;
    int rc = k->ops->memory(k, &memory, e);

    if (rc < 0) {
        return rc;
    }
    set_layouts(r, c, o, layout);
    x->kv_window_align = k->window_align;
    x->block_bytes = kv_layout_block_bytes(layout);
    if (!k->async) { /* the ranks on a machine share its memory */
        memory.free_bytes /= local_world_size(r);
    }
    return runner_pools(x, s, &memory, k->async, e);
}

/* What refuses pools is known before weights are read, which takes long: there will not
 * be more memory for them. A draft model's are as large as those of its target. */
static int check_pools(const struct runner *r, const struct settings *s,
                       const struct model_config *c, const struct model_options *o, struct err *e)
{
    struct executor_info x = r->base.info;
    struct kv_layout layout[LIMIT_KV_GROUPS];

    return r->target ? 0 : size_pools(r, s, c, o, &x, layout, e);
}

static int load_model(struct runner *r, const struct settings *s, const char *dir,
                      const struct model_config *c, struct err *e)
{
    struct executor_info *x = &r->base.info;
    bool gpu = r->backend->async;
    struct model_options o = {
        .dtype = runner_dtype(s, c),
        .dummy = s->load_format == LOAD_DUMMY,
        .max_tokens = x->max_num_batched_tokens,
        .max_logits = max_logits(x, gpu),
        .taps = r->taps,
        .max_len = x->max_len,
        .rank = r->place ? r->place->at.rank : 0,
        .n_ranks = n_ranks(r),
        .stage = r->place ? r->place->at.stage : 0,
        .n_stages = n_stages(r),
        .expert_parallel = s->expert_parallel == SWITCH_ON && (!r->target || c->experts.n > 0),
        .expert_parallel_auto = s->expert_parallel == SWITCH_AUTO,
        .fp8_cache = s->kv_cache_dtype == KV_CACHE_FP8,
        .one_kv_group = r->target || s->kv_policy != KV_PAGED,
    };

    set_quantise(&o, s);
    snprintf(x->dtype, sizeof(x->dtype), "%s", dtype_name(o.dtype));
    int rc = choose_kv_dtype(r, s, c, &o, e);
    rc = rc < 0 ? rc : check_pools(r, s, c, &o, e);
    rc = rc < 0 ? rc : model_open(&r->model, dir, c, &o, r->backend, e);
    if (rc == 0) {
        model_log_formats(r->model);
        model_log_experts(r->model);
    }
    return rc;
}

static int create_pools(struct runner *r, const struct kv_layout *layout, struct err *e)
{
    struct executor_info *x = &r->base.info;
    struct backend *k = r->backend;
    int rc = k->ops->kv_create(k, layout, x->n_blocks, x->n_host_blocks, e);

    return rc == 0 && k->ops->ready ? k->ops->ready(k, e) : rc;
}

/* Allocates the KV pools from the memory that the weights left. */
static int make_pools(struct runner *r, const struct settings *s, const struct model_config *c,
                      struct err *e)
{
    struct executor_info *x = &r->base.info;
    struct kv_layout layout[LIMIT_KV_GROUPS];
    int rc = size_pools(r, s, c, &r->model->options, x, layout, e);

    if (rc == 0 && r->place) {
        rc = r->place->agree(r->place, x, r->model, e);
    }
    return rc < 0 ? rc : create_pools(r, layout, e);
}

static int runner_start(struct runner *r, struct err *e)
{
    struct executor *x = &r->base;

    x->info.depth = 1;
    snprintf(x->info.device, sizeof(x->info.device), "%s: %s", r->backend->name,
             r->backend->device);
    if (r->backend->note[0]) {
        log_event(LOG_WARN, "device problem worked around", LOG_STR("device", r->backend->device),
                  LOG_STR("what", r->backend->note));
    }
    x->info.sets_up_sizes = r->backend->async;
    x->info.plans_behind_prefill = !r->backend->async && n_stages(r) == 1;
    bool direct = (r->backend->async && n_stages(r) == 1) || (r->place && r->place->direct);
    x->launch = direct ? direct_launch : threaded_launch;
    x->wait = direct ? direct_wait : threaded_wait;
    x->masks = r->backend->ops->masks ? runner_masks : NULL;
    if (direct) {
        x->launch_waits_us = r->backend->ops->launch_waits_us ? direct_launch_waits_us : NULL;
        return 0;
    }
    for (int i = 0; i < N_JOBS; i++) {
        if (batch_copy_reserve(&r->job[i].batch, batch_wire_max(&x->info), e) < 0) {
            return ERR_NOMEM;
        }
    }
    if (pthread_create(&r->thread, NULL, runner_main, r) != 0) {
        return err_set(e, ERR_IO, "cannot start the runner's thread");
    }
    r->threaded = true;
    pthread_setname_np(r->thread, "quire-runner");
    return 0;
}

static struct runner *runner_new(struct rank_place *place)
{
    struct runner *r = calloc(1, sizeof(*r));

    if (!r) {
        return NULL;
    }
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    r->base.free = runner_free;
    r->place = place;
    return r;
}

/* draft NULL: none is beside it. */
static int open_runner(struct executor **ret, const struct settings *s, const char *dir,
                       const struct model_config *c, struct rank_place *place,
                       const struct runner *draft, struct err *e)
{
    struct runner *r = runner_new(place);

    if (!r) {
        return err_nomem(e, "the runner");
    }
    if (draft) {
        r->base.info.draft_block_bytes = draft->base.info.block_bytes;
        r->taps = model_head_taps(&draft->model->config);
    }
    int rc = choose_backend(r, s, c, e);
    if (rc == 0) {
        rc = load_model(r, s, dir, c, e);
    }
    if (rc == 0) {
        rc = make_pools(r, s, c, e);
    }
    if (rc == 0) {
        rc = runner_start(r, e);
    }
    if (rc < 0) {
        runner_free(&r->base);
        return rc;
    }
    *ret = &r->base;
    return 0;
}

/* ---- a draft model beside the model ---- */

/* A model without a cache yet, whose info tells the bytes of a block. */
static int open_draft(struct runner **ret, const struct runner_draft *d,
                      const struct model_config *target, struct rank_place *place, struct err *e)
{
    struct runner *r = runner_new(place);

    if (!r) {
        return err_nomem(e, "the runner");
    }
    r->target = target;
    int rc = choose_backend(r, d->settings, d->config, e);
    if (rc == 0) {
        rc = load_model(r, d->settings, d->dir, d->config, e);
    }
    if (rc < 0) {
        runner_free(&r->base);
        return rc;
    }
    struct kv_layout layout[LIMIT_KV_GROUPS];
    set_layouts(r, d->config, &r->model->options, layout);
    r->base.info.block_bytes = kv_layout_block_bytes(layout);
    *ret = r;
    return 0;
}

/* Its cache, once the model's is there. */
static int complete_draft(struct runner *draft, const struct runner *target, struct err *e)
{
    struct executor_info *x = &draft->base.info;
    struct kv_layout layout[LIMIT_KV_GROUPS];
    bool is_head = draft->model->config.head.kind != HEAD_NONE;
    int rc = is_head ? model_head_bind(draft->model, target->model, e) : 0;

    set_layouts(draft, &draft->model->config, &draft->model->options, layout);
    x->n_blocks = target->base.info.n_blocks;
    rc = rc ? rc : create_pools(draft, layout, e);
    rc = rc ? rc : runner_start(draft, e);
    x->max_len = target->base.info.max_len;
    return rc;
}

static int open_both(struct executor **ret, struct executor **ret_draft, const struct settings *s,
                     const char *dir, const struct model_config *c, const struct runner_draft *d,
                     struct rank_place *place, struct err *e)
{
    struct runner *draft = NULL;
    struct executor *model = NULL;
    int rc = open_draft(&draft, d, c, place, e);

    if (rc == 0 && place) {
        place->draft = model_digest(draft->model);
    }
    rc = rc ? rc : open_runner(&model, s, dir, c, place, draft, e);
    rc = rc ? rc : complete_draft(draft, CONTAINER_OF(model, struct runner, base), e);
    if (rc < 0 && draft) {
        runner_free(&draft->base);
    }
    if (rc < 0 && model) {
        model->free(model);
    }
    if (rc == 0) {
        *ret = model;
        *ret_draft = &draft->base;
    }
    return rc;
}

int runner_open(struct executor **ret, const struct settings *s, const char *dir,
                const struct model_config *c, struct err *e)
{
    return open_runner(ret, s, dir, c, NULL, NULL, e);
}

int runner_open_both(struct executor **ret, struct executor **ret_draft, const struct settings *s,
                     const char *dir, const struct model_config *c,
                     const struct runner_draft *draft, struct err *e)
{
    return open_both(ret, ret_draft, s, dir, c, draft, NULL, e);
}

int runner_open_rank(struct executor **ret, struct executor **ret_draft, const struct settings *s,
                     const char *dir, const struct model_config *c,
                     const struct runner_draft *draft, struct rank_place *place, struct err *e)
{
    return draft ? open_both(ret, ret_draft, s, dir, c, draft, place, e)
                 : open_runner(ret, s, dir, c, place, NULL, e);
}
