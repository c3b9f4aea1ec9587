/* Inner products with AMX, sixteen rows of w at a time: rows as stored, x rounded to
 * bfloat16. Of rows of bfloat16 alone; other types are multiplied as without AMX.
 *
 * Sixteen rows of w are operand A, 32 elements of each as stored; packed x is operand B, with a column for each row of x. So C is [w][x]. An element of C adds,
 * for each 32 elements, the products of the even ones in their order, those of the odd
 * ones in theirs, then both; denormal numbers count as 0. A block of K_BLOCK elements
 * is one such sum; sums of blocks are added in their order.
 *
 * Panels for many rows of x have the same operands, with the rows of w side by side in
 * the second-level cache, and multiply two by two tiles.
 */
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/avx512.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)

enum {
    K_BLOCK = 2048,
    BLOCK_CHUNKS = K_BLOCK / TILE_CHUNK,
    W_ROWS = AMX_ROWS,            /* stored rows of w in a tile register */
    X_ROWS = AMX_ROWS,            /* rows of x in a tile register */
    SUMS = W_ROWS * X_ROWS,       /* of one product of two registers */
    CHUNK_BYTES = 2 * TILE_CHUNK, /* of a row */
    W_BYTES = W_ROWS * AMX_BYTES, /* a tile register of w, or a full one of x */
    FETCH_ROWS = 4,               /* of w that are read side by side */
    STREAM_AHEAD_BYTES = 1024,
    STREAM_TASK_BYTES = 512 << 10,
    PANEL_ROWS = 128,
    GROUP_TILES = X_ROWS / TILE_ROWS, /* tiles of panels' x in a register */
};

/* Registers. The numbers of tile registers are literals in the instructions. */
#define C00 0
#define C01 1
#define C10 2
#define C11 3
#define W0 4
#define W1 5
#define X0 6
#define X1 7

static int32_t packed_bytes(enum dtype t)
{
    return dtype_bytes(t);
}

/* Thirty-two floats, rounded to bfloat16. */
INLINE __m512 pack_pairs(const float *x)
{
    return (__m512)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
}

/* The same of a row of n floats from `at` on, zero-padded. */
INLINE __m512 pack_row(const float *x, int32_t at, int32_t n)
{
    float last[TILE_CHUNK] = {0};

    if (at + TILE_CHUNK <= n) {
        return pack_pairs(x + at);
    }
    if (at < n) {
        memcpy(last, x + at, (size_t)(n - at) * sizeof(*last));
    }
    return pack_pairs(last);
}

/* ---- tiles ---- */

/* A chunk of n_x <= X_ROWS rows: [pair][n_x] words. */
INLINE float *pack_chunk(float *to, const float *const *x, int32_t n_x, int32_t at, int32_t n)
{
    const __mmask16 rows = (__mmask16)((1 << n_x) - 1);
    __m512 r[X_ROWS];

    if (n_x == 1) {
        _mm512_storeu_ps(to, pack_row(x[0], at, n));
        return to + X_ROWS;
    }
    for (int i = 0; i < X_ROWS; i++) {
        r[i] = i < n_x ? pack_row(x[i], at, n) : _mm512_setzero_ps();
    }
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        _mm512_mask_storeu_ps(to + i * n_x, rows, r[i]);
    }
    return to + (int64_t)16 * n_x;
}

/* [chunk][half of the rows][pair][row of the half]: a half has up to X_ROWS rows. */
static void pack(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t)
{
    (void)t;
    float *to = out;
    int32_t low = MIN(n_x, X_ROWS);

    for (int32_t at = 0; at < n; at += TILE_CHUNK) {
        to = pack_chunk(to, x, low, at, n);
        if (n_x > low) {
            to = pack_chunk(to, x + low, n_x - low, at, n);
        }
    }
}

/* A block of W_ROWS rows that is copied side by side, [chunk][row], while the block in
 * front of it is multiplied: tiles read neighbouring lines, and memory is read as a few
 * streams, FETCH_ROWS rows at a time from their first chunk to their last. */
struct unit {
    const char *row[W_ROWS]; /* of the block's first chunk; the last rows may be the same */
    char *to;                /* [n_chunks][W_BYTES]; NULL: prefetched and not copied */
    int32_t n_chunks;
    bool last;            /* the block ends the rows */
    int32_t first, chunk; /* the next to be copied: FETCH_ROWS rows, one chunk of each */
};

/* Block `block` of the rows from `first` on. */
INLINE struct unit unit_at(const struct dot_rows *w, int32_t first, int32_t block, int32_t n_chunks,
                           char *to)
{
    struct unit u = {.to = to, .n_chunks = MIN(n_chunks - block * BLOCK_CHUNKS, BLOCK_CHUNKS)};
    int64_t offset = 2 * (w->first + (int64_t)block * K_BLOCK);

    u.last = (block + 1) * BLOCK_CHUNKS >= n_chunks;
    for (int32_t i = 0; i < W_ROWS; i++) {
        u.row[i] = (const char *)w->row[MIN(first + i, w->n - 1)] + offset;
    }
    return u;
}

/* What follows the last rows in memory, which the next call is likely to read. */
INLINE struct unit unit_behind(const struct dot_rows *w, int32_t n_chunks)
{
    struct unit u = {.n_chunks = MIN(n_chunks, BLOCK_CHUNKS)};

    for (int32_t i = 0; i < W_ROWS; i++) {
        const char *last = w->row[MAX(w->n - FETCH_ROWS + i % FETCH_ROWS, 0)];
        u.row[i] = last + (int64_t)(1 + i / FETCH_ROWS) * n_chunks * CHUNK_BYTES;
    }
    return u;
}

/* Where row i of the next four is read `ahead` bytes after `at`: in its own block, in
 * that of the next four rows, or in the unit that follows. */
INLINE const char *ahead_of(const struct unit *u, int i, int64_t at, int64_t ahead)
{
    int64_t past = at + ahead - (int64_t)u->n_chunks * CHUNK_BYTES;

    if (past < 0 || (u->first + FETCH_ROWS == W_ROWS && u->last)) {
        return u->row[u->first + i] + at + ahead;
    }
    return u->first + FETCH_ROWS == W_ROWS ? u->row[i] + at + ahead
                                           : u->row[u->first + FETCH_ROWS + i] + past;
}

INLINE void copy_chunk(struct unit *u, int64_t ahead)
{
    int64_t at = (int64_t)u->chunk * CHUNK_BYTES;

    if (u->to) {
#pragma GCC unroll 4
        for (int i = 0; i < FETCH_ROWS; i++) {
            __builtin_prefetch(ahead_of(u, i, at, ahead), 0, 3);
            _mm512_store_si512(u->to + u->chunk * W_BYTES + (u->first + i) * AMX_BYTES,
                               _mm512_loadu_si512(u->row[u->first + i] + at));
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < FETCH_ROWS; i++) {
            __builtin_prefetch(u->row[u->first + i] + at, 0, 2);
        }
    }
    if (++u->chunk == u->n_chunks) {
        u->chunk = 0;
        u->first += FETCH_ROWS;
    }
}

INLINE void copy_rest(struct unit *u, int64_t ahead)
{
    while (u->first < W_ROWS) {
        copy_chunk(u, ahead);
    }
}

/* sum [W_ROWS][n_x] = the copied rows . x, while `next` is copied. */
INLINE void multiply(float *sum, const struct unit *u, const char *x, int32_t n_x,
                     const bool halves, struct unit *next, int64_t ahead)
{
    int32_t low = MIN(n_x, X_ROWS);
    const char *w = u->to;

    _tile_zero(C00);
    if (halves) {
        _tile_zero(C01);
    }
    for (int32_t c = 0; c < u->n_chunks; c++, w += W_BYTES, x += (int64_t)n_x * CHUNK_BYTES) {
        for (int32_t i = 0; i < W_ROWS / FETCH_ROWS && next->first < W_ROWS; i++) {
            copy_chunk(next, ahead);
        }
        _tile_loadd(W0, w, AMX_BYTES);
        _tile_loadd(X0, x, 4 * low);
        _tile_dpbf16ps(C00, W0, X0);
        if (halves) {
            _tile_loadd(X1, x + X_ROWS * AMX_BYTES, 4 * (n_x - low));
            _tile_dpbf16ps(C01, W0, X1);
        }
    }
    _tile_stored(C00, sum, 4 * n_x);
    if (halves) {
        _tile_stored(C01, sum + X_ROWS, 4 * n_x);
    }
    amx_order();
}

static void put_sums(float *sum, const float *block, int32_t n, bool add)
{
    for (int32_t i = 0; i < n; i++) {
        sum[i] = add ? sum[i] + block[i] : block[i];
    }
}

INLINE void all_rows(float *sum, const struct dot_rows *w, const char *x, int32_t n_x,
                     const bool halves, int32_t n_chunks, bool add, int64_t ahead)
{
    _Alignas(64) char copy[2][BLOCK_CHUNKS * W_BYTES];
    int32_t n_blocks = (int32_t)div_ceil(n_chunks, BLOCK_CHUNKS);
    int32_t n_units = (int32_t)div_ceil(w->n, W_ROWS) * n_blocks;
    struct unit u = unit_at(w, 0, 0, n_chunks, copy[0]);

    copy_rest(&u, ahead);
    for (int32_t i = 0; i < n_units; i++) {
        int32_t first = i / n_blocks * W_ROWS, block = i % n_blocks;
        float part[2 * SUMS];
        struct unit next = i + 1 == n_units
                               ? unit_behind(w, n_chunks)
                               : unit_at(w, (i + 1) / n_blocks * W_ROWS, (i + 1) % n_blocks,
                                         n_chunks, copy[(i + 1) % 2]);
        amx_order();
        multiply(part, &u, x + (int64_t)block * K_BLOCK * 2 * n_x, n_x, halves, &next, ahead);
        put_sums(sum + (int64_t)first * n_x, part, MIN(W_ROWS, w->n - first) * n_x,
                 add || block > 0);
        if (next.to) {
            copy_rest(&next, ahead);
        }
        u = next;
    }
}

static void dots(float *sum, const struct dot_rows *w, const void *x, int32_t n_x, int32_t n_chunks,
                 bool add, const struct prefetch *ahead)
{
    struct amx_config t = amx_config();
    int32_t low = MIN(n_x, X_ROWS), high = n_x - low;
    int64_t bytes = ahead->period == 1 ? ahead->distance : 0;

    if (w->n == 0) {
        return;
    }
    amx_shape(&t, W0, W_ROWS, AMX_BYTES);
    amx_shape(&t, X0, AMX_ROWS, 4 * low);
    amx_shape(&t, C00, W_ROWS, 4 * low);
    if (high > 0) {
        amx_shape(&t, X1, AMX_ROWS, 4 * high);
        amx_shape(&t, C01, W_ROWS, 4 * high);
    }
    amx_begin(&t);
    if (high > 0) {
        all_rows(sum, w, x, n_x, true, n_chunks, add, bytes);
    } else {
        all_rows(sum, w, x, n_x, false, n_chunks, add, bytes);
    }
    amx_end();
}

/* ---- panels ---- */

/* [register][chunk][row]. */
static void pack_panel_rows(float *panel, const void *const *row, int64_t first, int32_t n,
                            enum dtype t)
{
    char *to = (char *)panel;

    for (int32_t r = 0; r < PANEL_ROWS; r++) {
        const char *from = (const char *)row[r] + first * dtype_bytes(t);
        char *line =
            to + (int64_t)(r / W_ROWS) * (n / TILE_CHUNK) * W_BYTES + r % W_ROWS * AMX_BYTES;
        for (int32_t at = 0; at < n; at += TILE_CHUNK, from += CHUNK_BYTES, line += W_BYTES) {
            _mm512_store_si512(line, _mm512_loadu_si512(from));
        }
    }
}

/* [register][chunk][pair][row]. */
static void pack_panel_x(float *out, int32_t tile, int32_t n_tiles, const float *const *x,
                         int32_t n_x, int32_t n, int32_t padded, enum dtype t)
{
    (void)n_tiles;
    (void)t;
    out += (int64_t)(tile / GROUP_TILES) * (padded / TILE_CHUNK) * SUMS +
           tile % GROUP_TILES * TILE_ROWS;
    for (int32_t at = 0; at < padded; at += TILE_CHUNK, out += SUMS) {
        __m512 r[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS; i++) {
            r[i] = pack_row(x[MIN(i, n_x - 1)], at, n);
        }
        transpose4(r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            float *to = out + i * X_ROWS;
            _mm_store_ps(to, _mm512_castps512_ps128(r[i]));
            _mm_store_ps(to + 4 * X_ROWS, _mm512_extractf32x4_ps(r[i], 1));
            _mm_store_ps(to + 8 * X_ROWS, _mm512_extractf32x4_ps(r[i], 2));
            _mm_store_ps(to + 12 * X_ROWS, _mm512_extractf32x4_ps(r[i], 3));
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

/* ---- sums of tiles to rows ---- */

static void transpose_sums(float *out, int32_t stride, const float *sum, int32_t n, int32_t n_x)
{
    if (n_x == 1) {
        memcpy(out, sum, (size_t)n * sizeof(*out));
        return;
    }
    for (int32_t i = 0; i < n; i += 16) {
        __mmask16 rows = n - i < 16 ? (__mmask16)((1 << (n - i)) - 1) : 0xFFFF;
        for (int32_t x = 0; x < n_x; x += 16) {
            __mmask16 here = n_x - x < 16 ? (__mmask16)((1 << (n_x - x)) - 1) : 0xFFFF;
            __m512 r[16];
            for (int k = 0; k < 16; k++) {
                r[k] = i + k < n ? _mm512_maskz_loadu_ps(here, sum + (i + k) * n_x + x)
                                 : _mm512_setzero_ps();
            }
            transpose16(r);
            for (int k = 0; k < 16 && x + k < n_x; k++) {
                _mm512_mask_storeu_ps(out + (int64_t)(x + k) * stride + i, rows, r[k]);
            }
        }
    }
}

void cpu_tiles_amx(struct cpu_kernels *k)
{
    k->linear_bf16 = (struct cpu_tiles){.k_block = K_BLOCK,
                                        .rows = 2 * X_ROWS,
                                        .streams = FETCH_ROWS,
                                        .step = W_ROWS / FETCH_ROWS,
                                        .task_bytes = STREAM_TASK_BYTES,
                                        .ahead_bytes = STREAM_AHEAD_BYTES,
                                        .packed_bytes = packed_bytes,
                                        .pack = pack,
                                        .dots = dots};
    k->panels_bf16 = (struct cpu_panels){.k_block = K_BLOCK,
                                         .rows = PANEL_ROWS,
                                         .from = 2 * X_ROWS + 1,
                                         .pack_rows = pack_panel_rows,
                                         .pack_x = pack_panel_x,
                                         .dots = panel_dots};
    k->transpose_sums = transpose_sums;
}

#endif
