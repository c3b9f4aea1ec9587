/* Stage 1, accept: libmicrohttpd's epoll pool, and what every route has in common.
 *
 * MHD accepts, parses, decrypts and answers; a request's body is gathered up to its
 * cap, then its route's handler runs on the pool's thread. A handler either answers at
 * once or leaves a stream behind (stream.h).
 */
#ifndef QUIRE_SERVER_HTTP_HTTP_H
#define QUIRE_SERVER_HTTP_HTTP_H

#include <microhttpd.h>

#include "server/access/admission.h"
#include "server/access/auth.h"
#include "server/http/body.h"
#include "server/http/trace.h"
#include "server/stream/stream.h"
#include "server/ui/kv_events.h"

enum { HTTP_STATUS_SLOTS = 20 };

/* One connection, from accept to close. */
struct conn {
    struct conn *prev, *next;
    int fd;
    bool left; /* the last sweep saw that the client closed its side */
    struct admitted admitted;
    /* When it is closed unless it has come further by then: the end of the head, of the
     * body, or of the rest between two requests; INT64_MAX while one is being
     * answered. */
    _Atomic int64_t due_us;
    /* when its last answer ended; 0: before the first, and from the next request's line
     * on */
    _Atomic int64_t idle_us;
};

/* A socket that listens, and who answers there. */
struct door {
    struct server *server;
    struct MHD_Daemon *daemon;
    int fd; /* -1: none */
    struct admission admission;
    bool admin; /* health and metrics alone (setting admin-listen) */
    bool local; /* only this machine reaches it */
};

struct server {
    const struct settings *settings;
    struct door front, admin;
    char url[300]; /* where the front door is, for people */
    bool tls;
    struct keys keys;
    struct stream_hub hub;
    struct watchers watchers;
    struct api_context api;        /* constant once `engine` is set */
    struct engine *_Atomic engine; /* NULL while starting */
    atomic_bool draining;
    atomic_bool dead; /* the engine could not start or died: told by /health */
    _Atomic int64_t connections;
    pthread_mutex_t peers_lock;
    struct conn *peers; /* of both doors */
    int64_t swept_us;
    /* For Retry-After: how fast requests end, by the last sweeps. */
    uint64_t ended;     /* requests ended when last looked */
    double ended_per_s; /* smoothed over about ten seconds */
    _Atomic int retry_after_s;
    /* http_requests_total, [route][status slot] */
    _Atomic uint64_t (*requests)[HTTP_STATUS_SLOTS];
};

/* One request, from its headers to its end. */
struct http_request {
    struct server *server;
    struct door *door;
    bool begun;                /* its head was whole */
    bool close;                /* nothing after it is read on its connection */
    size_t target_len;         /* of the target as it came */
    const char *target_error;  /* http_target_check's; static */
    const struct route *route; /* NULL: none matched */
    struct conn *peer;
    const char *method;   /* MHD's: good until the request is dispatched */
    char method_name[16]; /* for the log */
    bool http_1_0;
    uint64_t body_seen; /* bytes of body, dropped ones too */
    char path[256];
    char request_id[LIMIT_REQUEST_ID_BYTES + 1];
    struct trace trace;
    char origin[256];   /* of a CORS request that is allowed, or "" */
    struct grant grant; /* of its key */
    bool counted;       /* it began for grant.client, and has to end */
    struct buf body;
    struct account account; /* of what it holds itself: its body, an answer being made */
    struct body *answer;    /* on its way; a reference */
    bool refused;           /* answer `refusal`, drop the body */
    bool unread;            /* answer it at once: its body's end is not to be trusted */
    bool parked;
    struct reply *refusal;             /* owned */
    struct MHD_Connection *connection; /* while a handler runs */
    struct stream *stream;             /* holds a reference */
    char ignored[256];
    int64_t begin_us, body_begin_us;
    int status;
};

/* What a handler answers. */
struct reply {
    int status;
    const char *content_type; /* application/json when NULL */
    const char *allow;        /* Allow, with 405 and OPTIONS */
    struct buf body;
    bool close;
    /* of a page's script and style, for its Content-Security-Policy; "": no page */
    char nonce[33];
    int64_t retry_us; /* with 429, 503: when to come again; 0: by the rate at which requests end */
};
void reply_init(struct reply *r, int status);
/* An error body in place of what was there. */
void reply_error(struct reply *r, int status, const char *param, const char *message);

/* Count an answer that grows, beside the request's body. False when that is more than
 * the budget has: `r` says so then. */
bool reply_grow(struct http_request *x, struct reply *r, size_t bytes);
/* 503 for what client-buffer-bytes has no room for. */
void reply_no_room(struct reply *r);

/* Queue `r` (its body is taken over), the events or the body of x->stream. */
enum MHD_Result reply_send(struct http_request *x, struct MHD_Connection *c, struct reply *r);
enum MHD_Result reply_events(struct http_request *x, struct MHD_Connection *c);
enum MHD_Result reply_collected(struct http_request *x, struct MHD_Connection *c);

/* What MHD calls: a request's line, whose target is still as it came; its headers, body
 * and end of body (http.c); its end; a connection's begin and end (connections.c).
 * `door` is a struct door. */
void *http_on_target(void *door, const char *target, struct MHD_Connection *c);
enum MHD_Result http_on_request(void *door, struct MHD_Connection *c, const char *url,
                                const char *method, const char *version, const char *data,
                                size_t *size, void **context);
void http_on_completed(void *door, struct MHD_Connection *c, void **context,
                       enum MHD_RequestTerminationCode code);
void http_on_connection(void *door, struct MHD_Connection *c, void **context,
                        enum MHD_ConnectionNotificationCode code);

struct route {
    const char *method; /* GET or POST */
    const char *path;   /* exact; or a prefix that ends in '/', the rest is an argument */
    const char *label;  /* in metrics */
    bool open;          /* no API key asked */
    bool admin;         /* served at the admin door too */
    bool quiet;         /* logged at debug only */
    bool needs_engine;  /* 503 while starting */
    bool limited;       /* counts for the key's limits */
    bool generates;     /* the engine will be asked */
    /* Answer into `r`; or set x->stream, and nothing of `r` is used. `arg`: what
     * follows a prefix. */
    void (*handle)(struct http_request *x, const char *arg, struct reply *r);
};
extern const struct route routes[];
extern const int n_routes;
/* NULL with *ret_allow set: the path exists, with other methods. */
const struct route *route_find(const char *method, const char *path, const char **ret_arg,
                               const char **ret_allow);

/* Whether the URL has the argument `name`; its value ("" without one) in *ret. While a
 * handler runs. */
bool http_request_argument(const struct http_request *x, const char *name, const char **ret);

/* Handlers of GET / and GET /debug/kv (ui.c). */
void handle_page(struct http_request *x, const char *arg, struct reply *r);
void handle_kv_events(struct http_request *x, const char *arg, struct reply *r);

/* Read the keys file and the certificate again; whichever is bad stays as it was. Each
 * is told in the log. */
void server_reload(struct server *s);
/* Bind and start answering; `s->settings` is set. Everything but the engine is
 * ready. */
int server_open(struct server *s, const struct settings *settings, struct err *e);
/* The engine is there: requests are taken from here on. */
void server_ready(struct server *s, struct engine *engine);
/* Some times a second, from main: connections that bring no request in time, or whose
 * client left, are closed. */
void server_sweep(struct server *s);
/* Requests that have not been answered to the end. */
int64_t server_busy(const struct server *s);
/* Answer nothing more; joins MHD's threads. All streams must be gone
 * (stream_hub_abort). */
void server_stop(struct server *s);
/* server_stop, and give everything back. The engine, which uses the hub's sink, must be
 * gone. */
void server_close(struct server *s);

/* One line for a request that has ended; one for each of the first prompts of one that
 * was taken (request_log.c). */
void request_log(const struct http_request *x);
void prompts_log(const struct http_request *x);
/* What the daemon holds just now, as lines of the log (state.c). From main. */
void state_log(const struct server *s);

/* The slot of http_requests_total for a status, and back (0: other). */
int status_slot(int status);
int slot_status(int slot);

/* Prometheus text of everything (metrics.c). */
void metrics_write(struct buf *b, struct server *s);

#endif
