/* Ranks of several machines find each other: rank 0 listens, every other rank comes with two connections, one for what rank 0
 * and it tell each other (rank_link.h, rank_note.h), one for comm.
 *
 * The port is for a cluster's own network: whoever reaches it can say it were a rank. What is no rank's greeting is refused,
 * logged, and changes nothing.
 */
#ifndef QUIRE_ENGINE_RANK_NET_H
#define QUIRE_ENGINE_RANK_NET_H

#include "engine/rank_link.h"
#include "kernels/comm.h"

enum { RANK_NET_CONTROL, RANK_NET_COMM, RANK_NET_KINDS };

/* Rank 0's side. */
struct rank_net {
    int listen_fd;
    int32_t n_ranks;
    int fd[RANK_NET_KINDS][COMM_MAX_RANKS]; /* -1: not there */
};

/* Listens; `address` is this machine's, "" any. */
int rank_net_listen(struct rank_net *ret, const char *address, int port, int32_t n_ranks, struct err *e);
/* Take in one that comes within `ms`, if any does. slot_bytes: what rank 0's messages hold. */
void rank_net_admit(struct rank_net *n, size_t slot_bytes, int ms);
/* The first rank that is not there with both connections; -1: all are. */
int32_t rank_net_missing(const struct rank_net *n);
/* Closes what is not -1. */
void rank_net_release(struct rank_net *n);

/* Another rank's side: come to rank 0, trying again for up to wait_us while nobody listens there. */
int rank_net_join(int ret_fd[RANK_NET_KINDS], size_t *ret_slot_bytes, const char *address, int port, int32_t rank,
                  int32_t n_ranks, int64_t wait_us, struct err *e);

/* rank_stream.c: messages over connected sockets, as in comm_tcp_open; those stay the caller's. */
int rank_stream_open(struct rank_link **ret, const int *fd, int32_t rank, int32_t n_ranks, size_t slot_bytes,
                     struct err *e);

#endif
