/* The thread that starts the workers of ranks.c and watches them.
 *
 *     STARTED ──hello──► GREETED ──ready──► READY ──process ends──► GONE    (worker_state)
 *
 * set_state performs every transition: on_control_msg for hello and ready,
 * on_worker_end and stop_workers for GONE. Control messages, results and the end of a
 * worker arrive over its socket. A worker that fails, dies or hangs ends the executor:
 * the first reason is kept, and every rank that waits in comm or the pipeline is
 * released with it. Nothing is restarted here: that is systemd's task.
 *
 * With several nodes all ranks but rank 0 connect over the network (cluster.h), those
 * of this machine included. Other nodes' workers are started and reaped there (node.c);
 * here only their connections are known. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/workers/ranks/ranks_impl.h"
#include "engine/workers/ranks/worker_process.h"

enum {
    REAP_MS = 300,    /* for a process to exit after its socket closed */
    KILLED_MS = 3000, /* for a killed process to exit */
    ACCEPT_MS = 50,   /* between checks of this machine's workers while other nodes connect */
    /* for the ranks to connect to each other once all have connected to rank 0 */
    PEERS_US = 30000000,
};

/* ---- failure ---- */

void ranks_fail(struct ranks *x, const char *reason)
{
    pthread_mutex_lock(&x->lock);
    if (!x->failed && !x->stopping) {
        x->failed = true;
        snprintf(x->reason, sizeof(x->reason), "%s", reason);
    }
    pthread_cond_broadcast(&x->changed);
    pthread_mutex_unlock(&x->lock);
    transports_abort(&x->transports, reason);
}

int ranks_check_failed(struct ranks *x, struct err *e)
{
    pthread_mutex_lock(&x->lock);
    int rc = x->failed ? err_set(e, ERR_DEVICE, "%s", x->reason) : 0;
    pthread_mutex_unlock(&x->lock);
    return rc;
}

/* ---- watching ---- */

static void set_state(struct ranks *x, int32_t rank, enum worker_state state)
{
    pthread_mutex_lock(&x->lock);
    x->worker[rank].state = state;
    pthread_cond_broadcast(&x->changed);
    pthread_mutex_unlock(&x->lock);
}

static void on_worker_end(struct ranks *x, int32_t rank)
{
    struct worker_process *m = &x->worker[rank];
    char text[160];
    int status = 0;
    pid_t pid = m->pid;

    shutdown(m->fd,
             /* closed later, by stop_workers: the engine's thread may be writing to
              * it */
             SHUT_RDWR);
    if (pid == 0) {
        snprintf(text, sizeof(text), "rank %d, on node %d, closed its connection", rank,
                 rank / x->ranks_per_node);
    } else if (worker_ended(&m->pid, REAP_MS, &status)) {
        worker_exit_text(text, sizeof(text), rank, pid, status);
    } else {
        snprintf(text, sizeof(text), "rank %d (process %d) closed its connection", rank, (int)pid);
    }
    ranks_fail(x, text); /* before the state, which waiters take for progress */
    set_state(x, rank, WORKER_GONE);
}

/* Receives results from the rank that samples. The engine's thread reads them only once
 * n_results counts them. */
static void on_results(struct ranks *x, int32_t rank, const struct control_msg *msg)
{
    struct step_results *a = &x->results[x->n_results % RANKS_RESULTS];
    struct err e = {0};
    int rc =
        rank_results_receive(x->worker[rank].fd, msg, &a->gathered, x->base.info.max_samples, &e);

    if (rc == 0) {
        on_worker_end(x, rank);
        return;
    }
    if (rc < 0) {
        ranks_fail(x, e.text);
        return;
    }
    pthread_mutex_lock(&x->lock);
    a->arrived_us = clock_us();
    x->n_results++;
    pthread_cond_broadcast(&x->changed);
    pthread_mutex_unlock(&x->lock);
}

static void on_control_msg(struct ranks *x, int32_t rank)
{
    struct worker_process *m = &x->worker[rank];
    struct control_msg msg;
    struct err e = {0};
    char text[400];
    int rc = control_msg_receive(m->fd, &msg, &e);

    if (rc == 0) {
        on_worker_end(x, rank);
        return;
    }
    if (rc == 1 && msg.kind == CONTROL_HELLO) {
        m->hello = msg.hello;
        set_state(x, rank, WORKER_GREETED);
    } else if (rc == 1 && msg.kind == CONTROL_READY) {
        set_state(x, rank, WORKER_READY);
    } else if (rc == 1 && msg.kind == CONTROL_RESULTS) {
        on_results(x, rank, &msg);
    } else {
        struct err first; /* an earlier error of rank 0 itself, which may have caused this one */
        bool second = transports_check(&x->transports, &first) < 0;
        snprintf(text, sizeof(text), "rank %d: %.380s", rank, rc == 1 ? msg.text : e.text);
        ranks_fail(x, second ? first.text : text);
        if (rc < 0 && m->pid > 0) {
            kill(m->pid, SIGKILL);
        }
    }
}

static int spawn_worker(struct ranks *x, int32_t rank, pid_t parent, struct err *e)
{
    struct worker_process *m = &x->worker[rank];
    struct worker_args args = {.rank = rank,
                               .n_ranks = x->n,
                               .n_stages = x->place.at.n_stages,
                               .local_rank = x->place.local_rank + rank,
                               .local_world_size = x->place.local_world_size,
                               .over_tcp = x->ranks_per_node < x->n,
                               .slot_bytes = x->slot_bytes,
                               .parent = parent,
                               .settings = x->flags};
    int fd[2];

    if (args.over_tcp) {
        return worker_spawn(&m->pid, &args, e);
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) < 0) {
        return err_set(e, ERR_IO, "rank %d: no socket: %s", rank, strerror(errno));
    }
    args.shm_fd = x->shm_fd;
    args.control_fd = fd[1];
    int rc = worker_spawn(&m->pid, &args, e);
    close(fd[1]);
    if (rc < 0) {
        close(fd[0]);
    } else {
        m->fd = fd[0];
    }
    return rc;
}

static void spawn_workers(struct ranks *x)
{
    struct err e;

    for (int32_t i = 1; i < x->ranks_per_node; i++) {
        if (spawn_worker(x, i, getpid(), &e) < 0) {
            ranks_fail(x, e.text);
            return;
        }
    }
}

static int ms_until(int64_t at_us)
{
    return (int)MAX((at_us - clock_us()) / 1000, 0);
}

/* Waits for the workers to exit, killing those that do not within RANKS_STOP_MS of the
 * stop message, or all at once if none was sent. */
static void stop_workers(struct ranks *x)
{
    int status;

    pthread_mutex_lock(&x->lock);
    int64_t stop_us = clock_us() + (x->by_force ? 0 : RANKS_STOP_MS * INT64_C(1000)),
            gone_us = stop_us + KILLED_MS * 1000;
    pthread_mutex_unlock(&x->lock);
    for (int32_t i = 1; i < x->n; i++) {
        if (!worker_reap(&x->worker[i].pid, ms_until(stop_us), &status)) {
            kill(x->worker[i].pid, SIGKILL);
        }
    }
    for (int32_t i = 1; i < x->n; i++) {
        struct worker_process *m = &x->worker[i];
        worker_reap(&m->pid, ms_until(gone_us), &status);
        if (m->fd >= 0) {
            close(m->fd);
        }
        if (m->masks_fd >= 0) {
            close(m->masks_fd);
        }
        m->fd = m->masks_fd = -1;
        set_state(x, i, WORKER_GONE);
    }
}

/* Fails if a worker of this machine exited before it connected. */
static bool workers_alive(struct ranks *x)
{
    char text[160];
    int status;

    for (int32_t i = 1; i < x->ranks_per_node; i++) {
        pid_t pid = x->worker[i].pid;
        if (pid > 0 && worker_reap(&x->worker[i].pid, 0, &status)) {
            worker_exit_text(text, sizeof(text), i, pid, status);
            ranks_fail(x, text);
            return false;
        }
    }
    return true;
}

/* Whether to go on waiting for rank `missing`: 0, or an error if the executor is being
 * stopped, a worker of this machine has exited, or the time is up. */
static int check_may_wait(struct ranks *x, int32_t missing, int64_t until_us, struct err *e)
{
    eventfd_t stop;

    if (eventfd_read(x->wake_fd, &stop) == 0) {
        eventfd_write(x->wake_fd, stop); /* for supervisor_main's loop */
        return err_set(e, ERR_DRAINING, "stopped while the nodes were connecting");
    }
    if (!workers_alive(x)) {
        return err_set(e, ERR_DEVICE, "%s", x->reason);
    }
    if (clock_us() > until_us) {
        return err_set(e, ERR_TIMEOUT,
                       "rank %d, on node %d, has not connected within node_timeout, %.0f s",
                       missing, missing / x->ranks_per_node, x->settings->node_timeout);
    }
    return 0;
}

/* Accepts the ranks' connections until all are complete, a worker fails, or the
 * executor is stopped. */
static int connect_nodes(struct ranks *x, struct err *e)
{
    int64_t until_us = clock_us() + (int64_t)(x->settings->node_timeout * 1e6);
    int32_t missing;
    int rc = 0;

    while (rc == 0 && (missing = cluster_missing(&x->net)) >= 0) {
        cluster_accept(&x->net, x->slot_bytes, ACCEPT_MS);
        rc = check_may_wait(x, missing, until_us, e);
    }
    if (rc == 0) {
        rc = cluster_send_addresses(&x->net, e);
    }
    while (rc == 0 && (missing = cluster_unlinked(&x->net)) >= 0) {
        cluster_accept(&x->net, x->slot_bytes, ACCEPT_MS);
        rc = check_may_wait(x, missing, until_us + PEERS_US, e);
    }
    if (rc == 0) {
        rc = transports_connect(&x->transports, &x->net, x->slot_bytes, x->timeout_us, e);
    }
    for (int32_t i = 1; i < x->n; i++) {
        x->worker[i].fd = x->net.fd[CLUSTER_CONTROL][i];
        x->worker[i].masks_fd = x->net.fd[CLUSTER_MASKS][i];
        x->net.fd[CLUSTER_CONTROL][i] = x->net.fd[CLUSTER_MASKS][i] = -1;
    }
    return rc;
}

static void connect_workers(struct ranks *x)
{
    struct err e;
    int rc = connect_nodes(x, &e);

    cluster_release(&x->net);
    if (rc < 0) {
        ranks_fail(x, e.text);
    }
    pthread_mutex_lock(&x->lock);
    x->connected = rc == 0;
    pthread_cond_broadcast(&x->changed);
    pthread_mutex_unlock(&x->lock);
}

/* Kills this machine's workers after a failure, so that the memory that they hold is
 * returned sooner. */
static void kill_workers(struct ranks *x)
{
    for (int32_t i = 1; i < x->ranks_per_node; i++) {
        if (x->worker[i].pid > 0) {
            kill(x->worker[i].pid, SIGKILL);
        }
    }
}

static void *supervisor_main(void *arg)
{
    struct ranks *x = arg;
    struct err ignored;

    spawn_workers(x);
    if (x->ranks_per_node < x->n) {
        connect_workers(x);
    }
    for (bool stopping = false; !stopping;) {
        struct pollfd p[COMM_MAX_RANKS] = {{.fd = x->wake_fd, .events = POLLIN}};
        for (int32_t i = 1; i < x->n; i++) {
            p[i] = (struct pollfd){.fd = x->worker[i].state == WORKER_GONE ? -1 : x->worker[i].fd,
                                   .events = POLLIN};
        }
        poll(p, (nfds_t)x->n, -1);
        for (int32_t i = 1; i < x->n; i++) {
            if (p[i].fd >= 0 && p[i].revents) {
                on_control_msg(x, i);
            }
        }
        if (ranks_check_failed(x, &ignored) < 0) {
            kill_workers(x);
        }
        stopping = p[0].revents != 0;
    }
    stop_workers(x);
    return NULL;
}

int supervisor_start(struct ranks *x, struct err *e)
{
    x->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (x->wake_fd < 0) {
        return err_set(e, ERR_IO, "no eventfd for the ranks: %s", strerror(errno));
    }
    if (pthread_create(&x->supervisor, NULL, supervisor_main, x) != 0) {
        return err_set(e, ERR_IO, "cannot start the thread that watches the ranks");
    }
    x->supervised = true;
    pthread_setname_np(x->supervisor, "quire-ranks");
    return 0;
}
