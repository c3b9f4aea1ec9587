#include "engine/workers/ranks/transports.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t ring_bytes(size_t slot_bytes)
{
    return (ring_channel_bytes(slot_bytes) + 4095) / 4096 * 4096;
}

/* Offset of a stage's comm; at stage n_stages, of the pipeline. */
static size_t comm_offset(const struct pipeline_place *at, int32_t stage, size_t slot_bytes)
{
    return ring_bytes(slot_bytes) + (size_t)stage * comm_shm_bytes(at->n_ranks);
}

static size_t all_bytes(const struct pipeline_place *at, size_t slot_bytes)
{
    return comm_offset(at, at->n_stages, slot_bytes) +
           pipeline_shm_bytes(at->n_stages * at->n_ranks);
}

int transports_create(int *ret_fd, const struct pipeline_place *at, size_t slot_bytes,
                      struct err *e)
{
    int fd = memfd_create("quire-ranks", MFD_CLOEXEC);

    if (fd < 0 || ftruncate(fd, (off_t)all_bytes(at, slot_bytes)) < 0) {
        int why = errno;
        if (fd >= 0) {
            close(fd);
        }
        return err_set(e, ERR_IO, "memory shared by %d ranks: %s", at->n_stages * at->n_ranks,
                       strerror(why));
    }
    *ret_fd = fd;
    return 0;
}

int transports_open(struct transports *ret, int fd, const struct pipeline_place *at,
                    size_t slot_bytes, int64_t timeout_us, struct err *e)
{
    struct transports s = {.n_bytes = all_bytes(at, slot_bytes)};
    int32_t n = at->n_stages * at->n_ranks;
    char *memory = mmap(NULL, s.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (memory == MAP_FAILED) {
        return err_set(e, ERR_IO, "memory shared by %d ranks: %s", n, strerror(errno));
    }
    s.memory = memory;
    int rc = ring_channel_open(&s.channel, memory, pipeline_number(at, at->stage, at->rank), n,
                               slot_bytes, e);
    if (rc == 0 && at->n_ranks > 1) {
        rc = comm_shm_open(&s.comm, memory + comm_offset(at, at->stage, slot_bytes), at->rank,
                           at->n_ranks, timeout_us, e);
    }
    if (rc == 0 && at->n_stages > 1) {
        rc = pipeline_shm_open(&s.pipeline, memory + comm_offset(at, at->n_stages, slot_bytes), at,
                               timeout_us, e);
    }
    if (rc < 0) {
        transports_release(&s);
        return rc;
    }
    if (s.comm) {
        s.comm->first_rank = pipeline_number(at, at->stage, 0);
    }
    *ret = s;
    return 0;
}

/* Takes a connection out of `net`; -1: there is none. */
static int take_socket(struct cluster *net, enum cluster_link_kind kind, int32_t rank)
{
    int fd = rank < 0 ? -1 : net->fd[kind][rank];

    if (rank >= 0) {
        net->fd[kind][rank] = -1;
    }
    return fd;
}

static int connect_comm(struct transports *s, struct cluster *net, int64_t timeout_us,
                        struct err *e)
{
    const struct pipeline_place *at = &net->at;
    int fd[COMM_MAX_RANKS];
    int32_t first = pipeline_number(at, at->stage, 0);

    for (int32_t i = 0; i < at->n_ranks; i++) {
        fd[i] = take_socket(net, CLUSTER_COMM, first + i);
    }
    int rc = comm_tcp_open(&s->comm, fd, at->rank, at->n_ranks, timeout_us, e);
    if (rc == 0) {
        s->comm->first_rank = first;
    }
    return rc;
}

static int connect_pipeline(struct transports *s, struct cluster *net, int64_t timeout_us,
                            struct err *e)
{
    const struct pipeline_place *at = &net->at;
    int32_t target[COMM_MAX_RANKS];
    int fd[COMM_MAX_RANKS];
    int source =
        take_socket(net, at->stage > 0 ? CLUSTER_FORWARD : CLUSTER_BACK, pipeline_source(at));

    pipeline_targets(at, target);
    for (int32_t i = 0; i < at->n_ranks; i++) {
        fd[i] = take_socket(net, pipeline_is_last(at) ? CLUSTER_BACK : CLUSTER_FORWARD, target[i]);
    }
    return pipeline_tcp_open(&s->pipeline, source, fd, at, timeout_us, e);
}

int transports_connect(struct transports *ret, struct cluster *net, size_t slot_bytes,
                       int64_t timeout_us, struct err *e)
{
    const struct pipeline_place *at = &net->at;
    struct transports s = {0};
    int rc = at->n_ranks > 1 ? connect_comm(&s, net, timeout_us, e) : 0;

    if (rc == 0 && at->n_stages > 1) {
        rc = connect_pipeline(&s, net, timeout_us, e);
    }
    if (rc == 0) {
        rc = tcp_channel_open(&s.channel, net->fd[CLUSTER_CONTROL],
                              pipeline_number(at, at->stage, at->rank), net->n, slot_bytes, e);
    }
    if (rc < 0) {
        transports_release(&s);
    } else {
        *ret = s;
    }
    return rc;
}

void transports_abort(struct transports *s, const char *why)
{
    if (s->comm) {
        s->comm->ops->abort(s->comm, why);
    }
    if (s->pipeline) {
        s->pipeline->ops->abort(s->pipeline, why);
    }
}

int transports_check(struct transports *s, struct err *e)
{
    int rc = s->comm ? s->comm->ops->check(s->comm, e) : 0;

    return rc == 0 && s->pipeline ? s->pipeline->ops->check(s->pipeline, e) : rc;
}

void transports_release(struct transports *s)
{
    if (s->pipeline) {
        s->pipeline->ops->free(s->pipeline);
    }
    if (s->comm) {
        s->comm->ops->free(s->comm);
    }
    if (s->channel) {
        s->channel->ops->free(s->channel);
    }
    if (s->memory) {
        munmap(s->memory, s->n_bytes);
    }
    *s = (struct transports){0};
}
