/* Admission of connections: at most max-connections in all, and at most
 * max-connections-per-address of each peer address. Beyond max-connections,
 * LIMIT_RESERVED_CONNECTIONS are reserved for health checks; when these are full, the
 * oldest is closed for the newest, so that slow clients cannot block health checks.
 */
#ifndef QUIRE_SERVER_ACCESS_ADMISSION_H
#define QUIRE_SERVER_ACCESS_ADMISSION_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "config/settings/settings.h"

/* A network: the addresses that share the first `bits` bits. */
struct address_range {
    struct in6_addr address; /* IPv4 as ::ffff:a.b.c.d */
    int bits;                /* 0 .. 128; of an IPv4 network 96 more than its own */
};

/* Read "10.0.0.0/8, ::1, …" into *ret, for the caller to free. */
int address_ranges_parse(struct address_range **ret, int32_t *ret_n, const char *text,
                         struct err *e);
/* False if `a` is not an IP address. */
bool address_of(struct in6_addr *ret, const struct sockaddr *a);
bool address_is_within(const struct in6_addr *a, const struct address_range *range, int32_t n);
bool address_is_loopback(const struct in6_addr *a);

struct peer_count; /* number of connections of one address */

/* One connection's record, embedded in struct conn. All zeros: not admitted. */
struct admitted {
    struct peer_count *peer;      /* NULL: its address is not counted */
    bool taken;                   /* admitted: admission_leave is due */
    bool reserved;                /* beyond max-connections: may only ask for health */
    bool yielding;                /* a reserved one whose socket was shut down for a newer one */
    int fd;                       /* shut down when it has to yield */
    struct admitted *prev, *next; /* among the reserved ones */
};

enum { ADMISSION_BUCKETS = 4096 };

struct admission {
    int64_t max_connections, max_per_address;
    struct address_range *trusted; /* [n_trusted] setting trusted-proxies: not counted */
    int32_t n_trusted;
    uint64_t seed;        /* of the hash of addresses; random */
    pthread_mutex_t lock; /* of the counts; taken for every connection */
    /* Under lock. */
    int64_t n, n_reserved;            /* open connections; `n` without reserved ones */
    struct peer_count **bucket;       /* [ADMISSION_BUCKETS] chains by address hash */
    struct admitted *oldest, *newest; /* ends of the list of reserved ones */

    _Atomic int64_t connections; /* open, reserved ones included */
    _Atomic uint64_t n_refused;  /* since the start */
};

/* max_connections: the setting, or fewer if descriptors do not suffice; 0: every
 * connection is treated as a reserved one. */
int admission_open(struct admission *a, const struct settings *s, int64_t max_connections,
                   struct err *e);
void admission_close(struct admission *a);
/* Admit a connection on the socket `fd` from the address `from` (NULL: not counted).
 * False: the caller must close it. */
bool admission_enter(struct admission *a, struct admitted *m, const struct sockaddr *from, int fd);
/* To be called before the socket is closed. */
void admission_leave(struct admission *a, struct admitted *m);

#endif
