/* The state of the executor of many ranks, shared by ranks.c (steps, start, end) and
 * supervisor.c (the thread that starts and watches the workers). Private to these
 * two. */
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
    RANKS_STOP_MS = 2000, /* for a worker to exit after a stop message */
    RANKS_RESULTS = 4,    /* steps whose results are kept: two in flight, two that may be read */
};

enum worker_state { WORKER_STARTED, WORKER_GREETED, WORKER_READY, WORKER_GONE };

/* A worker process, as rank 0 sees it. */
struct worker_process {
    pid_t pid;               /* 0: reaped, or on another node */
    int fd;                  /* socket of its control messages; -1: closed */
    int masks_fd;            /* socket of its late masks; -1: `fd` serves for them too */
    enum worker_state state; /* under `lock` */
    struct rank_hello hello; /* valid from WORKER_GREETED on */
};

/* The results of a step, sampled by another rank. */
struct step_results {
    struct gathered gathered;        /* the rows */
    int64_t launched_us, arrived_us; /* clock_us */
};

struct ranks {
    struct executor base;          /* what the engine sees */
    struct executor *runner;       /* rank 0's own */
    struct executor draft;         /* the draft model's, which the engine sees too */
    struct executor *draft_runner; /* rank 0's own; NULL: there is none */
    struct rank_place place;       /* of rank 0 */
    struct transports transports;  /* rank 0's ends */
    int shm_fd, wake_fd; /* memory shared by all ranks, or -1; eventfd that stops the supervisor */
    size_t slot_bytes;   /* size of the largest step message */
    int64_t timeout_us;  /* step_timeout */
    bool deterministic;  /* the setting */
    bool all_sample;     /* all ranks of the last stage sample; else its first one does */
    char **flags;        /* the workers' settings, NULL-terminated */
    /* ranks in all; ranks started by each node, of which this node's are the first */
    int32_t n, ranks_per_node;
    const struct settings *settings; /* valid while it starts */
    struct cluster net;   /* several nodes: connections until `transports` takes them over */
    pthread_t supervisor; /* the thread */
    bool supervised;      /* the thread was started */
    uint64_t n_launched, n_waited; /* steps */
    int64_t last_us;               /* when the previous step's results arrived, clock_us */
    pthread_mutex_t lock;          /* guards the members marked so */
    pthread_cond_t changed; /* a worker's state, `connected`, `failed` or n_results changed */
    /* Under `lock`: */
    struct worker_process worker[COMM_MAX_RANKS]; /* [1 .. n-1] */
    bool connected;                               /* several nodes: `transports` is complete */
    bool failed, stopping, by_force;              /* by_force: no stop message was sent */
    /* steps whose results arrived; those of step i are results[i % RANKS_RESULTS] */
    uint64_t n_results;
    struct step_results results[RANKS_RESULTS]; /* used with several stages */
    char reason[400];                           /* of the first failure */
};

/* supervisor.c: records a failure and unblocks waiting ranks. The first reason is kept;
 * after ranks_free has begun, none is recorded. Any thread. */
void ranks_fail(struct ranks *x, const char *reason);
/* 0, or ERR_DEVICE with the recorded reason. */
int ranks_check_failed(struct ranks *x, struct err *e);
/* Starts the thread that starts the workers and watches them until wake_fd is written
 * to. */
int supervisor_start(struct ranks *x, struct err *e);

#endif
