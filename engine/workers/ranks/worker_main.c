/* The life of a rank other than the first: a process of its own, which computes what
 * rank 0 tells it.
 *
 *     settings ─► model (its slice) ─► hello ─► pools agreed on ─► ready ─► step, step, … ─► stop
 *
 * It has no scheduler, no tokenizer, no clients. What goes wrong is a note to rank 0,
 * whose service ends with that reason; on a machine of its own it logs it too. It ends
 * when it is told to, when a step fails, and with its parent.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "config/settings/settings.h"
#include "engine/commands.h"
#include "engine/engine.h"
#include "engine/workers/batch_wire.h"
#include "engine/workers/ranks/cluster.h"
#include "engine/workers/ranks/control_msg.h"
#include "engine/workers/ranks/transports.h"
#include "engine/workers/ranks/worker_process.h"
#include "engine/workers/runner.h"

enum {
    LOOK_US = 1000000,  /* between looks at whether the parent is there */
    SETTLE_US = 100000, /* without a further step, results of the last one are waited for */
};

struct member {
    struct rank_place share;
    struct worker_args order;
    struct settings settings;
    struct cluster net; /* only where rank 0 is on another machine, or speaks as if it were */
    struct transports shared;
    struct executor *executor;
    int32_t in_flight; /* launches not waited for */
};

/* Of several stages the last one's first rank draws, and tells rank 0. */
static bool draws(const struct member *m)
{
    const struct pipeline_place *at = &m->share.at;

    return at->n_stages > 1 && pipeline_is_last(at) && at->rank == 0;
}

/* The oldest step's results. Where rank 0 draws itself they are waited for to learn of
 * failures. */
static int settle(struct member *m, struct err *e)
{
    struct results r;

    m->in_flight--;
    int rc = m->executor->wait(m->executor, &r, e);
    return rc == 0 && draws(m) ? rank_results_send(m->order.note_fd, m->order.rank, &r, e) : rc;
}

/* The next message; ERR_IO when there will be none. */
static int next_message(struct member *m, struct rank_message *ret, struct err *e)
{
    struct step_channel *l = m->shared.link;

    for (;;) {
        int rc = l->ops->take(l, ret, m->in_flight > 0 ? SETTLE_US : LOOK_US, e);
        if (rc != 0) {
            return MIN(rc, 0);
        }
        if (m->in_flight > 0 && (rc = settle(m, e)) < 0) {
            return rc;
        }
        if (getppid() != m->order.parent) {
            return err_set(e, ERR_IO, "rank 0 is gone");
        }
    }
}

/* Tell what there is room for, and take what all have room for. */
static int agree(struct rank_place *share, struct executor_info *x, const struct model *model,
                 struct err *e)
{
    struct member *m = CONTAINER_OF(share, struct member, share);
    struct control_msg note = {.kind = NOTE_HELLO, .rank = m->order.rank};
    struct rank_message got;
    struct rank_pools pools;

    rank_hello_fill(&note.hello, x, model, m->settings.deterministic);
    int rc = control_msg_send(m->order.note_fd, &note, e);
    if (rc == 0) {
        rc = next_message(m, &got, e);
    }
    if (rc < 0) {
        return rc;
    }
    if (got.kind == RANK_STOP && got.n_bytes > 0) {
        return err_set(e, ERR_INVALID, "rank 0 does not start: %.*s", (int)MIN(got.n_bytes, 300),
                       (const char *)got.data);
    }
    if (got.kind == RANK_STOP) {
        return err_set(e, ERR_DRAINING, "rank 0 stopped while starting");
    }
    if (got.kind != RANK_POOLS || got.n_bytes != sizeof(pools)) {
        return err_set(e, ERR_INVALID, "rank 0 sent no pools");
    }
    memcpy(&pools, got.data, sizeof(pools));
    m->shared.link->ops->release(m->shared.link);
    x->n_blocks = pools.n_blocks;
    x->n_host_blocks = pools.n_host_blocks;
    x->max_len = pools.max_len;
    return 0;
}

/* Rank 0 is on another machine, or speaks as if it were. */
static int join(struct member *m, int64_t timeout_us, struct err *e)
{
    const struct settings *s = &m->settings;
    struct worker_args *o = &m->order;
    int rc = cluster_join(&m->net, &o->slot_bytes, s->master_addr ? s->master_addr : "",
                          (int)s->master_port, (int64_t)(s->node_timeout * 1e6), e);

    o->note_fd = m->net.fd[CLUSTER_CONTROL][0];
    return rc < 0 ? rc : transports_connect(&m->shared, &m->net, o->slot_bytes, timeout_us, e);
}

static int open_model(struct member *m, struct err *e)
{
    const struct worker_args *o = &m->order;
    const struct settings *s = &m->settings;
    struct model_config c;
    struct generation_defaults unused;
    int64_t timeout_us = (int64_t)(s->step_timeout * 1e6);
    struct pipeline_place at = pipeline_place_of(o->rank, o->n_stages, o->n_ranks / o->n_stages);

    cluster_init(&m->net, &at);
    int rc = o->over_net
                 ? join(m, timeout_us, e)
                 : transports_open(&m->shared, o->shared_fd, &at, o->slot_bytes, timeout_us, e);
    if (rc == 0) {
        rc = model_config_read(&c, &unused, s->model, e);
    }
    m->share = (struct rank_place){.at = at,
                                   .here = o->here,
                                   .n_here = o->n_here,
                                   .comm = m->shared.comm,
                                   .pipeline = m->shared.pipeline,
                                   .direct = true,
                                   .agree = agree};
    return rc < 0 ? rc : runner_open_share(&m->executor, s, s->model, &c, &m->share, e);
}

/* A step is launched as soon as it is told, so that the device goes from one to the
 * next. */
static int compute(struct member *m, const struct rank_message *msg, struct err *e)
{
    struct executor *x = m->executor;
    struct batch b;
    int rc = batch_wire_read(&b, msg->data, msg->n_bytes, &x->info, e);

    if (rc == 0) {
        rc = x->launch(x, &b, e);
    }
    m->shared.link->ops->release(m->shared.link);
    m->in_flight += rc == 0;
    return rc == 0 && (draws(m) || m->in_flight > x->info.depth) ? settle(m, e) : rc;
}

static int serve(struct member *m, struct err *e)
{
    struct control_msg ready = {.kind = NOTE_READY, .rank = m->order.rank};
    struct rank_message msg;
    int rc = control_msg_send(m->order.note_fd, &ready, e);

    while (rc == 0) {
        rc = next_message(m, &msg, e);
        if (rc == 0 && msg.kind == RANK_STOP) {
            return 0;
        }
        if (rc == 0) {
            rc = compute(m, &msg, e);
        }
    }
    return rc;
}

static void tell_failure(const struct member *m, const struct err *why)
{
    struct control_msg note = {.kind = NOTE_FAILED, .rank = m->order.rank};
    struct err unheard;

    snprintf(note.text, sizeof(note.text), "%s", why->text);
    control_msg_send(m->order.note_fd, &note, &unheard);
}

int worker_main(int argc, char **argv)
{
    struct member m = {0};
    struct err e = {0};
    bool help;
    char *no_environment[] = {NULL}, name[16];
    int rc = worker_args_parse(&m.order, argc, argv, &e), n_flags = 0;

    if (rc < 0) {
        fprintf(stderr, "quire: %s\n", e.text);
        return 2;
    }
    while (m.order.settings[n_flags]) {
        n_flags++;
    }
    snprintf(name, sizeof(name), "quire-rank-%d", m.order.rank);
    prctl(PR_SET_NAME, name);
    rc = settings_load(&m.settings, n_flags, (char **)m.order.settings, no_environment, &help, &e);
    if (rc == 0) {
        log_setup((enum log_format)m.settings.log_format, (enum log_level)m.settings.log_level);
        rc = open_model(&m, &e);
    }
    if (rc == 0) {
        rc = serve(&m, &e);
    }
    if (rc < 0 && m.order.over_net) {
        log_event(LOG_ERROR, "rank failed", LOG_I64("rank", m.order.rank),
                  LOG_STR("error", e.text));
    }
    if (rc < 0 && (m.shared.link || !m.order.over_net)) {
        tell_failure(&m, &e);
    }
    if (rc < 0) {
        _exit(1); /* what it holds of a device goes back faster so than piece by piece */
    }
    if (m.executor) {
        m.executor->free(m.executor);
    }
    transports_release(&m.shared);
    if (m.net.n > 0) {
        cluster_release(&m.net);
    }
    settings_release(&m.settings);
    return 0;
}
