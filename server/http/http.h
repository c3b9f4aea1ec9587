/* The HTTP server: connections, requests, routes and replies, on libmicrohttpd (MHD).
 *
 * MHD accepts connections, decrypts, parses requests and sends responses on several
 * threads, each with its own epoll set (loop.h). The server collects a request's body
 * up to max-body-bytes, then calls the route's handler: on the connection's thread, or
 * of a long body on a worker (workers.h). A handler either fills in a reply or leaves a
 * stream (stream.h), which answers later.
 *
 *     http_on_connection   a connection opens: admission, deadline of the first head
 *     http_on_target       a request line arrived: an http_request is allocated
 *     http_on_request      headers, body data, end of body: refusal or dispatch
 *     http_on_completed    the response was sent, or the connection failed: log, free
 *
 * Each http_request belongs to one MHD thread, or to a worker while its connection is
 * suspended; what other threads may touch is in its stream, its body and its conn,
 * which have their own locks or atomics.
 */
#ifndef QUIRE_SERVER_HTTP_HTTP_H
#define QUIRE_SERVER_HTTP_HTTP_H

#include <microhttpd.h>

#include "server/access/admission.h"
#include "server/access/auth.h"
#include "server/http/body.h"
#include "server/http/trace.h"
#include "server/http/workers.h"
#include "server/stream/stream.h"
#include "server/ui/kv_events.h"

enum { HTTP_STATUS_SLOTS = 20 };
#define HTTP_SHUTTING_DOWN "the server is shutting down; send this to another"

/* One connection, from accept to close. */
struct conn {
    struct conn *prev, *next; /* in server.conns, under conns_lock */
    int fd;                   /* owned by MHD */
    bool left;                /* the last sweep saw that the client closed its side */
    struct admitted admitted; /* its place in the listener's connection counts */
    /* Deadline: the connection is closed at this time unless the request has got
     * further. First for the head, then for the body, then for the idle time between
     * two requests; INT64_MAX while a request is being answered. */
    _Atomic int64_t due_us;
    /* When its last response ended; 0 before the first, and again from the next request
     * line on. */
    _Atomic int64_t idle_us;

    struct http_loop *loop;     /* whose daemon has the connection */
    struct MHD_Connection *mhd; /* the same connection, MHD's */
    /* While it sends a chunked body, of the loop's thread (loop.c). */
    struct conn *prev_chunked, *next_chunked; /* in http_loop.chunked */
    struct http_request *request;             /* the request whose body it is */
    bool watched;                             /* in http_loop.chunked */
    bool heard;                               /* a part of the body has come in this pass */
    int unread;                               /* bytes in the socket before this pass */
    int passes;                               /* in a row that have read none of them */
    atomic_bool lingers; /* answered by its loop, suspended, and waits for the client */
};

struct http_loop;

/* The daemons of a listener and their threads; loop.h. */
struct http_loops {
    struct http_loop *loop; /* [n], owned */
    int n;
};

/* A listening socket with its MHD daemons. */
struct listener {
    struct server *server;
    struct http_loops loops;    /* n 0: not started, or stopped */
    int fd;                     /* -1: none */
    struct admission admission; /* which connections are accepted */
    bool admin;                 /* serves health and metrics only (setting admin-listen) */
    bool local;                 /* bound to a loopback address or a Unix path */
};

struct server {
    const struct settings *settings;               /* the caller's */
    struct listener main_listener, admin_listener; /* the latter is open with admin-listen */
    char url[300];                 /* of the main listener, for the log and the terminal */
    bool tls;                      /* of the main listener; the admin listener never has TLS */
    struct keys keys;              /* API keys, reloaded on SIGHUP */
    struct workers workers;        /* for the handlers of long bodies */
    struct stream_hub hub;         /* streams, their writers, renderers and budget */
    struct kv_events kv_events;    /* subscribers of /debug/kv */
    struct api_context api;        /* constant once `engine` is set */
    struct engine *_Atomic engine; /* NULL while starting */
    atomic_bool draining;          /* SIGTERM came: generating requests get 503 */
    atomic_bool dead;              /* the engine failed to start or died: reported by /health */
    _Atomic int64_t connections;   /* open ones, of both listeners */
    pthread_mutex_t conns_lock;
    struct conn *conns; /* of both listeners; under conns_lock */
    int64_t swept_us;   /* time of the last once-a-second sweep; main thread only */

    /* For Retry-After: the rate at which requests end, updated by the sweep. */
    uint64_t ended;            /* requests ended up to the last sweep */
    double ended_per_s;        /* smoothed over about ten seconds */
    _Atomic int retry_after_s; /* estimate of when the present queue will be done */

    /* http_requests_total, [n_routes + 1][status slot]; the last row: no route */
    _Atomic uint64_t (*requests)[HTTP_STATUS_SLOTS];
};

/* The response that a handler makes. */
struct reply {
    int status;               /* HTTP status of the response */
    const char *content_type; /* NULL: application/json */
    const char *allow;        /* the Allow header of 405 and OPTIONS, or NULL */
    struct buf body;          /* taken over by reply_send */
    bool close;               /* close the connection afterwards */
    /* CSP nonce of the page's script and style; "": the reply is not a page */
    char nonce[33];
    /* How an error's body is written; NULL: as OpenAI does */
    const struct dialect *dialect;
    /* With 429 and 503: time until a retry can succeed; 0: estimated from the rate at
     * which requests end */
    int64_t retry_us;
};

/* One request, from its request line to the end of its response. */
struct http_request {
    struct server *server;
    struct listener *listener; /* the one that accepted its connection */
    struct http_loop *loop;    /* whose thread runs its connection */
    bool begun;                /* the head is complete */
    bool close;                /* close the connection after the response */
    size_t target_len;         /* bytes of the target as received */
    const char *target_error;  /* result of http_target_check; static, NULL: valid */
    const struct route *route; /* NULL: no route matched */
    struct conn *conn;         /* NULL: it could not be allocated */
    const char *method;        /* MHD's string, valid until the request is dispatched */
    char method_name[16];      /* a copy for the log */
    bool http_1_0;
    uint64_t body_seen; /* body bytes received, dropped ones included */
    char path[256];     /* decoded, NUL-terminated; a longer one matches no route */
    char request_id[LIMIT_REQUEST_ID_BYTES + 1]; /* the client's, or a random one */
    struct trace trace;                          /* W3C trace context; empty: none */
    char origin[256];                            /* the Origin header if CORS allows it, else "" */
    struct auth_result auth;                     /* the key's owner and limits */
    bool counted;           /* client_begin was called for auth.client: client_end is due */
    struct buf body;        /* received so far, at most max-body-bytes */
    struct account account; /* memory of `body` and of a reply being built */
    struct body *answer;    /* the response body being sent; holds a reference */
    bool refused;           /* reply with `refusal` and drop the rest of the body */
    bool unread;            /* refuse before the body: where it ends cannot be trusted */
    bool answered;          /* by its loop: see http_refuse_chunk */
    bool parked;            /* waits for the stream to complete its one JSON body */
    struct reply *refusal;  /* owned; NULL with `refused`: out of memory */
    struct MHD_Connection *connection; /* set while a handler runs */
    struct reply reply;                /* that the handler makes */
    bool handed;                       /* to a worker, until its reply is sent */
    struct http_request *next_long;    /* in workers */
    struct stream *stream;             /* holds a reference; NULL: none */
    char ignored[256];                 /* unknown fields, for X-Quire-Ignored */
    int64_t begin_us, body_begin_us;   /* arrival of the request line; end of the head */
    int status;                        /* as logged and counted; 499: the client left */
};

void reply_init(struct reply *r, int status);
/* The same for a request, in the form of its route. */
void reply_begin(struct reply *r, const struct http_request *x, int status);
/* Replace the body by an error object. */
void reply_error(struct reply *r, int status, const char *param, const char *message);

/* Account for `bytes` of a growing reply, beside the request's body. False if the
 * budget does not have them; `r` is then the 503 that says so. */
bool reply_grow(struct http_request *x, struct reply *r, size_t bytes);
/* Make `r` the 503 of an exhausted client-buffer-bytes. */
void reply_no_room(struct reply *r);

/* Queue a response: `r` (whose body is taken over), the events of x->stream, or the
 * collected body of x->stream. */
enum MHD_Result reply_send(struct http_request *x, struct MHD_Connection *c, struct reply *r);
enum MHD_Result reply_events(struct http_request *x, struct MHD_Connection *c);
enum MHD_Result reply_collected(struct http_request *x, struct MHD_Connection *c);

/* MHD's callbacks (see above); http_on_connection is in connections.c, the others in
 * http.c. `loop` is a struct http_loop; `target` is not decoded yet. */
void *http_on_target(void *loop, const char *target, struct MHD_Connection *c);
enum MHD_Result http_on_request(void *loop, struct MHD_Connection *c, const char *url,
                                const char *method, const char *version, const char *data,
                                size_t *size, void **context);
void http_on_completed(void *loop, struct MHD_Connection *c, void **context,
                       enum MHD_RequestTerminationCode code);
void http_on_connection(void *loop, struct MHD_Connection *c, void **context,
                        enum MHD_ConnectionNotificationCode code);
/* Run the handler of a complete request, which fills in x->reply or leaves x->stream.
 * On a thread of MHD's or a worker. */
void http_request_handle(struct http_request *x);
/* In place of that: x->reply is the 503 of a server that shuts down. */
void http_request_refuse(struct http_request *x);
/* Append the whole response, head and body, that refuses a request whose chunked body
 * has a line too long to be read. */
void http_refuse_chunk(struct http_request *x, struct buf *to);

struct route {
    const char *method; /* GET or POST */
    const char *path;   /* exact, or a prefix ending in '/' that an argument follows */
    const char *label;  /* value of the metrics label `route` */
    bool open;          /* needs no API key */
    bool admin;         /* also served by the admin listener */
    bool quiet;         /* logged at level debug only */
    bool needs_engine;  /* 503 while the model is loading */
    bool limited;       /* counts towards the key's limits */
    bool generates;     /* submits requests to the engine */
    /* How answers and errors are written; NULL: as completions and chats are */
    const struct dialect *dialect;
    /* Fill in `r`, or set x->stream, in which case `r` is discarded. `arg`: the path
     * after a prefix. */
    void (*handle)(struct http_request *x, const char *arg, struct reply *r);
};
extern const struct route routes[];
extern const int n_routes;
/* NULL with *ret_allow set: the path exists, but not for this method. */
const struct route *route_find(const char *method, const char *path, const char **ret_arg,
                               const char **ret_allow);

/* Whether the URL has the query argument `name`; its value, possibly "", in *ret. Only
 * while a handler runs. */
bool http_request_argument(const struct http_request *x, const char *name, const char **ret);

/* Handlers of GET / and GET /debug/kv (ui.c), and of POST /debug/masks (masks.c). */
void handle_page(struct http_request *x, const char *arg, struct reply *r);
void handle_kv_events(struct http_request *x, const char *arg, struct reply *r);
void handle_masks(struct http_request *x, const char *arg, struct reply *r);

/* SIGHUP: read the keys file and the certificate again. One that cannot be read stays
 * as it was; the log reports each. */
void server_reload(struct server *s);
/* Bind the sockets and start to answer; everything but the engine is ready then.
 * `settings` must outlive the server. */
int server_open(struct server *s, const struct settings *settings, struct err *e);
/* The model is loaded: generating requests are accepted from here on. */
void server_ready(struct server *s, struct engine *engine);
/* Close connections past their deadline or left by their client. Called from main
 * several times a second. */
void server_sweep(struct server *s);
/* Streams that are not finished, and long bodies that are not answered. */
int64_t server_busy(const struct server *s);
/* Close the listeners and join MHD's threads. All streams must have ended
 * (stream_hub_abort). */
void server_stop(struct server *s);
/* server_stop, then free everything. The engine, which uses the hub's sink, must have
 * been freed before. */
void server_close(struct server *s);

/* Log a request that has ended; log the first prompts of one that was submitted
 * (request_log.c). */
void request_log(const struct http_request *x);
void prompts_log(const struct http_request *x);
/* SIGUSR1: write the server's and the engine's state to the log (state.c). From
 * main. */
void state_log(const struct server *s);

/* The column of http_requests_total for a status, and back; 0: any other status. */
int status_slot(int status);
int slot_status(int slot);

/* Append all metrics in the Prometheus text format (metrics.c). */
void metrics_write(struct buf *b, struct server *s);

#endif
