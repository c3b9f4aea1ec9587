/* Writers: threads that own the sockets of parked connections.
 *
 * A writer has an epoll of its own with every parked socket in it, and an inbox of
 * streams that something happened to. It writes what is pending, sees clients leave
 * (EPOLLRDHUP, which MHD does not while a connection is suspended), puts a comment on
 * silent streams, cuts off clients that do not read, and gives sockets back to MHD.
 *
 * A client that closes only its sending side counts as gone too: from here it looks the
 * same as one that left, and what it asked for must not go on for nobody.
 *
 * The inbox is a stack of streams, pushed with one compare-and-swap and taken whole; a
 * stream is in it at most once. A push does not wake: writer_wake does, with one
 * eventfd write if the writer sleeps, so a step of the engine costs one.
 *
 * Waking a thread takes longer than writing an event. So where the writer sleeps and
 * few streams are in its inbox, whoever would wake it takes its turn instead, and
 * writes (nothing here waits for a client). `turn` is held by the one who does.
 */
#ifndef QUIRE_SERVER_STREAM_WRITER_H
#define QUIRE_SERVER_STREAM_WRITER_H

#include "server/stream/stream.h"

struct writer {
    int epoll_fd, wake_fd;
    pthread_t thread;
    _Alignas(64) struct stream *_Atomic inbox;
    atomic_bool asleep;
    atomic_bool stopping;
    const char *_Atomic abort_why; /* set: every stream is to end */
    _Alignas(64) pthread_mutex_t turn;
    /* Under `turn`. */
    struct stream *streams; /* linked */
    int64_t sweep_us;
};

int writer_open(struct writer *w, struct stream_hub *h, struct err *e);
/* Join the thread. No stream may be attached. */
void writer_close(struct writer *w);
struct writer *writer_pick(struct stream_hub *h);

/* Watch s->fd; the writer takes a reference. On an MHD thread. */
void writer_attach(struct writer *w, struct stream *s);
/* Watch it no longer (the descriptor is about to be closed). On an MHD thread; push the
 * stream afterwards. */
void writer_forget(struct writer *w, struct stream *s);
/* Something happened to `s`. Any thread. */
void writer_push(struct writer *w, struct stream *s);
/* What was pushed is looked at: by the writer, or before this returns. Any thread,
 * under no stream's lock. */
void writer_wake(struct writer *w);
void writer_abort(struct writer *w, const char *why);

#endif
