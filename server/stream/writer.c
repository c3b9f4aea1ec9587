/* The writer's inbox, its writes to parked sockets, and its loop over epoll events,
 * inbox and the sweep once a second. */
#include "server/stream/writer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    EVENTS = 256,            /* epoll events per call */
    TURNS = 8,               /* writes to one stream before the next stream's turn */
    TURN_BYTES = 256 * 1024, /* bytes to one stream before the next stream's turn */
    HELP = 4,                /* streams that a waking thread may serve itself (help) */
    HELP_BYTES = 16 * 1024,  /* unwritten bytes of such a stream, at most */
    SWEEP_US = 1000 * 1000,
    KEEP_BYTES = 64 * 1024, /* a buffer larger than this is freed when it is empty */
};

/* ---- the inbox ---- */

void writer_push(struct writer *w, struct stream *s)
{
    if (atomic_exchange_explicit(&s->queued, true, memory_order_acq_rel)) {
        return;
    }
    stream_ref(s);
    struct stream *head = atomic_load_explicit(&w->inbox, memory_order_relaxed);
    do {
        s->next_queued = head;
    } while (!atomic_compare_exchange_weak(&w->inbox, &head, s));
}

/* ---- attaching ---- */

void writer_attach(struct writer *w, struct stream *s)
{
    /* Edge-triggered: one event when the client leaves. */
    struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLET, .data.ptr = s};

    stream_ref(s);
    /* If this fails for lack of memory, keepalives still detect a client that left. */
    epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, s->fd, &ev);
}

/* The socket is full: ask for one event when it takes bytes again, or already does. */
static void await_writable(struct stream *s)
{
    struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLOUT | EPOLLET, .data.ptr = s};

    s->blocked = true;
    atomic_store_explicit(&s->account.since_us, clock_us(), memory_order_relaxed);
    epoll_ctl(s->writer->epoll_fd, EPOLL_CTL_MOD, s->fd, &ev);
}

void writer_forget(struct writer *w, struct stream *s)
{
    epoll_ctl(w->epoll_fd, EPOLL_CTL_DEL, s->fd, NULL);
}

static void writer_link(struct writer *w, struct stream *s)
{
    s->linked = true;
    s->prev = NULL;
    s->next = w->streams;
    if (s->next) {
        s->next->prev = s;
    }
    w->streams = s;
}

static void writer_unlink(struct writer *w, struct stream *s)
{
    if (s->prev) {
        s->prev->next = s->next;
    } else {
        w->streams = s->next;
    }
    if (s->next) {
        s->next->prev = s->prev;
    }
    s->linked = false;
}

/* ---- writing ---- */

static void progress(struct stream *s, int64_t now)
{
    atomic_store_explicit(&s->wrote_us, now, memory_order_relaxed);
    atomic_store_explicit(&s->account.since_us, 0, memory_order_relaxed);
}

/* Return the socket to MHD. Under s->lock. */
static void resume_mhd(struct stream *s)
{
    s->parked = false;
    MHD_resume_connection(s->connection);
    eventfd_write(s->wake_fd, 1);
}

/* Fill in the chunk's length and append its line end. */
static int frame_chunk(struct buf *b)
{
    static const char hex[] = "0123456789abcdef";
    size_t len = b->len - CHUNK_HEAD_BYTES;

    for (int i = CHUNK_DIGITS - 1; i >= 0; i--, len >>= 4) {
        b->data[i] = hex[len & 15];
    }
    return buf_append(b, "\r\n", 2);
}

static void reuse(struct buf *b)
{
    if (b->cap > KEEP_BYTES) {
        buf_release(b);
    } else {
        buf_clear(b);
    }
}

/* `out` is written: take `pending`. False: there is nothing to write now. */
static bool take_pending(struct stream *s)
{
    bool more = false;

    pthread_mutex_lock(&s->lock);
    reuse(&s->out);
    s->out_at = 0;
    s->unsent = 0;
    if (s->lost) {
        resume_mhd(s);
    } else if (s->pending.len) {
        struct buf empty = s->out;
        s->out = s->pending;
        s->pending = empty;
        s->lost = s->out.failed || (s->chunked && frame_chunk(&s->out));
        s->unsent = s->out.len;
        more = !s->lost;
        if (s->lost) {
            resume_mhd(s);
        }
    } else if (s->finished) {
        resume_mhd(s);
    }
    stream_wake_renderer(s);
    stream_account(s);
    pthread_mutex_unlock(&s->lock);
    return more;
}

/* The client left (`gone`) or must be disconnected. */
static void drop(struct stream *s, bool gone)
{
    stream_lose(s, gone);
    pthread_mutex_lock(&s->lock);
    if (s->parked) {
        resume_mhd(s);
    }
    pthread_mutex_unlock(&s->lock);
}

static void write_direct(struct stream *s, int64_t now)
{
    size_t left = TURN_BYTES;
    int turn = 0;

    while (s->out_at < s->out.len || take_pending(s)) {
        /* A stream that is refilled as fast as it is written must not delay the
         * others. */
        if (turn++ == TURNS || left == 0) {
            writer_push(s->writer, s);
            return;
        }
        ssize_t n = send(s->fd, s->out.data + s->out_at, MIN(s->out.len - s->out_at, left),
                         MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            s->out_at += (size_t)n;
            left -= (size_t)n;
            progress(s, now);
        } else if (n < 0 && errno == EAGAIN) {
            await_writable(s);
            return;
        } else if (n == 0 || errno != EINTR) {
            drop(s, !atomic_load(&s->account.cut));
            return;
        }
    }
}

/* Process a stream from the inbox. `own`: on the writer's thread. Only there a detached
 * stream is released, since epoll events already fetched may point to it. */
static void service(struct writer *w, struct stream *s, int64_t now, bool own)
{
    pthread_mutex_lock(&s->lock);
    bool parked = s->parked, detached = s->detached, attached = s->attached;
    bool long_one = s->pending.len + s->out.len > HELP_BYTES;
    if (detached && own) {
        s->attached = false;
    }
    bool direct = s->mode == STREAM_DIRECT && !s->lost;
    if (parked && !direct) {
        bool ready = s->lost || s->finished || (s->mode == STREAM_READER && s->pending.len);
        if (ready) {
            progress(s, now);
            resume_mhd(s);
        }
    }
    pthread_mutex_unlock(&s->lock);
    if ((detached || long_one) && !own) {
        writer_push(w, s);
        return;
    }
    if (detached && s->linked) {
        writer_unlink(w, s);
    }
    if (detached && attached) {
        stream_unref(s); /* the caller holds another reference */
        return;
    }
    if (attached && !s->linked) {
        writer_link(w, s);
        progress(s, now);
    }
    if (parked && direct && !s->blocked) {
        write_direct(s, now);
    }
}

static void take_inbox(struct writer *w, int64_t now, bool own)
{
    struct stream *s = atomic_exchange(&w->inbox, NULL);

    while (s) {
        struct stream *next = s->next_queued;
        /* Cleared before the stream is processed: it may be queued again meanwhile, so
         * a change is processed twice rather than missed. */
        atomic_store(&s->queued, false);
        service(w, s, now, own);
        stream_unref(s);
        s = next;
    }
}

/* Process the inbox in place of the sleeping writer, if it holds few streams. With
 * `turn` locked, no other thread takes streams from the inbox while they are
 * counted. */
static void help(struct writer *w)
{
    int n = 0;

    for (const struct stream *s = atomic_load(&w->inbox); s && n <= HELP; s = s->next_queued) {
        n++;
    }
    if (n <= HELP) {
        take_inbox(w, clock_us(), false);
    }
}

void writer_wake(struct writer *w)
{
    if (atomic_load(&w->inbox) && atomic_load(&w->asleep) && pthread_mutex_trylock(&w->turn) == 0) {
        help(w);
        pthread_mutex_unlock(&w->turn);
    }
    if (atomic_load(&w->inbox) && atomic_exchange(&w->asleep, false)) {
        uint64_t one = 1;
        ssize_t n = write(w->wake_fd, &one, sizeof(one));
        (void)n; /* fails only if the counter is full: the writer is awake then */
    }
}

/* ---- events and time ---- */

static void handle_event(struct stream *s, uint32_t events)
{
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
        drop(s, !atomic_load(&s->account.cut));
    } else if (events & EPOLLOUT && s->blocked) {
        s->blocked = false;
        writer_push(s->writer, s);
    }
}

/* Once a second: send comments on silent streams, disconnect clients that have taken
 * nothing for too long. `why`: set when the server stops. */
static void sweep_one(struct stream *s, int64_t now, const char *why)
{
    if (why) {
        stream_fail(s, 503, why);
        writer_push(s->writer, s);
    }
    int64_t silent_us = now - atomic_load_explicit(&s->wrote_us, memory_order_relaxed);
    bool stuck = s->blocked && silent_us > (why ? 1 : LIMIT_STALL_S) * (int64_t)1000000;
    if (stuck) {
        atomic_fetch_add(&s->hub->n_slow, account_cut(&s->account));
        drop(s, false);
        return;
    }
    if (s->mode == STREAM_COLLECT || s->blocked ||
        silent_us < LIMIT_KEEPALIVE_S * (int64_t)1000000) {
        return;
    }
    pthread_mutex_lock(&s->lock);
    /* not into an event that is only half rendered */
    if (s->parked && !s->finished && s->pending.len == 0 && !s->queue) {
        stream_keepalive(s);
    }
    pthread_mutex_unlock(&s->lock);
    writer_push(s->writer, s);
}

static void sweep(struct writer *w, int64_t now)
{
    const char *why = atomic_load(&w->abort_why);

    for (struct stream *s = w->streams; s; s = s->next) {
        sweep_one(s, now, why);
    }
    w->sweep_us = now + (why ? SWEEP_US / 20 : SWEEP_US);
}

/* Time until the next sweep, even without streams: another thread may attach one in
 * help(). */
static int wait_ms(struct writer *w, int64_t now)
{
    return atomic_load(&w->inbox) ? 0 : (int)MAX(0, (w->sweep_us - now) / 1000 + 1);
}

static void *writer_main(void *arg)
{
    struct writer *w = arg;
    struct epoll_event ev[EVENTS];

    while (!atomic_load(&w->stopping)) {
        atomic_store(&w->asleep, true);
        int n = epoll_wait(w->epoll_fd, ev, EVENTS, wait_ms(w, clock_us()));
        atomic_store(&w->asleep, false);
        pthread_mutex_lock(&w->turn);
        int64_t now = clock_us();
        /* Events before the inbox: a stream that is released there may have an event
         * here. */
        for (int i = 0; i < n; i++) {
            if (ev[i].data.ptr) {
                handle_event(ev[i].data.ptr, ev[i].events);
            } else {
                uint64_t count;
                ssize_t got = read(w->wake_fd, &count, sizeof(count));
                (void)got;
            }
        }
        take_inbox(w, now, true);
        if (now >= w->sweep_us) {
            sweep(w, now);
        }
        pthread_mutex_unlock(&w->turn);
    }
    return NULL;
}

int writer_open(struct writer *w, struct stream_hub *h, struct err *e)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};

    (void)h;
    pthread_mutex_init(&w->turn, NULL);
    w->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    w->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (w->epoll_fd < 0 || w->wake_fd < 0 ||
        epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, w->wake_fd, &ev) != 0 ||
        pthread_create(&w->thread, NULL, writer_main, w) != 0) {
        int rc = err_set(e, ERR_IO, "cannot start a writer: %s", strerror(errno));
        if (w->epoll_fd >= 0) {
            close(w->epoll_fd);
        }
        if (w->wake_fd >= 0) {
            close(w->wake_fd);
        }
        pthread_mutex_destroy(&w->turn);
        return rc;
    }
    pthread_setname_np(w->thread, "writer");
    return 0;
}

static void poke(struct writer *w)
{
    uint64_t one = 1;
    ssize_t n = write(w->wake_fd, &one, sizeof(one));

    (void)n;
}

void writer_close(struct writer *w)
{
    atomic_store(&w->stopping, true);
    poke(w);
    pthread_join(w->thread, NULL);
    take_inbox(w, clock_us(), true);
    close(w->epoll_fd);
    close(w->wake_fd);
    pthread_mutex_destroy(&w->turn);
}

void writer_abort(struct writer *w, const char *why)
{
    atomic_store(&w->abort_why, why);
    poke(w);
}

struct writer *writer_pick(struct stream_hub *h)
{
    return &h->writer[atomic_fetch_add(&h->next_writer, 1) % (unsigned)h->n_writers];
}
