/* The process of a rank other than 0, which computes the steps that rank 0 sends.
 *
 *     settings ─► model (its slice) ─► hello ─► pools agreed on ─► ready ─► step, step, … ─► stop
 *
 * It has no scheduler, no tokenizer and no clients. Errors are sent to rank 0, which
 * shuts the service down with that reason; on another machine they are logged there
 * too. It exits on a stop message, when a step fails, and with its parent. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "config/settings/settings.h"
#include "engine/commands.h"
#include "engine/drafts.h"
#include "engine/engine.h"
#include "engine/workers/batch_wire.h"
#include "engine/workers/ranks/cluster.h"
#include "engine/workers/ranks/control_msg.h"
#include "engine/workers/ranks/transports.h"
#include "engine/workers/ranks/worker_process.h"
#include "engine/workers/runner.h"

enum {
    PARENT_US = 1000000, /* between checks that the parent is alive */
    /* without another step for so long, the last one's results are waited for */
    RESULTS_US = 100000,
};

/* A model on this rank. */
struct part {
    struct executor *executor;
    int32_t in_flight; /* launches not waited for yet */
};

struct worker {
    struct rank_place place;
    struct worker_args args;
    struct settings settings;
    struct cluster net; /* several nodes: connections until `transports` takes them over */
    struct transports transports;
    struct part model, draft; /* draft: the draft model's, executor NULL: there is none */
    int masks_fd;             /* the socket of late masks */
};

/* Whether this rank samples for the pipeline and sends the results to rank 0: the last
 * stage's first rank does. */
static bool sends_results(const struct worker *w)
{
    const struct pipeline_place *at = &w->place.at;

    return at->n_stages > 1 && pipeline_is_last(at) && at->rank == 0;
}

/* Waits for the oldest step of the part and sends its results if they are needed;
 * otherwise the wait only detects failures. */
static int wait_results(struct worker *w, struct part *p, struct err *e)
{
    struct results r;

    p->in_flight--;
    int rc = p->executor->wait(p->executor, &r, e);
    return rc == 0 && sends_results(w) ? rank_results_send(w->args.control_fd, w->args.rank, &r, e)
                                       : rc;
}

/* The part that has steps in flight, the draft model before the model; NULL: none. */
static struct part *busy_part(struct worker *w)
{
    return w->draft.in_flight > 0 ? &w->draft : w->model.in_flight > 0 ? &w->model : NULL;
}

/* Takes the next message; ERR_IO: there will be none. */
static int next_message(struct worker *w, struct step_message *ret, struct err *e)
{
    struct step_channel *channel = w->transports.channel;

    for (;;) {
        struct part *busy = busy_part(w);
        int rc = channel->ops->take(channel, ret, busy ? RESULTS_US : PARENT_US, e);
        if (rc != 0) {
            return MIN(rc, 0);
        }
        if (busy && (rc = wait_results(w, busy, e)) < 0) {
            return rc;
        }
        if (getppid() != w->args.parent) {
            return err_set(e, ERR_IO, "rank 0 has exited");
        }
    }
}

/* rank_place.agree for a worker: sends its pools to rank 0 and takes those that fit all
 * ranks. */
static int agree_pools(struct rank_place *place, struct executor_info *x, const struct model *model,
                       struct err *e)
{
    struct worker *w = CONTAINER_OF(place, struct worker, place);
    struct control_msg msg = {.kind = CONTROL_HELLO, .rank = w->args.rank};
    struct step_message got;
    struct rank_pools pools;

    rank_hello_fill(&msg.hello, x, model, place->draft, w->settings.deterministic);
    int rc = control_msg_send(w->args.control_fd, &msg, e);
    if (rc == 0) {
        rc = next_message(w, &got, e);
    }
    if (rc < 0) {
        return rc;
    }
    if (got.kind == STEP_CHANNEL_STOP && got.n_bytes > 0) {
        return err_set(e, ERR_INVALID, "rank 0 does not start: %.*s", (int)MIN(got.n_bytes, 300),
                       (const char *)got.data);
    }
    if (got.kind == STEP_CHANNEL_STOP) {
        return err_set(e, ERR_DRAINING, "rank 0 stopped while starting");
    }
    if (got.kind != STEP_CHANNEL_POOLS || got.n_bytes != sizeof(pools)) {
        return err_set(e, ERR_INVALID, "rank 0 sent no pools");
    }
    memcpy(&pools, got.data, sizeof(pools));
    w->transports.channel->ops->release(w->transports.channel);
    x->n_blocks = pools.n_blocks;
    x->n_host_blocks = pools.n_host_blocks;
    x->max_len = pools.max_len;
    return 0;
}

/* Connects to the other ranks over the network. */
static int join_cluster(struct worker *w, int64_t timeout_us, struct err *e)
{
    const struct settings *s = &w->settings;
    struct worker_args *o = &w->args;
    int rc = cluster_join(&w->net, &o->slot_bytes, s->master_addr ? s->master_addr : "",
                          (int)s->master_port, (int64_t)(s->node_timeout * 1e6), e);

    o->control_fd = w->net.fd[CLUSTER_CONTROL][0];
    w->masks_fd = w->net.fd[CLUSTER_MASKS][0];
    return rc < 0 ? rc : transports_connect(&w->transports, &w->net, o->slot_bytes, timeout_us, e);
}

/* The model, and what drafts beside it. */
static int open_models(struct worker *w, struct err *e)
{
    const struct settings *s = &w->settings;
    struct model_config c, of_draft = {0};
    struct generation_defaults unused;
    char *draft_dir = NULL;
    int rc = model_config_read(&c, &unused, s->model, e);

    if (rc == 0) {
        rc = engine_draft_config(&of_draft, &draft_dir, s, s->model, &c, e);
    }
    if (rc < 0) {
        return rc;
    }
    struct settings own = engine_draft_settings(s, &c);
    struct runner_draft draft = {draft_dir, &of_draft, &own};
    rc = runner_open_rank(&w->model.executor, &w->draft.executor, s, s->model, &c,
                          draft_dir ? &draft : NULL, &w->place, e);
    free(draft_dir);
    return rc;
}

static int open_rank(struct worker *w, struct err *e)
{
    const struct worker_args *o = &w->args;
    const struct settings *s = &w->settings;
    int64_t timeout_us = (int64_t)(s->step_timeout * 1e6);
    struct pipeline_place at = pipeline_place_of(o->rank, o->n_stages, o->n_ranks / o->n_stages);

    w->masks_fd = o->control_fd;
    cluster_init(&w->net, &at);
    int rc = o->over_tcp
                 ? join_cluster(w, timeout_us, e)
                 : transports_open(&w->transports, o->shm_fd, &at, o->slot_bytes, timeout_us, e);
    w->place = (struct rank_place){.at = at,
                                   .local_rank = o->local_rank,
                                   .local_world_size = o->local_world_size,
                                   .comm = w->transports.comm,
                                   .pipeline = w->transports.pipeline,
                                   .direct = true,
                                   .agree = agree_pools};
    return rc < 0 ? rc : open_models(w, e);
}

/* Launches a step as soon as it arrives, so that the device goes from one to the next
 * without a gap. */
static int compute(struct worker *w, const struct step_message *msg, struct err *e)
{
    struct part *p = msg->kind == STEP_CHANNEL_DRAFT ? &w->draft : &w->model;
    struct executor *x = p->executor;
    struct batch b;

    if (!x) {
        return err_set(e, ERR_INVALID, "rank 0 sent a step of a draft model that is not there");
    }
    int rc = batch_wire_read(&b, msg->data, msg->n_bytes, &x->info, e);

    if (rc == 0) {
        rc = x->launch(x, &b, e);
    }
    w->transports.channel->ops->release(w->transports.channel);
    p->in_flight += rc == 0;
    return rc == 0 && (sends_results(w) || p->in_flight > x->info.depth) ? wait_results(w, p, e)
                                                                         : rc;
}

/* Takes late masks from rank 0, while the worker's own thread may be waiting for them
 * in a step. When there will be none, that one goes on without. */
static void *take_masks(void *arg)
{
    struct worker *w = arg;
    struct executor *x = w->model.executor;
    struct rank_masks got = {0};
    struct control_msg msg;
    struct err e;

    while (control_msg_receive(w->masks_fd, &msg, &e) == 1 && msg.kind == CONTROL_MASKS &&
           rank_masks_receive(w->masks_fd, &msg, &got, x->info.max_num_seqs,
                              mask_words(x->info.vocab), &e) == 1 &&
           x->masks(x, msg.step, got.mask, msg.n_masks, &e) == 0)
        ;
    x->masks(x, 0, NULL, 0, &e);
    rank_masks_release(&got);
    return NULL;
}

static int serve(struct worker *w, struct err *e)
{
    struct control_msg ready = {.kind = CONTROL_READY, .rank = w->args.rank};
    struct step_message msg;
    pthread_t masks;
    int rc = control_msg_send(w->args.control_fd, &ready, e);

    if (rc == 0 && w->model.executor->masks && pthread_create(&masks, NULL, take_masks, w) != 0) {
        rc = err_set(e, ERR_IO, "cannot start a thread for masks");
    }
    while (rc == 0) {
        rc = next_message(w, &msg, e);
        if (rc == 0 && msg.kind == STEP_CHANNEL_STOP) {
            if (w->model.executor->masks) {
                shutdown(w->masks_fd, SHUT_RD);
                pthread_join(masks, NULL);
            }
            return 0;
        }
        if (rc == 0) {
            rc = compute(w, &msg, e);
        }
    }
    return rc;
}

static void send_failure(const struct worker *w, const struct err *why)
{
    struct control_msg msg = {.kind = CONTROL_FAILED, .rank = w->args.rank};
    struct err ignored;

    snprintf(msg.text, sizeof(msg.text), "%s", why->text);
    control_msg_send(w->args.control_fd, &msg, &ignored);
}

int worker_main(int argc, char **argv)
{
    struct worker w = {0};
    struct err e = {0};
    bool help;
    char *no_environment[] = {NULL}, name[16];
    int rc = worker_args_parse(&w.args, argc, argv, &e), n_flags = 0;

    if (rc < 0) {
        fprintf(stderr, "quire: %s\n", e.text);
        return 2;
    }
    while (w.args.settings[n_flags]) {
        n_flags++;
    }
    snprintf(name, sizeof(name), "quire-rank-%d", w.args.rank);
    prctl(PR_SET_NAME, name);
    rc = settings_load(&w.settings, n_flags, (char **)w.args.settings, no_environment, &help, &e);
    if (rc == 0) {
        log_setup((enum log_format)w.settings.log_format, (enum log_level)w.settings.log_level);
        rc = open_rank(&w, &e);
    }
    if (rc == 0) {
        rc = serve(&w, &e);
    }
    if (rc < 0 && w.args.over_tcp) {
        log_event(LOG_ERROR, "rank failed", LOG_I64("rank", w.args.rank), LOG_STR("error", e.text));
    }
    if (rc < 0 && (w.transports.channel || !w.args.over_tcp)) {
        send_failure(&w, &e);
    }
    if (rc < 0) {
        _exit(1); /* exiting returns device memory faster than freeing it piece by piece */
    }
    if (w.draft.executor) { /* it reads what the model's keeps */
        w.draft.executor->free(w.draft.executor);
    }
    if (w.model.executor) {
        w.model.executor->free(w.model.executor);
    }
    transports_release(&w.transports);
    if (w.net.n > 0) {
        cluster_release(&w.net);
    }
    settings_release(&w.settings);
    return 0;
}
