/* linear for many rows of x, by panels: PANEL_ROWS rows of w become float32 in the order the inner loop reads them, stay in
 * the second-level cache, and meet every tile of x, k_block elements after k_block elements. The rows after them are fetched
 * meanwhile. A task is one panel, or a part of its tiles where panels are few.
 */
#include <stdlib.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fetch.h"

enum { LINE_BYTES = 64, TASKS_PER_SHARE = 8, PART_TILES = 16 };

struct panel_job {
    struct cpu_backend *c;
    struct mat out, x, w;
    const struct epilogue *ep;
    int32_t padded; /* columns, a multiple of TILE_CHUNK */
    int32_t n_tiles;
    int32_t share_panels; /* of w, of a thread */
    int32_t n_parts;
    int32_t part_tiles; /* of x in a task */
    int64_t thread_floats;
    int64_t panel_floats; /* of them the panel's, then the sums */
    int32_t n_blocks;     /* of k_block columns */
};

/* Packed x from column `first` on, where a block begins. */
static float *packed_block(const struct panel_job *j, int32_t first)
{
    return (float *)(void *)j->c->packed + (int64_t)first * TILE_ROWS * j->n_tiles +
           first / j->c->k.panels.k_block * PANEL_SLACK;
}

static void pack_tile(void *arg, int32_t tile, int32_t thread)
{
    (void)thread;
    const struct panel_job *j = arg;
    const struct cpu_panels *k = &j->c->k.panels;
    int32_t n_x = MIN(TILE_ROWS, j->x.rows - tile * TILE_ROWS);
    for (int32_t first = 0; first < j->padded; first += k->k_block) {
        const float *row[TILE_ROWS];
        int32_t n = MIN(k->k_block, j->padded - first);
        for (int32_t i = 0; i < n_x; i++) {
            row[i] = mat_row_const(j->x, tile * TILE_ROWS + i) + first;
        }
        k->pack_x(packed_block(j, first), tile, j->n_tiles, row, n_x, MIN(n, j->x.cols - first), n, j->w.dtype);
    }
}

/* One panel of w, and the rows after it, which are fetched meanwhile. */
struct panel {
    int32_t first, n;           /* rows of w */
    const void *row[PANEL_ROWS]; /* the last panel is filled up with its last row */
    const char *ahead;
    int64_t lines;
};

static struct panel panel_at(const struct panel_job *j, int32_t first)
{
    struct panel p = {.first = first, .n = MIN(PANEL_ROWS, j->w.rows - first)};
    int64_t row_bytes = j->w.stride * dtype_bytes(j->w.dtype);
    const char *base = j->w.data;
    for (int32_t i = 0; i < PANEL_ROWS; i++) {
        p.row[i] = base + MIN(first + i, j->w.rows - 1) * row_bytes;
    }
    p.ahead = base + (int64_t)(first + PANEL_ROWS) * row_bytes;
    p.lines = MAX(MIN(PANEL_ROWS, j->w.rows - first - PANEL_ROWS), 0) * row_bytes / LINE_BYTES;
    return p;
}

/* Rows [from, end) of x have their sums: through the epilogue. */
static void finish_rows(const struct panel_job *j, const struct panel *p, int32_t from, int32_t end, const float *sum)
{
    const float *bias = j->ep->bias.data;
    for (int32_t r = from; r < end; r++, sum += PANEL_ROWS) {
        j->c->k.finish(mat_row(j->out, r) + p->first, sum, bias != NULL ? bias + p->first : NULL,
                       j->ep->residual.data != NULL ? mat_row_const(j->ep->residual, r) + p->first : NULL, p->n,
                       j->ep->act);
    }
}

/* Their places in out are asked for while they are computed: each lies a row apart, and would be waited for. */
static void fetch_places(const struct panel_job *j, const struct panel *p, int32_t from, int32_t end)
{
    for (int32_t r = from; r < end; r++) {
        const float *at = mat_row_const(j->out, r) + p->first;
        fetch_to_write(at);
        fetch_to_write(at + p->n - 1);
    }
}

/* The panel against tiles [from, end) of x, a few at a time. */
static void multiply(const struct panel_job *j, struct panel *p, int32_t from, int32_t end, float *panel, float *sum)
{
    const struct cpu_panels *k = &j->c->k.panels;
    int32_t n_calls = j->n_blocks * (int32_t)div_ceil(end - from, PANEL_TILES);
    int64_t lines_a_call = div_ceil(p->lines, n_calls);
    for (int32_t at = 0; at < j->padded; at += k->k_block) {
        int32_t n = MIN(k->k_block, j->padded - at);
        k->pack_rows(panel, p->row, at, n, j->w.dtype);
        for (int32_t tile = from; tile < end; tile += PANEL_TILES) {
            int32_t count = MIN(PANEL_TILES, end - tile);
            float *to = sum + (j->n_blocks > 1 ? (int64_t)(tile - from) * TILE_ROWS * PANEL_ROWS : 0);
            int64_t lines = MIN(lines_a_call, p->lines);
            int32_t row = tile * TILE_ROWS;
            int32_t end_row = MIN((tile + count) * TILE_ROWS, j->x.rows);
            if (at + n == j->padded) {
                fetch_places(j, p, row, end_row);
            }
            k->dots(to, panel, packed_block(j, at), tile, count, j->n_tiles, n, at > 0, p->ahead, (int32_t)lines);
            p->ahead += lines * LINE_BYTES;
            p->lines -= lines;
            if (at + n == j->padded) {
                finish_rows(j, p, row, end_row, to);
            }
        }
    }
}

static void panel_task(void *arg, int32_t task, int32_t thread)
{
    const struct panel_job *j = arg;
    int32_t share = task / (j->share_panels * j->n_parts);
    int32_t first = (share * j->share_panels + task % j->share_panels) * PANEL_ROWS;
    int32_t from = task / j->share_panels % j->n_parts * j->part_tiles;
    int32_t end = MIN(from + j->part_tiles, j->n_tiles);
    if (first < j->w.rows && from < end) {
        struct panel p = panel_at(j, first);
        float *floats = j->c->panel + thread * j->thread_floats;
        multiply(j, &p, from, end, floats, floats + j->panel_floats);
    }
}

/* Room for packed x and the threads' panels and sums; both grow to the largest seen. */
static int make_room(struct panel_job *j)
{
    struct cpu_backend *c = j->c;
    j->n_blocks = (int32_t)div_ceil(j->padded, c->k.panels.k_block);
    j->panel_floats = (int64_t)MIN(j->padded, c->k.panels.k_block) * PANEL_ROWS + PANEL_SLACK;
    j->thread_floats = j->panel_floats + (int64_t)j->part_tiles * TILE_ROWS * PANEL_ROWS;
    int64_t need = j->thread_floats * cpu_pool_threads(c->pool);
    if (need > c->panel_floats) {
        free(c->panel);
        c->panel = aligned_alloc(LINE_BYTES, (size_t)need * sizeof(*c->panel));
        c->panel_floats = c->panel != NULL ? need : 0;
    }
    int64_t packed = (int64_t)j->padded * TILE_ROWS * j->n_tiles + (int64_t)j->n_blocks * PANEL_SLACK;
    return c->panel != NULL ? cpu_packed_room(c, packed * (int64_t)sizeof(float)) : ERR_NOMEM;
}

void cpu_linear_panels(struct cpu_backend *c, struct mat out, struct mat x, struct mat w, const struct epilogue *ep)
{
    struct panel_job j = {.c = c, .out = out, .x = x, .w = w, .ep = ep};
    j.padded = (int32_t)(div_ceil(x.cols, TILE_CHUNK) * TILE_CHUNK);
    j.n_tiles = (int32_t)div_ceil(x.rows, TILE_ROWS);
    j.share_panels = (int32_t)div_ceil(div_ceil(w.rows, PANEL_ROWS), cpu_pool_threads(c->pool));
    j.n_parts = (int32_t)MIN(div_ceil(TASKS_PER_SHARE, j.share_panels), MAX(j.n_tiles / PART_TILES, 1));
    j.part_tiles = (int32_t)div_ceil(j.n_tiles, j.n_parts);
    if (make_room(&j) < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for a matrix product");
        return;
    }
    cpu_pool_run(c->pool, j.n_tiles, pack_tile, &j);
    cpu_pool_run_shares(c->pool, j.share_panels * j.n_parts, panel_task, &j, NULL);
}
