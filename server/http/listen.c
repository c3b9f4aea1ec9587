/* Sockets by address, by path or from systemd, and the limit of descriptors. */
#include "server/http/listen.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "config/base/log.h"
#include "server/access/admission.h"

enum {
    BACKLOG = 4096,
    SPARE_DESCRIPTORS = 768,
    /* Half for connections; the rest for the reserved ones, the engine and its files. A
     * thread of MHD that cannot accept its first connection polls without rest. */
    LEAST_DESCRIPTORS = 256,
    SYSTEMD_FIRST_FD = 3
};

/* systemd's socket activation: the descriptor, if exactly one socket was passed to this
 * process; -1: none. */
static int inherited_fd(void)
{
    const char *pid = getenv("LISTEN_PID"), *n = getenv("LISTEN_FDS");

    if (!pid || !n || strtol(pid, NULL, 10) != (long)getpid() || strcmp(n, "1") != 0) {
        return -1;
    }
    return SYSTEMD_FIRST_FD;
}

/* `param`: the setting that gives the path. */
static int listen_unix(int *ret, const char *path, const char *param, struct err *e)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct stat st;

    if (strlen(path) >= sizeof(a.sun_path)) {
        return err_set_param(e, ERR_INVALID, param,
                             "%s is a path of %zu bytes; at most %zu are allowed", param,
                             strlen(path), sizeof(a.sun_path) - 1);
    }
    strcpy(a.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return err_set(e, ERR_IO, "cannot make a socket: %s", strerror(errno));
    }
    /* Replace a socket that a dead server has left, but not one that answers. */
    if (lstat(path, &st) == 0 && S_ISSOCK(st.st_mode) &&
        connect(fd, (struct sockaddr *)&a, sizeof(a)) != 0 && errno == ECONNREFUSED) {
        unlink(path);
    }
    if (bind(fd, (struct sockaddr *)&a, sizeof(a)) != 0 || listen(fd, BACKLOG) != 0) {
        int rc = err_set_param(e, ERR_IO, param, "cannot listen on %s '%s': %s", param, path,
                               errno == EADDRINUSE
                                   ? "the path is in use; stop the other server or choose another"
                                   : strerror(errno));
        close(fd);
        return rc;
    }
    *ret = fd;
    return 0;
}

/* The listening descriptor, or -1 with errno set. */
static int listen_at(const struct addrinfo *a)
{
    int on = 1, off = 0, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0) {
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (a->ai_family == AF_INET6) {
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off)); /* "::" takes IPv4 too */
    }
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) {
        return fd;
    }
    int saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static int listen_error(const char *host, const char *port, struct err *e)
{
    if (errno == EADDRINUSE) {
        return err_set_param(
            e, ERR_IO, "port",
            "port %s on %s is in use by another process; stop it or choose another with --port",
            port, host);
    }
    if (errno == EACCES) {
        return err_set_param(e, ERR_IO, "port",
                             "port %s needs privileges; choose one above 1023 with --port", port);
    }
    return err_set_param(e, ERR_IO, "host", "cannot listen on %s port %s: %s", host, port,
                         strerror(errno));
}

static int listen_tcp(int *ret, const char *host, const char *port, struct err *e)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *list;
    char bare[256];

    snprintf(bare, sizeof(bare), "%s", host[0] == '[' ? host + 1 : host);
    bare[strcspn(bare, "]")] = '\0';
    int rc = getaddrinfo(bare, port, &hints, &list);
    if (rc) {
        return err_set_param(e, ERR_INVALID, "host",
                             "host '%s' is not an address of this machine: %s", host,
                             gai_strerror(rc));
    }
    int fd = -1;
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = listen_at(a);
    }
    int saved = errno;
    freeaddrinfo(list);
    errno = saved;
    if (fd < 0) {
        return listen_error(host, port, e);
    }
    *ret = fd;
    return 0;
}

/* The address as text, as http://127.0.0.1:8000; for port 0 with the one that the
 * kernel chose. */
static void describe(char *url, size_t size, int fd, bool tls)
{
    struct sockaddr_storage a;
    socklen_t len = sizeof(a);
    char host[NI_MAXHOST], port[NI_MAXSERV];
    const char *scheme = tls ? "https" : "http";

    if (getsockname(fd, (struct sockaddr *)&a, &len) != 0) {
        snprintf(url, size, "%s://?", scheme);
    } else if (a.ss_family == AF_UNIX) {
        snprintf(url, size, "unix:%s", ((struct sockaddr_un *)&a)->sun_path);
    } else if (getnameinfo((struct sockaddr *)&a, len, host, sizeof(host), port, sizeof(port),
                           NI_NUMERICHOST | NI_NUMERICSERV) == 0) {
        bool v6 = strchr(host, ':');
        snprintf(url, size, "%s://%s%s%s:%s", scheme, v6 ? "[" : "", host, v6 ? "]" : "", port);
    }
}

int listen_open(int *ret_fd, char *url, size_t url_size, const struct settings *s, struct err *e)
{
    int fd = inherited_fd();
    char port[16];

    snprintf(port, sizeof(port), "%lld", (long long)s->port);
    int rc = fd >= 0  ? 0
             : s->uds ? listen_unix(&fd, s->uds, "uds", e)
                      : listen_tcp(&fd, s->host ? s->host : "127.0.0.1", port, e);

    if (rc) {
        return rc;
    }
    describe(url, url_size, fd, s->ssl_certfile != NULL);
    *ret_fd = fd;
    return 0;
}

/* Listen on ADDRESS:PORT, with an IPv6 address in brackets. */
static int listen_address(int *ret_fd, const char *where, struct err *e)
{
    const char *colon = strrchr(where, ':');
    char host[256], *end = NULL;
    long port = colon ? strtol(colon + 1, &end, 10) : -1;
    size_t len = colon ? (size_t)(colon - where) : 0;
    bool bracket = len > 1 && where[0] == '[' && where[len - 1] == ']';

    if (!end || end == colon + 1 || *end || port < 0 || port > 65535 || len == 0 ||
        len >= sizeof(host) || (!bracket && memchr(where, ':', len))) {
        return err_set_param(e, ERR_INVALID, "admin-listen",
                             "admin-listen '%.200s' must be ADDRESS:PORT, [IPV6]:PORT or unix:PATH",
                             where);
    }
    memcpy(host, where, len);
    host[len] = '\0';
    int rc = listen_tcp(ret_fd, host, colon + 1, e);
    return rc ? err_prefix(e, "admin-listen") : 0;
}

int listen_admin(int *ret_fd, char *url, size_t url_size, const char *where, struct err *e)
{
    bool path = strncmp(where, "unix:", 5) == 0;
    int rc =
        path ? listen_unix(ret_fd, where + 5, "admin-listen", e) : listen_address(ret_fd, where, e);

    if (rc == 0) {
        describe(url, url_size, *ret_fd, false);
    }
    return rc;
}

bool listen_is_local(int fd)
{
    struct sockaddr_storage a = {0};
    socklen_t len = sizeof(a);
    struct in6_addr address;

    if (getsockname(fd, (struct sockaddr *)&a, &len) != 0) {
        return false;
    }
    return a.ss_family == AF_UNIX ||
           (address_of(&address, (const struct sockaddr *)&a) && address_is_loopback(&address));
}

int raise_nofile(int64_t *ret, int64_t connections, struct err *e)
{
    struct rlimit r;
    rlim_t want = (rlim_t)connections + SPARE_DESCRIPTORS;

    *ret = connections;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur >= want) {
        return 0;
    }
    r.rlim_cur = r.rlim_max == RLIM_INFINITY ? want : MIN(want, r.rlim_max);
    setrlimit(RLIMIT_NOFILE, &r);
    if (r.rlim_cur >= want) {
        return 0;
    }
    if (r.rlim_cur < LEAST_DESCRIPTORS) {
        return err_set(e, ERR_INVALID,
                       "the limit of open files is %lld and must be at least %d: raise the hard "
                       "limit (ulimit -Hn, LimitNOFILE=)",
                       (long long)r.rlim_cur, LEAST_DESCRIPTORS);
    }
    *ret = MAX((int64_t)r.rlim_cur - SPARE_DESCRIPTORS, (int64_t)r.rlim_cur / 2);
    log_event(LOG_WARN, "few_descriptors", LOG_I64("limit", (int64_t)r.rlim_cur),
              LOG_I64("max_connections", *ret),
              LOG_STR("hint", "raise the hard limit of open files (ulimit -Hn, LimitNOFILE=)"));
    return 0;
}
