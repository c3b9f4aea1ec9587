/* linear by tiles: the order of the products, such that w is read from memory once and
 * caches are reused.
 *
 * x is packed first, in tiles of cpu_tiles.rows rows. A task is a block of rows of w,
 * which fits into the second-level cache, and a range of tiles of x. Each tile is
 * multiplied with the whole block, k_block elements at a time, so that the tile stays
 * in the first-level cache; the next block is prefetched meanwhile. A single tile of x
 * goes to linear_stream.c, many rows to linear_panels.c where the instruction set has
 * panels.
 */
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"

enum {
    BLOCK_BYTES = 192 << 10, /* of w, in the second-level cache */
    BLOCK_STEP = 24,         /* a multiple of every tile's rows of w, halved for long rows */
    BLOCK_MAX_ROWS = 240,
    TASKS_PER_THREAD = 8,  /* at least, where the rows allow */
    TASK_TILES = 8,        /* of x in a task, at least */
    SERIAL_PACK_TILES = 8, /* up to as many are packed by the calling thread */
};

struct linear_job {
    struct cpu_backend *c;
    struct mat out, x, w;
    const struct epilogue *ep;
    const struct cpu_tiles *tiles;   /* for rows of w's type */
    const struct cpu_blocks *blocks; /* of w in blocks */
    int32_t full_rows;               /* of floats or of codes in a full tile */
    int32_t planes;                  /* rows of codes of a row of x; of floats 1 */
    int64_t tile_bytes;              /* of a full tile, packed */
    int32_t n_tiles;                 /* of x */
    int32_t block_rows;              /* of w in a block */
    int32_t thread_rows;             /* rows of w per thread */
    int32_t n_blocks;                /* of a thread */
    int32_t task_tiles;              /* of x in a task */
    int32_t n_ranges;                /* ranges of tiles, one per task of a block */
};

/* The row of x that a tile begins with. */
static int32_t tile_first(const struct linear_job *j, int32_t tile)
{
    return tile * (j->full_rows / j->planes);
}

/* Rows of x in a tile: all but the last have as many as tile 0. */
static int32_t tile_rows(const struct linear_job *j, int32_t tile)
{
    return MIN(j->full_rows / j->planes, j->x.rows - tile_first(j, tile));
}

/* The second plane of n floats, a multiple of 32, behind the first one at `to`. */
static void quantise_rest(const struct linear_job *j, struct act_block *to, int32_t n_x,
                          const float *x, int32_t n)
{
    float rest[FORMAT_BLOCK_MAX];

    for (int32_t at = 0; at < n; at += FORMAT_BLOCK_MAX, to += n_x) {
        int32_t here = MIN(FORMAT_BLOCK_MAX, n - at);
        act_rest(rest, to, x + at, here);
        j->blocks->quantise(to + 1, n_x, rest, here);
    }
}

static void quantise_planes(const struct linear_job *j, struct act_block *to, int32_t n_x,
                            const float *x, int32_t n)
{
    j->blocks->quantise(to, n_x, x, n);
    if (j->planes > 1) {
        quantise_rest(j, to, n_x, x, n);
    }
}

/* Quantise a row of x to every n_x-th of `to`, its planes side by side; the last block
 * is zero-padded where the columns are no multiple of 32. */
static void quantise_row(const struct linear_job *j, struct act_block *to, int32_t n_x,
                         const float *x)
{
    int32_t n = j->x.cols;
    int32_t whole = n % 32 == 0 ? n : n / FORMAT_BLOCK_MAX * FORMAT_BLOCK_MAX;
    float last[FORMAT_BLOCK_MAX] = {0};

    quantise_planes(j, to, n_x, x, whole);
    if (whole < n) {
        memcpy(last, x + whole, (size_t)(n - whole) * sizeof(*x));
        quantise_planes(j, to + (int64_t)whole / FORMAT_BLOCK_MAX * n_x, n_x, last,
                        FORMAT_BLOCK_MAX);
    }
}

static void pack_tile(void *arg, int32_t tile, int32_t thread)
{
    (void)thread;
    const struct linear_job *j = arg;
    const float *row[TILE_X_MAX];
    int32_t n = tile_rows(j, tile);
    for (int32_t i = 0; i < n; i++) {
        row[i] = mat_row_const(j->x, tile_first(j, tile) + i);
    }
    if (j->w.format) {
        for (int32_t i = 0; i < n; i++) {
            struct act_block *to = (struct act_block *)(j->c->packed + tile * j->tile_bytes);
            quantise_row(j, to + i * j->planes, n * j->planes, row[i]);
        }
        return;
    }
    j->tiles->pack(j->c->packed + tile * j->tile_bytes, row, n, j->x.cols, j->w.dtype);
}

void cpu_add_planes(float *sum, int32_t n, int32_t planes)
{
    for (int32_t i = 0; i < n && planes > 1; i++) {
        sum[i] = sum[2 * i] + sum[2 * i + 1];
    }
}

/* Mapped, because a heap would keep the pages of each smaller block that was
 * outgrown. */
int cpu_reserve_packed(struct cpu_backend *c, int64_t n_bytes)
{
    enum { STEP = 64 << 10 };
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    size_t need = (size_t)div_ceil(n_bytes, STEP) * STEP;

    if (need > c->packed_bytes) {
        cpu_free_packed(c);
        void *at = mmap(NULL, need, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) {
            return ERR_NOMEM;
        }
        c->packed = at;
        c->packed_bytes = need;
    }
    return 0;
}

void cpu_free_packed(struct cpu_backend *c)
{
    if (c->packed) {
        munmap(c->packed, c->packed_bytes);
    }
    c->packed = NULL;
    c->packed_bytes = 0;
}

int64_t cpu_codes_bytes(int32_t cols)
{
    return div_ceil(cols, FORMAT_BLOCK_MAX) * TILE_ROWS * (int64_t)sizeof(struct act_block);
}

void cpu_pack_codes(struct cpu_backend *c, char *to, struct mat x, const struct mat *w)
{
    struct linear_job j = {.c = c, .x = x, .w = *w, .planes = cpu_planes(w)};
    int32_t n_x = x.rows * j.planes;

    j.blocks = cpu_blocks_of(&c->k, w->format->id, n_x);
    for (int32_t i = 0; i < x.rows; i++) {
        quantise_row(&j, (struct act_block *)to + i * j.planes, n_x, mat_row_const(x, i));
    }
}

static int pack_all(struct linear_job *j)
{
    struct cpu_backend *c = j->c;
    int64_t padded = div_ceil(j->x.cols, TILE_CHUNK) * TILE_CHUNK;

    if (j->w.format) {
        j->tile_bytes = cpu_codes_bytes(j->x.cols);
    } else {
        j->tile_bytes = padded * j->full_rows * j->tiles->packed_bytes(j->w.dtype);
    }
    if (cpu_reserve_packed(c, j->tile_bytes * j->n_tiles) < 0) {
        return ERR_NOMEM;
    }
    if (j->w.format && cpu_packed_already(c, (struct cpu_packed){.x = j->x.data,
                                                                 .blocks = j->blocks,
                                                                 .rows = j->x.rows,
                                                                 .planes = j->planes})) {
        return 0;
    }
    if (j->n_tiles <= SERIAL_PACK_TILES) {
        for (int32_t i = 0; i < j->n_tiles; i++) {
            pack_tile(j, i, 0);
        }
    } else {
        cpu_pool_run(c->pool, j->n_tiles, pack_tile, j);
    }
    return 0;
}

/* Store sum [n][n_x] to out through the epilogue. */
static void store_tile(const struct linear_job *j, int32_t tile, int32_t first, int32_t n,
                       const float *sum)
{
    const float *bias = j->ep->bias.data;
    int32_t n_x = tile_rows(j, tile);
    float line[TILE_X_MAX][BLOCK_MAX_ROWS];

    j->c->k.transpose_sums(line[0], BLOCK_MAX_ROWS, sum, n, n_x);
    for (int32_t x = 0; x < n_x; x++) {
        int32_t r = tile_first(j, tile) + x;
        j->c->k.epilogue(mat_row(j->out, r) + first, line[x], bias != NULL ? bias + first : NULL,
                         j->ep->residual.data != NULL ? mat_row_const(j->ep->residual, r) + first
                                                      : NULL,
                         n, j->ep->act);
    }
}

/* sum = rows w . tile of x, block by block of the elements. */
static void multiply(const struct linear_job *j, struct dot_rows *w, int32_t tile, float *sum,
                     const struct prefetch *ahead)
{
    const char *x = j->c->packed + tile * j->tile_bytes;
    int32_t n_x = tile_rows(j, tile);

    if (j->w.format) {
        j->blocks->dots[j->w.format->id](sum, w, j->w.cols, (const struct act_block *)x,
                                         n_x * j->planes, ahead);
        cpu_add_planes(sum, w->n * n_x, j->planes);
        return;
    }
    for (w->first = 0; w->first < j->w.cols; w->first += j->tiles->k_block) {
        int32_t n_k = (int32_t)MIN(j->tiles->k_block, j->w.cols - w->first);
        j->tiles->dots(sum, w, x + w->first * n_x * j->tiles->packed_bytes(w->dtype), n_x,
                       (int32_t)div_ceil(n_k, TILE_CHUNK), w->first > 0, ahead);
    }
}

/* One block of w against tiles [from, end) of x. */
static void run_block(const struct linear_job *j, int32_t first, int32_t n, int32_t from,
                      int32_t end)
{
    const void *row[BLOCK_MAX_ROWS];
    struct row_scales scales[BLOCK_MAX_ROWS];
    bool apart = j->w.format && weight_format_has_scales(j->w.format);
    float sum[TILE_X_MAX * BLOCK_MAX_ROWS + 4];
    struct dot_rows w = {.row = row, .n = n, .dtype = j->w.dtype, .scales = apart ? scales : NULL};
    struct prefetch ahead = {.distance = n * cpu_row_bytes(&j->w), .period = end - from};

    for (int32_t i = 0; i < n; i++) {
        row[i] = cpu_row(&j->w, first + i);
    }
    for (int32_t i = 0; i < n && apart; i++) {
        scales[i] = cpu_row_scales(&j->w, first + i);
    }
    for (int32_t tile = from; tile < end; tile++) {
        ahead.phase = tile - from;
        multiply(j, &w, tile, sum, &ahead);
        store_tile(j, tile, first, n, sum);
    }
}

static void linear_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct linear_job *j = arg;
    int32_t range = task / (j->n_blocks * j->n_ranges); /* the thread it is meant for */
    int32_t first = range * j->thread_rows + task % j->n_blocks * j->block_rows;
    int32_t end = MIN(MIN(first + j->block_rows, (range + 1) * j->thread_rows), j->w.rows);
    int32_t from = task / j->n_blocks % j->n_ranges * j->task_tiles;
    if (first < end && from < j->n_tiles) {
        run_block(j, first, end - first, from, MIN(from + j->task_tiles, j->n_tiles));
    }
}

/* Each thread gets neighbouring rows of w, so that it prefetches what it will read
 * itself. Blocks are as large as the cache allows, but enough of them that threads of
 * different speeds end together. Returns the tasks per thread. */
static int32_t plan(struct linear_job *j)
{
    int32_t threads = cpu_pool_threads(j->c->pool);
    int32_t want = threads == 1 ? 1 : TASKS_PER_THREAD;
    int32_t step = BLOCK_STEP / 2;
    int64_t row_bytes = cpu_row_bytes(&j->w);

    j->thread_rows = (int32_t)div_ceil(div_ceil(j->w.rows, threads), step) * step;
    int64_t fit = MAX(BLOCK_BYTES / row_bytes / BLOCK_STEP * BLOCK_STEP, step);
    int64_t even = div_ceil(div_ceil(j->thread_rows, want), step) * step;
    j->block_rows = (int32_t)MIN(MIN(fit, even), BLOCK_MAX_ROWS);
    j->n_blocks = (int32_t)div_ceil(j->thread_rows, j->block_rows);
    j->n_ranges = (int32_t)MIN(div_ceil(want, j->n_blocks), MAX(j->n_tiles / TASK_TILES, 1));
    j->task_tiles = (int32_t)div_ceil(j->n_tiles, j->n_ranges);
    return j->n_blocks * j->n_ranges;
}

void cpu_linear_tiled(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                      const struct epilogue *ep)
{
    const struct cpu_panels *panels = cpu_panels_of(&c->k, w.dtype);

    if (!w.format && panels->k_block > 0 && x.rows >= panels->from) {
        cpu_linear_panels(c, out, x, w, ep);
        return;
    }
    struct linear_job j = {.c = c, .out = out, .x = x, .w = w, .ep = ep, .planes = cpu_planes(&w)};
    j.tiles = cpu_tiles_of(&c->k, w.dtype);
    j.blocks = w.format ? cpu_blocks_of(&c->k, w.format->id, x.rows * j.planes) : NULL;
    j.full_rows = w.format ? TILE_ROWS : j.tiles->rows;
    j.n_tiles = (int32_t)div_ceil((int64_t)x.rows * j.planes, j.full_rows);
    if (pack_all(&j) < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for a matrix product");
        return;
    }
    if (j.n_tiles == 1) {
        cpu_linear_stream(c, out, x, w, ep);
    } else {
        cpu_pool_run_ranges(c->pool, plan(&j), linear_task, &j, NULL);
    }
}
