/* The step channel over connected sockets (see step_channel.h): a head, then the data,
 * sent to one rank after the other. Rank 0 never blocks for longer than the last
 * `begin`'s timeout; the error names a rank that takes nothing. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "config/base/base.h"
#include "engine/workers/ranks/cluster.h"

enum { STREAM_MAGIC = 0x51524e33, ALIGN = 64, BODY_MS = 60000 };

struct head {
    uint32_t magic, kind;
    uint64_t n_bytes;
};

struct tcp_channel {
    struct step_channel base;
    int fd[COMM_MAX_RANKS];
    int64_t timeout_us;
    char *slot; /* [slot_bytes], aligned */
};

/* Sends or receives n_bytes, waiting at most `ms` whenever the socket would block. 0,
 * ERR_TIMEOUT, or ERR_IO: closed. */
static int move(int fd, void *data, size_t n_bytes, bool out, int ms)
{
    for (size_t at = 0; at < n_bytes;) {
        struct pollfd p = {.fd = fd, .events = out ? POLLOUT : POLLIN};
        ssize_t n = out ? send(fd, (char *)data + at, n_bytes - at, MSG_DONTWAIT | MSG_NOSIGNAL)
                        : recv(fd, (char *)data + at, n_bytes - at, MSG_DONTWAIT);
        if (n > 0) {
            at += (size_t)n;
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            return ERR_IO;
        } else if (poll(&p, 1, ms) == 0) {
            return ERR_TIMEOUT;
        }
    }
    return 0;
}

static int stream_begin(struct step_channel *l, void **ret, int64_t timeout_us, struct err *e)
{
    (void)e;
    struct tcp_channel *s = CONTAINER_OF(l, struct tcp_channel, base);
    s->timeout_us = timeout_us;
    *ret = s->slot;
    return 0;
}

static int stream_commit(struct step_channel *l, uint32_t kind, size_t n_bytes, struct err *e)
{
    struct tcp_channel *s = CONTAINER_OF(l, struct tcp_channel, base);
    struct head h = {.magic = STREAM_MAGIC, .kind = kind, .n_bytes = n_bytes};
    int ms = (int)MIN(s->timeout_us / 1000, INT32_MAX);

    if (n_bytes > l->slot_bytes) {
        return err_set(e, ERR_INVALID, "a message of %zu bytes for slots of %zu", n_bytes,
                       l->slot_bytes);
    }
    for (int32_t r = 1; r < l->n_ranks; r++) {
        int rc = move(s->fd[r], &h, sizeof(h), true, ms);
        if (rc == 0) {
            rc = move(s->fd[r], s->slot, n_bytes, true, ms);
        }
        if (rc == ERR_TIMEOUT) {
            return err_set(e, rc, "rank %d took no message for %.0f s", r,
                           (double)s->timeout_us * 1e-6);
        }
        if (rc < 0) {
            return err_set(e, rc, "rank %d closed its connection", r);
        }
    }
    return 0;
}

static int stream_take(struct step_channel *l, struct step_message *ret, int64_t timeout_us,
                       struct err *e)
{
    struct tcp_channel *s = CONTAINER_OF(l, struct tcp_channel, base);
    struct pollfd p = {.fd = s->fd[0], .events = POLLIN};
    struct head h;

    if (poll(&p, 1, (int)(timeout_us / 1000)) <= 0) {
        return 0;
    }
    int rc = move(s->fd[0], &h, sizeof(h), false, BODY_MS);
    if (rc == 0 && (h.magic != STREAM_MAGIC || h.n_bytes > l->slot_bytes)) {
        return err_set(e, ERR_INVALID, "rank 0 sent a malformed message");
    }
    if (rc == 0) {
        rc = move(s->fd[0], s->slot, (size_t)h.n_bytes, false, BODY_MS);
    }
    if (rc < 0) {
        return err_set(e, ERR_IO, "rank 0 closed its connection");
    }
    *ret = (struct step_message){.kind = h.kind, .data = s->slot, .n_bytes = (size_t)h.n_bytes};
    return 1;
}

static void stream_release(struct step_channel *l)
{
    (void)l;
}

static void stream_free(struct step_channel *l)
{
    struct tcp_channel *s = CONTAINER_OF(l, struct tcp_channel, base);

    free(s->slot);
    free(s);
}

static const struct step_channel_ops STREAM_OPS = {.begin = stream_begin,
                                                   .commit = stream_commit,
                                                   .take = stream_take,
                                                   .release = stream_release,
                                                   .free = stream_free};

int tcp_channel_open(struct step_channel **ret, const int *fd, int32_t rank, int32_t n_ranks,
                     size_t slot_bytes, struct err *e)
{
    struct tcp_channel *s = calloc(1, sizeof(*s));

    if (s) {
        s->slot = aligned_alloc(ALIGN, (slot_bytes + ALIGN - 1) / ALIGN * ALIGN);
    }
    if (!s || !s->slot) {
        free(s);
        return err_nomem(e, "messages to the ranks");
    }
    s->base = (struct step_channel){
        .ops = &STREAM_OPS, .rank = rank, .n_ranks = n_ranks, .slot_bytes = slot_bytes};
    memcpy(s->fd, fd, (size_t)(rank == 0 ? n_ranks : 1) * sizeof(*fd));
    *ret = &s->base;
    return 0;
}
