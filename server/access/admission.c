/* Parsing of networks, counts by peer address, and the reserved connections. */
#include "server/access/admission.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#include "config/base/limits.h"

enum { ADDRESS_BITS = 128, MAPPED_BITS = 96, NETWORK_BYTES = 8 };

struct peer_count {
    struct peer_count *next;
    struct in6_addr address; /* of IPv6 only the /64, which a single site may use */
    int64_t n;               /* open connections */
};

/* ---- addresses ---- */

static const uint8_t mapped_prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

static bool is_mapped(const struct in6_addr *a)
{
    return memcmp(a->s6_addr, mapped_prefix, sizeof(mapped_prefix)) == 0;
}

static void map_v4(struct in6_addr *ret, const struct in_addr *a)
{
    memcpy(ret->s6_addr, mapped_prefix, sizeof(mapped_prefix));
    memcpy(ret->s6_addr + sizeof(mapped_prefix), a, sizeof(*a));
}

bool address_of(struct in6_addr *ret, const struct sockaddr *a)
{
    if (a->sa_family == AF_INET) {
        map_v4(ret, &((const struct sockaddr_in *)a)->sin_addr);
        return true;
    }
    if (a->sa_family == AF_INET6) {
        *ret = ((const struct sockaddr_in6 *)a)->sin6_addr;
        return true;
    }
    return false;
}

bool address_is_loopback(const struct in6_addr *a)
{
    return is_mapped(a) ? a->s6_addr[sizeof(mapped_prefix)] == 127 : IN6_IS_ADDR_LOOPBACK(a);
}

static bool same_bits(const struct in6_addr *a, const struct in6_addr *b, int bits)
{
    size_t whole = (size_t)bits / 8;
    unsigned rest = (unsigned)bits % 8, mask = 0xff00u >> rest & 0xff;

    return memcmp(a->s6_addr, b->s6_addr, whole) == 0 &&
           (!rest || ((a->s6_addr[whole] ^ b->s6_addr[whole]) & mask) == 0);
}

bool address_is_within(const struct in6_addr *a, const struct address_range *range, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (same_bits(a, &range[i].address, range[i].bits)) {
            return true;
        }
    }
    return false;
}

/* ---- trusted-proxies ---- */

static bool read_range(struct address_range *ret, const char *text, size_t len)
{
    char address[INET6_ADDRSTRLEN + 1];
    size_t slash = 0;
    struct in_addr v4;
    int bits = -1;

    while (slash < len && text[slash] != '/') {
        slash++;
    }
    if (slash == 0 || slash >= sizeof(address)) {
        return false;
    }
    memcpy(address, text, slash);
    address[slash] = '\0';
    if (slash < len) {
        size_t digits = strspn(text + slash + 1, "0123456789");
        bits = (int)strtol(text + slash + 1, NULL, 10);
        if (digits == 0 || digits > 3 || slash + 1 + digits != len) {
            return false;
        }
    }
    if (inet_pton(AF_INET, address, &v4) == 1) {
        map_v4(&ret->address, &v4);
        ret->bits = bits < 0 ? ADDRESS_BITS : bits + MAPPED_BITS;
    } else if (inet_pton(AF_INET6, address, &ret->address) == 1) {
        ret->bits = bits < 0 ? ADDRESS_BITS : bits;
    } else {
        return false;
    }
    return ret->bits <= ADDRESS_BITS;
}

int address_ranges_parse(struct address_range **ret, int32_t *ret_n, const char *text,
                         struct err *e)
{
    int32_t n = 1;

    *ret = NULL;
    *ret_n = 0;
    if (!text || !text[0]) {
        return 0;
    }
    for (const char *p = text; *p; p++) {
        n += *p == ',';
    }
    struct address_range *range = calloc((size_t)n, sizeof(*range));
    if (!range) {
        return err_nomem(e, "trusted-proxies");
    }
    const char *at = text;
    for (int32_t i = 0; i < n; i++) {
        at += strspn(at, " ");
        size_t len = strcspn(at, ",");
        const char *next = at + len + (at[len] == ',');
        while (len > 0 && at[len - 1] == ' ') {
            len--;
        }
        if (!read_range(&range[i], at, len)) {
            free(range);
            return err_set_param(
                e, ERR_INVALID, "trusted-proxies",
                "trusted-proxies has '%.*s'; an address or a network is wanted, as 10.0.0.0/8",
                (int)MIN(len, (size_t)64), at);
        }
        at = next;
    }
    *ret = range;
    *ret_n = n;
    return 0;
}

/* ---- counting ---- */

int admission_open(struct admission *a, const struct settings *s, int64_t max_connections,
                   struct err *e)
{
    *a = (struct admission){.max_connections = max_connections};
    pthread_mutex_init(&a->lock, NULL);
    a->max_per_address = s->max_connections_per_address ? s->max_connections_per_address
                                                        : MAX(max_connections / 4, 1);
    ssize_t got = getrandom(&a->seed, sizeof(a->seed), 0);
    (void)got;
    a->bucket = calloc(ADMISSION_BUCKETS, sizeof(struct peer_count *));
    int rc = a->bucket ? 0 : err_nomem(e, "counts of connections");
    return rc ? rc : address_ranges_parse(&a->trusted, &a->n_trusted, s->trusted_proxies, e);
}

void admission_close(struct admission *a)
{
    for (size_t i = 0; a->bucket && i < ADMISSION_BUCKETS; i++) {
        for (struct peer_count *p = a->bucket[i], *next; p; p = next) {
            next = p->next;
            free(p);
        }
    }
    if (a->bucket) {
        pthread_mutex_destroy(&a->lock);
    }
    free(a->bucket);
    free(a->trusted);
    *a = (struct admission){0};
}

static struct peer_count **find_peer(struct admission *a, const struct in6_addr *address)
{
    uint64_t hash = XXH3_64bits_withSeed(address, sizeof(*address), a->seed);
    struct peer_count **at = &a->bucket[hash % ADMISSION_BUCKETS];

    while (*at && memcmp(&(*at)->address, address, sizeof(*address)) != 0) {
        at = &(*at)->next;
    }
    return at;
}

/* Under lock. False: the address has reached its limit, or no memory. */
static bool count_peer(struct admission *a, struct admitted *m, const struct sockaddr *from)
{
    struct in6_addr address;

    if (!address_of(&address, from) || address_is_loopback(&address) ||
        address_is_within(&address, a->trusted, a->n_trusted)) {
        return true;
    }
    if (!is_mapped(&address)) {
        memset(address.s6_addr + NETWORK_BYTES, 0, sizeof(address) - NETWORK_BYTES);
    }
    struct peer_count **at = find_peer(a, &address);
    if (!*at) {
        *at = calloc(1, sizeof(**at));
        if (!*at) {
            return false;
        }
        (*at)->address = address;
    }
    if ((*at)->n >= a->max_per_address) {
        return false;
    }
    (*at)->n++;
    m->peer = *at;
    return true;
}

static void uncount_peer(struct admission *a, struct admitted *m)
{
    if (m->peer && --m->peer->n == 0) {
        struct peer_count **at = find_peer(a, &m->peer->address);
        *at = m->peer->next;
        free(m->peer);
    }
    m->peer = NULL;
}

/* ---- reserved connections ---- */

static void unlink_reserved(struct admission *a, struct admitted *m)
{
    *(m->prev ? &m->prev->next : &a->oldest) = m->next;
    *(m->next ? &m->next->prev : &a->newest) = m->prev;
    m->prev = m->next = NULL;
}

/* Under lock. */
static void enter_reserved(struct admission *a, struct admitted *m)
{
    if (a->n_reserved >= LIMIT_RESERVED_CONNECTIONS) {
        struct admitted *oldest = a->oldest;
        shutdown(oldest->fd, SHUT_RDWR); /* MHD notices the end and closes it */
        unlink_reserved(a, oldest);
        oldest->yielding = true;
        a->n_reserved--;
    }
    a->n_reserved++;
    m->reserved = true;
    m->prev = a->newest;
    *(m->prev ? &m->prev->next : &a->oldest) = m;
    a->newest = m;
}

bool admission_enter(struct admission *a, struct admitted *m, const struct sockaddr *from, int fd)
{
    *m = (struct admitted){.fd = fd};
    pthread_mutex_lock(&a->lock);
    bool ok = !from || count_peer(a, m, from);
    if (ok && a->n >= a->max_connections) {
        enter_reserved(a, m);
    }
    if (ok) {
        m->taken = true;
        a->n += !m->reserved;
        atomic_fetch_add(&a->connections, 1);
    } else {
        uncount_peer(a, m);
        atomic_fetch_add(&a->n_refused, 1);
    }
    pthread_mutex_unlock(&a->lock);
    return ok;
}

void admission_leave(struct admission *a, struct admitted *m)
{
    if (!m->taken) {
        return;
    }
    pthread_mutex_lock(&a->lock);
    uncount_peer(a, m);
    if (m->reserved && !m->yielding) {
        unlink_reserved(a, m);
        a->n_reserved--;
    }
    a->n -= !m->reserved;
    pthread_mutex_unlock(&a->lock);
    atomic_fetch_sub(&a->connections, 1);
    m->taken = false;
}
