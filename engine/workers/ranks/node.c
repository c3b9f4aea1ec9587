/* The main process of a node other than the first: starts the node's ranks and waits
 * for them; it serves no HTTP.
 *
 * The ranks connect to rank 0 by themselves and follow its messages. When one of them
 * fails, the node's others are killed and the exit status tells the launcher; when rank
 * 0 stops normally, so do they. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config/base/log.h"
#include "config/settings/settings.h"
#include "engine/commands.h"
#include "engine/engine.h"
#include "engine/model_path.h"
#include "engine/smoothed.h"
#include "engine/workers/ranks/worker_process.h"
#include "kernels/comm/comm.h"

static int spawn_ranks(const struct settings *s, char *const *flags, int32_t ranks_per_node,
                       pid_t *pid, struct err *e)
{
    int rc = 0;

    for (int32_t i = 0; i < ranks_per_node && rc == 0; i++) {
        struct worker_args args = {
            .rank = (int32_t)s->node_rank * ranks_per_node + i,
            .n_ranks = (int32_t)(s->tensor_parallel_size * s->pipeline_parallel_size),
            .n_stages = (int32_t)s->pipeline_parallel_size,
            .local_rank = (int32_t)s->local_rank * ranks_per_node + i,
            .local_world_size = (int32_t)s->local_size * ranks_per_node,
            .over_tcp = true,
            .parent = getpid(),
            .settings = flags};
        rc = worker_spawn(&pid[i], &args, e);
    }
    return rc;
}

/* Waits until all ranks have exited with 0, or one has not. A rank that exited with 1
 * has logged the reason, so the error has no text then. */
static int wait_ranks(const pid_t *pid, int32_t n, int32_t first, struct err *e)
{
    for (int32_t left = n; left > 0; left--) {
        int status = 0;
        pid_t ended = waitpid(-1, &status, 0);
        int32_t i = 0;
        while (i < n && pid[i] != ended) {
            i++;
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            continue;
        }
        char text[160] = "";
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 1) {
            worker_exit_text(text, sizeof(text), first + i, ended, status);
        }
        for (i = 0; i < n; i++) {
            kill(pid[i], SIGKILL);
        }
        while (waitpid(-1, NULL, 0) > 0)
            ;
        return err_set(e, ERR_DEVICE, "%s", text);
    }
    return 0;
}

int node_run(const struct settings *s, struct err *e)
{
    pid_t pid[COMM_MAX_RANKS];
    char *dir = NULL, *draft_dir = NULL, **flags = NULL;
    int32_t n = (int32_t)(s->tensor_parallel_size * s->pipeline_parallel_size / s->nnodes);
    int rc = model_path_find(&dir, s->model, MODEL_SERVED, e);

    if (rc == 0) {
        rc = smoothed_find(&dir, s, e);
    }
    if (rc == 0 && s->draft_model) {
        rc = model_path_find(&draft_dir, s->draft_model, MODEL_DRAFTS, e);
    }
    if (rc == 0) {
        rc = settings_pass_on(&flags, s, dir, draft_dir, e);
    }
    if (rc == 0) {
        rc = spawn_ranks(s, flags, n, pid, e);
    }
    if (rc == 0) {
        log_event(LOG_INFO, "node", LOG_I64("node_rank", s->node_rank), LOG_I64("ranks", n),
                  LOG_STR("master_addr", s->master_addr), LOG_I64("master_port", s->master_port));
        rc = wait_ranks(pid, n, (int32_t)s->node_rank * n, e);
    }
    settings_pass_on_free(flags);
    free(dir);
    free(draft_dir);
    return rc;
}
