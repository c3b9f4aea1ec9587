/* linear for one tile of x, as in decoding, where the time is that of reading w once.
 *
 * Every thread has a range of neighbouring rows of w, and reads it as cpu_tiles.streams
 * streams side by side, from the range's first rows to its last without a break between
 * tasks.
 * While a thread waits (for other threads, or through a norm or attention) it
 * prefetches the beginning of its range of the weight that followed in the step before,
 * so that memory does not idle between products.
 */
#include "kernels/cpu/cpu.h"

enum {
    STREAMS_MAX = 4,
    CODES_STREAMS = 4, /* cpu_tiles.streams of codes */
    CODES_STEP = 3,    /* cpu_tiles.step of codes */
    SLICE_MAX = 60,    /* rows of one stream in a task */
    TASK_MAX_ROWS = STREAMS_MAX * SLICE_MAX,
    CODES_TASK_BYTES = 32 << 10,  /* cpu_tiles.task_bytes of codes */
    TASKS_PER_THREAD = 8,         /* at least, where the rows allow */
    CODES_AHEAD_BYTES = 3072,     /* prefetched ahead of codes */
    WAIT_AHEAD_BYTES = 192 << 10, /* prefetched of the next range, for the second-level cache */
};

struct stream_job {
    struct cpu_backend *c;
    struct mat out, x, w;
    const struct epilogue *ep;
    const struct cpu_tiles *tiles; /* for rows of w's type */
    int32_t n_streams;             /* 1 .. STREAMS_MAX */
    int32_t thread_rows;           /* rows of w per thread */
    int32_t run;                   /* rows of a stream */
    int32_t slice;                 /* rows of a stream in a task */
    int32_t n_each;                /* tasks per thread */
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
        struct prefetch ahead = {.distance = CODES_AHEAD_BYTES, .period = 1};
        cpu_blocks_of(&j->c->k, j->w.format->id, n_x)
            ->dots[j->w.format->id](sum, w, j->w.cols, (struct act_block *)j->c->packed, n_x,
                                    &ahead);
        cpu_add_planes(sum, w->n * j->x.rows, cpu_planes(&j->w));
    } else {
        struct prefetch ahead = {.distance = j->tiles->ahead_bytes, .period = 1};
        j->tiles->dots(sum, w, j->c->packed, j->x.rows, (int32_t)div_ceil(j->w.cols, TILE_CHUNK),
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
        cpu_rows(&j->w, s->first[i], s->longest, row + i, j->n_streams);
    }
    if (s->whole && !scales) {
        return j->n_streams * s->longest;
    }
    for (int32_t i = 0; i < j->n_streams; i++) {
        cpu_rows(&j->w, s->first[i], s->n[i], of_stream[i], 1);
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
        (s.whole && plain ? store_sums : store_slices)(j, &s, sum);
    }
}

static void plan_ranges(struct stream_job *j)
{
    int32_t threads = cpu_pool_threads(j->c->pool);

    j->tiles = cpu_tiles_of(&j->c->k, j->w.dtype);
    int32_t n = j->n_streams = j->w.format ? CODES_STREAMS : j->tiles->streams;
    int32_t step = j->w.format ? CODES_STEP : j->tiles->step;
    int64_t bytes = j->w.format ? CODES_TASK_BYTES : j->tiles->task_bytes;
    j->run = (int32_t)div_ceil(j->w.rows, threads * n);
    j->thread_rows = j->run * n;
    int64_t slice =
        MIN(bytes / (n * cpu_row_bytes(&j->w)), j->run / TASKS_PER_THREAD) / step * step;
    j->slice = (int32_t)MIN(MAX(slice, step), SLICE_MAX / step * step);
    j->n_each = (int32_t)div_ceil(j->run, j->slice);
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
    struct stream_job j = {.c = c, .out = out, .x = x, .w = w, .ep = ep};

    plan_ranges(&j);
    struct cpu_readahead ahead = ahead_of(&j);
    cpu_pool_run_ranges(c->pool, j.n_each, stream_task, &j, &ahead);
}
