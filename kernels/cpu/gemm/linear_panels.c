/* linear for many rows of x, by panels: some rows of w (cpu_panels.rows) are put in the
 * order in which the inner loop reads them, converted where it needs that, and stay in
 * the second-level cache while they are multiplied with every tile of x. The next
 * panel's rows are prefetched meanwhile. A task is one panel with all tiles, or with a
 * range of them where panels are few.
 *
 * Of more columns than k_block, one block at a time is taken through all of w, so that
 * the block of packed x, which every panel reads, fits into the last-level cache. The
 * sums of the blocks so far are kept in out.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/fetch.h"

enum {
    LINE_BYTES = 64,
    TASKS_PER_THREAD = 8,                /* at least, where the tiles allow */
    TASK_TILES = 16,                     /* of x in a task, at least */
    GROUP_ROWS = PANEL_TILES * TILE_ROWS /* of x in one call of dots */
};

struct panel_job {
    struct cpu_backend *c;
    struct mat out, x, w;
    const struct epilogue *ep;
    const struct cpu_panels *panels; /* for rows of w's type */
    int32_t padded;                  /* columns, a multiple of TILE_CHUNK */
    int32_t first_col, n_cols;       /* of the block under way */
    int32_t n_tiles;                 /* of x */
    int32_t panel_rows;              /* of w in a panel */
    int32_t thread_panels;           /* panels of w per thread */
    int32_t n_ranges;                /* ranges of tiles, one per task of a panel */
    int32_t task_tiles;              /* of a range */
    int64_t panel_floats;            /* of one thread's panel */
};

static void pack_tile(void *arg, int32_t tile, int32_t thread)
{
    (void)thread;
    const struct panel_job *j = arg;
    const float *row[TILE_ROWS];
    int32_t n_x = MIN(TILE_ROWS, j->x.rows - tile * TILE_ROWS);
    for (int32_t i = 0; i < n_x; i++) {
        row[i] = mat_row_const(j->x, tile * TILE_ROWS + i) + j->first_col;
    }
    j->panels->pack_x((float *)(void *)j->c->packed, tile, j->n_tiles, row, n_x,
                      MIN(j->n_cols, j->x.cols - j->first_col), j->n_cols, j->w.dtype);
}

/* Pack the block's columns of a panel's rows from `first` on. The last panel is filled
 * up with copies of w's last row. */
static void pack_panel(const struct panel_job *j, int32_t first, float *panel)
{
    const void *row[PANEL_MAX_ROWS];

    for (int32_t i = 0; i < j->panel_rows; i++) {
        row[i] = (const char *)j->w.data +
                 MIN(first + i, j->w.rows - 1) * j->w.stride * dtype_bytes(j->w.dtype);
    }
    j->panels->pack_rows(panel, row, j->first_col, j->n_cols, j->w.dtype);
}

/* The stored rows of the next panel, to be prefetched over this panel's tiles. */
static struct line_prefetch next_panel(const struct panel_job *j, int32_t first, int32_t n_tiles)
{
    int32_t rows = MAX(MIN(j->panel_rows, j->w.rows - first - j->panel_rows), 0);
    int64_t bytes = dtype_bytes(j->w.dtype);
    int32_t row_lines = (int32_t)div_ceil(j->n_cols * bytes, LINE_BYTES);
    int64_t at = (int64_t)(first + j->panel_rows) * j->w.stride + j->first_col;

    return (struct line_prefetch){.at = (const char *)j->w.data + at * bytes,
                                  .left = rows * row_lines,
                                  .per_tile = (int32_t)div_ceil((int64_t)rows * row_lines, n_tiles),
                                  .row_lines = row_lines,
                                  .skip = j->w.stride * bytes - (int64_t)row_lines * LINE_BYTES};
}

/* Prefetch the elements of out that are about to be computed: they lie a row apart, so
 * that stores to them would miss. */
static void prefetch_out(const struct panel_job *j, int32_t first, int32_t n, int32_t from,
                         int32_t end)
{
    for (int32_t r = from; r < end; r++) {
        const float *at = mat_row_const(j->out, r) + first;
        fetch_to_write(at);
        fetch_to_write(at + n - 1);
    }
}

/* Store the sums of rows [from, end) of x with n rows of w: added to those of the
 * blocks before and, with the last block, through the epilogue. */
static void store_rows(const struct panel_job *j, int32_t first, int32_t n, int32_t from,
                       int32_t end, float *sum)
{
    const struct cpu_kernels *k = &j->c->k;
    const struct epilogue none = {0};
    const struct epilogue *ep = j->first_col + j->n_cols == j->padded ? j->ep : &none;
    const float *bias = ep->bias.data;

    for (int32_t r = from; r < end; r++, sum += j->panel_rows) {
        float *out = mat_row(j->out, r) + first;
        if (j->first_col > 0) {
            k->add(sum, out, n);
        }
        k->epilogue(out, sum, bias != NULL ? bias + first : NULL,
                    ep->residual.data != NULL ? mat_row_const(ep->residual, r) + first : NULL, n,
                    ep->act);
    }
}

static void panel_task(void *arg, int32_t task, int32_t thread)
{
    const struct panel_job *j = arg;
    const float *x = (const float *)(const void *)j->c->packed;
    _Alignas(LINE_BYTES) float sum[GROUP_ROWS * PANEL_MAX_ROWS];
    float *panel = j->c->panel + thread * j->panel_floats;
    int32_t range = task / (j->thread_panels * j->n_ranges); /* the thread it is meant for */
    int32_t first = (range * j->thread_panels + task % j->thread_panels) * j->panel_rows;
    int32_t n = MIN(j->panel_rows, j->w.rows - first);
    int32_t from = task / j->thread_panels % j->n_ranges * j->task_tiles;
    int32_t end = MIN(from + j->task_tiles, j->n_tiles);

    if (n <= 0 || from >= end) {
        return;
    }
    struct line_prefetch ahead = next_panel(j, first, end - from);
    pack_panel(j, first, panel);
    for (int32_t tile = from; tile < end; tile += PANEL_TILES) {
        int32_t count = MIN(PANEL_TILES, end - tile);
        int32_t row = tile * TILE_ROWS;
        int32_t end_row = MIN(row + count * TILE_ROWS, j->x.rows);
        prefetch_out(j, first, n, row, end_row);
        j->panels->dots(sum, panel, x, tile, count, j->n_tiles, j->n_cols, j->w.dtype, &ahead);
        store_rows(j, first, n, row, end_row, sum);
    }
}

/* Allocate packed x and the threads' panels; both grow to the largest seen. */
static int reserve(struct panel_job *j)
{
    struct cpu_backend *c = j->c;
    int64_t n_cols = MIN(j->padded, j->panels->k_block);

    j->panel_floats = n_cols * j->panel_rows + PANEL_SLACK;
    int64_t need = j->panel_floats * cpu_pool_threads(c->pool);
    if (need > c->panel_floats) {
        free(c->panel);
        c->panel = aligned_alloc(LINE_BYTES, (size_t)need * sizeof(*c->panel));
        c->panel_floats = c->panel ? need : 0;
    }
    int64_t packed = n_cols * TILE_ROWS * j->n_tiles + PANEL_SLACK;
    return c->panel ? cpu_reserve_packed(c, packed * (int64_t)sizeof(float)) : ERR_NOMEM;
}

/* A copy of the residual where it lies in out, which blocks before the last overwrite;
 * NULL: none needed. */
static int copy_residual(const struct panel_job *j, struct epilogue *ep, float **ret)
{
    struct mat *m = &ep->residual;

    if (!m->data || m->data != j->out.data || j->padded <= j->panels->k_block) {
        return 0;
    }
    size_t n = (size_t)j->out.rows * (size_t)m->stride;
    float *copy = malloc(n * sizeof(*copy));
    if (!copy) {
        return ERR_NOMEM;
    }
    for (int32_t r = 0; r < j->out.rows; r++) {
        memcpy(copy + r * m->stride, mat_row_const(*m, r), (size_t)j->out.cols * sizeof(*copy));
    }
    m->data = *ret = copy;
    return 0;
}

void cpu_linear_panels(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep)
{
    struct epilogue mine = *ep;
    float *residual = NULL;
    struct panel_job j = {.c = c, .out = out, .x = x, .w = w, .ep = &mine};

    j.padded = (int32_t)(div_ceil(x.cols, TILE_CHUNK) * TILE_CHUNK);
    j.n_tiles = (int32_t)div_ceil(x.rows, TILE_ROWS);
    j.panels = cpu_panels_of(&c->k, w.dtype);
    j.panel_rows = j.panels->rows;
    j.thread_panels = (int32_t)div_ceil(div_ceil(w.rows, j.panel_rows), cpu_pool_threads(c->pool));
    j.n_ranges =
        (int32_t)MIN(div_ceil(TASKS_PER_THREAD, j.thread_panels), MAX(j.n_tiles / TASK_TILES, 1));
    j.task_tiles = (int32_t)div_ceil(div_ceil(j.n_tiles, j.n_ranges), PANEL_TILES) * PANEL_TILES;
    if (reserve(&j) < 0 || copy_residual(&j, &mine, &residual) < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for a matrix product");
        return;
    }
    for (; j.first_col < j.padded; j.first_col += j.n_cols) {
        j.n_cols = MIN(j.panels->k_block, j.padded - j.first_col);
        cpu_pool_run(c->pool, j.n_tiles, pack_tile, &j);
        cpu_pool_run_ranges(c->pool, j.thread_panels * j.n_ranges, panel_task, &j, NULL);
    }
    free(residual);
}
