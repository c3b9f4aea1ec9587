/* Ranks of several machines find each other:
 *
 *     rank 0 listens ◄── control ── every other rank, which listens too and says where
 *     all are there ──► table of addresses to all
 *                   ──► each connects to the lower of those it has to do with
 *
 * Control is for what rank 0 and another tell each other (step_channel.h,
 * control_msg.h). Who else has to do with whom: a stage's ranks with its first
 * (comm_tcp.c), a rank with its like in the stages before and after, and the last
 * stage's first with the ranks of the first stage (pipeline_tcp.c).
 *
 * The ports are for a cluster's own network: whoever reaches them can say it were a
 * rank. What is no rank's greeting is refused, logged, and changes nothing.
 */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_CLUSTER_H
#define QUIRE_ENGINE_WORKERS_RANKS_CLUSTER_H

#include <sys/socket.h>

#include "engine/workers/ranks/step_channel.h"
#include "kernels/comm/comm.h"
#include "kernels/comm/pipeline.h"

enum cluster_link_kind {
    CLUSTER_CONTROL,
    CLUSTER_COMM,
    CLUSTER_FORWARD, /* activations to the next stage */
    CLUSTER_BACK,    /* tokens to the first stage */
    CLUSTER_KINDS
};

/* A rank's side of it. */
struct cluster {
    struct pipeline_place at;
    int32_t n;                                       /* ranks in all */
    int listen_fd;                                   /* -1: none */
    int fd[CLUSTER_KINDS][COMM_MAX_RANKS];           /* by the other rank's number; -1: not there */
    struct sockaddr_storage address[COMM_MAX_RANKS]; /* they listen */
};

/* Nothing is open. */
void cluster_init(struct cluster *n, const struct pipeline_place *at);
/* Rank 0 listens; `address` is this machine's, "" any. Names that nobody knows yet are
 * asked for again for up to wait_us, here and in cluster_join: in a cluster they come
 * with the machines. */
int cluster_listen(struct cluster *n, const char *address, int port, int64_t wait_us,
                   struct err *e);
/* Take in one that comes within `ms`, if any does. slot_bytes: what rank 0's messages
 * hold. */
void cluster_accept(struct cluster *n, size_t slot_bytes, int ms);
/* Rank 0: the first rank whose control is not there; -1: all are. */
int32_t cluster_missing(const struct cluster *n);
/* Rank 0, when none is missing: tells all where the others are. */
int cluster_send_addresses(struct cluster *n, struct err *e);
/* The first rank to which another connection is not there; -1: all are. */
int32_t cluster_unlinked(const struct cluster *n);
/* Closes what is not -1. */
void cluster_release(struct cluster *n);

/* Another rank: all of this. It tries again for up to wait_us while nobody listens
 * there, and waits as long for each of the others. */
int cluster_join(struct cluster *n, size_t *ret_slot_bytes, const char *address, int port,
                 int64_t wait_us, struct err *e);

/* step_channel_tcp.c: messages over connected sockets, fd[rank], [0] on all but rank 0;
 * those stay the caller's. */
int tcp_channel_open(struct step_channel **ret, const int *fd, int32_t rank, int32_t n_ranks,
                     size_t slot_bytes, struct err *e);

#endif
