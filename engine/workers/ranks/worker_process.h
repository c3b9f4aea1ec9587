/* A rank's process: started by rank 0 from the same executable, never outliving it. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_WORKER_PROCESS_H
#define QUIRE_ENGINE_WORKERS_RANKS_WORKER_PROCESS_H

#include <sys/types.h>

#include "config/settings/settings.h"

/* What a rank is told at its start, before its settings. */
struct worker_args {
    int32_t rank, n_ranks, n_stages;      /* of a pipeline, each with its share of the ranks */
    int32_t local_rank, local_world_size; /* its place among the ranks of this machine */
    /* rank 0 is found as the settings say (cluster.h), without these descriptors */
    bool over_tcp;
    int shm_fd;            /* memory of all ranks: ring, then comm */
    int control_fd;        /* its end of the socket for notes */
    size_t slot_bytes;     /* of the ring */
    pid_t parent;          /* rank 0 */
    char *const *settings; /* flags, NULL-terminated */
};

/* fork and exec `quire rank`. The kernel ends the process when the thread that called
 * this ends: call it from one that lives as long as the ranks. */
int worker_spawn(pid_t *ret, const struct worker_args *o, struct err *e);
/* argv of `quire rank` back into an order; ERR_INVALID when it is none. `settings`
 * points into argv. */
int worker_args_parse(struct worker_args *ret, int argc, char **argv, struct err *e);
/* Whether *pid, a child, has ended within `ms`, and its status; it is 0 then. True for
 * 0. */
bool worker_reap(pid_t *pid, int ms, int *ret_status);
/* The same, or it is ending and its status is known: *pid stays then, for worker_reap.
 * What a process holds of a device is given back while it ends, which takes longer than
 * anyone should wait for the reason. */
bool worker_ended(pid_t *pid, int ms, int *ret_status);
/* "rank 1 (process 4711) was ended by signal 9 (Killed)", from waitpid's status. */
void worker_exit_text(char *ret, size_t cap, int32_t rank, pid_t pid, int status);

#endif
