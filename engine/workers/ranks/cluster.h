/* How ranks on several machines connect to each other:
 *
 *     rank 0 listens ◄── control ── every other rank, with the port on which it listens
 *     all have connected ──► table of addresses to all
 *                        ──► each connects to the lower-numbered ranks that it needs
 *
 * Control connections carry what rank 0 and another rank send each other
 * (step_channel.h, control_msg.h), but for late masks, which have connections of their
 * own because another thread reads them. The other connections: a stage's ranks with
 * its first rank (comm_tcp.c), a rank with its counterparts in the stages before and
 * after, and the last stage's first rank with the ranks of the first stage
 * (pipeline_tcp.c).
 *
 * The ports are for a cluster's private network: anyone who can reach them can
 * impersonate a rank. A connection without a valid greeting is refused and logged, and
 * changes nothing. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_CLUSTER_H
#define QUIRE_ENGINE_WORKERS_RANKS_CLUSTER_H

#include <sys/socket.h>

#include "engine/workers/ranks/step_channel.h"
#include "kernels/comm/comm.h"
#include "kernels/comm/pipeline.h"

enum cluster_link_kind {
    CLUSTER_CONTROL, /* rank 0 and another rank */
    CLUSTER_COMM,    /* all-reduce within a stage */
    CLUSTER_FORWARD, /* activations to the next stage */
    CLUSTER_BACK,    /* tokens to the first stage */
    CLUSTER_MASKS,   /* rank 0 to another rank: late masks */
    CLUSTER_KINDS
};

/* A rank's connections. */
struct cluster {
    struct pipeline_place at; /* this rank's */
    int32_t n;                /* ranks in all */
    int listen_fd;            /* -1: none */
    /* by the other rank's number; -1: not connected */
    int fd[CLUSTER_KINDS][COMM_MAX_RANKS];
    struct sockaddr_storage address[COMM_MAX_RANKS]; /* where each rank listens */
};

/* Initially no connection is open. */
void cluster_init(struct cluster *n, const struct pipeline_place *at);
/* Rank 0: listens on `address`, this machine's ("": any). An unknown name is looked up
 * again for up to wait_us, here and in cluster_join, because a cluster's names may
 * appear only when its machines start. */
int cluster_listen(struct cluster *n, const char *address, int port, int64_t wait_us,
                   struct err *e);
/* Accepts one connection if any arrives within `ms`. slot_bytes: the size of rank 0's
 * messages. */
void cluster_accept(struct cluster *n, size_t slot_bytes, int ms);
/* Rank 0: the first rank without a control connection; -1: none. */
int32_t cluster_missing(const struct cluster *n);
/* Rank 0, once none is missing: sends every rank the table of addresses. */
int cluster_send_addresses(struct cluster *n, struct err *e);
/* The first rank to which a connection other than control is missing; -1: none. */
int32_t cluster_unlinked(const struct cluster *n);
/* Closes every open connection. */
void cluster_release(struct cluster *n);

/* Any other rank: makes all its connections. Retries for up to wait_us while rank 0
 * does not listen yet, and waits as long for each other rank. */
int cluster_join(struct cluster *n, size_t *ret_slot_bytes, const char *address, int port,
                 int64_t wait_us, struct err *e);

/* step_channel_tcp.c: a step channel over connected sockets, fd[rank] on rank 0, fd[0]
 * on the others. The sockets stay the caller's. */
int tcp_channel_open(struct step_channel **ret, const int *fd, int32_t rank, int32_t n_ranks,
                     size_t slot_bytes, struct err *e);

#endif
