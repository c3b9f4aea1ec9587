/* Writers: threads that own the sockets of parked connections.
 *
 * A writer has an epoll set with every parked socket, and an inbox of streams to look
 * at. It writes pending events, notices clients that leave (EPOLLRDHUP, which MHD does
 * not poll for while a connection is suspended), sends a comment on silent streams,
 * disconnects clients that do not read, and returns sockets to MHD.
 *
 * A client that closes only its sending side counts as gone, too: it looks the same as
 * one that left, and work must not continue for a client that left.
 *
 * The inbox is a stack of streams, pushed with one compare-and-swap and taken as a
 * whole; a stream is in it at most once. A push does not wake the writer: writer_wake
 * does, with one eventfd write if the writer sleeps, so an engine step costs one write.
 *
 * Waking a thread takes longer than writing an event. So if the writer sleeps and few
 * streams are in its inbox, the caller of writer_wake locks `turn` and writes itself;
 * nothing here waits for a client.
 */
#ifndef QUIRE_SERVER_STREAM_WRITER_H
#define QUIRE_SERVER_STREAM_WRITER_H

#include "server/stream/stream.h"

struct writer {
    int epoll_fd, wake_fd; /* wake_fd: an eventfd in the epoll set */
    pthread_t thread;
    _Alignas(64) struct stream *_Atomic inbox; /* top of the stack, by next_queued */
    atomic_bool asleep;                        /* in epoll_wait, or about to be */
    atomic_bool stopping;                      /* set by writer_close */
    const char *_Atomic abort_why;             /* set: end every stream with this error */
    _Alignas(64) pthread_mutex_t turn;         /* held by the thread that does the writer's work */
    /* Under `turn`. */
    struct stream *streams; /* attached ones, by prev and next */
    int64_t sweep_us;       /* time of the next sweep */
};

int writer_open(struct writer *w, struct stream_hub *h, struct err *e);
/* Stop and join the thread. No stream may be attached. */
void writer_close(struct writer *w);
/* The writer for a new stream, in turn. */
struct writer *writer_pick(struct stream_hub *h);

/* Poll s->fd; the writer takes a reference. On an MHD thread. */
void writer_attach(struct writer *w, struct stream *s);
/* Stop polling s->fd, which is about to be closed. On an MHD thread; push the stream
 * afterwards, so that the writer drops its reference. */
void writer_forget(struct writer *w, struct stream *s);
/* Put `s` into the inbox. Any thread. */
void writer_push(struct writer *w, struct stream *s);
/* Have the inbox processed: by the writer, or by this call. Any thread, under no
 * stream's lock. */
void writer_wake(struct writer *w);
/* End every stream with the error `why`, a static string. */
void writer_abort(struct writer *w, const char *why);

#endif
