/* See rank_net.h. A greeting is answered before the connection is used: with the size of rank 0's messages, or why it is refused. */
#include "engine/rank_net.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "config/log.h"

enum {
    GREETING_MAGIC = 0x51524e32,
    GREETING_S = 5, /* for a greeting or its answer to come whole */
    RETRY_MS = 50,
    MOST_SLOT_BYTES = 1 << 30,
};

struct greeting {
    uint32_t magic, kind;
    int32_t rank, n_ranks;
    char version[32];
};

struct answer {
    uint32_t magic;
    int32_t ok;
    uint64_t slot_bytes;
    char why[160];
};

static void set_up(int fd)
{
    struct timeval t = {.tv_sec = GREETING_S};
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){1}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof(t));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof(t));
}

static void end_set_up(int fd)
{
    struct timeval none = {0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof(none));
}

static bool whole(ssize_t n, size_t wanted)
{
    return n == (ssize_t)wanted;
}

/* The addresses of a name; the caller frees them. */
static int resolve(struct addrinfo **ret, const char *address, int port, bool listens, struct err *e)
{
    char service[8];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = listens ? AI_PASSIVE : 0};
    snprintf(service, sizeof(service), "%d", port);
    int rc = getaddrinfo(*address ? address : NULL, service, &hints, ret);
    return rc == 0
               ? 0
               : err_set_param(e, ERR_INVALID, "master_addr", "master_addr \"%.80s\": %s", address, gai_strerror(rc));
}

/* ---- rank 0 --------------------------------------------------------------------------------------------------------- */

int rank_net_listen(struct rank_net *ret, const char *address, int port, int32_t n_ranks, struct err *e)
{
    struct addrinfo *found = NULL;
    ret->listen_fd = -1;
    ret->n_ranks = n_ranks;
    memset(ret->fd, 0xFF, sizeof(ret->fd));
    int rc = resolve(&found, address, port, true, e), why = EADDRNOTAVAIL;
    for (struct addrinfo *a = found; a && ret->listen_fd < 0; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) == 0 &&
            bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, COMM_MAX_RANKS * RANK_NET_KINDS) == 0) {
            ret->listen_fd = fd;
            break;
        }
        why = errno;
        if (fd >= 0)
            close(fd);
    }
    if (found)
        freeaddrinfo(found);
    if (rc == 0 && ret->listen_fd < 0)
        return err_set_param(e, ERR_IO, "master_port", "rank 0 cannot listen on %.80s, port %d: %s",
                             *address ? address : "any address", port, strerror(why));
    return rc;
}

/* Why a greeting is refused; empty: it is not. */
static void judge(const struct rank_net *n, const struct greeting *g, char *why, size_t cap)
{
    *why = '\0';
    if (g->magic != GREETING_MAGIC || g->kind >= RANK_NET_KINDS)
        snprintf(why, cap, "that is no rank's greeting");
    else if (memcmp(g->version, QUIRE_VERSION, sizeof(QUIRE_VERSION)) != 0)
        snprintf(why, cap, "it is quire %.31s, rank 0 is %s: all must be the same", g->version, QUIRE_VERSION);
    else if (g->n_ranks != n->n_ranks)
        snprintf(why, cap, "it has tensor_parallel_size %d, rank 0 has %d", g->n_ranks, n->n_ranks);
    else if (g->rank < 1 || g->rank >= n->n_ranks)
        snprintf(why, cap, "rank %d of %d is not possible", g->rank, n->n_ranks);
    else if (n->fd[g->kind][g->rank] >= 0)
        snprintf(why, cap, "rank %d is there already: do two nodes have one node_rank?", g->rank);
}

void rank_net_admit(struct rank_net *n, size_t slot_bytes, int ms)
{
    struct pollfd p = {.fd = n->listen_fd, .events = POLLIN};
    struct answer a = {.magic = GREETING_MAGIC, .slot_bytes = slot_bytes};
    struct greeting g = {0};
    int fd = poll(&p, 1, ms) == 1 ? accept4(n->listen_fd, NULL, NULL, SOCK_CLOEXEC) : -1;
    if (fd < 0)
        return;
    set_up(fd);
    ssize_t got = recv(fd, &g, sizeof(g), MSG_WAITALL);
    g.version[sizeof(g.version) - 1] = '\0';
    if (!whole(got, sizeof(g)))
        g.magic = 0;
    judge(n, &g, a.why, sizeof(a.why));
    a.ok = a.why[0] == '\0';
    bool told = whole(send(fd, &a, sizeof(a), MSG_NOSIGNAL), sizeof(a));
    if (!a.ok)
        log_event(LOG_WARN, "a connection of the ranks was refused", LOG_STR("why", a.why));
    if (!a.ok || !told) {
        close(fd);
        return;
    }
    end_set_up(fd);
    n->fd[g.kind][g.rank] = fd;
}

int32_t rank_net_missing(const struct rank_net *n)
{
    for (int32_t r = 1; r < n->n_ranks; r++) {
        for (int k = 0; k < RANK_NET_KINDS; k++) {
            if (n->fd[k][r] < 0)
                return r;
        }
    }
    return -1;
}

void rank_net_release(struct rank_net *n)
{
    for (int32_t r = 0; r < n->n_ranks; r++) {
        for (int k = 0; k < RANK_NET_KINDS; k++) {
            if (n->fd[k][r] >= 0)
                close(n->fd[k][r]);
        }
    }
    if (n->listen_fd >= 0)
        close(n->listen_fd);
    *n = (struct rank_net){.listen_fd = -1};
}

/* ---- the others ----------------------------------------------------------------------------------------------------- */

static int connect_once(const struct addrinfo *found)
{
    for (const struct addrinfo *a = found; a; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            continue;
        set_up(fd); /* bounds connect too */
        if (connect(fd, a->ai_addr, a->ai_addrlen) == 0)
            return fd;
        close(fd);
    }
    return -1;
}

static int greet(int fd, uint32_t kind, int32_t rank, int32_t n_ranks, size_t *ret_slot_bytes, struct err *e)
{
    struct greeting g = {.magic = GREETING_MAGIC, .kind = kind, .rank = rank, .n_ranks = n_ranks};
    struct answer a = {0};
    snprintf(g.version, sizeof(g.version), "%s", QUIRE_VERSION);
    if (!whole(send(fd, &g, sizeof(g), MSG_NOSIGNAL), sizeof(g)) ||
        !whole(recv(fd, &a, sizeof(a), MSG_WAITALL), sizeof(a)) || a.magic != GREETING_MAGIC)
        return err_set(e, ERR_IO, "rank %d: what listens at master_addr and master_port is no rank 0", rank);
    a.why[sizeof(a.why) - 1] = '\0';
    if (!a.ok)
        return err_set(e, ERR_INVALID, "rank %d is refused by rank 0: %s", rank, a.why);
    if (a.slot_bytes > MOST_SLOT_BYTES)
        return err_set(e, ERR_INVALID, "rank 0 speaks of messages of %llu bytes", (unsigned long long)a.slot_bytes);
    *ret_slot_bytes = (size_t)a.slot_bytes;
    end_set_up(fd);
    return 0;
}

int rank_net_join(int ret_fd[RANK_NET_KINDS], size_t *ret_slot_bytes, const char *address, int port, int32_t rank,
                  int32_t n_ranks, int64_t wait_us, struct err *e)
{
    int64_t until_us = clock_us() + wait_us;
    struct addrinfo *found = NULL;
    int rc = resolve(&found, address, port, false, e);
    ret_fd[0] = ret_fd[1] = -1;
    for (int k = 0; k < RANK_NET_KINDS && rc == 0; k++) {
        while ((ret_fd[k] = connect_once(found)) < 0 && clock_us() < until_us)
            nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000L}, NULL);
        if (ret_fd[k] < 0)
            rc = err_set(e, ERR_TIMEOUT, "rank %d: nobody listens at %.80s, port %d, for %.0f s: is node 0 there?",
                         rank, address, port, (double)wait_us * 1e-6);
        else
            rc = greet(ret_fd[k], (uint32_t)k, rank, n_ranks, ret_slot_bytes, e);
    }
    if (found)
        freeaddrinfo(found);
    for (int k = 0; k < RANK_NET_KINDS && rc < 0; k++) {
        if (ret_fd[k] >= 0)
            close(ret_fd[k]);
    }
    return rc;
}
