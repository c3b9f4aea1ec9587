#include "engine/rank_shared.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/rank_net.h"

static size_t ring_bytes(size_t slot_bytes)
{
    return (rank_ring_bytes(slot_bytes) + 4095) / 4096 * 4096;
}

int rank_shared_create(int *ret_fd, int32_t n_ranks, size_t slot_bytes, struct err *e)
{
    int fd = memfd_create("quire-ranks", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(ring_bytes(slot_bytes) + comm_shm_bytes(n_ranks))) < 0) {
        int why = errno;
        if (fd >= 0)
            close(fd);
        return err_set(e, ERR_IO, "memory shared by %d ranks: %s", n_ranks, strerror(why));
    }
    *ret_fd = fd;
    return 0;
}

int rank_shared_open(struct rank_shared *ret, int fd, int32_t rank, int32_t n_ranks, size_t slot_bytes,
                     int64_t timeout_us, struct err *e)
{
    struct rank_shared s = {.n_bytes = ring_bytes(slot_bytes) + comm_shm_bytes(n_ranks)};
    s.memory = mmap(NULL, s.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s.memory == MAP_FAILED)
        return err_set(e, ERR_IO, "memory shared by %d ranks: %s", n_ranks, strerror(errno));
    int rc = rank_ring_open(&s.link, s.memory, rank, n_ranks, slot_bytes, e);
    if (rc == 0)
        rc = comm_shm_open(&s.comm, (char *)s.memory + ring_bytes(slot_bytes), rank, n_ranks, timeout_us, e);
    if (rc < 0) {
        rank_shared_release(&s);
        return rc;
    }
    *ret = s;
    return 0;
}

int rank_shared_connect(struct rank_shared *ret, const int *control, const int *comm, int32_t rank, int32_t n_ranks,
                        size_t slot_bytes, int64_t timeout_us, struct err *e)
{
    struct rank_shared s = {0};
    int rc = comm_tcp_open(&s.comm, comm, rank, n_ranks, timeout_us, e);
    if (rc == 0)
        rc = rank_stream_open(&s.link, control, rank, n_ranks, slot_bytes, e);
    if (rc < 0)
        rank_shared_release(&s);
    else
        *ret = s;
    return rc;
}

void rank_shared_release(struct rank_shared *s)
{
    if (s->comm)
        s->comm->ops->free(s->comm);
    if (s->link)
        s->link->ops->free(s->link);
    if (s->memory)
        munmap(s->memory, s->n_bytes);
    *s = (struct rank_shared){0};
}
