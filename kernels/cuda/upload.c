/* Weights from host memory to the device, by several threads: each copies its share into pinned buffers of its own, two in
 * turn, and sends them off; one thread alone copies slower than the device takes them.
 *
 * A weight is cut into slices of whole stored rows, and the threads take the next one until none is left. When upload_send
 * returns the source has been read, but the copies may still be on their way. Slices whose stored type or order differs go
 * through a buffer on the device and are converted into place there.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"

enum { MAX_SENDERS = 8, BUFFERS = 2 };
#define PAGE_BYTES ((uintptr_t)4096)

/* One thread's buffers. */
struct sender {
    struct upload *upload;
    pthread_t thread;
    char *pinned[BUFFERS], *device[BUFFERS];
    cudaEvent_t free[BUFFERS]; /* the copy out of the buffer is done */
    int turn;
};

/* One piece on its way. Written by upload_send while no thread is at work. */
struct job {
    struct weight_piece piece;
    struct mat out;
    int64_t at; /* element of `out` where stored row 0 goes (or column, when transposed) */
    int32_t rows_at_once, n_slices;
};

struct upload {
    struct cuda_backend *backend;
    struct sender sender[MAX_SENDERS]; /* the first is the caller's own */
    int32_t n_threads;                 /* of the others */
    struct job job;
    atomic_int next_slice;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t n_jobs; /* these four under `lock` */
    int32_t n_busy;
    cudaError_t failed;
    bool stopping;
};

/* ---- one slice ---- */

/* The pages of a mapped file at once, where the kernel can: one by one they cost more than the copy. */
static void touch(const char *from, size_t n_bytes)
{
#ifdef MADV_POPULATE_READ
    uintptr_t first = (uintptr_t)from / PAGE_BYTES * PAGE_BYTES;
    madvise((void *)first, (uintptr_t)from + n_bytes - first, MADV_POPULATE_READ); /* a wish */
#else
    (void)from, (void)n_bytes;
#endif
}

/* Stored rows [first, first + n) of a piece, one behind the other. */
static void gather_rows(char *to, const struct weight_piece *p, int32_t first, int32_t n)
{
    int64_t size = dtype_bytes(p->dtype);
    size_t row_bytes = (size_t)(p->cols * size);
    const char *from = (const char *)p->data + first * p->stride * size;
    touch(from, (size_t)(n - 1) * (size_t)(p->stride * size) + row_bytes);
    if (p->stride == p->cols) {
        memcpy(to, from, row_bytes * (size_t)n);
        return;
    }
    for (int32_t r = 0; r < n; r++) {
        memcpy(to + (size_t)r * row_bytes, from + r * p->stride * size, row_bytes);
    }
}

static cudaError_t send_slice(struct sender *s, const struct job *j, int32_t slice)
{
    const struct weight_piece *p = &j->piece;
    const struct mat *m = &j->out;
    cudaStream_t stream = s->upload->backend->stream;
    int32_t first = slice * j->rows_at_once, n = MIN(j->rows_at_once, p->rows - first);
    int turn = s->turn = (s->turn + 1) % BUFFERS;
    bool direct = !p->transposed && p->dtype == m->dtype;
    char *to = (char *)m->data + (j->at + (p->transposed ? first : first * m->stride)) * dtype_bytes(m->dtype);
    size_t n_bytes = (size_t)n * (size_t)p->cols * (size_t)dtype_bytes(p->dtype);
    cudaError_t rc = cudaEventSynchronize(s->free[turn]);
    if (rc != cudaSuccess) {
        return rc;
    }
    gather_rows(s->pinned[turn], p, first, n);
    rc = cudaMemcpyAsync(direct ? to : s->device[turn], s->pinned[turn], n_bytes, cudaMemcpyHostToDevice, stream);
    if (rc == cudaSuccess && !direct) {
        launch_convert(to, (int)m->dtype, m->stride, s->device[turn], (int)p->dtype, p->cols,
                       p->transposed ? p->cols : n, p->transposed ? n : p->cols, p->transposed, stream);
        rc = cudaGetLastError();
    }
    return rc == cudaSuccess ? cudaEventRecord(s->free[turn], stream) : rc;
}

static void note_failure(struct upload *u, cudaError_t rc)
{
    pthread_mutex_lock(&u->lock);
    u->failed = u->failed == cudaSuccess ? rc : u->failed;
    pthread_mutex_unlock(&u->lock);
}

static cudaError_t make_buffers(struct sender *s)
{
    cudaError_t rc = cudaSuccess;
    for (int i = 0; i < BUFFERS && rc == cudaSuccess; i++) {
        rc = cudaHostAlloc((void **)&s->pinned[i], UPLOAD_SLICE_BYTES, cudaHostAllocDefault);
        rc = rc == cudaSuccess ? cudaMalloc((void **)&s->device[i], UPLOAD_SLICE_BYTES) : rc;
        rc = rc == cudaSuccess ? cudaEventCreateWithFlags(&s->free[i], cudaEventDisableTiming) : rc;
    }
    return rc;
}

static void work(struct sender *s)
{
    struct upload *u = s->upload;
    int32_t slice;
    cudaError_t rc = s->free[BUFFERS - 1] == NULL ? make_buffers(s) : cudaSuccess;
    while (rc == cudaSuccess && (slice = atomic_fetch_add(&u->next_slice, 1)) < u->job.n_slices) {
        rc = send_slice(s, &u->job, slice);
    }
    if (rc != cudaSuccess) {
        note_failure(u, rc);
    }
}

/* ---- the threads ---- */

static void *sender_main(void *arg)
{
    struct sender *s = arg;
    struct upload *u = s->upload;
    uint64_t n_seen = 0;
    cudaError_t rc = cudaSetDevice(u->backend->config.device);
    if (rc != cudaSuccess) {
        note_failure(u, rc);
    }
    pthread_mutex_lock(&u->lock);
    for (;;) {
        while (u->n_jobs == n_seen && !u->stopping) {
            pthread_cond_wait(&u->changed, &u->lock);
        }
        if (u->stopping) {
            break;
        }
        n_seen = u->n_jobs;
        pthread_mutex_unlock(&u->lock);
        work(s);
        pthread_mutex_lock(&u->lock);
        if (--u->n_busy == 0) {
            pthread_cond_broadcast(&u->changed);
        }
    }
    pthread_mutex_unlock(&u->lock);
    return NULL;
}

void cuda_upload_release(struct cuda_backend *c)
{
    struct upload *u = c->upload;
    if (u == NULL) {
        return;
    }
    pthread_mutex_lock(&u->lock);
    u->stopping = true;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    for (int32_t i = 1; i <= u->n_threads; i++) {
        pthread_join(u->sender[i].thread, NULL);
    }
    cudaStreamSynchronize(c->stream);
    for (int32_t i = 0; i < MAX_SENDERS; i++) {
        for (int k = 0; k < BUFFERS; k++) {
            cudaFreeHost(u->sender[i].pinned[k]);
            cudaFree(u->sender[i].device[k]);
            if (u->sender[i].free[k] != NULL) {
                cudaEventDestroy(u->sender[i].free[k]);
            }
        }
    }
    pthread_cond_destroy(&u->changed);
    pthread_mutex_destroy(&u->lock);
    free(u);
    c->upload = NULL;
}

static int upload_init(struct cuda_backend *c, struct err *e)
{
    struct upload *u = calloc(1, sizeof(*u));
    if (u == NULL) {
        return err_nomem(e, "loading weights");
    }
    c->upload = u;
    u->backend = c;
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->changed, NULL);
    for (int32_t i = 0; i < MAX_SENDERS; i++) {
        u->sender[i].upload = u;
    }
    return 0;
}

/* Fewer than wanted are slower, no more. */
static void start_threads(struct upload *u)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    for (int32_t i = 1; i < MIN(n, MAX_SENDERS); i++) {
        if (pthread_create(&u->sender[i].thread, NULL, sender_main, &u->sender[i]) != 0) {
            return;
        }
        u->n_threads = i;
    }
}

int upload_send(struct cuda_backend *c, const struct weight_piece *p, struct mat out, int64_t at, struct err *e)
{
    int64_t rows = UPLOAD_SLICE_BYTES / (p->cols * dtype_bytes(p->dtype));
    if (rows < 1) {
        return err_set(e, ERR_UNSUPPORTED, "cuda: a weight with rows of %d elements", p->cols);
    }
    int rc = c->upload == NULL ? upload_init(c, e) : 0;
    if (rc < 0) {
        return rc;
    }
    struct upload *u = c->upload;
    u->job = (struct job){.piece = *p,
                          .out = out,
                          .at = at,
                          .rows_at_once = (int32_t)MIN(rows, p->rows),
                          .n_slices = (int32_t)div_ceil(p->rows, MIN(rows, p->rows))};
    atomic_store(&u->next_slice, 0);
    if (u->job.n_slices > 1 && u->n_threads == 0) {
        start_threads(u);
    }
    pthread_mutex_lock(&u->lock);
    if (u->job.n_slices > 1) {
        u->n_jobs++;
        u->n_busy = u->n_threads;
        pthread_cond_broadcast(&u->changed);
    }
    pthread_mutex_unlock(&u->lock);
    work(&u->sender[0]);
    pthread_mutex_lock(&u->lock);
    while (u->n_busy > 0) {
        pthread_cond_wait(&u->changed, &u->lock);
    }
    cudaError_t status = u->failed;
    pthread_mutex_unlock(&u->lock);
    return status == cudaSuccess ? 0 : cuda_error(e, status, "loading weights");
}
