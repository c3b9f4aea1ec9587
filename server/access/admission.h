/* Which connections are taken: at most max-connections, of them at most so many of
 * one peer address. Beyond max-connections a few are kept for health checks; the
 * oldest of those yields to the newest, so that no client that dawdles on them locks
 * others out.
 */
#ifndef QUIRE_SERVER_ACCESS_ADMISSION_H
#define QUIRE_SERVER_ACCESS_ADMISSION_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "config/settings/settings.h"

/* An IPv6 address (IPv4 ones are mapped), of which the first `bits` count. */
struct address_range {
    struct in6_addr address;
    int bits;
};

/* Read "10.0.0.0/8, ::1, …" into *ret, for the caller to free. */
int address_ranges_parse(struct address_range **ret, int32_t *ret_n, const char *text,
                         struct err *e);
/* False for what is no IP address. */
bool address_of(struct in6_addr *ret, const struct sockaddr *a);
bool address_is_within(const struct in6_addr *a, const struct address_range *range, int32_t n);
bool address_is_loopback(const struct in6_addr *a);

struct peer_count; /* connections of one address */

/* A connection's part. All zeros: none. */
struct admitted {
    struct peer_count *peer; /* NULL: of an address that is not counted */
    bool taken;
    bool reserved; /* beyond max-connections: for health checks alone */
    bool yielding; /* it was that, and its socket has been shut down */
    int fd;        /* what shutdown(2) is for where it has to yield */
    struct admitted *prev, *next;
};

enum { ADMISSION_BUCKETS = 4096 };

struct admission {
    int64_t max_connections, max_per_address;
    struct address_range *trusted; /* [n_trusted] */
    int32_t n_trusted;
    uint64_t seed;
    pthread_mutex_t lock;
    /* Under lock. */
    int64_t n, n_reserved;
    struct peer_count **bucket;       /* [ADMISSION_BUCKETS] */
    struct admitted *oldest, *newest; /* of the reserved ones */
    _Atomic int64_t connections;      /* that are open, reserved ones too */
    _Atomic uint64_t n_refused;       /* since the start */
};

/* max_connections: what the settings say, or fewer that descriptors allow; 0: every
 * one is taken as a reserved one is. */
int admission_open(struct admission *a, const struct settings *s, int64_t max_connections,
                   struct err *e);
void admission_close(struct admission *a);
/* A connection from `from` (NULL: its address is not counted) on the socket `fd`.
 * False: it is to be closed. */
bool admission_enter(struct admission *a, struct admitted *m, const struct sockaddr *from, int fd);
/* Before its socket is closed. */
void admission_leave(struct admission *a, struct admitted *m);

#endif
