/* The frame of `dots` (kernels.h), the same for every instruction set: rows of w in
 * groups of the tile's height, blocks of K_BLOCK elements, one function per type.
 *
 * A tile_*.c file includes it once, after defining
 *     tile(sum, w, x, t, n_w, n_x, n_chunks, add, fetch)
 *         inlined with constant t, n_w and n_x; advances fetch->row
 *     packed_bytes(t)      as in struct cpu_tiles
 *     K_BLOCK, TILE_SUMS   cpu_tiles.k_block; sums of the largest tile
 *     ROWS_1 .. ROWS_4     rows of w in a tile of so many rows of x
 */
#ifdef INLINE

enum {
    TILE_MAX_ROWS = 8,
    STREAMS = 4,
    STREAM_STEP = 3, /* STREAMS * STREAM_STEP is a multiple of every tile's rows of w */
    STREAM_TASK_BYTES = 32 << 10,
    STREAM_AHEAD_BYTES = 1024
};

/* All rows of w, n_w at a time. The last group is filled up with copies of its last
 * row, whose sums are dropped. */
INLINE void all_rows(float *sum, const struct dot_rows *w, const char *x, const enum dtype t,
                     const int n_w, const int n_x, int32_t n_chunks, bool add,
                     const struct prefetch *ahead)
{
    int64_t offset = w->first * dtype_bytes(t);
    int32_t fetch_at = ahead->phase; /* the next row to be prefetched at ahead->distance */

    for (int32_t i = 0; i < w->n; i += n_w) {
        const char *row[TILE_MAX_ROWS];
        float last[TILE_SUMS + 4];
        int32_t n = MIN(n_w, w->n - i);
        for (int j = 0; j < n_w; j++) {
            row[j] = (const char *)w->row[i + (j < n ? j : n - 1)] + offset;
        }
        struct fetch fetch = {.stream = ahead->period == 1 ? ahead->distance : 0,
                              .far = ahead->far};
        for (int k = 0; fetch_at < i + n_w && ahead->period > 1; fetch_at += ahead->period, k = 1) {
            fetch.row[k] = row[MIN(fetch_at - i, n_w - 1)] + ahead->distance;
        }
        float *to = n == n_w ? sum + i * n_x : last;
        const char *from = x;
        for (int32_t c = 0; c < n_chunks; c += K_BLOCK / TILE_CHUNK) {
            int32_t n_c = MIN(n_chunks - c, K_BLOCK / TILE_CHUNK);
            tile(to, row, from, t, n_w, n_x, n_c, c > 0 || (add && n == n_w), &fetch);
            from += (int64_t)n_c * n_x * TILE_CHUNK * packed_bytes(t);
            for (int j = 0; j < n_w; j++) {
                row[j] += n_c * TILE_CHUNK * dtype_bytes(t);
            }
        }
        for (int32_t k = 0; k < n * n_x && n < n_w; k++) {
            sum[i * n_x + k] = add ? sum[i * n_x + k] + last[k] : last[k];
        }
    }
}

INLINE void dots_type(float *sum, const struct dot_rows *w, const void *x, const enum dtype t,
                      int32_t n_x, int32_t n_chunks, bool add, const struct prefetch *ahead)
{
    switch (n_x) {
    case 1:
        all_rows(sum, w, x, t, ROWS_1, 1, n_chunks, add, ahead);
        break;
    case 2:
        all_rows(sum, w, x, t, ROWS_2, 2, n_chunks, add, ahead);
        break;
    case 3:
        all_rows(sum, w, x, t, ROWS_3, 3, n_chunks, add, ahead);
        break;
    default:
        all_rows(sum, w, x, t, ROWS_4, 4, n_chunks, add, ahead);
        break;
    }
}

static void dots_bf16(float *sum, const struct dot_rows *w, const void *x, int32_t n_x,
                      int32_t n_chunks, bool add, const struct prefetch *ahead)
{
    dots_type(sum, w, x, DTYPE_BF16, n_x, n_chunks, add, ahead);
}

static void dots_f16(float *sum, const struct dot_rows *w, const void *x, int32_t n_x,
                     int32_t n_chunks, bool add, const struct prefetch *ahead)
{
    dots_type(sum, w, x, DTYPE_F16, n_x, n_chunks, add, ahead);
}

static void dots_f32(float *sum, const struct dot_rows *w, const void *x, int32_t n_x,
                     int32_t n_chunks, bool add, const struct prefetch *ahead)
{
    dots_type(sum, w, x, DTYPE_F32, n_x, n_chunks, add, ahead);
}

static void dots(float *sum, const struct dot_rows *w, const void *x, int32_t n_x, int32_t n_chunks,
                 bool add, const struct prefetch *ahead)
{
    if (w->dtype == DTYPE_BF16) {
        dots_bf16(sum, w, x, n_x, n_chunks, add, ahead);
    } else if (w->dtype == DTYPE_F16) {
        dots_f16(sum, w, x, n_x, n_chunks, add, ahead);
    } else {
        dots_f32(sum, w, x, n_x, n_chunks, add, ahead);
    }
}

/* As in struct cpu_tiles; defined by the file that includes this one. */
static void pack(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t);

INLINE struct cpu_tiles row_tiles(void)
{
    return (struct cpu_tiles){.k_block = K_BLOCK,
                              .rows = TILE_ROWS,
                              .streams = STREAMS,
                              .step = STREAM_STEP,
                              .task_bytes = STREAM_TASK_BYTES,
                              .ahead_bytes = STREAM_AHEAD_BYTES,
                              .packed_bytes = packed_bytes,
                              .pack = pack,
                              .dots = dots};
}

#endif
