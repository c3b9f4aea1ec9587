/* linear for many rows of x with weights in blocks, by panels: CODE_PANEL_ROWS rows of
 * w are unpacked once for all rows of x. A task is a few neighbouring panels, which
 * stay in the second-level cache, and all tiles of x or a range of them; each tile is
 * multiplied with all panels of the task while the first-level cache has it. The rows
 * of the panel that follows are prefetched while one is unpacked. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum {
    TASK_BYTES = 256 << 10, /* of panels, about */
    TASK_PANELS = 4,        /* at most */
    TASK_ROWS = TASK_PANELS * CODE_PANEL_ROWS,
    TASKS_PER_THREAD = 8, /* at least, where the rows allow */
    TASK_TILES = 8,       /* of x in a task, at least */
    LINE_BYTES = 64,
};

struct codes_job {
    struct cpu_backend *c;
    struct mat out, x, w;
    const struct epilogue *ep;
    const struct cpu_code_panels *panels;
    enum weight_format_id as; /* whose panels and tiles these are */
    int64_t tile_bytes, panel_bytes;
    int32_t planes;      /* rows of codes of a row of x */
    int32_t n_tiles;     /* of x */
    int32_t thread_rows; /* rows of w per thread, a multiple of those of a panel */
    int32_t task_rows;   /* of w in a task, likewise */
    int32_t n_blocks;    /* tasks of a thread's rows */
    int32_t task_tiles;  /* of x in a task */
    int32_t n_ranges;    /* ranges of tiles */
};

/* Rows of x in a tile: all but the last have as many as tile 0. */
static int32_t tile_rows(const struct codes_job *j, int32_t tile)
{
    int32_t most = j->panels->tile_rows / j->planes;

    return MIN(most, j->x.rows - tile * most);
}

static void pack_tile(void *arg, int32_t tile, int32_t thread)
{
    (void)thread;
    const struct codes_job *j = arg;
    const float *row[CODE_TILE_ROWS];
    int32_t n = tile_rows(j, tile);
    for (int32_t i = 0; i < n; i++) {
        row[i] = mat_row_const(j->x, tile * (j->panels->tile_rows / j->planes) + i);
    }
    j->panels->pack_x(j->c->packed + tile * j->tile_bytes, j->as, row, n * j->planes, j->x.cols,
                      j->planes);
}

/* Unpack the panel of the rows from `first` on; the last one is filled up with copies
 * of w's last row. */
static void pack_panel(const struct codes_job *j, int32_t first, char *panel)
{
    const void *row[CODE_PANEL_ROWS];
    struct row_scales scales[CODE_PANEL_ROWS];
    int64_t ahead = CODE_PANEL_ROWS * cpu_row_bytes(&j->w);

    for (int32_t i = 0; i < CODE_PANEL_ROWS; i++) {
        row[i] = cpu_row(&j->w, MIN(first + i, j->w.rows - 1));
    }
    if (!weight_format_has_scales(j->w.format)) {
        j->panels->pack_rows(panel, row, j->w.cols, ahead);
        return;
    }
    for (int32_t i = 0; i < CODE_PANEL_ROWS; i++) {
        scales[i] = cpu_row_scales(&j->w, MIN(first + i, j->w.rows - 1));
    }
    j->panels->pack_apart(panel, j->w.format->id, row, scales, j->w.cols, ahead);
}

/* Add the planes of n_x rows: sum [n_x * planes][TASK_ROWS] becomes
 * [n_x][TASK_ROWS]. */
static void add_planes(const struct codes_job *j, float *sum, int32_t n_x, int32_t n)
{
    for (int32_t i = 0; i < n_x && j->planes > 1; i++) {
        float *from = sum + (int64_t)i * j->planes * TASK_ROWS;
        j->c->k.add(from, from + TASK_ROWS, n);
        if (i > 0) {
            memcpy(sum + (int64_t)i * TASK_ROWS, from, (size_t)n * sizeof(*sum));
        }
    }
}

/* One tile of x with n rows of w, from `first` on, that are unpacked at `panel`. */
static void run_tile(const struct codes_job *j, const char *panel, int32_t first, int32_t n,
                     int32_t tile)
{
    _Alignas(LINE_BYTES) float sum[CODE_TILE_ROWS * TASK_ROWS];
    const float *bias = j->ep->bias.data;
    int32_t n_x = tile_rows(j, tile);

    for (int32_t at = 0; at < n; at += CODE_PANEL_ROWS, panel += j->panel_bytes) {
        j->panels->dots(sum + at, TASK_ROWS, j->as, panel, j->c->packed + tile * j->tile_bytes,
                        n_x * j->planes, j->w.cols);
    }
    add_planes(j, sum, n_x, n);
    for (int32_t i = 0; i < n_x; i++) {
        int32_t r = tile * (j->panels->tile_rows / j->planes) + i;
        j->c->k.epilogue(mat_row(j->out, r) + first, sum + (int64_t)i * TASK_ROWS,
                         bias != NULL ? bias + first : NULL,
                         j->ep->residual.data != NULL ? mat_row_const(j->ep->residual, r) + first
                                                      : NULL,
                         n, j->ep->act);
    }
}

static void codes_task(void *arg, int32_t task, int32_t thread)
{
    const struct codes_job *j = arg;
    char *panel = (char *)j->c->panel + thread * (j->task_rows / CODE_PANEL_ROWS) * j->panel_bytes;
    int32_t range = task / (j->n_blocks * j->n_ranges); /* the thread it is meant for */
    int32_t first = range * j->thread_rows + task % j->n_blocks * j->task_rows;
    int32_t end = MIN(MIN(first + j->task_rows, (range + 1) * j->thread_rows), j->w.rows);
    int32_t from = task / j->n_blocks % j->n_ranges * j->task_tiles;

    if (first >= end || from >= j->n_tiles) {
        return;
    }
    for (int32_t at = first; at < end; at += CODE_PANEL_ROWS) {
        pack_panel(j, at, panel + (at - first) / CODE_PANEL_ROWS * j->panel_bytes);
    }
    for (int32_t tile = from; tile < MIN(from + j->task_tiles, j->n_tiles); tile++) {
        run_tile(j, panel, first, end - first, tile);
    }
}

static void plan(struct codes_job *j)
{
    int32_t threads = cpu_pool_threads(j->c->pool);
    int32_t want = threads == 1 ? 1 : TASKS_PER_THREAD;

    j->thread_rows = (int32_t)div_ceil(div_ceil(j->w.rows, threads), CODE_PANEL_ROWS);
    int64_t fit = MIN(MAX(TASK_BYTES / j->panel_bytes, 1), TASK_PANELS);
    int32_t panels = (int32_t)MIN(fit, MAX(j->thread_rows / want, 1));
    j->n_blocks = (int32_t)div_ceil(j->thread_rows, panels);
    j->task_rows = panels * CODE_PANEL_ROWS;
    j->thread_rows *= CODE_PANEL_ROWS;
    j->n_ranges = (int32_t)MIN(div_ceil(want, j->n_blocks), MAX(j->n_tiles / TASK_TILES, 1));
    j->task_tiles = (int32_t)div_ceil(j->n_tiles, j->n_ranges);
}

/* Packed x and the threads' panels; both grow to the largest seen. */
static int reserve(const struct codes_job *j)
{
    struct cpu_backend *c = j->c;
    int64_t bytes = j->task_rows / CODE_PANEL_ROWS * j->panel_bytes * cpu_pool_threads(c->pool);
    int64_t need = bytes / (int64_t)sizeof(*c->panel);

    if (need > c->panel_floats) {
        free(c->panel);
        c->panel = aligned_alloc(LINE_BYTES, (size_t)bytes);
        c->panel_floats = c->panel ? need : 0;
    }
    return c->panel ? cpu_reserve_packed(c, j->tile_bytes * j->n_tiles) : ERR_NOMEM;
}

void cpu_linear_codes(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                      const struct epilogue *ep)
{
    struct codes_job j = {.c = c, .out = out, .x = x, .w = w, .ep = ep, .planes = cpu_planes(&w)};

    j.as = cpu_panels_as(w.priv);
    j.panels = &c->k.code_panels[j.as];
    j.tile_bytes = cpu_code_tile_bytes(j.panels, j.as, w.cols);
    j.panel_bytes = cpu_code_panel_bytes(j.panels, j.as, w.cols);
    j.n_tiles = (int32_t)div_ceil((int64_t)x.rows * j.planes, j.panels->tile_rows);
    plan(&j);
    if (reserve(&j) < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for a matrix product");
        return;
    }
    if (!cpu_packed_already(
            c, (struct cpu_packed){x.data, j.panels, NULL, (int32_t)j.as, x.rows, j.planes})) {
        cpu_pool_run(c->pool, j.n_tiles, pack_tile, &j);
    }
    cpu_pool_run_ranges(c->pool, j.n_blocks * j.n_ranges, codes_task, &j, NULL);
}
