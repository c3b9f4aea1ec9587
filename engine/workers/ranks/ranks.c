/* The executor of many ranks: one process each, of which this one is the first.
 *
 *     engine ─► launch ─► ring ───────────────► rank 1 … n-1   (worker_main.c)
 *                   └───► runner (rank 0) ◄─comm─► runner
 *     engine ◄─ wait ◄──────┘
 *
 * One scheduler, one set of block ids: every rank holds its heads' share of every block
 * and gets the same batch, table updates included, as one message (batch_wire.h,
 * step_channel.h); so swapping, copy-on-write, beams and the prefix cache need to know
 * nothing of ranks. Inside the step the ranks meet in comm's sums; rank 0 draws the
 * tokens and its runner's results are the answer.
 *
 * With a pipeline (pipeline_parallel_size) the ranks are n_stages times as many, stage
 * by stage. Each stage holds its layers, and their share of every block under the same
 * ids; it gets the same message, cuts the step into the same parts (microbatch.h), and
 * hands the residual stream of each to the next (pipeline.h). The last stage's first
 * rank draws: the tokens go to the first stage for the step after, the results to this
 * process (control_msg.h), whose answer they are.
 *
 * A thread starts the ranks and watches them (supervisor.c): once one failed, launch,
 * wait and check return why, and the engine dies of it as of any device error.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "config/base/wait.h"
#include "engine/workers/batch_wire.h"
#include "engine/workers/ranks/ranks_impl.h"

enum {
    HOST_BLOCKS_MAX = 1 << 20, /* swapped in one step: part of a message's size */
    START_S = 900,             /* for a rank to read its slice */
    OWN_NAME_US = 30000000,    /* for this machine's own name to be known */
};

/* ---- a step ---- */

static int send_step(struct ranks *x, const struct batch *b, struct err *e)
{
    struct step_channel *l = x->shared.link;
    void *at;
    size_t n_bytes = batch_wire_write(NULL, b);

    if (n_bytes > l->slot_bytes) {
        return err_set(e, ERR_INVALID, "step %llu is a message of %zu bytes; ranks take %zu",
                       (unsigned long long)b->step, n_bytes, l->slot_bytes);
    }
    int rc = l->ops->begin(l, &at, x->timeout_us, e);
    if (rc < 0) {
        return rc;
    }
    batch_wire_write(at, b);
    return l->ops->commit(l, RANK_STEP, n_bytes, e);
}

static int ranks_launch(struct executor *base, const struct batch *b, struct err *e)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);

    x->answer[x->n_launched++ % RANKS_ANSWERS].launched_us = clock_us();
    int rc = ranks_check_failed(x, e);
    if (rc == 0 && (rc = send_step(x, b, e)) < 0) {
        ranks_fail(x, e->text);
    }
    return rc < 0 ? rc : x->runner->launch(x->runner, b, e);
}

/* The results of the oldest step, which another rank drew. */
static int await_answer(struct ranks *x, struct results *ret, struct err *e)
{
    const struct rank_answer *a = &x->answer[x->n_waited % RANKS_ANSWERS];
    int64_t until_us = clock_us() + x->timeout_us;
    bool late = false;

    pthread_mutex_lock(&x->lock);
    while (x->n_answered <= x->n_waited && !x->failed && !late) {
        late = !wait_until(&x->changed, &x->lock, until_us);
    }
    bool there = x->n_answered > x->n_waited;
    pthread_mutex_unlock(&x->lock);
    if (!there) {
        char text[80];
        snprintf(text, sizeof(text), "rank %d gave no results for %.0f s",
                 pipeline_number(&x->share.at, x->share.at.n_stages - 1, 0),
                 (double)x->timeout_us * 1e-6);
        ranks_fail(x, text);
        return ranks_check_failed(x, e);
    }
    *ret = a->gathered.results;
    ret->device_us = MAX(a->arrived_us - MAX(a->launched_us, x->last_us), 1);
    x->last_us = a->arrived_us;
    x->n_waited++;
    return 0;
}

static int ranks_wait(struct executor *base, struct results *ret, struct err *e)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    int rc = x->runner->wait(x->runner, ret, e);

    if (rc == 0 && x->share.at.n_stages > 1) {
        rc = await_answer(x, ret, e);
    }
    if (rc < 0) {
        ranks_check_failed(x, e); /* the reason behind it, where it is known */
    }
    return rc;
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
        up |= (uint64_t)(x->member[i].state == READY) << i;
    }
    pthread_mutex_unlock(&x->lock);
    return up;
}

/* ---- start ---- */

/* Until every other rank has reached `state`. */
static int await_all(struct ranks *x, enum member_state state, struct err *e)
{
    int64_t until_us = clock_us() + START_S * (int64_t)1000000;
    int rc = 0;

    pthread_mutex_lock(&x->lock);
    for (int32_t i = 1; i < x->n && rc == 0;) {
        if (x->failed) {
            rc = err_set(e, ERR_DEVICE, "%s", x->reason);
        } else if (x->member[i].state >= state) {
            i++;
        } else if (!wait_until(&x->changed, &x->lock, until_us)) {
            rc = err_set(e, ERR_TIMEOUT, "rank %d is not ready after %d s", i, START_S);
        }
    }
    pthread_mutex_unlock(&x->lock);
    return rc;
}

static int await_meeting(struct ranks *x, struct err *e)
{
    pthread_mutex_lock(&x->lock);
    while (!x->met && !x->failed) {
        pthread_cond_wait(&x->changed, &x->lock);
    }
    int rc = x->failed ? err_set(e, ERR_DEVICE, "%s", x->reason) : 0;
    pthread_mutex_unlock(&x->lock);
    return rc;
}

/* The ranks of other nodes log why the start ends. */
static void tell_reason(struct ranks *x, const char *why)
{
    struct step_channel *l = x->shared.link;
    struct err unheard;
    void *at;
    size_t n = strlen(why);

    if (n > 0 && n <= l->slot_bytes && l->ops->begin(l, &at, RANKS_STOP_MS * 1000, &unheard) == 0) {
        memcpy(at, why, n);
        l->ops->commit(l, RANK_STOP, n, &unheard);
    }
}

/* All hold the same model, and the cache is as large as the smallest room for it. */
static int agree(struct rank_place *share, struct executor_info *info, const struct model *model,
                 struct err *e)
{
    struct ranks *x = CONTAINER_OF(share, struct ranks, share);
    struct step_channel *l = x->shared.link;
    struct rank_hello mine;
    void *at;

    rank_hello_fill(&mine, info, model, x->deterministic);
    int rc = await_all(x, GREETED, e);
    for (int32_t i = 1; rc == 0 && i < x->n; i++) {
        const struct rank_hello *h = &x->member[i].hello;
        rc = rank_hello_compare(&mine, h, i, e);
        info->n_blocks = (int32_t)MIN(info->n_blocks, h->n_blocks);
        info->n_host_blocks = (int32_t)MIN(info->n_host_blocks, h->n_host_blocks);
        info->max_len = (int32_t)MIN(info->max_len, h->max_len);
    }
    info->n_host_blocks = MIN(info->n_host_blocks, HOST_BLOCKS_MAX);
    if (rc < 0) {
        tell_reason(x, e->text);
    } else {
        rc = l->ops->begin(l, &at, x->timeout_us, e);
    }
    if (rc < 0) {
        return rc;
    }
    struct rank_pools pools = {info->n_blocks, info->n_host_blocks, info->max_len};
    memcpy(at, &pools, sizeof(pools));
    return l->ops->commit(l, RANK_POOLS, sizeof(pools), e);
}

/* What can be refused before a process is started; the size of a step's message. */
static int prepare(struct ranks *x, struct settings *s, const struct model_config *c, struct err *e)
{
    struct executor_info limits = {0};
    const struct pipeline_place *at = &x->share.at;
    int rc = model_check_ranks(c, at->n_ranks, e);

    if (rc == 0) {
        rc = model_check_stages(c, at->n_stages, e);
    }
    if (rc == 0) {
        runner_choose_device(s);
    }
    if (rc == 0) {
        rc = runner_limits(&limits, s, c, s->device == DEVICE_CUDA, e);
    }
    limits.n_host_blocks = HOST_BLOCKS_MAX;
    x->base.info.max_samples = limits.max_samples; /* results may be no more */
    x->slot_bytes = rc < 0 ? 0 : batch_wire_max(&limits);
    return rc;
}

/* Processes, shared memory, the model on rank 0, readiness of all. */
static int start(struct ranks *x, const struct settings *s, const char *dir,
                 const struct model_config *c, struct err *e)
{
    bool one_machine = x->n_here == x->n;
    int rc = settings_pass_on(&x->flags, s, dir, e);

    x->settings = s;
    x->share.here = (int32_t)s->local_rank * x->n_here;
    x->share.n_here = (int32_t)s->local_size * x->n_here;
    x->share.agree = agree;
    if (rc == 0 && one_machine) {
        rc = transports_create(&x->shared_fd, &x->share.at, x->slot_bytes, e);
    }
    if (rc == 0 && one_machine) {
        rc = transports_open(&x->shared, x->shared_fd, &x->share.at, x->slot_bytes, x->timeout_us,
                             e);
    }
    if (rc == 0 && !one_machine) {
        rc = cluster_listen(&x->net, s->master_addr, (int)s->master_port,
                            MIN((int64_t)(s->node_timeout * 1e6), OWN_NAME_US), e);
    }
    if (rc == 0) {
        rc = supervisor_main(x, e);
    }
    if (rc == 0 && !one_machine) {
        rc = await_meeting(x, e);
    }
    x->share.comm = x->shared.comm;
    x->share.pipeline = x->shared.pipeline;
    if (rc == 0) {
        rc = runner_open_share(&x->runner, s, dir, c, &x->share, e);
    }
    return rc < 0 ? rc : await_all(x, READY, e);
}

static void ranks_free(struct executor *base)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    struct err unheard;
    void *at;

    pthread_mutex_lock(&x->lock);
    bool failed = x->failed;
    x->stopping = true;
    pthread_mutex_unlock(&x->lock);
    struct step_channel *l = x->shared.link;
    bool told = !failed && x->runner && l &&
                l->ops->begin(l, &at, RANKS_STOP_MS * 1000, &unheard) == 0 &&
                l->ops->commit(l, RANK_STOP, 0, &unheard) == 0;
    pthread_mutex_lock(&x->lock);
    x->by_force = !told;
    pthread_mutex_unlock(&x->lock);
    if (!told) {
        transports_abort(&x->shared, "rank 0 stopped");
    }
    if (x->watching) {
        eventfd_write(x->wake_fd, 1);
        pthread_join(x->watcher, NULL);
    }
    if (x->runner) {
        x->runner->free(x->runner);
    }
    transports_release(&x->shared);
    cluster_release(&x->net);
    settings_pass_on_free(x->flags);
    for (int i = 0; i < RANKS_ANSWERS; i++) {
        gathered_release(&x->answer[i].gathered);
    }
    if (x->shared_fd >= 0) {
        close(x->shared_fd);
    }
    if (x->wake_fd >= 0) {
        close(x->wake_fd);
    }
    pthread_mutex_destroy(&x->lock);
    pthread_cond_destroy(&x->changed);
    free(x);
}

static void describe(struct ranks *x)
{
    struct executor_info *i = &x->base.info;

    *i = x->runner->info;
    i->n_ranks = x->n;
    int len =
        snprintf(i->device, sizeof(i->device), "%.100s, %d ranks", x->runner->info.device, x->n);
    if (x->share.at.n_stages > 1) {
        snprintf(i->device + len, sizeof(i->device) - (size_t)len, " in %d stages",
                 x->share.at.n_stages);
    }
}

int ranks_open(struct executor **ret, const struct settings *s, const char *dir,
               const struct model_config *c, struct err *e)
{
    struct ranks *x = calloc(1, sizeof(*x));

    if (!x) {
        return err_nomem(e, "the ranks");
    }
    struct settings own = *s; /* texts are the caller's */
    x->share.at = (struct pipeline_place){.n_stages = (int32_t)s->pipeline_parallel_size,
                                          .n_ranks = (int32_t)s->tensor_parallel_size};
    x->n = x->share.at.n_stages * x->share.at.n_ranks;
    x->timeout_us = (int64_t)(s->step_timeout * 1e6);
    x->deterministic = s->deterministic;
    x->n_here = x->n / (int32_t)s->nnodes;
    x->shared_fd = x->wake_fd = -1;
    cluster_init(&x->net, &x->share.at);
    for (int32_t i = 0; i < COMM_MAX_RANKS; i++) {
        x->member[i].fd = -1;
    }
    pthread_mutex_init(&x->lock, NULL);
    wait_init(&x->changed);
    x->base = (struct executor){.launch = ranks_launch,
                                .wait = ranks_wait,
                                .free = ranks_free,
                                .check = ranks_check,
                                .ranks_up = ranks_up};
    int rc = prepare(x, &own, c, e);
    if (rc == 0) {
        rc = start(x, &own, dir, c, e);
    }
    if (rc < 0) {
        ranks_free(&x->base);
        return rc;
    }
    describe(x);
    *ret = &x->base;
    return 0;
}
