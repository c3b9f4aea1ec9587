/* linear for one tile of x, as in decoding, where the time is that of reading w once.
 *
 * Every thread has a range of neighbouring rows of w, and reads it as some streams side
 * by side (ways/read_way.h), from the range's first rows to its last without a break
 * between tasks. Rows of a weight in blocks are taken in the order in which they are
 * stored, which may be another than that of the result's columns.
 * While a thread waits (for other threads, or through a norm or attention) it
 * prefetches the beginning of its range of the weight that followed in the step before,
 * so that memory does not idle between products.
 *
 * Small products that do not depend on each other, as those of a layer's experts, are
 * one job: a thread has a range of each, one after the other, and threads meet once.
 */
#include "kernels/cpu/cpu.h"

enum {
    STREAMS_MAX = 4,
    SLICE_MAX = 60, /* rows of one stream in a task */
    TASK_MAX_ROWS = STREAMS_MAX * SLICE_MAX,
    CODES_TASK_BYTES = 32 << 10,  /* cpu_tiles.task_bytes of codes */
    TASKS_PER_THREAD = 8,         /* at least, where the rows allow */
    WAIT_AHEAD_BYTES = 192 << 10, /* prefetched of the next range, for the second-level cache */
    PRODUCTS_MAX = 64,            /* in a job */
    SERIAL_PACKS = 8,             /* up to as many x are packed by the calling thread */
};

struct stream_job {
    struct cpu_backend *c;
    struct mat out, x, w;
    const struct epilogue *ep;
    const char *packed;            /* x */
    const struct cpu_tiles *tiles; /* for rows of w's type */
    const struct cpu_read_way *way;
    int32_t n_streams;   /* 1 .. STREAMS_MAX */
    int32_t thread_rows; /* rows of w per thread */
    int32_t run;         /* rows of a stream */
    int32_t slice;       /* rows of a stream in a task */
    int32_t n_each;      /* tasks per thread */
    bool paired;         /* cpu_rows_paired(&w) */
};

/* The rows of one task: n[s] rows of stream s from first[s] on. */
struct slices {
    int32_t first[STREAMS_MAX], n[STREAMS_MAX];
    int32_t longest; /* the greatest n */
    bool whole;      /* all n are the greatest */
};

static struct slices task_slices(const struct stream_job *j, int32_t task)
{
    struct slices s = {0};
    int32_t thread = task / j->n_each;
    int32_t at = (task - thread * j->n_each) * j->slice;

    for (int32_t i = 0; i < j->n_streams; i++) {
        s.first[i] = thread * j->thread_rows + i * j->run + at;
        s.n[i] = MAX(MIN(MIN(j->slice, j->run - at), j->w.rows - s.first[i]), 0);
        s.longest = MAX(s.longest, s.n[i]);
    }
    s.whole = true;
    for (int32_t i = 0; i < j->n_streams; i++) {
        s.whole &= s.n[i] == s.longest;
    }
    return s;
}

/* Store sum [rows in the order read][n_x] to out, where there is no epilogue and no
 * stream ends early, as in most tasks. */
static void store_sums(const struct stream_job *j, const struct slices *s, const float *sum)
{
    int32_t n_x = j->x.rows;

    for (int32_t x = 0; x < n_x; x++) {
        for (int32_t i = 0; i < j->n_streams; i++) {
            float *to = mat_row(j->out, x) + s->first[i];
            const float *from = sum + i * n_x + x;
            for (int32_t k = 0; k < s->longest; k++) {
                to[k] = from[k * j->n_streams * n_x];
            }
        }
    }
}

/* The same where rows are stored in pairs. */
static void store_pairs(const struct stream_job *j, const struct slices *s, const float *sum)
{
    int32_t n_x = j->x.rows, at[SLICE_MAX];

    for (int32_t i = 0; i < j->n_streams; i++) {
        cpu_stored_places(&j->w, s->first[i], s->longest, at);
        for (int32_t x = 0; x < n_x; x++) {
            float *to = mat_row(j->out, x);
            const float *from = sum + i * n_x + x;
            for (int32_t k = 0; k < s->longest; k++) {
                to[at[k]] = from[k * j->n_streams * n_x];
            }
        }
    }
}

/* n sums of one row of x, through the epilogue, to the columns of the rows that are
 * stored from number `first` on. */
static void store_paired(const struct stream_job *j, float *out, const float *residual,
                         const float *sum, int32_t first, int32_t n)
{
    const float *bias = j->ep->bias.data;
    float line[SLICE_MAX], of_bias[SLICE_MAX], of_residual[SLICE_MAX];
    int32_t at[SLICE_MAX];

    cpu_stored_places(&j->w, first, n, at);
    for (int32_t k = 0; k < n; k++) {
        of_bias[k] = bias ? bias[at[k]] : 0;
        of_residual[k] = residual ? residual[at[k]] : 0;
    }
    j->c->k.epilogue(line, sum, bias ? of_bias : NULL, residual ? of_residual : NULL, n,
                     j->ep->act);
    for (int32_t k = 0; k < n; k++) {
        out[at[k]] = line[k];
    }
}

/* The same for any task, through the epilogue. */
static void store_slices(const struct stream_job *j, const struct slices *s, const float *sum)
{
    float line[TILE_X_MAX][TASK_MAX_ROWS]; /* a stream behind the other */
    const float *bias = j->ep->bias.data;
    int32_t n_x = j->x.rows;

    for (int32_t k = 0; k < s->longest; k++) {
        for (int32_t i = 0; i < j->n_streams; i++) {
            for (int32_t x = 0; x < n_x && k < s->n[i]; x++) {
                line[x][i * SLICE_MAX + k] = *sum++;
            }
        }
    }
    for (int32_t x = 0; x < n_x; x++) {
        for (int32_t i = 0; i < j->n_streams; i++) {
            const float *residual = j->ep->residual.data ? mat_row_const(j->ep->residual, x) : NULL;
            if (j->paired) {
                store_paired(j, mat_row(j->out, x), residual, line[x] + i * SLICE_MAX, s->first[i],
                             s->n[i]);
                continue;
            }
            j->c->k.epilogue(mat_row(j->out, x) + s->first[i], line[x] + i * SLICE_MAX,
                             bias != NULL ? bias + s->first[i] : NULL,
                             residual != NULL ? residual + s->first[i] : NULL, s->n[i], j->ep->act);
        }
    }
}

static void multiply(const struct stream_job *j, const struct dot_rows *w, float *sum)
{
    if (j->w.format) {
        int32_t n_x = j->x.rows * cpu_planes(&j->w);
        struct prefetch ahead = {.distance = j->way->ahead_bytes, .period = 1, .far = j->way->far};
        cpu_blocks_of(&j->c->k, j->w.format->id, n_x)
            ->dots[j->w.format->id](sum, w, j->w.cols, (const struct act_block *)j->packed, n_x,
                                    &ahead);
        cpu_add_planes(sum, w->n * j->x.rows, cpu_planes(&j->w));
    } else {
        int32_t bytes = j->way->ahead_bytes > 0 ? j->way->ahead_bytes : j->tiles->ahead_bytes;
        struct prefetch ahead = {.distance = bytes, .period = 1, .far = j->way->far};
        j->tiles->dots(sum, w, j->packed, j->x.rows, (int32_t)div_ceil(j->w.cols, TILE_CHUNK),
                       false, &ahead);
    }
}

/* The rows of a weight that is not in blocks, in the order in which they are read.
 * Returns their number. */
static int32_t list_rows(const struct stream_job *j, const struct slices *s, const void **row)
{
    int64_t bytes = cpu_row_bytes(&j->w);
    const char *next[STREAMS_MAX];
    int32_t n = 0;

    for (int32_t i = 0; i < j->n_streams; i++) {
        next[i] = (const char *)j->w.data + s->first[i] * bytes;
    }
    for (int32_t k = 0; k < s->longest; k++) {
        for (int32_t i = 0; i < j->n_streams; i++) {
            if (k < s->n[i]) {
                row[n++] = next[i];
                next[i] += bytes;
            }
        }
    }
    return n;
}

/* The same of one in blocks, and the scales of its rows where they lie apart (else
 * NULL). */
static int32_t list_block_rows(const struct stream_job *j, const struct slices *s, const void **row,
                               struct row_scales *scales)
{
    const void *of_stream[STREAMS_MAX][SLICE_MAX];
    int32_t n = 0;

    for (int32_t i = 0; i < j->n_streams && s->whole && !scales; i++) {
        cpu_stored_rows(&j->w, s->first[i], s->longest, row + i, j->n_streams);
    }
    if (s->whole && !scales) {
        return j->n_streams * s->longest;
    }
    for (int32_t i = 0; i < j->n_streams; i++) {
        cpu_stored_rows(&j->w, s->first[i], s->n[i], of_stream[i], 1);
    }
    for (int32_t k = 0; k < s->longest; k++) {
        for (int32_t i = 0; i < j->n_streams; i++) {
            if (k < s->n[i]) {
                row[n] = of_stream[i][k];
                if (scales) {
                    scales[n] = cpu_row_scales(&j->w, s->first[i] + k);
                }
                n++;
            }
        }
    }
    return n;
}

static void stream_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct stream_job *j = arg;
    const void *row[TASK_MAX_ROWS];
    struct row_scales scales[TASK_MAX_ROWS];
    bool apart = j->w.format && weight_format_has_scales(j->w.format);
    float sum[TILE_X_MAX * TASK_MAX_ROWS + 4];
    struct slices s = task_slices(j, task);
    struct dot_rows w = {.row = row, .dtype = j->w.dtype, .scales = apart ? scales : NULL};
    w.n = j->w.format ? list_block_rows(j, &s, row, apart ? scales : NULL) : list_rows(j, &s, row);
    if (w.n > 0) {
        multiply(j, &w, sum);
        bool plain = !j->ep->bias.data && !j->ep->residual.data && j->ep->act == ACT_NONE;
        (!s.whole || !plain ? store_slices : j->paired ? store_pairs : store_sums)(j, &s, sum);
    }
}

static enum cpu_read_class class_of(const struct mat *w)
{
    return w->format ? READ_CODES : READ_FLOATS;
}

static void plan_ranges(struct stream_job *j)
{
    int32_t threads = cpu_pool_threads(j->c->pool);

    j->tiles = cpu_tiles_of(&j->c->k, j->w.dtype);
    j->way = cpu_read_way(&j->c->reads, class_of(&j->w));
    int32_t n = j->n_streams = j->way->streams > 0 ? j->way->streams : j->tiles->streams;
    int32_t step = j->way->step > 0 ? j->way->step : j->tiles->step;
    int64_t bytes = j->w.format ? CODES_TASK_BYTES : j->tiles->task_bytes;
    j->run = (int32_t)div_ceil(j->w.rows, threads * n);
    j->thread_rows = j->run * n;
    int64_t slice =
        MIN(bytes / (n * cpu_row_bytes(&j->w)), j->run / TASKS_PER_THREAD) / step * step;
    j->slice = (int32_t)MIN(MAX(slice, step), SLICE_MAX / step * step);
    j->n_each = (int32_t)div_ceil(j->run, j->slice);
    j->paired = cpu_rows_paired(&j->w);
}

/* Record that this weight is read now; returns where the threads will begin to read the
 * weight that followed it last time. */
static struct cpu_readahead ahead_of(const struct stream_job *j)
{
    struct cpu_weight *own = j->w.priv;
    struct cpu_weight *now = own && !own->view ? own : NULL;
    struct cpu_weight *before = j->c->last_weight;

    if (before) {
        before->next = now;
    }
    j->c->last_weight = now;
    if (!now || !now->next || now->next->n_parts > 1) {
        return (struct cpu_readahead){0};
    }
    struct stream_job next = {.c = j->c, .w = now->next->m};
    plan_ranges(&next);
    int64_t bytes = cpu_row_bytes(&next.w);
    return (struct cpu_readahead){.data = next.w.data,
                                  .n_total = next.w.rows * bytes,
                                  .thread_bytes = next.thread_rows * bytes,
                                  .stream_bytes = next.run * bytes,
                                  .n_bytes =
                                      MIN(next.run * bytes, WAIT_AHEAD_BYTES / next.n_streams),
                                  .n_streams = next.n_streams};
}

void cpu_linear_stream(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep)
{
    struct stream_job j = {.c = c, .out = out, .x = x, .w = w, .ep = ep, .packed = c->packed};

    plan_ranges(&j);
    struct cpu_readahead ahead = ahead_of(&j);
    enum cpu_read_class class = class_of(&w);
    bool timed = x.rows == 1 && cpu_read_is_timed(&c->reads, class);
    int64_t began_us = timed ? clock_us() : 0;
    cpu_pool_run_ranges(c->pool, j.n_each, stream_task, &j, &ahead);
    if (timed) {
        cpu_read_took(&c->reads, class, clock_us() - began_us, w.rows * cpu_row_bytes(&w));
    }
}

/* ---- several products ---- */

struct stream_jobs {
    struct stream_job job[PRODUCTS_MAX];
    int32_t n;
    int32_t n_each; /* tasks per thread, of all */
};

static void streams_task(void *arg, int32_t task, int32_t thread)
{
    struct stream_jobs *js = arg;
    int32_t range = task / js->n_each, at = task % js->n_each;
    struct stream_job *j = js->job;

    while (at >= j->n_each) {
        at -= j->n_each;
        j++;
    }
    stream_task(j, range * j->n_each + at, thread);
}

static void pack_product(void *arg, int32_t i, int32_t thread)
{
    const struct stream_jobs *js = arg;
    const struct stream_job *j = &js->job[i];

    (void)thread;
    if (i == 0 || j->packed != j[-1].packed) {
        cpu_pack_codes(j->c, (char *)(uintptr_t)j->packed, j->x, &j->w);
    }
}

/* Whether the two products have the same rows of codes. */
static bool have_same_x(const struct cpu_product *a, const struct cpu_product *b)
{
    return a->x.data == b->x.data && a->x.rows == b->x.rows &&
           cpu_planes(&a->w) == cpu_planes(&b->w) && a->w.format == b->w.format;
}

static void run_products(struct cpu_backend *c, const struct cpu_product *p, int32_t n,
                         int64_t tile_bytes)
{
    struct stream_jobs js = {.n = n};
    int32_t at = -1;

    for (int32_t i = 0; i < n; i++) {
        struct stream_job *j = &js.job[i];
        at += i == 0 || !have_same_x(&p[i - 1], &p[i]);
        *j = (struct stream_job){.c = c, .out = p[i].out, .x = p[i].x, .w = p[i].w, .ep = &p[i].ep};
        j->packed = c->packed + at * tile_bytes;
        plan_ranges(j);
        js.n_each += j->n_each;
    }
    if (at < SERIAL_PACKS) {
        for (int32_t i = 0; i < n; i++) {
            pack_product(&js, i, 0);
        }
    } else {
        cpu_pool_run(c->pool, n, pack_product, &js);
    }
    cpu_pool_run_ranges(c->pool, js.n_each, streams_task, &js, NULL);
}

void cpu_linear_products(struct cpu_backend *c, const struct cpu_product *p, int32_t n)
{
    int64_t tile_bytes = 0;

    for (int32_t i = 0; i < n; i++) {
        tile_bytes = MAX(tile_bytes, cpu_codes_bytes(p[i].w.cols));
    }
    c->packed_x.x = NULL;
    c->last_weight = NULL;
    if (cpu_reserve_packed(c, MIN(n, PRODUCTS_MAX) * tile_bytes) < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for a matrix product");
        return;
    }
    for (int32_t i = 0; i < n; i += PRODUCTS_MAX) {
        run_products(c, p + i, MIN(PRODUCTS_MAX, n - i), tile_bytes);
    }
}
