/* Starts and reaps worker processes. A worker runs the same executable as its parent,
 * rank 0 or a node's main process, and never outlives it. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_WORKER_PROCESS_H
#define QUIRE_ENGINE_WORKERS_RANKS_WORKER_PROCESS_H

#include <sys/types.h>

#include "config/settings/settings.h"

/* The arguments that a worker gets on its command line, before its settings. */
struct worker_args {
    int32_t rank, n_ranks, n_stages;      /* n_ranks: of all stages */
    int32_t local_rank, local_world_size; /* rank among the ranks on this machine; their number */
    /* connects to rank 0 as the settings say (cluster.h), without the descriptors
     * below */
    bool over_tcp;
    int shm_fd;            /* memory shared by all ranks (transports.h) */
    int control_fd;        /* its end of the socket for control messages */
    size_t slot_bytes;     /* size of a slot of the ring */
    pid_t parent;          /* the process that starts it */
    char *const *settings; /* flags, NULL-terminated */
};

/* Between fork and exec in a child of the process `parent`: the kernel sends it
 * `death` when the thread that forked ends, no signal is blocked, and all descriptors
 * but the standard ones close on exec. */
void worker_before_exec(pid_t parent, int death);
/* Forks and executes `quire rank`. The kernel kills the process when the thread that
 * called this exits, so that thread must live as long as the workers. */
int worker_spawn(pid_t *ret, const struct worker_args *o, struct err *e);
/* Parses the arguments of `quire rank`; ERR_INVALID: malformed. `settings` points into
 * argv. */
int worker_args_parse(struct worker_args *ret, int argc, char **argv, struct err *e);
/* Waits up to `ms` for *pid, a child, to exit: sets its status, sets *pid to 0 and
 * returns true. *pid 0: true. */
bool worker_reap(pid_t *pid, int ms, int *ret_status);
/* The same, but also true once the child is exiting with a known status; *pid is kept
 * then, for worker_reap. A process returns its device memory while it exits, which
 * takes longer than reporting the reason should wait. */
bool worker_ended(pid_t *pid, int ms, int *ret_status);
/* Formats waitpid's status: "rank 1 (process 4711) was ended by signal 9 (Killed)". */
void worker_exit_text(char *ret, size_t cap, int32_t rank, pid_t pid, int status);

#endif
