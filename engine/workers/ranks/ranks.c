/* The executor of many ranks: one process each; this process is rank 0.
 *
 *     engine ─► launch ─► ring ───────────────► rank 1 … n-1   (worker_main.c)
 *                   └───► runner (rank 0) ◄─comm─► runner
 *     engine ◄─ wait ◄──────┘
 *
 * There is one scheduler and one set of block ids: every rank holds its heads' slice of
 * every block and gets the same batch, table updates included, as one message
 * (batch_wire.h, step_channel.h); so swapping, copy-on-write, beams and the prefix
 * cache do not depend on the number of ranks. Within a step the ranks synchronise in
 * comm's all-reduces. Rank 0 samples, and its runner's results are the step's.
 *
 * With a pipeline (pipeline_parallel_size) there are n_stages times as many ranks,
 * numbered stage by stage. Each stage holds its layers and their slice of every block
 * under the same ids. It gets the same message, splits the step into the same
 * micro-batches (microbatch.h), and passes the residual stream of each to the next
 * stage (pipeline.h). The last stage's first rank samples: it sends the tokens to the
 * first stage, for the following step, and the results to this process (control_msg.h).
 *
 * A thread starts the workers and watches them (supervisor.c). Once one has failed,
 * launch, wait and check return the reason, and the engine dies as of any device
 * error. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "config/base/wait.h"
#include "engine/workers/batch_wire.h"
#include "engine/workers/ranks/ranks_impl.h"

enum {
    HOST_BLOCKS_MAX = 1 << 20, /* swapped in one step: bounds a message's size */
    START_S = 900,             /* for a rank to load its slice of the model */
    OWN_NAME_US = 30000000,    /* for this machine's own name to become known */
};

/* ---- a step ---- */

static int send_step(struct ranks *x, enum step_message_kind kind, const struct batch *b,
                     struct err *e)
{
    struct step_channel *channel = x->transports.channel;
    void *at;
    size_t n_bytes = batch_wire_write(NULL, b);

    if (n_bytes > channel->slot_bytes) {
        return err_set(e, ERR_INVALID, "step %llu needs a message of %zu bytes; slots hold %zu",
                       (unsigned long long)b->step, n_bytes, channel->slot_bytes);
    }
    int rc = channel->ops->begin(channel, &at, x->timeout_us, e);
    if (rc < 0) {
        return rc;
    }
    batch_wire_write(at, b);
    return channel->ops->commit(channel, kind, n_bytes, e);
}

/* Starts a step on all ranks; on this one `runner` computes it. */
static int launch_on(struct ranks *x, enum step_message_kind kind, struct executor *runner,
                     const struct batch *b, struct err *e)
{
    int rc = ranks_check_failed(x, e);

    if (rc == 0 && (rc = send_step(x, kind, b, e)) < 0) {
        ranks_fail(x, e->text);
    }
    return rc < 0 ? rc : runner->launch(runner, b, e);
}

static int ranks_launch(struct executor *base, const struct batch *b, struct err *e)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);

    x->results[x->n_launched++ % RANKS_RESULTS].launched_us = clock_us();
    return launch_on(x, STEP_CHANNEL_STEP, x->runner, b, e);
}

/* Waits for the results of the oldest step from the last stage. */
static int wait_last_stage(struct ranks *x, struct results *ret, struct err *e)
{
    const struct step_results *a = &x->results[x->n_waited % RANKS_RESULTS];
    int64_t until_us = clock_us() + x->timeout_us;
    bool late = false;

    pthread_mutex_lock(&x->lock);
    while (x->n_results <= x->n_waited && !x->failed && !late) {
        late = !wait_until(&x->changed, &x->lock, until_us);
    }
    bool there = x->n_results > x->n_waited;
    pthread_mutex_unlock(&x->lock);
    if (!there) {
        char text[80];
        snprintf(text, sizeof(text), "rank %d gave no results for %.0f s",
                 pipeline_number(&x->place.at, x->place.at.n_stages - 1, 0),
                 (double)x->timeout_us * 1e-6);
        ranks_fail(x, text);
        return ranks_check_failed(x, e);
    }
    struct expert_load first = ret->experts; /* the only stage's whose counts are here */
    *ret = a->gathered.results;
    ret->experts = first;
    ret->device_us = MAX(a->arrived_us - MAX(a->launched_us, x->last_us), 1);
    x->last_us = a->arrived_us;
    x->n_waited++;
    return 0;
}

static int ranks_wait(struct executor *base, struct results *ret, struct err *e)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    int rc = x->runner->wait(x->runner, ret, e);

    if (rc == 0 && x->place.at.n_stages > 1) {
        rc = wait_last_stage(x, ret, e);
    }
    if (rc < 0) {
        ranks_check_failed(x, e); /* prefers the recorded reason */
    }
    return rc;
}

/* ---- a step of the draft model ---- */

/* None of the model's is in flight then, so that all ranks take the collectives of both
 * in one order. */
static int draft_launch(struct executor *draft, const struct batch *b, struct err *e)
{
    struct ranks *x = CONTAINER_OF(draft, struct ranks, draft);

    return launch_on(x, STEP_CHANNEL_DRAFT, x->draft_runner, b, e);
}

static int draft_wait(struct executor *draft, struct results *ret, struct err *e)
{
    struct ranks *x = CONTAINER_OF(draft, struct ranks, draft);
    int rc = x->draft_runner->wait(x->draft_runner, ret, e);

    if (rc < 0) {
        ranks_check_failed(x, e); /* prefers the recorded reason */
    }
    return rc;
}

/* The runner reads hidden states of the model's: ranks_free frees it first. */
static void draft_free(struct executor *draft)
{
    (void)draft;
}

/* ---- masks, failures ---- */

/* Sends masks to the other ranks that sample, and hands them to rank 0's own. */
static int ranks_masks(struct executor *base, uint64_t step, const struct late_mask *mask,
                       int32_t n, struct err *e)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    const struct pipeline_place *at = &x->place.at;
    int32_t first = pipeline_number(at, at->n_stages - 1, 0);
    int32_t end = x->all_sample ? first + at->n_ranks : first + 1;
    int rc = 0;

    for (int32_t i = MAX(first, 1); i < end && rc == 0; i++) {
        const struct worker_process *w = &x->worker[i];
        rc = rank_masks_send(w->masks_fd >= 0 ? w->masks_fd : w->fd, step, mask, n,
                             mask_words(base->info.vocab), e);
    }
    if (rc < 0) { /* the rank is gone, and the reason is known soon if it is not yet */
        ranks_fail(x, e->text);
    }
    return rc < 0 ? rc : x->runner->masks(x->runner, step, mask, n, e);
}

static int ranks_check(struct executor *base, struct err *e)
{
    return ranks_check_failed(CONTAINER_OF(base, struct ranks, base), e);
}

static uint64_t ranks_up(struct executor *base)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    uint64_t up = 1;

    pthread_mutex_lock(&x->lock);
    for (int32_t i = 1; i < x->n; i++) {
        up |= (uint64_t)(x->worker[i].state == WORKER_READY) << i;
    }
    pthread_mutex_unlock(&x->lock);
    return up;
}

/* ---- start ---- */

/* Waits until every worker has reached `state`. */
static int wait_workers(struct ranks *x, enum worker_state state, struct err *e)
{
    int64_t until_us = clock_us() + START_S * (int64_t)1000000;
    int rc = 0;

    pthread_mutex_lock(&x->lock);
    for (int32_t i = 1; i < x->n && rc == 0;) {
        if (x->failed) {
            rc = err_set(e, ERR_DEVICE, "%s", x->reason);
        } else if (x->worker[i].state >= state) {
            i++;
        } else if (!wait_until(&x->changed, &x->lock, until_us)) {
            rc = err_set(e, ERR_TIMEOUT, "rank %d is not ready after %d s", i, START_S);
        }
    }
    pthread_mutex_unlock(&x->lock);
    return rc;
}

static int wait_connected(struct ranks *x, struct err *e)
{
    pthread_mutex_lock(&x->lock);
    while (!x->connected && !x->failed) {
        pthread_cond_wait(&x->changed, &x->lock);
    }
    int rc = x->failed ? err_set(e, ERR_DEVICE, "%s", x->reason) : 0;
    pthread_mutex_unlock(&x->lock);
    return rc;
}

/* Sends the workers the reason for which the start fails; those on other nodes log
 * it. */
static void send_stop_reason(struct ranks *x, const char *why)
{
    struct step_channel *channel = x->transports.channel;
    struct err ignored;
    void *at;
    size_t n = strlen(why);

    if (n > 0 && n <= channel->slot_bytes &&
        channel->ops->begin(channel, &at, RANKS_STOP_MS * 1000, &ignored) == 0) {
        memcpy(at, why, n);
        channel->ops->commit(channel, STEP_CHANNEL_STOP, n, &ignored);
    }
}

/* rank_place.agree for rank 0: checks that all ranks hold the same model, lowers the
 * pools to the smallest, and sends the result to all. */
static int agree_pools(struct rank_place *place, struct executor_info *info,
                       const struct model *model, struct err *e)
{
    struct ranks *x = CONTAINER_OF(place, struct ranks, place);
    struct step_channel *channel = x->transports.channel;
    struct rank_hello mine;
    void *at;

    rank_hello_fill(&mine, info, model, place->draft, x->deterministic);
    int rc = wait_workers(x, WORKER_GREETED, e);
    for (int32_t i = 1; rc == 0 && i < x->n; i++) {
        const struct rank_hello *h = &x->worker[i].hello;
        rc = rank_hello_compare(&mine, h, i, e);
        info->n_blocks = (int32_t)MIN(info->n_blocks, h->n_blocks);
        info->n_host_blocks = (int32_t)MIN(info->n_host_blocks, h->n_host_blocks);
        info->max_len = (int32_t)MIN(info->max_len, h->max_len);
    }
    info->n_host_blocks = MIN(info->n_host_blocks, HOST_BLOCKS_MAX);
    if (rc < 0) {
        send_stop_reason(x, e->text);
    } else {
        rc = channel->ops->begin(channel, &at, x->timeout_us, e);
    }
    if (rc < 0) {
        return rc;
    }
    struct rank_pools pools = {info->n_blocks, info->n_host_blocks, info->max_len};
    memcpy(at, &pools, sizeof(pools));
    return channel->ops->commit(channel, STEP_CHANNEL_POOLS, sizeof(pools), e);
}

static int check_draft(const struct runner_draft *d, const struct pipeline_place *at, bool gpu,
                       struct err *e)
{
    if (at->n_stages > 1) {
        return err_set_param(e, ERR_UNSUPPORTED, "pipeline_parallel_size",
                             "pipeline_parallel_size must be 1 with a draft model or head");
    }
    if (gpu) {
        return err_set_param(e, ERR_UNSUPPORTED, "tensor_parallel_size",
                             "tensor_parallel_size must be 1 with a draft model or head on GPUs");
    }
    bool by_expert = d->settings->expert_parallel == SWITCH_ON && d->config->experts.n > 0;
    int rc = model_check_ranks(d->config, at->n_ranks, by_expert, e);
    if (rc < 0) {
        err_prefix(e, "the draft model or head");
    }
    return rc;
}

/* Checks what can be refused before a process is started, and sets the size of a step
 * message. */
static int prepare(struct ranks *x, struct settings *s, const struct model_config *c,
                   const struct runner_draft *draft, struct err *e)
{
    struct executor_info limits = {0}, of_draft = {0};
    const struct pipeline_place *at = &x->place.at;
    int rc = model_check_ranks(c, at->n_ranks, s->expert_parallel == SWITCH_ON, e);

    if (rc == 0) {
        rc = model_check_stages(c, at->n_stages, e);
    }
    if (rc == 0) {
        runner_choose_device(s);
    }
    bool gpu = s->device == DEVICE_CUDA;
    if (rc == 0 && draft) {
        rc = check_draft(draft, at, gpu, e);
    }
    if (rc == 0) {
        rc = runner_limits(&limits, s, c, gpu, e);
    }
    if (rc == 0 && draft) {
        rc = runner_draft_limits(&of_draft, draft->settings, draft->config, c, gpu, e);
    }
    limits.n_host_blocks = HOST_BLOCKS_MAX;
    x->base.info.max_samples = limits.max_samples; /* bound for results from the last stage */
    x->all_sample = gpu;
    if (rc == 0) {
        x->slot_bytes = MAX(batch_wire_max(&limits), draft ? batch_wire_max(&of_draft) : 0);
    }
    return rc;
}

/* Starts the workers, connects the ranks, opens the model on rank 0 and waits until all
 * are ready. */
static int start(struct ranks *x, const struct settings *s, const char *dir,
                 const struct model_config *c, const struct runner_draft *draft, struct err *e)
{
    bool one_machine = x->ranks_per_node == x->n;
    int rc = settings_pass_on(&x->flags, s, dir, draft && s->draft_model ? draft->dir : NULL, e);

    x->settings = s;
    x->place.local_rank = (int32_t)s->local_rank * x->ranks_per_node;
    x->place.local_world_size = (int32_t)s->local_size * x->ranks_per_node;
    x->place.agree = agree_pools;
    if (rc == 0 && one_machine) {
        rc = transports_create(&x->shm_fd, &x->place.at, x->slot_bytes, e);
    }
    if (rc == 0 && one_machine) {
        rc = transports_open(&x->transports, x->shm_fd, &x->place.at, x->slot_bytes, x->timeout_us,
                             e);
    }
    if (rc == 0 && !one_machine) {
        rc = cluster_listen(&x->net, s->master_addr, (int)s->master_port,
                            MIN((int64_t)(s->node_timeout * 1e6), OWN_NAME_US), e);
    }
    if (rc == 0) {
        rc = supervisor_start(x, e);
    }
    if (rc == 0 && !one_machine) {
        rc = wait_connected(x, e);
    }
    x->place.comm = x->transports.comm;
    x->place.pipeline = x->transports.pipeline;
    if (rc == 0) {
        rc = runner_open_rank(&x->runner, &x->draft_runner, s, dir, c, draft, &x->place, e);
    }
    return rc < 0 ? rc : wait_workers(x, WORKER_READY, e);
}

static void ranks_free(struct executor *base)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    struct err ignored;
    void *at;

    pthread_mutex_lock(&x->lock);
    bool failed = x->failed;
    x->stopping = true;
    pthread_mutex_unlock(&x->lock);
    struct step_channel *channel = x->transports.channel;
    bool stop_sent = !failed && x->runner && channel &&
                     channel->ops->begin(channel, &at, RANKS_STOP_MS * 1000, &ignored) == 0 &&
                     channel->ops->commit(channel, STEP_CHANNEL_STOP, 0, &ignored) == 0;
    pthread_mutex_lock(&x->lock);
    x->by_force = !stop_sent;
    pthread_mutex_unlock(&x->lock);
    if (!stop_sent) {
        transports_abort(&x->transports, "rank 0 stopped");
    }
    if (x->supervised) {
        eventfd_write(x->wake_fd, 1);
        pthread_join(x->supervisor, NULL);
    }
    if (x->draft_runner) {
        x->draft_runner->free(x->draft_runner);
    }
    if (x->runner) {
        x->runner->free(x->runner);
    }
    transports_release(&x->transports);
    cluster_release(&x->net);
    settings_pass_on_free(x->flags);
    for (int i = 0; i < RANKS_RESULTS; i++) {
        microbatch_results_release(&x->results[i].gathered);
    }
    if (x->shm_fd >= 0) {
        close(x->shm_fd);
    }
    if (x->wake_fd >= 0) {
        close(x->wake_fd);
    }
    pthread_mutex_destroy(&x->lock);
    pthread_cond_destroy(&x->changed);
    free(x);
}

static void fill_info(struct ranks *x)
{
    struct executor_info *i = &x->base.info;

    *i = x->runner->info;
    x->base.masks = x->runner->masks ? ranks_masks : NULL;
    i->n_ranks = x->n;
    int len =
        snprintf(i->device, sizeof(i->device), "%.100s, %d ranks", x->runner->info.device, x->n);
    if (x->place.at.n_stages > 1) {
        snprintf(i->device + len, sizeof(i->device) - (size_t)len, " in %d stages",
                 x->place.at.n_stages);
    }
}

static void fill_draft(struct ranks *x)
{
    x->draft = (struct executor){.info = x->draft_runner->info,
                                 .launch = draft_launch,
                                 .wait = draft_wait,
                                 .free = draft_free};
}

int ranks_open(struct executor **ret, struct executor **ret_draft, const struct settings *s,
               const char *dir, const struct model_config *c, const struct runner_draft *draft,
               struct err *e)
{
    struct ranks *x = calloc(1, sizeof(*x));

    if (!x) {
        return err_nomem(e, "the ranks");
    }
    struct settings own = *s; /* its strings are the caller's */
    x->place.at = (struct pipeline_place){.n_stages = (int32_t)s->pipeline_parallel_size,
                                          .n_ranks = (int32_t)s->tensor_parallel_size};
    x->n = x->place.at.n_stages * x->place.at.n_ranks;
    x->timeout_us = (int64_t)(s->step_timeout * 1e6);
    x->deterministic = s->deterministic;
    x->ranks_per_node = x->n / (int32_t)s->nnodes;
    x->shm_fd = x->wake_fd = -1;
    cluster_init(&x->net, &x->place.at);
    for (int32_t i = 0; i < COMM_MAX_RANKS; i++) {
        x->worker[i].fd = x->worker[i].masks_fd = -1;
    }
    pthread_mutex_init(&x->lock, NULL);
    wait_init(&x->changed);
    x->base = (struct executor){.launch = ranks_launch,
                                .wait = ranks_wait,
                                .free = ranks_free,
                                .check = ranks_check,
                                .ranks_up = ranks_up};
    int rc = prepare(x, &own, c, draft, e);
    struct runner_draft d = draft ? *draft : (struct runner_draft){0};
    struct settings of_draft = draft ? *draft->settings : own;
    of_draft.device = own.device;
    d.settings = &of_draft;
    if (rc == 0) {
        rc = start(x, &own, dir, c, draft ? &d : NULL, e);
    }
    if (rc < 0) {
        ranks_free(&x->base);
        return rc;
    }
    fill_info(x);
    if (draft) {
        fill_draft(x);
        *ret_draft = &x->draft;
    }
    *ret = &x->base;
    return 0;
}
