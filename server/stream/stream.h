/* A stream: the path of an answer from the engine's sink to one HTTP connection.
 *
 * A stream belongs to one HTTP request, which has one engine request per prompt. Three
 * sides hold references: the HTTP request (from stream_new to its end), the engine
 * (until `last` arrived for every prompt), and the writer that polls the socket (while
 * `attached`).
 *
 *   engine's output thread   sink.emit: append an event to `pending`;
 *                            sink.flush: wake each writer at most once, or do its work
 *   writer (writer.c)        take `pending` and write it to the socket, notice clients
 *                            that leave, send keepalives on silent streams
 *   MHD thread               send the headers before and the end of the body after;
 *                            in between the connection is suspended ("parked")
 *
 * While a connection is parked, MHD does not touch its socket, so the writer writes
 * there itself, framed as HTTP chunks: a token costs at most one send(2), and MHD need
 * not resume every connection, and walk over all suspended ones, at every step. MHD is
 * resumed once, when everything is written, and ends the body. With TLS, where the
 * writer cannot write, it resumes MHD's content reader, which copies from `pending`.
 *
 * `parked` tells which side owns the socket: the writer while true, MHD while false. It
 * becomes true only on an MHD thread, inside a callback and together with
 * MHD_suspend_connection; it becomes false only in the writer, together with
 * MHD_resume_connection; both under `lock`. So only a suspended connection is resumed.
 *
 * The end of a stream, all under `lock`:
 *   ending     no output will follow, but queued ones are not rendered yet
 *   finished   `pending` is complete                             (stream_finish)
 *   lost       the client left or was disconnected               (stream_lose, _break)
 *   detached   the HTTP request is over, MHD's objects are gone  (stream_detach)
 */
#ifndef QUIRE_SERVER_STREAM_STREAM_H
#define QUIRE_SERVER_STREAM_STREAM_H

#include <microhttpd.h>
#include <pthread.h>

#include "server/access/budget.h"
#include "server/access/quota.h"
#include "server/api/api.h"
#include "server/stream/answer.h"
#include "server/stream/collect.h"
#include "server/stream/render.h"
#include "server/stream/sse.h"

/* Placeholder in front of an HTTP chunk for its length, always eight hex digits:
 * "0000012c\r\n". */
#define CHUNK_HEAD "00000000\r\n"
enum { CHUNK_HEAD_BYTES = sizeof(CHUNK_HEAD) - 1, CHUNK_DIGITS = 8 };

struct writer;

/* What all streams have in common. */
struct stream_hub {
    struct sink sink;      /* given to engine_open */
    struct writer *writer; /* [n_writers] */
    int n_writers;
    atomic_uint next_writer;       /* round robin of writer_pick */
    struct engine *_Atomic engine; /* NULL while the model is loading */
    struct budget budget;          /* memory held for clients, of streams and of other replies */
    struct renderers renderers;    /* threads for long outputs */
    /* Units of JSON that the output thread may still render itself before the next
     * flush; only that thread uses it. */
    int32_t allowance;
    _Atomic int64_t n_streams; /* streams that exist */
    /* Clients that left before the end; clients that streams disconnected because they
     * did not read, beside those that the budget has cut off (stream_hub_slow). */
    _Atomic uint64_t n_gone, n_slow;
};

enum stream_mode {
    STREAM_DIRECT,  /* events, written to the socket by the writer */
    STREAM_READER,  /* events through MHD (TLS) */
    STREAM_COLLECT, /* one JSON body at the end */
};

/* The state of a stream's queue for the renderers. */
enum render_state {
    RENDER_IDLE,    /* the queue is empty */
    RENDER_QUEUED,  /* a renderer works on the stream, or will */
    RENDER_BLOCKED, /* waits until the client reads (stream_wake_renderer) */
};

/* An echoed prompt's JSON, for all choices that begin with it. Only the renderer that
 * has the stream uses it. */
struct shared_prompt {
    struct buf middle; /* written by sse_middle */
    bool whole;        /* `middle` is complete */
    int32_t left;      /* choices whose event still needs it */
};

struct piece;

struct stream {
    /* Constant. */
    struct stream_hub *hub;
    struct writer *writer; /* one of the hub's, for the stream's whole life */
    enum stream_mode mode;
    bool chunked;       /* HTTP/1.1: the body is sent in chunks */
    bool include_usage; /* the last event gives the usage */
    struct sse_style style;
    struct request **request; /* [n_requests] one per prompt; references */
    int32_t n_requests, n;    /* n: choices per prompt */
    size_t limit_bytes;       /* a client with more unread bytes counts as slow */
    struct client *client;    /* charged for generated tokens; NULL: none */
    /* The least size of a collected answer, accounted for from the start
     * (stream_reserve). */
    int64_t min_bytes;
    /* [n_requests] if several choices' events repeat an echoed prompt, else NULL */
    struct shared_prompt *shared;
    struct MHD_Connection *connection;
    int fd;      /* the client's socket, MHD's; -1: none yet */
    int wake_fd; /* eventfd of the thread that runs MHD for the connection */

    pthread_mutex_t lock; /* adaptive; held for short times only */
    /* Under `lock`. */
    struct buf pending;         /* events that the writer has not taken yet */
    size_t unsent;              /* bytes that the writer took last; an upper bound */
    struct collector collector; /* while there is a queue, the renderer's */
    /* The answer if it is read by the model's format, instead of `collector`; as that
     * the renderer's while there is a queue. */
    struct answer *answer;
    struct account account;           /* of all the stream's buffers (stream_account) */
    struct piece *queue, *queue_last; /* see render.h; the first may be half rendered */
    size_t queue_bytes;               /* memory of all queued pieces */
    size_t queue_unread;              /* memory of those with copied outputs */
    size_t collected, shared_bytes;   /* memory of `collector` or `answer`, of `shared` */
    enum render_state render;
    enum request_parking parking; /* of its requests in the engine */
    bool ending;                  /* becomes `finished` when the queue is empty */
    struct usage *usage;          /* [n_requests] */
    struct usage total;           /* the sum of `usage` */
    /* [n_requests * n] the choice's first event was made; NULL unless the first event
     * differs: with token ids, and for chats */
    uint8_t *begun;
    int32_t n_left; /* requests whose `last` has not arrived */
    bool attached;  /* the writer polls the socket and holds a reference */
    bool parked, detached;
    bool finished; /* nothing more will be appended to `pending` */
    bool lost;     /* the client left or is disconnected: the connection must close */
    /* of the prompts that have ended: the longest times, the sums of the rest */
    struct request_timing course;
    enum finish_reason finish; /* of the first choice that ended: for the log */
    int status;                /* 200, or the HTTP status of the error */
    char error[256];           /* the error's message with another status than 200 */
    /* The request's arrival on both clocks; the first token, 0: none yet. */
    int64_t begin_us, begin_unix, first_us;

    atomic_int refs;              /* one for each side, see above */
    bool dying;                   /* no references are left: a renderer will free it */
    atomic_bool queued;           /* in the writer's inbox */
    struct stream *next_queued;   /* in the inbox */
    struct stream *next_rendered; /* under the renderers' lock */

    /* The writer's: under its `turn`. */
    struct buf out;           /* taken from `pending` and framed as a chunk */
    size_t out_at;            /* bytes of `out` that are written */
    bool linked;              /* in the writer's list, by prev and next */
    bool blocked;             /* the socket is full; EPOLLOUT is awaited */
    _Atomic int64_t wrote_us; /* last progress; the output thread reads it */
    struct stream *prev, *next;
};

/* Start n_writers writers and the renderers; `sink` is usable from here on. `budget`:
 * the most bytes to hold for clients, 0: derived from the machine's memory. */
int stream_hub_open(struct stream_hub *h, int n_writers, int64_t budget, struct err *e);
/* No stream may exist any more. */
void stream_hub_close(struct stream_hub *h);
/* Clients disconnected because they did not read. */
uint64_t stream_hub_slow(const struct stream_hub *h);
/* The server stops: end every stream with the error `why` and cancel its requests. */
void stream_hub_abort(struct stream_hub *h, const char *why);

/* A lower bound of the answer's JSON bytes, known before it is computed: from the
 * echoed prompts, and from the tokens that min_tokens or ignore_eos make certain. */
int64_t stream_min_bytes(const struct completion *c);
/* Make a stream and its requests, named `id`, from `c`, whose parameters and prompts
 * are taken over. The caller holds one reference. */
int stream_new(struct stream **ret, struct stream_hub *h, struct completion *c, const char *id,
               const struct api_context *ctx, struct err *e);
/* Account for `bytes` from the start; false: the budget does not have them. */
bool stream_reserve(struct stream *s, int64_t bytes);
/* Submit all requests to the engine; on failure the caller still holds its
 * reference. */
int stream_submit(struct stream *s, struct engine *engine, struct err *e);
struct stream *stream_ref(struct stream *s);
void stream_unref(struct stream *s);

/* A stream without requests (n_requests is 0), as /debug/kv has: events, or one body
 * (STREAM_COLLECT), given to stream_offer by one thread. */
int stream_new_plain(struct stream **ret, struct stream_hub *h, enum stream_mode mode,
                     struct err *e);
/* Send `data` if the client has read all that was sent before; else drop it and return
 * false. `last`: the stream ends with it. */
bool stream_offer(struct stream *s, const char *data, size_t len, bool last);
/* End such a stream with an error event; `at_once`: disconnect the client instead. */
void stream_end(struct stream *s, int status, const char *message, bool at_once);
/* The HTTP request is over. */
bool stream_is_over(struct stream *s);

/* ---- on MHD threads, with s->connection, fd, mode and chunked set ---- */

/* An MHD_ContentReaderCallback: parks the connection if there is nothing to send. */
ssize_t stream_read(void *stream, uint64_t pos, char *to, size_t max);
/* STREAM_COLLECT: true if the answer is complete; else the connection is parked. */
bool stream_collected(struct stream *s);
/* The MHD request has ended, in whatever way: its objects are not touched any more, and
 * requests that still run are cancelled. */
void stream_detach(struct stream *s);

/* ---- for the writer ---- */

/* The client left (`gone`, which is counted) or is disconnected. Under no lock. */
void stream_lose(struct stream *s, bool gone);
/* End the stream with an error event. Under no lock. */
void stream_fail(struct stream *s, int status, const char *message);
/* Append an SSE comment. Under s->lock. */
void stream_keepalive(struct stream *s);

/* ---- for the renderers, under s->lock ---- */

/* Put the placeholder of a chunk's length into an empty `pending`. */
void stream_begin_pending(struct stream *s);
/* Account for the memory of all buffers. */
void stream_account(struct stream *s);
/* Append the closing events; the stream is finished. */
void stream_finish(struct stream *s);
/* The stream cannot go on: `rc` is an error of collector_add or of a buffer. */
void stream_break(struct stream *s, int rc);
/* If the budget chose this stream to be disconnected, end a collected answer with an
 * error and return true. */
bool stream_end_if_cut(struct stream *s);
/* Cancel the stream's requests. Under no lock. */
void stream_cancel(struct stream *s);

#endif
