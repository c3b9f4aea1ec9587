/* An answer on its way: what stands between the engine's sink and one HTTP connection.
 *
 * A stream belongs to one HTTP request, which has one engine request a prompt. Three
 * parties hold references: the HTTP side (from stream_new to the request's end), the
 * engine (until `last` came for every prompt), and the writer that watches the socket
 * (while attached).
 *
 *   engine's output side     sink.emit: append an event to `pending` sink.flush: wake
 *                            each writer at most once, or help it
 *   writer (writer.c)        take `pending`, write it to the socket, watch for clients
 *                            that leave, keep silent ones alive
 *   MHD worker               headers before, the end of the body after; the connection
 *                            is suspended ("parked") in between
 *
 * While a connection is parked, MHD does not touch its socket, so the writer writes
 * there itself, in HTTP chunks that it frames: a token costs one send(2) at most, and
 * none of MHD's wake-ups and walks over all suspended connections (a resume for every
 * stream and step). MHD is resumed once, when all is written, and ends the body. Where
 * the writer cannot (TLS), it resumes MHD's content reader instead, which copies from
 * `pending`.
 *
 * `parked` says who owns the socket: the writer while true, MHD while false. It turns
 * true only on an MHD thread, inside a callback and together with
 * MHD_suspend_connection, and false only in the writer, together with
 * MHD_resume_connection; both under `lock`. So a connection is never resumed that is
 * not suspended.
 */
#ifndef QUIRE_SERVER_STREAM_STREAM_H
#define QUIRE_SERVER_STREAM_STREAM_H

#include <microhttpd.h>
#include <pthread.h>

#include "server/access/budget.h"
#include "server/access/quota.h"
#include "server/api/api.h"
#include "server/stream/collect.h"
#include "server/stream/render.h"
#include "server/stream/sse.h"

/* Room in front of an HTTP chunk for its length, always eight digits:
 * "0000012c\r\n". */
#define CHUNK_HEAD "00000000\r\n"
enum { CHUNK_HEAD_BYTES = sizeof(CHUNK_HEAD) - 1, CHUNK_DIGITS = 8 };

struct writer;

/* What all streams share. */
struct stream_hub {
    struct sink sink;      /* given to engine_open */
    struct writer *writer; /* [n_writers] */
    int n_writers;
    atomic_uint next_writer;
    struct engine *_Atomic engine;
    struct budget budget; /* of all that is held for clients; the server's other answers too */
    struct renderers renderers;
    /* the sink's own: units of JSON that may still be made at once before the next
     * flush */
    int32_t allowance;
    _Atomic int64_t n_streams; /* streams that exist */
    /* clients that left before the end; that were cut off because they did not read */
    _Atomic uint64_t n_gone, n_slow;
};

enum stream_mode {
    STREAM_DIRECT,  /* events; the writer writes them */
    STREAM_READER,  /* events through MHD (TLS) */
    STREAM_COLLECT, /* one JSON body at the end */
};

/* What a stream's pieces that are too long to be made at once wait for. */
enum render_state {
    RENDER_IDLE,    /* there are none */
    RENDER_QUEUED,  /* a renderer has it, or will */
    RENDER_BLOCKED, /* for the client to read */
};

/* A prompt's JSON, for all choices that begin with it. The renderers' own. */
struct shared_prompt {
    struct buf middle; /* see sse_middle */
    bool whole;
    int32_t left; /* choices that it still goes out with */
};

struct piece;

struct stream {
    /* Constant. */
    struct stream_hub *hub;
    struct writer *writer;
    enum stream_mode mode;
    bool chunked; /* HTTP/1.1: bodies of unknown length are chunked */
    bool include_usage;
    struct sse_style style;
    struct request **request; /* [n_requests] one a prompt */
    int32_t n_requests, n;    /* n: choices a prompt */
    size_t limit_bytes;       /* unread beyond this: cut off */
    struct client *client;    /* pays for what is drawn; NULL: none */
    /* that a collected answer has, so far as is known beforehand: it holds them from
     * the start */
    int64_t least_bytes;
    /* [n_requests] where several choices' events begin with a prompt */
    struct shared_prompt *shared;
    struct MHD_Connection *connection;
    int fd;

    pthread_mutex_t lock;
    /* Under `lock`. */
    struct buf pending;         /* events made and not taken by the writer */
    size_t unsent;              /* bytes that the writer has taken, at most */
    struct collector collector; /* while there is a queue the renderers' own */
    struct account account;
    struct piece *queue, *queue_last; /* see render.h; the first may be half made */
    size_t queue_bytes;               /* of all its pieces */
    size_t queue_unread;              /* of those that were copied */
    size_t collected, shared_bytes;   /* held by the collector, by `shared` */
    enum render_state render;
    enum request_parking parking; /* of its requests */
    bool ending;                  /* all was said: `finished` once the queue is empty */
    struct usage *usage;          /* [n_requests] */
    struct usage total;
    /* [n_requests * n] whether the choice's first event went out; only with token ids
     * and for chats */
    uint8_t *begun;
    int32_t n_left; /* requests whose `last` has not come */
    bool attached;  /* the writer holds a reference */
    bool parked, detached;
    bool finished; /* nothing more will be appended */
    bool lost;     /* the client is gone or cut off: the connection is to be closed */
    /* of the prompts that have ended: longest times, all preemptions */
    struct request_course course;
    enum finish_reason finish; /* of the first choice that ended: for the log */
    int status;                /* 200, or what went wrong */
    char error[256];
    int64_t begin_us, begin_unix, first_us;

    atomic_int refs;
    bool dying;         /* the last reference was given back, and a renderer frees it */
    atomic_bool queued; /* in the writer's inbox */
    struct stream *next_queued;
    struct stream *next_rendered; /* under the renderers' lock */

    /* The writer's own: under its `turn`. */
    struct buf out; /* framed, [out_at, len) not written yet */
    size_t out_at;
    bool linked, blocked;
    _Atomic int64_t wrote_us; /* last progress; the output thread reads it */
    struct stream *prev, *next;
};

/* n_writers threads, and renderers; `sink` is usable from here on. `budget`: bytes to
 * be held for clients, 0: by memory. */
int stream_hub_open(struct stream_hub *h, int n_writers, int64_t budget, struct err *e);
/* No stream may be left. */
void stream_hub_close(struct stream_hub *h);
/* The server ends: every stream still there gets an error and its requests are
 * cancelled. */
void stream_hub_abort(struct stream_hub *h, const char *why);

/* The JSON bytes that the answer has at least, so far as is known before it is
 * computed: what is certain of its prompt and of tokens that no end can save. */
int64_t stream_least_bytes(const struct completion *c);
/* Takes over c's parameters and prompts and makes its requests, named `id`. One
 * reference is the caller's. */
int stream_new(struct stream **ret, struct stream_hub *h, struct completion *c, const char *id,
               const struct api_context *ctx, struct err *e);
/* Set so many bytes aside for it from the start; false: the budget has not so many
 * left. */
bool stream_reserve(struct stream *s, int64_t bytes);
/* Hand all requests to the engine; on failure the caller still holds its reference. */
int stream_submit(struct stream *s, struct engine *engine, struct err *e);
struct stream *stream_ref(struct stream *s);
void stream_unref(struct stream *s);

/* A stream without requests (n_requests is 0), for those who watch: events, or one body
 * (STREAM_COLLECT). What it says comes through stream_offer, from one thread. */
int stream_new_plain(struct stream **ret, struct stream_hub *h, enum stream_mode mode,
                     struct err *e);
/* Say `data`, unless the client has not read what was said before: false, and it is
 * passed over. `last`: the end. */
bool stream_offer(struct stream *s, const char *data, size_t len, bool last);
/* End it with an error that the client is told, or `at_once` without waiting for the
 * client. */
void stream_end(struct stream *s, int status, const char *message, bool at_once);
/* The client is gone, or was told all. */
bool stream_over(struct stream *s);

/* Called by MHD threads, with s->connection, fd, mode and chunked set. */
/* As MHD_ContentReaderCallback: parks the connection where there is nothing to say. */
ssize_t stream_read(void *stream, uint64_t pos, char *to, size_t max);
/* STREAM_COLLECT: true when the answer is complete; otherwise the connection was
 * parked. */
bool stream_collected(struct stream *s);
/* The MHD request has ended, by whatever way: nothing of it is touched any more, and
 * what still runs is cancelled. */
void stream_detach(struct stream *s);

/* For the writer: the client left (`gone`: it is counted), or is cut off. Under no
 * lock. */
void stream_lose(struct stream *s, bool gone);
/* End it with an error that the client is told. */
void stream_fail(struct stream *s, int status, const char *message);
/* Append an SSE comment. Under s->lock. */
void stream_keepalive(struct stream *s);

/* For the renderers, under s->lock. Room for a chunk's length where `pending` is empty;
 * count what the stream holds; all has been said; it cannot go on, for an error of
 * collector_add or of a buffer. */
void stream_begin_pending(struct stream *s);
void stream_account(struct stream *s);
void stream_finish(struct stream *s);
void stream_break(struct stream *s, int rc);
/* It was chosen to end, for what all streams hold is too much: then a collected answer
 * becomes an error. */
bool stream_end_if_cut(struct stream *s);
/* Cancel its requests. Under no lock. */
void stream_cancel(struct stream *s);

#endif
