/* One connection of `quire bench serve`: its request, and the states it goes through.
 * Which request it sends when, and what becomes of the answer, is bench_serve.c's. */
#ifndef QUIRE_SERVER_BENCH_BENCH_CONN_H
#define QUIRE_SERVER_BENCH_BENCH_CONN_H

#include <sys/socket.h>

#include "config/base/buf.h"
#include "server/bench/bench.h"
#include "server/bench/bench_stream.h"

enum { CONN_REQUEST_BYTES = 16 << 20 };

/* Where requests go, and the epoll that watches the way. */
struct target {
    struct sockaddr_storage addr;
    socklen_t addr_len;
    char host[256], path[256];
    int epoll_fd;
};
/* http://HOST[:PORT][/PATH]; resolves the name. */
int target_parse(struct target *t, const char *url, struct err *e);

/*     CLOSED ─► CONNECTING ─► SENDING ─► READING ─► IDLE ─► SENDING … ; any ─►
 * CLOSED */
enum conn_state { CONN_CLOSED, CONN_CONNECTING, CONN_SENDING, CONN_READING, CONN_IDLE };

struct conn {
    int fd; /* -1: CLOSED */
    enum conn_state state;
    bool used;      /* answered before: the server may have closed it meanwhile */
    struct buf out; /* the request */
    size_t sent;
    struct stream_reader reader;
    int64_t sent_us, first_us, last_us; /* request begun, first and latest event */
};

/* Put the request of item `item` into c->out. `prompt`: room for the longest. */
int conn_write(struct conn *c, const struct target *t, const struct bench_options *o,
               const struct bench_load *l, int32_t item, int32_t *prompt, struct err *e);
/* Send what is in c->out, connecting first where there is no connection. */
int conn_begin(struct conn *c, const struct target *t, struct err *e);
/* The socket takes more. */
int conn_send(struct conn *c, const struct target *t, struct err *e);
/* A CONNECTING socket became writable. */
int conn_connected(struct conn *c, const struct target *t, struct err *e);
void conn_close(struct conn *c);

#endif
