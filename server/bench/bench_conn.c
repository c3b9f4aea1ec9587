/* Non-blocking connections: parse the URL, write the request, connect and send. */
#include "server/bench/bench_conn.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

int target_parse(struct target *t, const char *url, struct err *e)
{
    char name[256], port[16] = "80";

    if (strncmp(url, "http://", 7) != 0) {
        return err_set(e, ERR_INVALID, "--url %s: must be http://HOST:PORT", url);
    }
    size_t len = strcspn(url + 7, "/");
    snprintf(t->host, sizeof(t->host), "%.*s", (int)MIN(len, sizeof(t->host) - 1), url + 7);
    snprintf(t->path, sizeof(t->path), "%s", url + 7 + len);
    if (t->path[0] && t->path[strlen(t->path) - 1] == '/') {
        t->path[strlen(t->path) - 1] = '\0';
    }
    const char *colon = strrchr(t->host, ':');
    bool has_port = colon && !strchr(colon, ']');
    snprintf(name, sizeof(name), "%.*s", has_port ? (int)(colon - t->host) : (int)strlen(t->host),
             t->host);
    if (has_port) {
        snprintf(port, sizeof(port), "%s", colon + 1);
    }
    if (name[0] == '[') { /* IPv6 */
        memmove(name, name + 1, strlen(name));
        name[strcspn(name, "]")] = '\0';
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    int rc = getaddrinfo(name, port, &hints, &found);
    if (rc != 0) {
        return err_set(e, ERR_INVALID, "--url %s: %s", url, gai_strerror(rc));
    }
    memcpy(&t->addr, found->ai_addr, found->ai_addrlen);
    t->addr_len = found->ai_addrlen;
    freeaddrinfo(found);
    return 0;
}

static void write_body(struct buf *b, const struct bench_options *o, const struct bench_item *it,
                       const int32_t *prompt)
{
    buf_puts(b, "{\"prompt\":[");
    for (int32_t i = 0; i < it->n_prompt; i++) {
        buf_printf(b, i ? ",%d" : "%d", prompt[i]);
    }
    buf_printf(b, "],\"max_tokens\":%d,\"stream\":true,\"stream_options\":{\"include_usage\":true}",
               it->max_tokens);
    buf_printf(b, ",\"temperature\":%g,\"top_p\":%g,\"ignore_eos\":%s", o->temperature, o->top_p,
               o->stop_at_eos ? "false" : "true");
    if (o->top_k > 0) {
        buf_printf(b, ",\"top_k\":%lld", (long long)o->top_k);
    }
    if (o->n > 1) {
        buf_printf(b, ",\"n\":%lld", (long long)o->n);
    }
    if (o->beam_width > 0) {
        buf_printf(b, ",\"use_beam_search\":true,\"beam_width\":%lld", (long long)o->beam_width);
    }
    if (o->model) {
        buf_puts(b, ",\"model\":\"");
        buf_json_escape(b, o->model, strlen(o->model));
        buf_puts(b, "\"");
    }
    buf_puts(b, "}");
}

int conn_write(struct conn *c, const struct target *t, const struct bench_options *o,
               const struct bench_load *l, int32_t item, int32_t *prompt, struct err *e)
{
    struct buf body;

    buf_init(&body, CONN_REQUEST_BYTES);
    bench_load_prompt(l, item, prompt);
    write_body(&body, o, &l->item[item], prompt);
    buf_clear(&c->out);
    buf_printf(&c->out,
               "POST %s/v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n",
               t->path, t->host);
    buf_printf(&c->out, "Accept: text/event-stream\r\nContent-Length: %zu\r\n", body.len);
    if (o->api_key) {
        buf_printf(&c->out, "Authorization: Bearer %s\r\n", o->api_key);
    }
    buf_puts(&c->out, "\r\n");
    bool failed =
        body.failed || !body.data || buf_append(&c->out, body.data, body.len) < 0 || c->out.failed;
    buf_release(&body);
    return failed ? err_set(e, ERR_FULL, "a request of %d prompt tokens does not fit into %d bytes",
                            l->item[item].n_prompt, CONN_REQUEST_BYTES)
                  : 0;
}

static int conn_watch(struct conn *c, const struct target *t, uint32_t events, int op)
{
    struct epoll_event ev = {.events = events, .data.ptr = c};

    return epoll_ctl(t->epoll_fd, op, c->fd, &ev);
}

void conn_close(struct conn *c)
{
    if (c->fd >= 0) {
        close(c->fd);
    }
    c->fd = -1;
    c->state = CONN_CLOSED;
    c->used = false;
}

static int conn_open(struct conn *c, const struct target *t, struct err *e)
{
    c->fd = socket(t->addr.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) {
        return err_set(e, ERR_IO, "socket: %s", strerror(errno));
    }
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    if ((connect(c->fd, (const struct sockaddr *)&t->addr, t->addr_len) != 0 &&
         errno != EINPROGRESS) ||
        conn_watch(c, t, EPOLLOUT, EPOLL_CTL_ADD) != 0) {
        return err_set(e, ERR_IO, "%s: %s", t->host, strerror(errno));
    }
    c->state = CONN_CONNECTING;
    return 0;
}

int conn_connected(struct conn *c, const struct target *t, struct err *e)
{
    int error = 0;
    socklen_t len = sizeof(error);

    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len);
    if (error) {
        return err_set(e, ERR_IO, "%s: %s", t->host, strerror(error));
    }
    c->state = CONN_SENDING;
    return conn_send(c, t, e);
}

int conn_send(struct conn *c, const struct target *t, struct err *e)
{
    while (c->sent < c->out.len) {
        ssize_t n = send(c->fd, c->out.data + c->sent, c->out.len - c->sent, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            conn_watch(c, t, EPOLLOUT | EPOLLIN, EPOLL_CTL_MOD);
            return 0;
        }
        if (n < 0) {
            return err_set(e, ERR_IO, "send: %s", strerror(errno));
        }
        c->sent += (size_t)n;
    }
    c->state = CONN_READING;
    conn_watch(c, t, EPOLLIN, EPOLL_CTL_MOD);
    return 0;
}

int conn_begin(struct conn *c, const struct target *t, struct err *e)
{
    stream_reader_init(&c->reader);
    c->sent = 0;
    c->first_us = 0;
    c->sent_us = clock_us();
    if (c->state == CONN_CLOSED) {
        return conn_open(c, t, e);
    }
    c->state = CONN_SENDING;
    return conn_send(c, t, e);
}
