/* One client connection of `quire bench serve`: its request and its states.
 * bench_serve.c decides which request it sends when, and evaluates the answer. */
#ifndef QUIRE_SERVER_BENCH_BENCH_CONN_H
#define QUIRE_SERVER_BENCH_BENCH_CONN_H

#include <sys/socket.h>

#include "config/base/buf.h"
#include "server/bench/bench.h"
#include "server/bench/bench_stream.h"

enum { CONN_REQUEST_BYTES = 16 << 20 };

/* The server under test, and the epoll set of the connections. */
struct target {
    struct sockaddr_storage addr; /* [addr_len] bytes are used */
    socklen_t addr_len;
    char host[256], path[256]; /* HOST[:PORT] for the Host header; path prefix, or "" */
    int epoll_fd;              /* the caller's */
};
/* Parse http://HOST[:PORT][/PATH] and resolve the name. */
int target_parse(struct target *t, const char *url, struct err *e);

/*     CLOSED ─► CONNECTING ─► SENDING ─► READING ─► IDLE ─► SENDING … ; any ─►
 * CLOSED */
enum conn_state { CONN_CLOSED, CONN_CONNECTING, CONN_SENDING, CONN_READING, CONN_IDLE };

struct conn {
    int fd; /* -1: CLOSED */
    enum conn_state state;
    bool used;      /* answered a request before: the server may have closed it since */
    struct buf out; /* the request */
    size_t sent;    /* bytes of `out` that were sent */
    struct stream_reader reader;        /* of the answer */
    int64_t sent_us, first_us, last_us; /* start of the request, first and last event */
};

/* Write the request of item `item` into c->out. `prompt`: scratch of the load's
 * max_prompt ids. */
int conn_write(struct conn *c, const struct target *t, const struct bench_options *o,
               const struct bench_load *l, int32_t item, int32_t *prompt, struct err *e);
/* Start to send c->out, after connecting if the connection is closed. */
int conn_begin(struct conn *c, const struct target *t, struct err *e);
/* The socket is writable: send more. */
int conn_send(struct conn *c, const struct target *t, struct err *e);
/* A CONNECTING socket is writable: it is connected or has failed. */
int conn_connected(struct conn *c, const struct target *t, struct err *e);
void conn_close(struct conn *c);

#endif
