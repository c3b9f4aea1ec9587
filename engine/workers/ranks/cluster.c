/* See cluster.h. A connection begins with a greeting. Rank 0 answers a control greeting
 * with the size of its messages; a greeting that is refused is answered with the
 * reason. */
#include "engine/workers/ranks/cluster.h"

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

#include "config/base/log.h"

enum {
    GREETING_MAGIC = 0x51524e35,
    GREETING_TIMEOUT_S = 5,   /* for a greeting or its answer to arrive */
    CONNECT_RETRY_MS = 50,    /* between attempts to connect, and for one accept */
    LOOKUP_RETRY_MS = 500,    /* between look-ups of an unknown name */
    MAX_SLOT_BYTES = 1 << 30, /* of a message that rank 0 announces */
};

struct greeting {
    uint32_t magic, kind;
    int32_t rank, n_ranks, n_stages;
    int32_t port; /* on which it listens; control only */
    char version[32];
};

/* The answer to a greeting: always to control, otherwise only if refused. */
struct answer {
    uint32_t magic;
    int32_t ok;
    uint64_t slot_bytes;
    char why[160];
};

static void set_timeouts(int fd)
{
    struct timeval t = {.tv_sec = GREETING_TIMEOUT_S};

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){1}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof(t));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof(t));
}

static void clear_timeouts(int fd)
{
    struct timeval none = {0};

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof(none));
}

static bool is_complete(ssize_t n, size_t wanted)
{
    return n == (ssize_t)wanted;
}

/* Resolves a name, waiting for it to become known; the caller frees the list. */
static int resolve(struct addrinfo **ret, const char *address, int port, bool listens,
                   int64_t wait_us, struct err *e)
{
    char service[8];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = listens ? AI_PASSIVE : 0};
    int64_t until_us = clock_us() + wait_us;
    int rc;

    snprintf(service, sizeof(service), "%d", port);
    for (bool logged = false;; logged = true) {
        rc = getaddrinfo(*address ? address : NULL, service, &hints, ret);
        if ((rc != EAI_NONAME && rc != EAI_AGAIN) || clock_us() > until_us) {
            break;
        }
        if (!logged) {
            log_event(LOG_WARN, "master_addr is not known yet", LOG_STR("master_addr", address),
                      LOG_STR("because", gai_strerror(rc)));
        }
        nanosleep(&(struct timespec){.tv_nsec = LOOKUP_RETRY_MS * 1000000L}, NULL);
    }
    return rc == 0 ? 0
                   : err_set_param(e, ERR_INVALID, "master_addr", "master_addr \"%.80s\": %s",
                                   address, gai_strerror(rc));
}

void cluster_init(struct cluster *n, const struct pipeline_place *at)
{
    *n = (struct cluster){.at = *at, .n = at->n_stages * at->n_ranks, .listen_fd = -1};
    memset(n->fd, 0xFF, sizeof(n->fd));
}

static int32_t own_number(const struct cluster *n)
{
    return pipeline_number(&n->at, n->at.stage, n->at.rank);
}

void cluster_release(struct cluster *n)
{
    for (int32_t r = 0; r < n->n; r++) {
        for (int k = 0; k < CLUSTER_KINDS; k++) {
            if (n->fd[k][r] >= 0) {
                close(n->fd[k][r]);
            }
        }
    }
    if (n->listen_fd >= 0) {
        close(n->listen_fd);
    }
    cluster_init(n, &n->at);
}

/* ---- which ranks connect ---- */

/* Whether activations go from a to b. */
static bool forwards(struct pipeline_place a, struct pipeline_place b)
{
    return b.stage == a.stage + 1 && b.rank == a.rank;
}

/* Whether sampled tokens go from a to b. */
static bool returns(struct pipeline_place a, struct pipeline_place b)
{
    return a.n_stages > 1 && pipeline_is_last(&a) && a.rank == 0 && b.stage == 0;
}

/* Whether this rank needs a connection of this kind with another. */
static bool linked(const struct cluster *n, enum cluster_link_kind kind, int32_t other)
{
    struct pipeline_place a = n->at, b = pipeline_place_of(other, a.n_stages, a.n_ranks);

    switch (kind) {
    case CLUSTER_COMM:
        return a.stage == b.stage && (a.rank == 0) != (b.rank == 0);
    case CLUSTER_FORWARD:
        return forwards(a, b) || forwards(b, a);
    case CLUSTER_BACK:
        return returns(a, b) || returns(b, a);
    default:
        return own_number(n) == 0 ? other > 0 : other == 0;
    }
}

int32_t cluster_missing(const struct cluster *n)
{
    for (int32_t r = 1; r < n->n; r++) {
        if (n->fd[CLUSTER_CONTROL][r] < 0) {
            return r;
        }
    }
    return -1;
}

int32_t cluster_unlinked(const struct cluster *n)
{
    for (int32_t r = 0; r < n->n; r++) {
        for (int k = CLUSTER_COMM; k < CLUSTER_KINDS; k++) {
            if (linked(n, (enum cluster_link_kind)k, r) && n->fd[k][r] < 0) {
                return r;
            }
        }
    }
    return -1;
}

/* ---- accepting ---- */

/* Listens on an address. 0, or errno. */
static int listen_at(struct cluster *n, const struct sockaddr *address, socklen_t len)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) == 0 &&
        bind(fd, address, len) == 0 && listen(fd, COMM_MAX_RANKS * CLUSTER_KINDS) == 0) {
        n->listen_fd = fd;
        return 0;
    }
    int why = errno;
    if (fd >= 0) {
        close(fd);
    }
    return why;
}

int cluster_listen(struct cluster *n, const char *address, int port, int64_t wait_us, struct err *e)
{
    struct addrinfo *found = NULL;
    int rc = resolve(&found, address, port, true, wait_us, e), why = EADDRNOTAVAIL;

    for (struct addrinfo *a = found; a && why != 0; a = a->ai_next) {
        why = listen_at(n, a->ai_addr, a->ai_addrlen);
    }
    if (found) {
        freeaddrinfo(found);
    }
    if (rc == 0 && why != 0) {
        return err_set_param(e, ERR_IO, "master_port", "rank 0 cannot listen on %.80s, port %d: %s",
                             *address ? address : "any address", port, strerror(why));
    }
    return rc;
}

/* Sets `why` to the reason for refusing a greeting; empty: it is accepted. */
static void set_refusal(const struct cluster *n, const struct greeting *g, char *why, size_t cap)
{
    const struct pipeline_place *at = &n->at;

    *why = '\0';
    if (g->magic != GREETING_MAGIC || g->kind >= CLUSTER_KINDS) {
        snprintf(why, cap, "not a rank's greeting");
    } else if (memcmp(g->version, QUIRE_VERSION, sizeof(QUIRE_VERSION)) != 0) {
        snprintf(why, cap, "it is quire %.31s, rank 0 is %s: all must be the same", g->version,
                 QUIRE_VERSION);
    } else if (g->n_ranks != at->n_ranks) {
        snprintf(why, cap, "it has tensor_parallel_size %d, rank 0 has %d", g->n_ranks,
                 at->n_ranks);
    } else if (g->n_stages != at->n_stages) {
        snprintf(why, cap, "it has pipeline_parallel_size %d, rank 0 has %d", g->n_stages,
                 at->n_stages);
    } else if (g->rank < 1 || g->rank >= n->n ||
               !linked(n, (enum cluster_link_kind)g->kind, g->rank)) {
        snprintf(why, cap, "rank %d of %d is impossible", g->rank, n->n);
    } else if (n->fd[g->kind][g->rank] >= 0) {
        snprintf(why, cap, "rank %d is already connected: do two nodes have the same node_rank?",
                 g->rank);
    }
}

static void set_port(struct sockaddr_storage *a, int port)
{
    if (a->ss_family == AF_INET6) {
        ((struct sockaddr_in6 *)a)->sin6_port = htons((uint16_t)port);
    } else {
        ((struct sockaddr_in *)a)->sin_port = htons((uint16_t)port);
    }
}

static int port_of(const struct sockaddr_storage *a)
{
    return ntohs(a->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)a)->sin6_port
                                          : ((const struct sockaddr_in *)a)->sin_port);
}

void cluster_accept(struct cluster *n, size_t slot_bytes, int ms)
{
    struct pollfd p = {.fd = n->listen_fd, .events = POLLIN};
    struct answer a = {.magic = GREETING_MAGIC, .slot_bytes = slot_bytes};
    struct greeting g = {0};
    struct sockaddr_storage from = {0};
    socklen_t len = sizeof(from);
    int fd = poll(&p, 1, ms) == 1
                 ? accept4(n->listen_fd, (struct sockaddr *)&from, &len, SOCK_CLOEXEC)
                 : -1;

    if (fd < 0) {
        return;
    }
    set_timeouts(fd);
    ssize_t got = recv(fd, &g, sizeof(g), MSG_WAITALL);
    g.version[sizeof(g.version) - 1] = '\0';
    if (!is_complete(got, sizeof(g))) {
        g.magic = 0;
    }
    set_refusal(n, &g, a.why, sizeof(a.why));
    a.ok = a.why[0] == '\0';
    bool answered = (a.ok && g.kind != CLUSTER_CONTROL) ||
                    is_complete(send(fd, &a, sizeof(a), MSG_NOSIGNAL), sizeof(a));
    if (!a.ok) {
        log_event(LOG_WARN, "rank connection refused", LOG_STR("why", a.why));
    }
    if (!a.ok || !answered) {
        close(fd);
        return;
    }
    clear_timeouts(fd);
    n->fd[g.kind][g.rank] = fd;
    if (g.kind == CLUSTER_CONTROL) {
        set_port(&from, g.port);
        n->address[g.rank] = from;
    }
}

int cluster_send_addresses(struct cluster *n, struct err *e)
{
    for (int32_t r = 1; r < n->n; r++) {
        if (!is_complete(
                send(n->fd[CLUSTER_CONTROL][r], n->address, sizeof(n->address), MSG_NOSIGNAL),
                sizeof(n->address))) {
            return err_set(e, ERR_IO,
                           "rank %d closed its connection before all ranks had connected", r);
        }
    }
    return 0;
}

/* ---- connecting ---- */

static int connect_to(const struct sockaddr *address, socklen_t len)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0) {
        return -1;
    }
    set_timeouts(fd); /* bounds connect() too */
    if (connect(fd, address, len) == 0) {
        return fd;
    }
    close(fd);
    return -1;
}

static int connect_once(const struct addrinfo *found)
{
    int fd = -1;

    for (const struct addrinfo *a = found; a && fd < 0; a = a->ai_next) {
        fd = connect_to(a->ai_addr, a->ai_addrlen);
    }
    return fd;
}

static bool send_greeting(const struct cluster *n, int fd, enum cluster_link_kind kind, int port)
{
    struct greeting g = {.magic = GREETING_MAGIC,
                         .kind = (uint32_t)kind,
                         .rank = own_number(n),
                         .n_ranks = n->at.n_ranks,
                         .n_stages = n->at.n_stages,
                         .port = port};

    snprintf(g.version, sizeof(g.version), "%s", QUIRE_VERSION);
    return is_complete(send(fd, &g, sizeof(g), MSG_NOSIGNAL), sizeof(g));
}

/* Listens on the address from which rank 0 is reached, and sends rank 0 a greeting with
 * the port. */
static int greet_rank0(struct cluster *n, int fd, size_t *ret_slot_bytes, struct err *e)
{
    struct sockaddr_storage own = {0};
    socklen_t len = sizeof(own);
    struct answer a = {0};
    int32_t rank = own_number(n);
    int why = getsockname(fd, (struct sockaddr *)&own, &len) < 0 ? errno : 0;

    set_port(&own, 0);
    why = why ? why : listen_at(n, (struct sockaddr *)&own, len);
    if (why || getsockname(n->listen_fd, (struct sockaddr *)&own, &len) < 0) {
        return err_set(e, ERR_IO, "rank %d cannot listen: %s", rank, strerror(why ? why : errno));
    }
    if (!send_greeting(n, fd, CLUSTER_CONTROL, port_of(&own)) ||
        !is_complete(recv(fd, &a, sizeof(a), MSG_WAITALL), sizeof(a)) ||
        a.magic != GREETING_MAGIC) {
        return err_set(e, ERR_IO,
                       "rank %d: the process at master_addr and master_port is not rank 0", rank);
    }
    a.why[sizeof(a.why) - 1] = '\0';
    if (!a.ok) {
        return err_set(e, ERR_INVALID, "rank %d is refused by rank 0: %s", rank, a.why);
    }
    if (a.slot_bytes > MAX_SLOT_BYTES) {
        return err_set(e, ERR_INVALID,
                       "rank 0 announces messages of %llu bytes, which is too large",
                       (unsigned long long)a.slot_bytes);
    }
    *ret_slot_bytes = (size_t)a.slot_bytes;
    clear_timeouts(fd);
    return 0;
}

/* Receives the table of addresses, which rank 0 sends once all ranks have connected. */
static int receive_addresses(struct cluster *n, int64_t wait_us, struct err *e)
{
    int fd = n->fd[CLUSTER_CONTROL][0];
    struct pollfd p = {.fd = fd, .events = POLLIN};
    socklen_t len = sizeof(n->address[0]);

    if (poll(&p, 1, (int)MIN(wait_us / 1000, INT32_MAX)) < 1) {
        return err_set(e, ERR_TIMEOUT,
                       "rank %d: rank 0 has sent nothing for %.0f s: are nodes missing?",
                       own_number(n), (double)wait_us * 1e-6);
    }
    if (!is_complete(recv(fd, n->address, sizeof(n->address), MSG_WAITALL), sizeof(n->address))) {
        return err_set(e, ERR_IO, "rank 0 closed its connection");
    }
    if (getpeername(fd, (struct sockaddr *)&n->address[0], &len) < 0) {
        return err_set(e, ERR_IO, "rank 0 closed its connection");
    }
    return 0;
}

/* Connects to lower-numbered ranks, then accepts higher-numbered ones. Waits form no
 * cycle, because each rank waits for lower ones first. */
static int connect_peers(struct cluster *n, int64_t wait_us, struct err *e)
{
    int64_t until_us = clock_us() + wait_us;
    int32_t own = own_number(n), missing;

    for (int32_t r = 0; r < own; r++) {
        for (int k = CLUSTER_COMM; k < CLUSTER_KINDS; k++) {
            enum cluster_link_kind kind = (enum cluster_link_kind)k;
            if (!linked(n, kind, r)) {
                continue;
            }
            n->fd[k][r] = connect_to((struct sockaddr *)&n->address[r], sizeof(n->address[r]));
            if (n->fd[k][r] < 0 || !send_greeting(n, n->fd[k][r], kind, 0)) {
                return err_set(e, ERR_IO, "rank %d cannot reach rank %d at port %d of its node: %s",
                               own, r, port_of(&n->address[r]), strerror(errno));
            }
            clear_timeouts(n->fd[k][r]);
        }
    }
    while ((missing = cluster_unlinked(n)) >= 0) {
        if (clock_us() > until_us) {
            return err_set(e, ERR_TIMEOUT, "rank %d: rank %d has not connected within %.0f s", own,
                           missing, (double)wait_us * 1e-6);
        }
        cluster_accept(n, 0, CONNECT_RETRY_MS);
        char byte;
        if (recv(n->fd[CLUSTER_CONTROL][0], &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
            return err_set(e, ERR_IO, "rank 0 closed its connection");
        }
    }
    return 0;
}

int cluster_join(struct cluster *n, size_t *ret_slot_bytes, const char *address, int port,
                 int64_t wait_us, struct err *e)
{
    int64_t until_us = clock_us() + wait_us;
    struct addrinfo *found = NULL;
    int *fd = &n->fd[CLUSTER_CONTROL][0];
    int rc = resolve(&found, address, port, false, wait_us, e);

    while (rc == 0 && (*fd = connect_once(found)) < 0 && clock_us() < until_us) {
        nanosleep(&(struct timespec){.tv_nsec = CONNECT_RETRY_MS * 1000000L}, NULL);
    }
    if (found) {
        freeaddrinfo(found);
    }
    if (rc == 0 && *fd < 0) {
        rc = err_set(e, ERR_TIMEOUT,
                     "rank %d: nothing listens at %.80s, port %d, after %.0f s: is node 0 running?",
                     own_number(n), address, port, (double)wait_us * 1e-6);
    }
    if (rc == 0) {
        rc = greet_rank0(n, *fd, ret_slot_bytes, e);
    }
    if (rc == 0) {
        rc = receive_addresses(n, 2 * wait_us, e);
    }
    return rc < 0 ? rc : connect_peers(n, wait_us, e);
}
