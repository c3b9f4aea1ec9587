/* The executor of many ranks: one process each, of which this one is the first.
 *
 *     engine ─► launch ─► ring ───────────────► rank 1 … n-1   (rank_main.c)
 *                   └───► runner (rank 0) ◄─comm─► runner
 *     engine ◄─ wait ◄──────┘
 *
 * One scheduler, one set of block ids: every rank holds its heads' share of every block and gets the same batch, table updates
 * included, as one message (batch_wire.h, rank_link.h); so swapping, copy-on-write, beams and the prefix cache need to
 * know nothing of ranks. Inside the step the ranks meet in comm's sums; rank 0 draws the tokens and its runner's results are
 * the answer.
 *
 * A thread of this file starts the ranks and watches them: a note or the end of one comes over its socket. A rank that
 * fails, dies or hangs is the end of the executor: the reason is kept, whoever waits in comm is let go with it, launch,
 * wait and check return it, and the engine dies of it as of any device error. Nothing is restarted here: systemd does that.
 *
 *     STARTED ──hello──► GREETED ──ready──► READY ──end of process──► GONE
 *
 * With several nodes all ranks but this one come over the network (rank_net.h), those of this machine too; the other nodes'
 * are started and watched there (rank_node.c), and known here by their connections alone.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "engine/batch_wire.h"
#include "engine/rank_net.h"
#include "engine/rank_note.h"
#include "engine/rank_process.h"
#include "engine/rank_shared.h"
#include "engine/runner.h"

enum {
    HOST_BLOCKS_MAX = 1 << 20, /* swapped in one step: part of a message's size */
    START_S = 900,             /* for a rank to read its slice */
    STOP_MS = 2000,            /* for a rank to end when told to */
    REAP_MS = 300,    /* between the end of its socket and that of its process; a device is given back slowly */
    KILLED_MS = 3000, /* for a process that was killed to be gone */
    MEET_MS = 50,     /* between looks at the ranks of this machine while others are awaited */
};

enum member_state { STARTED, GREETED, READY, GONE };

/* A rank, as this process sees it. */
struct member {
    pid_t pid; /* 0: reaped, or another node's */
    int fd;    /* notes; -1: closed */
    enum member_state state;
    struct rank_hello hello;
};

struct ranks {
    struct executor base;
    struct executor *runner; /* rank 0 */
    struct rank_share share;
    struct rank_shared shared;
    int shared_fd, wake_fd;
    size_t slot_bytes;
    int64_t timeout_us;
    bool deterministic;
    char **flags;                    /* settings of the ranks */
    int32_t n, n_here;               /* ranks, and those of this machine, which are the first */
    const struct settings *settings; /* while it starts */
    struct rank_net net;
    pthread_t watcher;
    bool watching; /* the thread is there */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a member's state, `failed` */
    /* under `lock` */
    struct member member[COMM_MAX_RANKS]; /* [1 .. n-1] */
    bool met;                             /* shared's link and comm are there */
    bool failed, stopping, by_force;      /* by_force: they were not told to stop */
    char reason[400];
};

/* ---- failure -------------------------------------------------------------------------------------------------------- */

/* The first reason stays; once the ranks were told to stop, none is one. */
static void set_failed(struct ranks *x, const char *reason)
{
    pthread_mutex_lock(&x->lock);
    if (!x->failed && !x->stopping) {
        x->failed = true;
        snprintf(x->reason, sizeof(x->reason), "%s", reason);
    }
    pthread_cond_broadcast(&x->changed);
    pthread_mutex_unlock(&x->lock);
    if (x->shared.comm)
        x->shared.comm->ops->abort(x->shared.comm, reason);
}

static int check_failed(struct ranks *x, struct err *e)
{
    pthread_mutex_lock(&x->lock);
    int rc = x->failed ? err_set(e, ERR_DEVICE, "%s", x->reason) : 0;
    pthread_mutex_unlock(&x->lock);
    return rc;
}

/* ---- watching ------------------------------------------------------------------------------------------------------- */

static void set_state(struct ranks *x, int32_t rank, enum member_state state)
{
    pthread_mutex_lock(&x->lock);
    x->member[rank].state = state;
    pthread_cond_broadcast(&x->changed);
    pthread_mutex_unlock(&x->lock);
}

static void on_end(struct ranks *x, int32_t rank)
{
    struct member *m = &x->member[rank];
    char text[160];
    int status = 0;
    pid_t pid = m->pid;
    shutdown(m->fd, SHUT_RDWR); /* closed by end_all: the engine's thread may be writing to it */
    if (pid == 0)
        snprintf(text, sizeof(text), "rank %d, on node %d, closed its connection", rank, rank / x->n_here);
    else if (rank_reap(&m->pid, REAP_MS, &status))
        rank_exit_text(text, sizeof(text), rank, pid, status);
    else
        snprintf(text, sizeof(text), "rank %d (process %d) closed its connection", rank, (int)pid);
    set_failed(x, text); /* before the state, which waiters take for progress */
    set_state(x, rank, GONE);
}

static void on_note(struct ranks *x, int32_t rank)
{
    struct member *m = &x->member[rank];
    struct rank_note note;
    struct err e = {0};
    char text[400];
    int rc = rank_note_receive(m->fd, &note, &e);
    if (rc == 0) {
        on_end(x, rank);
        return;
    }
    if (rc == 1 && note.kind == NOTE_HELLO) {
        m->hello = note.hello;
        set_state(x, rank, GREETED);
    } else if (rc == 1 && note.kind == NOTE_READY) {
        set_state(x, rank, READY);
    } else {
        struct comm *c = x->shared.comm;
        struct err first; /* what rank 0 itself met before, of which this may be a consequence */
        bool second = c && c->ops->check(c, &first) < 0;
        snprintf(text, sizeof(text), "rank %d: %.380s", rank, rc == 1 ? note.text : e.text);
        set_failed(x, second ? first.text : text);
        if (rc < 0 && m->pid > 0)
            kill(m->pid, SIGKILL);
    }
}

static int spawn(struct ranks *x, int32_t rank, pid_t parent, struct err *e)
{
    struct member *m = &x->member[rank];
    struct rank_order order = {.rank = rank,
                               .n_ranks = x->n,
                               .here = x->share.here + rank,
                               .n_here = x->share.n_here,
                               .over_net = x->n_here < x->n,
                               .slot_bytes = x->slot_bytes,
                               .parent = parent,
                               .settings = x->flags};
    int fd[2];
    if (order.over_net)
        return rank_spawn(&m->pid, &order, e);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) < 0)
        return err_set(e, ERR_IO, "rank %d: no socket: %s", rank, strerror(errno));
    order.shared_fd = x->shared_fd;
    order.note_fd = fd[1];
    int rc = rank_spawn(&m->pid, &order, e);
    close(fd[1]);
    if (rc < 0)
        close(fd[0]);
    else
        m->fd = fd[0];
    return rc;
}

static void spawn_all(struct ranks *x)
{
    struct err e;
    for (int32_t i = 1; i < x->n_here; i++) {
        if (spawn(x, i, getpid(), &e) < 0) {
            set_failed(x, e.text);
            return;
        }
    }
}

static int ms_until(int64_t at_us)
{
    return (int)MAX((at_us - clock_us()) / 1000, 0);
}

/* The others stop by themselves or, a moment after they were told to, by force. */
static void end_all(struct ranks *x)
{
    int status;
    pthread_mutex_lock(&x->lock);
    int64_t stop_us = clock_us() + (x->by_force ? 0 : STOP_MS * INT64_C(1000)), gone_us = stop_us + KILLED_MS * 1000;
    pthread_mutex_unlock(&x->lock);
    for (int32_t i = 1; i < x->n; i++) {
        if (!rank_reap(&x->member[i].pid, ms_until(stop_us), &status))
            kill(x->member[i].pid, SIGKILL);
    }
    for (int32_t i = 1; i < x->n; i++) {
        struct member *m = &x->member[i];
        rank_reap(&m->pid, ms_until(gone_us), &status);
        if (m->fd >= 0)
            close(m->fd);
        m->fd = -1;
        set_state(x, i, GONE);
    }
}

/* A rank of this machine that ended before it came is a failure; its status says which. */
static bool all_live(struct ranks *x)
{
    char text[160];
    int status;
    for (int32_t i = 1; i < x->n_here; i++) {
        pid_t pid = x->member[i].pid;
        if (pid > 0 && rank_reap(&x->member[i].pid, 0, &status)) {
            rank_exit_text(text, sizeof(text), i, pid, status);
            set_failed(x, text);
            return false;
        }
    }
    return true;
}

/* Take in the ranks as they come over the network, until all are there, one failed, or all is stopped. */
static int meet(struct ranks *x, struct err *e)
{
    const struct settings *s = x->settings;
    int64_t until_us = clock_us() + (int64_t)(s->node_timeout * 1e6);
    int32_t missing;
    while ((missing = rank_net_missing(&x->net)) >= 0) {
        eventfd_t stop;
        rank_net_admit(&x->net, x->slot_bytes, MEET_MS);
        if (eventfd_read(x->wake_fd, &stop) == 0) {
            eventfd_write(x->wake_fd, stop); /* the watcher's loop shall see it too */
            return err_set(e, ERR_DRAINING, "stopped while the nodes meet");
        }
        if (!all_live(x))
            return err_set(e, ERR_DEVICE, "%s", x->reason);
        if (clock_us() > until_us)
            return err_set(e, ERR_TIMEOUT, "rank %d, on node %d, has not come within node_timeout, %.0f s", missing,
                           missing / x->n_here, s->node_timeout);
    }
    int rc = rank_shared_connect(&x->shared, x->net.fd[RANK_NET_CONTROL], x->net.fd[RANK_NET_COMM], 0, x->n,
                                 x->slot_bytes, x->timeout_us, e);
    for (int32_t i = 1; i < x->n; i++) {
        x->net.fd[RANK_NET_COMM][i] = -1; /* comm's, or closed */
        x->member[i].fd = x->net.fd[RANK_NET_CONTROL][i];
        x->net.fd[RANK_NET_CONTROL][i] = -1;
    }
    return rc;
}

static void meet_all(struct ranks *x)
{
    struct err e;
    int rc = meet(x, &e);
    rank_net_release(&x->net);
    if (rc < 0)
        set_failed(x, e.text);
    pthread_mutex_lock(&x->lock);
    x->met = rc == 0;
    pthread_cond_broadcast(&x->changed);
    pthread_mutex_unlock(&x->lock);
}

static void *watcher_main(void *arg)
{
    struct ranks *x = arg;
    spawn_all(x);
    if (x->n_here < x->n)
        meet_all(x);
    for (bool stopping = false; !stopping;) {
        struct pollfd p[COMM_MAX_RANKS] = {{.fd = x->wake_fd, .events = POLLIN}};
        for (int32_t i = 1; i < x->n; i++)
            p[i] = (struct pollfd){.fd = x->member[i].state == GONE ? -1 : x->member[i].fd, .events = POLLIN};
        poll(p, (nfds_t)x->n, -1);
        for (int32_t i = 1; i < x->n; i++) {
            if (p[i].fd >= 0 && p[i].revents)
                on_note(x, i);
        }
        stopping = p[0].revents != 0;
    }
    end_all(x);
    return NULL;
}

/* ---- a step --------------------------------------------------------------------------------------------------------- */

static int send_step(struct ranks *x, const struct batch *b, struct err *e)
{
    struct rank_link *l = x->shared.link;
    void *at;
    size_t n_bytes = batch_wire_write(NULL, b);
    if (n_bytes > l->slot_bytes)
        return err_set(e, ERR_INVALID, "step %llu is a message of %zu bytes; ranks take %zu",
                       (unsigned long long)b->step, n_bytes, l->slot_bytes);
    int rc = l->ops->begin(l, &at, x->timeout_us, e);
    if (rc < 0)
        return rc;
    batch_wire_write(at, b);
    return l->ops->commit(l, RANK_STEP, n_bytes, e);
}

static int ranks_launch(struct executor *base, const struct batch *b, struct err *e)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    int rc = check_failed(x, e);
    if (rc == 0 && (rc = send_step(x, b, e)) < 0)
        set_failed(x, e->text);
    return rc < 0 ? rc : x->runner->launch(x->runner, b, e);
}

static int ranks_wait(struct executor *base, struct results *ret, struct err *e)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    int rc = x->runner->wait(x->runner, ret, e);
    if (rc < 0)
        check_failed(x, e); /* the reason behind it, where it is known */
    return rc;
}

static int ranks_check(struct executor *base, struct err *e)
{
    return check_failed(CONTAINER_OF(base, struct ranks, base), e);
}

static uint64_t ranks_up(struct executor *base)
{
    struct ranks *x = CONTAINER_OF(base, struct ranks, base);
    uint64_t up = 1;
    pthread_mutex_lock(&x->lock);
    for (int32_t i = 1; i < x->n; i++)
        up |= (uint64_t)(x->member[i].state == READY) << i;
    pthread_mutex_unlock(&x->lock);
    return up;
}

/* ---- start ---------------------------------------------------------------------------------------------------------- */

/* Until every other rank has reached `state`. */
static int await_all(struct ranks *x, enum member_state state, struct err *e)
{
    struct timespec until;
    int rc = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += START_S;
    pthread_mutex_lock(&x->lock);
    for (int32_t i = 1; i < x->n && rc == 0;) {
        if (x->failed)
            rc = err_set(e, ERR_DEVICE, "%s", x->reason);
        else if (x->member[i].state >= state)
            i++;
        else if (pthread_cond_timedwait(&x->changed, &x->lock, &until) == ETIMEDOUT)
            rc = err_set(e, ERR_TIMEOUT, "rank %d is not ready after %d s", i, START_S);
    }
    pthread_mutex_unlock(&x->lock);
    return rc;
}

static int await_meeting(struct ranks *x, struct err *e)
{
    pthread_mutex_lock(&x->lock);
    while (!x->met && !x->failed)
        pthread_cond_wait(&x->changed, &x->lock);
    int rc = x->failed ? err_set(e, ERR_DEVICE, "%s", x->reason) : 0;
    pthread_mutex_unlock(&x->lock);
    return rc;
}

/* All hold the same model, and the cache is as large as the smallest room for it. */
static int agree(struct rank_share *share, struct executor_info *info, const struct model *model, struct err *e)
{
    struct ranks *x = CONTAINER_OF(share, struct ranks, share);
    struct rank_link *l = x->shared.link;
    struct rank_hello mine;
    void *at;
    rank_hello_fill(&mine, info, model, x->n, x->deterministic);
    int rc = await_all(x, GREETED, e);
    for (int32_t i = 1; rc == 0 && i < x->n; i++) {
        const struct rank_hello *h = &x->member[i].hello;
        rc = rank_hello_compare(&mine, h, i, e);
        info->n_blocks = (int32_t)MIN(info->n_blocks, h->n_blocks);
        info->n_host_blocks = (int32_t)MIN(info->n_host_blocks, h->n_host_blocks);
        info->max_len = (int32_t)MIN(info->max_len, h->max_len);
    }
    info->n_host_blocks = MIN(info->n_host_blocks, HOST_BLOCKS_MAX);
    if (rc == 0)
        rc = l->ops->begin(l, &at, x->timeout_us, e);
    if (rc < 0)
        return rc;
    struct rank_pools pools = {info->n_blocks, info->n_host_blocks, info->max_len};
    memcpy(at, &pools, sizeof(pools));
    return l->ops->commit(l, RANK_POOLS, sizeof(pools), e);
}

/* What can be refused before a process is started; the size of a step's message. */
static int prepare(struct ranks *x, struct settings *s, const struct model_config *c, struct err *e)
{
    struct executor_info limits = {0};
    if (s->pipeline_parallel_size > 1)
        return err_set_param(e, ERR_UNSUPPORTED, "pipeline_parallel_size",
                             "pipeline_parallel_size %lld: layers are not divided over ranks; tensor_parallel_size "
                             "shares each layer",
                             (long long)s->pipeline_parallel_size);
    int rc = model_check_ranks(c, x->n, e);
    if (rc == 0)
        rc = runner_settle_device(s, e);
    if (rc == 0)
        rc = runner_limits(&limits, s, c, s->device == DEVICE_CUDA, e);
    limits.n_host_blocks = HOST_BLOCKS_MAX;
    x->slot_bytes = rc < 0 ? 0 : batch_wire_max(&limits);
    return rc;
}

static int start_watcher(struct ranks *x, struct err *e)
{
    x->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (x->wake_fd < 0)
        return err_set(e, ERR_IO, "no eventfd for the ranks: %s", strerror(errno));
    if (pthread_create(&x->watcher, NULL, watcher_main, x) != 0)
        return err_set(e, ERR_IO, "cannot start the thread that watches the ranks");
    x->watching = true;
    pthread_setname_np(x->watcher, "quire-ranks");
    return 0;
}

/* Processes, shared memory, the model on rank 0, readiness of all. */
static int start(struct ranks *x, const struct settings *s, const char *dir, const struct model_config *c,
                 struct err *e)
{
    bool one_machine = x->n_here == x->n;
    int rc = settings_pass_on(&x->flags, s, dir, e);
    x->settings = s;
    x->share = (struct rank_share){.rank = 0,
                                   .n_ranks = x->n,
                                   .here = (int32_t)s->local_rank * x->n_here,
                                   .n_here = (int32_t)s->local_size * x->n_here,
                                   .agree = agree};
    if (rc == 0 && one_machine)
        rc = rank_shared_create(&x->shared_fd, x->n, x->slot_bytes, e);
    if (rc == 0 && one_machine)
        rc = rank_shared_open(&x->shared, x->shared_fd, 0, x->n, x->slot_bytes, x->timeout_us, e);
    if (rc == 0 && !one_machine)
        rc = rank_net_listen(&x->net, s->master_addr, (int)s->master_port, x->n, e);
    if (rc == 0)
        rc = start_watcher(x, e);
    if (rc == 0 && !one_machine)
        rc = await_meeting(x, e);
    x->share.comm = x->shared.comm;
    if (rc == 0)
        rc = runner_open_share(&x->runner, s, dir, c, &x->share, e);
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
    struct rank_link *l = x->shared.link;
    bool told = !failed && x->runner && l && l->ops->begin(l, &at, STOP_MS * 1000, &unheard) == 0 &&
                l->ops->commit(l, RANK_STOP, 0, &unheard) == 0;
    pthread_mutex_lock(&x->lock);
    x->by_force = !told;
    pthread_mutex_unlock(&x->lock);
    if (!told && x->shared.comm)
        x->shared.comm->ops->abort(x->shared.comm, "rank 0 stopped");
    if (x->watching) {
        eventfd_write(x->wake_fd, 1);
        pthread_join(x->watcher, NULL);
    }
    if (x->runner)
        x->runner->free(x->runner);
    rank_shared_release(&x->shared);
    rank_net_release(&x->net);
    settings_pass_on_free(x->flags);
    if (x->shared_fd >= 0)
        close(x->shared_fd);
    if (x->wake_fd >= 0)
        close(x->wake_fd);
    pthread_mutex_destroy(&x->lock);
    pthread_cond_destroy(&x->changed);
    free(x);
}

static void describe(struct ranks *x)
{
    struct executor_info *i = &x->base.info;
    *i = x->runner->info;
    i->n_ranks = x->n;
    snprintf(i->device, sizeof(i->device), "%.100s, %d ranks", x->runner->info.device, x->n);
}

int ranks_open(struct executor **ret, const struct settings *s, const char *dir, const struct model_config *c,
               struct err *e)
{
    struct ranks *x = calloc(1, sizeof(*x));
    if (!x)
        return err_nomem(e, "the ranks");
    struct settings own = *s; /* texts are the caller's */
    x->n = (int32_t)s->tensor_parallel_size;
    x->timeout_us = (int64_t)(s->step_timeout * 1e6);
    x->deterministic = s->deterministic;
    x->n_here = x->n / (int32_t)s->nnodes;
    x->shared_fd = x->wake_fd = x->net.listen_fd = -1;
    for (int32_t i = 0; i < COMM_MAX_RANKS; i++)
        x->member[i].fd = -1;
    pthread_mutex_init(&x->lock, NULL);
    pthread_cond_init(&x->changed, NULL);
    x->base = (struct executor){
        .launch = ranks_launch, .wait = ranks_wait, .free = ranks_free, .check = ranks_check, .ranks_up = ranks_up};
    int rc = prepare(x, &own, c, e);
    if (rc == 0)
        rc = start(x, &own, dir, c, e);
    if (rc < 0) {
        ranks_free(&x->base);
        return rc;
    }
    describe(x);
    *ret = &x->base;
    return 0;
}
