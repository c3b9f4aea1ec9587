/* Copying weights from host memory to the device, by several threads. Each copies its
 * share into two pinned buffers of its own, used alternately, and sends them off; a
 * single thread would copy slower than the device receives.
 *
 * A weight is cut into slices of whole stored rows, queued behind those of earlier
 * weights; the threads take the next one. Mapped data stays valid, so the caller goes
 * on to the next weight; other data has been read when upload_send returns. The copies
 * may still be in flight. Slices whose stored type or order differs go through a device
 * buffer and are converted into place.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"

enum { MAX_SENDERS = 16, BUFFERS = 2, MAX_JOBS = 64 };
#define PAGE_BYTES ((uintptr_t)4096)

/* One thread with its buffers. */
struct sender {
    struct upload *upload;
    pthread_t thread;
    char *pinned[BUFFERS], *device[BUFFERS]; /* device: made when first needed for a conversion */
    cudaEvent_t free[BUFFERS];               /* the copy out of the buffer has completed */
    int buffer;                              /* used last */
};

/* One piece of a weight. */
struct job {
    struct weight_piece piece;
    struct mat out;
    int64_t at; /* element of `out` where stored row 0 goes (or column 0, if transposed) */
    int32_t rows_at_once, n_slices;
};

struct upload {
    struct cuda_backend *backend;
    struct sender sender[MAX_SENDERS];
    int32_t n_threads;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* job i is at i % MAX_JOBS; this and all below is guarded by `lock` */
    struct job job[MAX_JOBS];
    int64_t n_jobs, n_begun; /* jobs queued; of these, jobs whose slices are all taken */
    int32_t next_slice;      /* of job n_begun */
    int32_t n_busy;          /* threads working on a slice */
    cudaError_t failed;      /* first error; then no more slices are sent */
    bool stopping;
};

/* ---- one slice ---- */

/* Populates the pages of a mapped file at once, where the kernel can: page faults one
 * by one cost more than the copy. */
static void touch(const char *from, size_t n_bytes)
{
#ifdef MADV_POPULATE_READ
    uintptr_t first = (uintptr_t)from / PAGE_BYTES * PAGE_BYTES;
    /* best effort */
    madvise((void *)first, (uintptr_t)from + n_bytes - first, MADV_POPULATE_READ);
#else
    (void)from, (void)n_bytes;
#endif
}

/* Copies stored rows [first, first + n) of a piece, without gaps. */
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

/* Allocated here and registered, which is much faster than a pinned allocation by the
 * driver. */
static cudaError_t pin_buffer(char **ret)
{
    void *p =
        mmap(NULL, UPLOAD_SLICE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        return cudaErrorMemoryAllocation;
    }
    memset(p, 0, UPLOAD_SLICE_BYTES);
    *ret = p;
    return cudaHostRegister(p, UPLOAD_SLICE_BYTES, cudaHostRegisterDefault);
}

static void unpin_buffer(char *p)
{
    if (p) {
        cudaHostUnregister(p);
        munmap(p, UPLOAD_SLICE_BYTES);
    }
}

static cudaError_t make_buffer(struct sender *s, int i, bool direct)
{
    cudaError_t rc = cudaSuccess;

    if (!s->pinned[i]) {
        rc = pin_buffer(&s->pinned[i]);
        rc = rc == cudaSuccess ? cudaEventCreateWithFlags(&s->free[i], cudaEventDisableTiming) : rc;
    }
    if (!direct && !s->device[i] && rc == cudaSuccess) {
        rc = cudaMalloc((void **)&s->device[i], UPLOAD_SLICE_BYTES);
    }
    return rc;
}

static cudaError_t send_slice(struct sender *s, const struct job *j, int32_t slice)
{
    const struct weight_piece *p = &j->piece;
    const struct mat *m = &j->out;
    cudaStream_t stream = s->upload->backend->stream;
    int32_t first = slice * j->rows_at_once, n = MIN(j->rows_at_once, p->rows - first);
    int buffer = s->buffer = (s->buffer + 1) % BUFFERS;
    bool direct = !p->transposed && p->dtype == m->dtype;
    char *to = (char *)m->data +
               (j->at + (p->transposed ? first : first * m->stride)) * dtype_bytes(m->dtype);
    size_t n_bytes = (size_t)n * (size_t)p->cols * (size_t)dtype_bytes(p->dtype);
    cudaError_t rc = make_buffer(s, buffer, direct);

    rc = rc == cudaSuccess ? cudaEventSynchronize(s->free[buffer]) : rc;
    if (rc != cudaSuccess) {
        return rc;
    }
    gather_rows(s->pinned[buffer], p, first, n);
    rc = cudaMemcpyAsync(direct ? to : s->device[buffer], s->pinned[buffer], n_bytes,
                         cudaMemcpyHostToDevice, stream);
    if (rc == cudaSuccess && !direct) {
        launch_convert(to, (int)m->dtype, m->stride, s->device[buffer], (int)p->dtype, p->cols,
                       p->transposed ? p->cols : n, p->transposed ? n : p->cols, p->transposed,
                       stream);
        rc = cudaGetLastError();
    }
    return rc == cudaSuccess ? cudaEventRecord(s->free[buffer], stream) : rc;
}

/* ---- the threads ---- */

/* Takes the next slice; -1: there is none now. Under `lock`. */
static int32_t take_slice(struct upload *u, struct job *ret)
{
    if (u->n_begun == u->n_jobs) {
        return -1;
    }
    *ret = u->job[u->n_begun % MAX_JOBS];
    int32_t slice = u->next_slice++;
    if (u->next_slice == ret->n_slices) {
        u->next_slice = 0;
        u->n_begun++;
    }
    return slice;
}

static void *sender_main(void *arg)
{
    struct sender *s = arg;
    struct upload *u = s->upload;
    struct job job;
    cudaError_t rc = cudaSetDevice(u->backend->config.device);

    pthread_mutex_lock(&u->lock);
    while (!u->stopping) {
        u->failed = u->failed == cudaSuccess ? rc : u->failed;
        int32_t slice = take_slice(u, &job);
        if (slice < 0) {
            pthread_cond_wait(&u->changed, &u->lock);
            continue;
        }
        if (u->failed != cudaSuccess) {
            continue;
        }
        u->n_busy++;
        pthread_mutex_unlock(&u->lock);
        rc = send_slice(s, &job, slice);
        pthread_mutex_lock(&u->lock);
        u->n_busy--;
        pthread_cond_broadcast(&u->changed);
    }
    pthread_mutex_unlock(&u->lock);
    return NULL;
}

void cuda_upload_release(struct cuda_backend *c)
{
    struct upload *u = c->upload;

    if (!u) {
        return;
    }
    pthread_mutex_lock(&u->lock);
    u->stopping = true;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    for (int32_t i = 0; i < u->n_threads; i++) {
        pthread_join(u->sender[i].thread, NULL);
    }
    cudaStreamSynchronize(c->stream);
    for (int32_t i = 0; i < MAX_SENDERS; i++) {
        for (int k = 0; k < BUFFERS; k++) {
            unpin_buffer(u->sender[i].pinned[k]);
            cudaFree(u->sender[i].device[k]);
            if (u->sender[i].free[k]) {
                cudaEventDestroy(u->sender[i].free[k]);
            }
        }
    }
    pthread_cond_destroy(&u->changed);
    pthread_mutex_destroy(&u->lock);
    free(u);
    c->upload = NULL;
}

/* Starts at least one thread; fewer than wanted are only slower. */
static int start_threads(struct upload *u, struct err *e)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);

    for (int32_t i = 0; i < MIN(MAX(n, 1), MAX_SENDERS); i++) {
        u->sender[i].upload = u;
        if (pthread_create(&u->sender[i].thread, NULL, sender_main, &u->sender[i]) != 0) {
            break;
        }
        u->n_threads = i + 1;
    }
    return u->n_threads > 0 ? 0 : err_set(e, ERR_IO, "cannot start a thread to load weights");
}

static int upload_init(struct cuda_backend *c, struct err *e)
{
    struct upload *u = calloc(1, sizeof(*u));

    if (!u) {
        return err_nomem(e, "loading weights");
    }
    c->upload = u;
    u->backend = c;
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->changed, NULL);
    return start_threads(u, e);
}

/* Waits until every slice of all jobs was read and sent off. Under `lock`. */
static void wait_all_read(struct upload *u)
{
    while (u->n_begun < u->n_jobs || u->n_busy > 0) {
        pthread_cond_wait(&u->changed, &u->lock);
    }
}

int upload_send(struct cuda_backend *c, const struct weight_piece *p, struct mat out, int64_t at,
                bool mapped, struct err *e)
{
    int64_t rows = UPLOAD_SLICE_BYTES / (p->cols * dtype_bytes(p->dtype));

    if (rows < 1) {
        return err_set(e, ERR_UNSUPPORTED, "cuda: a weight with rows of %d elements", p->cols);
    }
    int rc = !c->upload ? upload_init(c, e) : 0;
    if (rc < 0) {
        return rc;
    }
    struct upload *u = c->upload;
    pthread_mutex_lock(&u->lock);
    while (u->n_jobs - u->n_begun == MAX_JOBS) {
        pthread_cond_wait(&u->changed, &u->lock);
    }
    u->job[u->n_jobs++ % MAX_JOBS] =
        (struct job){.piece = *p,
                     .out = out,
                     .at = at,
                     .rows_at_once = (int32_t)MIN(rows, p->rows),
                     .n_slices = (int32_t)div_ceil(p->rows, MIN(rows, p->rows))};
    pthread_cond_broadcast(&u->changed);
    if (!mapped) {
        wait_all_read(u);
    }
    cudaError_t status = u->failed;
    pthread_mutex_unlock(&u->lock);
    return status == cudaSuccess ? 0 : cuda_error(e, status, "loading weights");
}

int cuda_upload_finish(struct cuda_backend *c, struct err *e)
{
    struct upload *u = c->upload;
    cudaError_t rc = cudaSuccess;

    if (u) {
        pthread_mutex_lock(&u->lock);
        wait_all_read(u);
        rc = u->failed;
        pthread_mutex_unlock(&u->lock);
    }
    rc = rc == cudaSuccess ? cudaStreamSynchronize(c->stream) : rc;
    cuda_upload_release(c);
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "loading weights");
}
