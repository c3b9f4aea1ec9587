/* `quire health`: ask a running server whether it is ready, for containers and
 * scripts. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "config/settings/settings.h"
#include "server/commands.h"

enum { TIMEOUT_S = 5 };

struct target {
    char host[256], port[16], path[108]; /* path: of a Unix socket, or "" for TCP */
    bool tls;
};

/* http://host:port, http://[::1]:port, unix:/path */
static bool parse_url(struct target *t, const char *url)
{
    if (strncmp(url, "unix:", 5) == 0) {
        snprintf(t->path, sizeof(t->path), "%s", url + 5);
        return t->path[0];
    }
    t->tls = strncmp(url, "https://", 8) == 0;
    if (!t->tls && strncmp(url, "http://", 7) != 0) {
        return false;
    }
    const char *at = url + (t->tls ? 8 : 7);
    bool bracket = *at == '[';
    size_t n = strcspn(at + bracket, bracket ? "]" : ":/");
    if (n == 0 || n >= sizeof(t->host)) {
        return false;
    }
    memcpy(t->host, at + bracket, n);
    const char *rest = at + bracket + n + bracket;
    snprintf(t->port, sizeof(t->port), "%.*s", *rest == ':' ? (int)strcspn(rest + 1, "/") : 0,
             rest + 1);
    if (!t->port[0]) {
        strcpy(t->port, t->tls ? "443" : "80");
    }
    return true;
}

static void from_settings(struct target *t, const struct settings *s)
{
    const char *host = s->host ? s->host : "127.0.0.1";

    /* A server that listens on any address is reached at the loopback address. */
    host = strcmp(host, "0.0.0.0") == 0                           ? "127.0.0.1"
           : strcmp(host, "::") == 0 || strcmp(host, "[::]") == 0 ? "::1"
                                                                  : host;
    snprintf(t->host, sizeof(t->host), "%s", host);
    snprintf(t->port, sizeof(t->port), "%lld", (long long)s->port);
    snprintf(t->path, sizeof(t->path), "%s", s->uds ? s->uds : "");
    t->tls = s->ssl_certfile != NULL;
}

static int dial_tcp(const struct target *t)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list;
    struct timeval limit = {.tv_sec = TIMEOUT_S};
    int fd = -1;

    if (getaddrinfo(t->host, t->port, &hints, &list) != 0) {
        return -1;
    }
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(list);
    return fd;
}

static int dial(const struct target *t)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = TIMEOUT_S};

    if (!t->path[0]) {
        return dial_tcp(t);
    }
    snprintf(a.sun_path, sizeof(a.sun_path), "%s", t->path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a)) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Print the server's answer; 0 if its status is 200. */
static int ask(int fd)
{
    static const char request[] = "GET /health HTTP/1.0\r\n\r\n";
    char answer[4096];
    size_t len = 0;
    ssize_t n;

    if (send(fd, request, sizeof(request) - 1, MSG_NOSIGNAL) != (ssize_t)sizeof(request) - 1) {
        return 1;
    }
    while (len < sizeof(answer) - 1 &&
           (n = recv(fd, answer + len, sizeof(answer) - 1 - len, 0)) > 0) {
        len += (size_t)n;
    }
    answer[len] = '\0';
    const char *body = strstr(answer, "\r\n\r\n");
    printf("%s\n", body ? body + 4 : "no answer");
    return strncmp(answer, "HTTP/1.", 7) == 0 && strncmp(answer + 8, " 200", 4) == 0 ? 0 : 1;
}

static int find_target(struct target *t, int argc, char **argv, char **env)
{
    struct settings s;
    struct err e = {0};
    bool help = false;

    if (argc == 2 && strcmp(argv[0], "--url") == 0) {
        if (parse_url(t, argv[1])) {
            return 0;
        }
        fprintf(stderr, "quire: --url '%s' must be http://HOST:PORT or unix:PATH\n", argv[1]);
        return 2;
    }
    if (settings_load(&s, argc, argv, env, &help, &e)) {
        fprintf(stderr, "quire: %s\n", e.text);
        return 2;
    }
    from_settings(t, &s);
    settings_release(&s);
    if (help) {
        printf(
            "usage: quire health [--url http://HOST:PORT | --url unix:PATH | the flags of serve]\n"
            "Exit status 0 when the server is ready, 1 when it is not.\n");
        return -1;
    }
    return 0;
}

int health_main(int argc, char **argv, char **env)
{
    struct target t = {0};
    int rc = find_target(&t, argc, argv, env);

    if (rc) {
        return rc < 0 ? 0 : rc;
    }
    int fd = dial(&t);
    if (fd < 0) {
        fprintf(stderr, "quire: no server at %s%s%s: %s\n", t.path[0] ? t.path : t.host,
                t.path[0] ? "" : ":", t.path[0] ? "" : t.port, strerror(errno));
        return 1;
    }
    if (t.tls) {
        printf("listening (quire health does not speak TLS, so the state is unknown)\n");
    } else {
        rc = ask(fd);
    }
    close(fd);
    return rc;
}
