/* Rank and world size from a launcher's environment: torchrun, Slurm's srun, Open MPI,
 * MPICH and its descendants, Kubernetes' LeaderWorkerSet. Each process that the
 * launcher starts is one node. The environment is read only if the model is distributed
 * (tensor_parallel_size, pipeline_parallel_size) and nnodes is not set. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/settings/settings_table.h"

enum { HOST_BYTES = 256, MAX_RANKS = 64 };

struct launcher {
    /* Names of variables. The local ones are NULL if each process has its own
     * machine. */
    const char *name, *size, *rank, *local_size, *local_rank;
};

static const struct launcher LAUNCHERS[] = {
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"},
    {"Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"},
    {"Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
    {"LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", NULL, NULL},
};

static int64_t n_ranks(const struct settings *s)
{
    return s->tensor_parallel_size * s->pipeline_parallel_size;
}

static const char *variable(char **env, const char *name)
{
    size_t len = strlen(name);

    for (int i = 0; env[i]; i++) {
        if (strncmp(env[i], name, len) == 0 && env[i][len] == '=') {
            return env[i] + len + 1;
        }
    }
    return NULL;
}

/* Set one setting from a variable, if it exists. Of a list such as Slurm's 2(x3) the
 * first number counts. */
static int take(struct settings *s, char **env, const char *name, const char *key, struct err *e)
{
    const struct setting *row = setting_find(key, strlen(key));
    const char *text = variable(env, name);
    char number[24];
    size_t n = text ? strspn(text, "0123456789") : 0;

    if (!text || setting_origin(s, row) != FROM_DEFAULT) {
        return 0;
    }
    snprintf(number, sizeof(number), "%.*s", (int)MIN(n, sizeof(number) - 1), text);
    return setting_set(s, row, n > 0 ? number : text, FROM_ENV, name, e);
}

/* The first host of a Slurm list: of "gpu[03-07,9],login" it is gpu03. */
static void first_host(char *ret, const char *list)
{
    size_t prefix = strcspn(list, "[,"),
           digits = list[prefix] == '[' ? strcspn(list + prefix + 1, "-,]") : 0;

    snprintf(ret, HOST_BYTES, "%.*s%.*s", (int)MIN(prefix, HOST_BYTES / 2), list,
             (int)MIN(digits, HOST_BYTES / 4), digits > 0 ? list + prefix + 1 : "");
}

static int take_master(struct settings *s, char **env, const struct launcher *l, struct err *e)
{
    const struct setting *row = setting_find("master_addr", 11);
    const char *address = variable(env, "MASTER_ADDR"),
               *list = variable(env, "SLURM_STEP_NODELIST");

    address = address ? address : variable(env, "LWS_LEADER_ADDRESS");
    char host[HOST_BYTES];
    int rc = take(s, env, "MASTER_PORT", "master_port", e);
    if (rc < 0 || s->master_addr) {
        return rc;
    }
    if (!address && list) {
        first_host(host, list);
        address = host;
    }
    if (address) {
        return setting_set(s, row, address, FROM_ENV, "MASTER_ADDR", e);
    }
    return err_set_param(e, ERR_INVALID, "master_addr",
                         "%s has started several processes, and the model is distributed over %lld "
                         "ranks, but neither MASTER_ADDR nor master_addr gives the address of "
                         "the first one",
                         l->name, (long long)n_ranks(s));
}

int settings_cluster(struct settings *s, char **env, struct err *e)
{
    if (n_ranks(s) < 2 || setting_origin(s, setting_find("nnodes", 6)) != FROM_DEFAULT) {
        return 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(LAUNCHERS); i++) {
        const struct launcher *l = &LAUNCHERS[i];
        const char *size = variable(env, l->size);
        if (!size || !variable(env, l->rank) || atoi(size) < 2) {
            continue;
        }
        int rc = take(s, env, l->size, "nnodes", e);
        if (rc == 0) {
            rc = take(s, env, l->rank, "node_rank", e);
        }
        if (rc == 0 && l->local_size) {
            rc = take(s, env, l->local_size, "local_size", e);
        }
        if (rc == 0 && l->local_rank) {
            rc = take(s, env, l->local_rank, "local_rank", e);
        }
        return rc < 0 ? rc : take_master(s, env, l, e);
    }
    return 0;
}

int settings_check_nodes(const struct settings *s, struct err *e)
{
    int64_t n = n_ranks(s);

    if (n > MAX_RANKS) {
        return err_set_param(
            e, ERR_INVALID, "pipeline_parallel_size",
            "tensor_parallel_size %lld times pipeline_parallel_size %lld is more than %d ranks",
            (long long)s->tensor_parallel_size, (long long)s->pipeline_parallel_size, MAX_RANKS);
    }
    if (s->nnodes > 1 && n % s->nnodes != 0 && s->pipeline_parallel_size > 1) {
        return err_set_param(
            e, ERR_INVALID, "nnodes",
            "nnodes %lld does not divide the %lld ranks of tensor_parallel_size %lld and "
            "pipeline_parallel_size %lld",
            (long long)s->nnodes, (long long)n, (long long)s->tensor_parallel_size,
            (long long)s->pipeline_parallel_size);
    }
    if (s->nnodes > 1 && n % s->nnodes != 0) {
        return err_set_param(e, ERR_INVALID, "nnodes",
                             "nnodes %lld does not divide tensor_parallel_size %lld",
                             (long long)s->nnodes, (long long)s->tensor_parallel_size);
    }
    if (s->node_rank >= s->nnodes) {
        return err_set_param(e, ERR_INVALID, "node_rank",
                             "node_rank %lld must be less than nnodes %lld",
                             (long long)s->node_rank, (long long)s->nnodes);
    }
    if (s->local_rank >= s->local_size) {
        return err_set_param(e, ERR_INVALID, "local_rank",
                             "local_rank %lld must be less than local_size %lld",
                             (long long)s->local_rank, (long long)s->local_size);
    }
    if (s->nnodes > 1 && !s->master_addr) {
        return err_set_param(e, ERR_INVALID, "master_addr",
                             "nnodes %lld: master_addr is missing; set it to the address of node 0",
                             (long long)s->nnodes);
    }
    return 0;
}
