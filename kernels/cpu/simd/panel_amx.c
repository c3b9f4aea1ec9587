/* Inner products with AMX of many rows of x with stored rows of w in bfloat16: panels
 * of 128 rows of w are transposed once, chunk by chunk, and stay in the second-level
 * cache while two by two tiles are multiplied. The sums are those of tile_amx.c.
 */
#include "kernels/cpu/simd/amx_bf16.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)

enum {
    PANEL_ROWS = 128,
    GROUP_TILES = X_ROWS / TILE_ROWS, /* tiles of panels' x in a register */
};

/* [register][chunk][row]. */
static void pack_panel_rows(float *panel, const void *const *row, int64_t first, int32_t n,
                            enum dtype t)
{
    int64_t n_chunks = n / TILE_CHUNK;

    for (int32_t r = 0; r < PANEL_ROWS; r++) {
        const char *from = (const char *)row[r] + first * dtype_bytes(t);
        char *to =
            (char *)panel + r / W_ROWS * n_chunks * W_BYTES + (int64_t)(r % W_ROWS) * AMX_BYTES;
        for (int32_t line = 0; line < n / TILE_CHUNK; line += STEP_LINES) {
            turn_step(to + (int64_t)line * W_BYTES, from + (int64_t)line * LINE_BYTES,
                      n / TILE_CHUNK - line);
        }
    }
}

/* [register][chunk][pair][row]. */
static void pack_panel_x(float *out, int32_t tile, int32_t n_tiles, const float *const *x,
                         int32_t n_x, int32_t n, int32_t padded, enum dtype t)
{
    (void)n_tiles;
    (void)t;
    int64_t n_lines = padded / TILE_CHUNK;
    int64_t whole = n_lines / STEP_LINES * STEP_LINES;

    out += tile / GROUP_TILES * n_lines * SUMS + (int64_t)(tile % GROUP_TILES) * TILE_ROWS;
    for (int64_t line = 0; line < n_lines; line++) {
        bool turned = line < whole;
        int64_t apart = turned ? SUMS : X_ROWS; /* of two pairs of the line */
        float *to = out + line * SUMS;
        __m512 r[TILE_ROWS];
        if (turned) {
            to = out + line / STEP_LINES * STEP_LINES * SUMS + line % STEP_LINES * X_ROWS;
        }
        for (int i = 0; i < TILE_ROWS; i++) {
            r[i] = pack_line(x[MIN(i, n_x - 1)], (int32_t)line * TILE_CHUNK, n);
        }
        transpose4(r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, to += apart) {
            _mm_store_ps(to, _mm512_castps512_ps128(r[i]));
            _mm_store_ps(to + 4 * apart, _mm512_extractf32x4_ps(r[i], 1));
            _mm_store_ps(to + 8 * apart, _mm512_extractf32x4_ps(r[i], 2));
            _mm_store_ps(to + 12 * apart, _mm512_extractf32x4_ps(r[i], 3));
        }
    }
}

/* c [2][2][SUMS] = two registers of w . one or two of x. */
INLINE void panel_block(float *c, const char *w, const char *x, int32_t n_chunks, const bool two,
                        struct line_prefetch *ahead, int32_t n_lines)
{
    int64_t next = (int64_t)n_chunks * W_BYTES;

    _tile_zero(C00);
    _tile_zero(C01);
    _tile_zero(C10);
    _tile_zero(C11);
    for (int32_t i = 0; i < n_chunks; i++, w += W_BYTES, x += W_BYTES) {
        prefetch_lines(ahead, n_lines);
        _tile_loadd(W0, w, AMX_BYTES);
        _tile_loadd(X0, x, AMX_BYTES);
        _tile_dpbf16ps(C00, W0, X0);
        _tile_loadd(W1, w + next, AMX_BYTES);
        _tile_dpbf16ps(C10, W1, X0);
        if (two) {
            _tile_loadd(X1, x + next, AMX_BYTES);
            _tile_dpbf16ps(C01, W0, X1);
            _tile_dpbf16ps(C11, W1, X1);
        }
    }
    _tile_stored(C00, c, AMX_BYTES);
    _tile_stored(C01, c + SUMS, AMX_BYTES);
    _tile_stored(C10, c + 2 * SUMS, AMX_BYTES);
    _tile_stored(C11, c + 3 * SUMS, AMX_BYTES);
    amx_order();
}

/* c [w][x] to sum [x][PANEL_ROWS]. */
INLINE void put_turned(float *sum, const float *c)
{
    __m512 r[16];

#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        r[i] = _mm512_load_ps(c + (int64_t)i * X_ROWS);
    }
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        _mm512_store_ps(sum + (int64_t)i * PANEL_ROWS, r[i]);
    }
}

INLINE void panel_rows(float *sum, const char *w, const char *x, int32_t n_chunks, const bool two,
                       struct line_prefetch *ahead, int32_t n_lines)
{
    _Alignas(64) float c[4 * SUMS];

    for (int32_t r = 0; r < PANEL_ROWS; r += 2 * W_ROWS, w += (int64_t)2 * n_chunks * W_BYTES) {
        panel_block(c, w, x, n_chunks, two, ahead, n_lines);
        put_turned(sum + r, c);
        put_turned(sum + r + W_ROWS, c + 2 * SUMS);
        if (two) {
            put_turned(sum + X_ROWS * PANEL_ROWS + r, c + SUMS);
            put_turned(sum + X_ROWS * PANEL_ROWS + r + W_ROWS, c + 3 * SUMS);
        }
    }
}

static void panel_dots(float *sum, const float *panel, const float *x, int32_t tile, int32_t count,
                       int32_t n_tiles, int32_t n, enum dtype t, struct line_prefetch *ahead)
{
    (void)n_tiles;
    (void)t;
    struct amx_config shapes = amx_config();
    int32_t n_chunks = n / TILE_CHUNK;
    int32_t n_lines =
        (int32_t)div_ceil((int64_t)count * ahead->per_tile, PANEL_ROWS / (2 * W_ROWS) * n_chunks);
    const char *from = (const char *)(x + (int64_t)(tile / GROUP_TILES) * n_chunks * SUMS);

    for (int i = 0; i < AMX_TILES; i++) {
        amx_shape(&shapes, i, AMX_ROWS, AMX_BYTES);
    }
    amx_begin(&shapes);
    if (count > GROUP_TILES) {
        panel_rows(sum, (const char *)panel, from, n_chunks, true, ahead, n_lines);
    } else {
        panel_rows(sum, (const char *)panel, from, n_chunks, false, ahead, n_lines);
    }
    amx_end();
}

void cpu_panels_amx_bf16(struct cpu_kernels *k)
{
    k->panels_bf16 = (struct cpu_panels){.k_block = K_BLOCK,
                                         .rows = PANEL_ROWS,
                                         .from = 2 * X_ROWS + 1,
                                         .pack_rows = pack_panel_rows,
                                         .pack_x = pack_panel_x,
                                         .dots = panel_dots};
}

#endif
