/* Inside the executor of many ranks: what ranks.c (steps, start, end) and supervisor.c
 * (its thread) share. Nobody else includes this. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_RANKS_IMPL_H
#define QUIRE_ENGINE_WORKERS_RANKS_RANKS_IMPL_H

#include <pthread.h>
#include <sys/types.h>

#include "config/settings/settings.h"
#include "engine/workers/ranks/cluster.h"
#include "engine/workers/ranks/control_msg.h"
#include "engine/workers/ranks/transports.h"
#include "engine/workers/runner.h"

enum {
    RANKS_STOP_MS = 2000, /* for a rank to end when told to */
    RANKS_RESULTS = 4,    /* steps whose results are kept: two in flight, two that may be read */
};

enum worker_state { WORKER_STARTED, WORKER_GREETED, WORKER_READY, WORKER_GONE };

/* A rank, as this process sees it. */
struct worker_process {
    pid_t pid; /* 0: reaped, or another node's */
    int fd;    /* notes; -1: closed */
    enum worker_state state;
    struct rank_hello hello;
};

/* The results of a step that another rank drew. */
struct step_results {
    struct gathered gathered;
    int64_t launched_us, arrived_us;
};

struct ranks {
    struct executor base;
    struct executor *runner; /* rank 0 */
    struct rank_place place;
    struct transports transports;
    int shm_fd, wake_fd;
    size_t slot_bytes;
    int64_t timeout_us;
    bool deterministic;
    char **flags;                    /* settings of the ranks */
    int32_t n, ranks_per_node;       /* ranks, and those of this machine, which are the first */
    const struct settings *settings; /* while it starts */
    struct cluster net;
    pthread_t supervisor;
    bool supervised; /* the thread is there */
    uint64_t n_launched, n_waited;
    int64_t last_us; /* when the step before had its results */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a member's state, `failed`, n_results */
    /* under `lock` */
    struct worker_process worker[COMM_MAX_RANKS]; /* [1 .. n-1] */
    bool connected;                               /* shared's link, comm and pipeline are there */
    bool failed, stopping, by_force;              /* by_force: they were not told to stop */
    uint64_t n_results; /* steps whose results came; step i's are answer[i % RANKS_RESULTS] */
    struct step_results results[RANKS_RESULTS]; /* of several stages */
    char reason[400];
};

/* supervisor.c. The first reason stays; once the ranks were told to stop, none is one.
 * Any thread. */
void ranks_fail(struct ranks *x, const char *reason);
int ranks_check_failed(struct ranks *x, struct err *e);
/* The thread that starts the ranks and watches them, until wake_fd is written to. */
int supervisor_start(struct ranks *x, struct err *e);

#endif
