/* Inner products with AMX of few rows of x with stored rows of w in bfloat16; see
 * amx_bf16.h for the order of sums, and panel_amx.c for many rows.
 *
 * A vector of sixteen neighbouring pairs of w holds one pair of each chunk. So for the
 * fewest rows of x, where the time is that of reading w, AVX-512 sums sixteen chunks
 * side by side without turning w around, and gives the same bits. For more rows each
 * step of w is transposed on its way, while the rows in front of it are multiplied by
 * tiles.
 */
#include "kernels/cpu/simd/amx_bf16.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)

enum {
    FEW_ROWS = 4,                /* of x, up to which AVX-512 is as fast */
    FEW_STEPS = 8 * BLOCK_STEPS, /* of a row, whose chunks' sums wait for other rows' */
    FETCH_ROWS = 4,              /* of w that are read side by side */
    STREAM_AHEAD_BYTES = 1024,
    STREAM_TASK_BYTES = 512 << 10,
};

/* Of x packed for few rows, which is the most. */
static int32_t packed_bytes(enum dtype t)
{
    (void)t;
    return (int32_t)sizeof(float);
}

/* The first and the second elements of sixteen pairs. */
INLINE __m512 firsts(__m512 pairs)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}

INLINE __m512 seconds(__m512 pairs)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-65536)));
}

/* ---- few rows of x ---- */

/* [line][row][first or second] of sixteen floats. */
static void pack_few(float *to, const float *const *x, int32_t n_x, int32_t n)
{
    for (int32_t at = 0; at < n; at += TILE_CHUNK) {
        for (int32_t j = 0; j < n_x; j++, to += TILE_CHUNK) {
            __m512 pairs = pack_line(x[j], at, n);
            _mm512_store_ps(to, firsts(pairs));
            _mm512_store_ps(to + 16, seconds(pairs));
        }
    }
}

/* The sums of sixteen chunks each, of one step of W_ROWS rows of w with rows of x. */
struct chunk_sums {
    __m512 of[FEW_ROWS][W_ROWS];
};

/* Lines of W_ROWS rows of w behind their last whole step, each a chunk. */
struct last_lines {
    __m512 of[STEP_LINES][W_ROWS];
};

/* Steps of n_w neighbouring entries of `row`, from entry `at` on, and a copy of the
 * lines behind them. */
INLINE void few_steps(struct chunk_sums *to, struct last_lines *last, const char *const *row,
                      int32_t at, const float *x, const int n_w, const int n_x, int32_t n_lines,
                      int64_t ahead)
{
    int32_t whole = n_lines / STEP_LINES * STEP_LINES;

    for (int32_t first = 0; first < whole; first += STEP_LINES, to++) {
        __m512 a[FEW_ROWS * 2], b[FEW_ROWS * 2];
#pragma GCC unroll 8
        for (int i = 0; i < n_w * n_x; i++) {
            a[i] = b[i] = _mm512_setzero_ps();
        }
        for (int32_t l = first; l < first + STEP_LINES; l++) {
#pragma GCC unroll 4
            for (int i = 0; i < n_w; i++) {
                const char *from = row[at + i] + (int64_t)l * LINE_BYTES;
                __builtin_prefetch(from + ahead, 0, 3);
                __m512 w = _mm512_loadu_ps(from);
                __m512 u = firsts(w), v = seconds(w);
#pragma GCC unroll 4
                for (int j = 0; j < n_x; j++) {
                    const float *with = x + ((int64_t)l * n_x + j) * TILE_CHUNK;
                    a[i * n_x + j] = _mm512_fmadd_ps(u, _mm512_load_ps(with), a[i * n_x + j]);
                    b[i * n_x + j] = _mm512_fmadd_ps(v, _mm512_load_ps(with + 16), b[i * n_x + j]);
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < n_w; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < n_x; j++) {
                to->of[j][at + i] = _mm512_add_ps(a[i * n_x + j], b[i * n_x + j]);
            }
        }
    }
    for (int32_t l = whole; l < n_lines; l++) {
        for (int i = 0; i < n_w; i++) {
            const char *from = row[at + i] + (int64_t)l * LINE_BYTES;
            __builtin_prefetch(from + ahead, 0, 3);
            last->of[l - whole][at + i] = _mm512_loadu_ps(from);
        }
    }
}

/* c plus the chunks of some steps, in their order. */
INLINE __m512 add_steps(__m512 c, const struct chunk_sums *from, int j, int32_t n_steps)
{
    for (int32_t k = 0; k < n_steps; k++) {
        __m512 r[W_ROWS];
#pragma GCC unroll 16
        for (int i = 0; i < W_ROWS; i++) {
            r[i] = from[k].of[j][i];
        }
        transpose16(r);
#pragma GCC unroll 16
        for (int l = 0; l < STEP_LINES; l++) {
            c = _mm512_add_ps(c, r[l]);
        }
    }
    return c;
}

/* The same of lines, turned [pair][row]; x is their first line of row j. */
INLINE __m512 add_lines(__m512 c, const struct last_lines *from, const float *x, const int n_x,
                        int32_t n_lines)
{
    for (int32_t l = 0; l < n_lines; l++, x += (int64_t)n_x * TILE_CHUNK) {
        __m512 a = _mm512_setzero_ps(), b = a;
#pragma GCC unroll 16
        for (int p = 0; p < STEP_LINES; p++) {
            a = _mm512_fmadd_ps(firsts(from->of[l][p]), _mm512_set1_ps(x[p]), a);
            b = _mm512_fmadd_ps(seconds(from->of[l][p]), _mm512_set1_ps(x[16 + p]), b);
        }
        c = _mm512_add_ps(c, _mm512_add_ps(a, b));
    }
    return c;
}

/* sum [n][n_x] = or += the sums of n_lines lines, a block after the other; x is packed
 * from the first of them on. */
INLINE void add_chunks(float *sum, const struct chunk_sums *from, const struct last_lines *last,
                       const float *x, int32_t n, const int n_x, int32_t n_lines, bool add)
{
    enum { BLOCK_LINES = K_BLOCK / TILE_CHUNK };
    _Alignas(64) float total[W_ROWS];
    int32_t whole = n_lines / STEP_LINES * STEP_LINES;

    for (int j = 0; j < n_x; j++) {
        for (int32_t l = 0; l < n_lines; l += BLOCK_LINES) {
            int32_t n_steps = (MIN(l + BLOCK_LINES, whole) - l) / STEP_LINES;
            __m512 c = add_steps(_mm512_setzero_ps(), from + l / STEP_LINES, j, n_steps);
            if (l + BLOCK_LINES > whole) {
                c = add_lines(c, last, x + ((int64_t)whole * n_x + j) * TILE_CHUNK, n_x,
                              n_lines - whole);
            }
            _mm512_store_ps(total, c);
            for (int32_t i = 0; i < n; i++) {
                sum[i * n_x + j] = add || l > 0 ? sum[i * n_x + j] + total[i] : total[i];
            }
        }
    }
}

INLINE void few_rows(float *sum, const struct dot_rows *w, const float *x, const int n_w,
                     const int n_x, int32_t n_lines, bool add, int64_t ahead)
{
    struct chunk_sums part[FEW_STEPS];
    struct last_lines last;

    for (int32_t i = 0; i < w->n; i += W_ROWS, sum += (int64_t)W_ROWS * n_x) {
        int32_t n = MIN(W_ROWS, w->n - i);
        for (int32_t l = 0; l < n_lines; l += FEW_STEPS * STEP_LINES) {
            int32_t n_l = MIN(n_lines - l, FEW_STEPS * STEP_LINES);
            const float *with = x + (int64_t)l * n_x * TILE_CHUNK;
            const char *row[W_ROWS];
            for (int32_t r = 0; r < W_ROWS; r++) {
                row[r] = (const char *)w->row[i + MIN(r, n - 1)] + 2 * w->first +
                         (int64_t)l * LINE_BYTES;
            }
            for (int32_t at = 0; at < W_ROWS; at += n_w) {
                few_steps(part, &last, row, at, with, n_w, n_x, n_l, ahead);
            }
            for (int32_t k = 0; k < n_l % STEP_LINES; k++) {
                transpose16(last.of[k]);
            }
            add_chunks(sum, part, &last, with, n, n_x, n_l, add || l > 0);
        }
    }
}

/* Apart from its caller, which sets how denormal numbers count. */
static __attribute__((noinline)) void dots_few(float *sum, const struct dot_rows *w, const float *x,
                                               int32_t n_x, int32_t n_lines, bool add,
                                               int64_t ahead)
{
    switch (n_x) {
    case 1:
        few_rows(sum, w, x, 4, 1, n_lines, add, ahead);
        break;
    case 2:
        few_rows(sum, w, x, 4, 2, n_lines, add, ahead);
        break;
    case 3:
        few_rows(sum, w, x, 2, 3, n_lines, add, ahead);
        break;
    default:
        few_rows(sum, w, x, 2, 4, n_lines, add, ahead);
        break;
    }
}

/* ---- tiles ---- */

/* [chunk][half of the rows][pair][row of the half]: a half has up to X_ROWS rows. */
static void pack_half(float *to, const float *const *x, int32_t n_half, int32_t n_x, int32_t n)
{
    const __mmask16 rows = (__mmask16)((1 << n_half) - 1);
    int64_t n_lines = div_ceil(n, TILE_CHUNK), whole = n_lines / STEP_LINES * STEP_LINES;

    for (int64_t line = 0; line < n_lines; line++) {
        __m512 r[X_ROWS];
        for (int i = 0; i < X_ROWS; i++) {
            r[i] =
                i < n_half ? pack_line(x[i], (int32_t)line * TILE_CHUNK, n) : _mm512_setzero_ps();
        }
        transpose16(r);
        for (int l = 0; l < STEP_LINES; l++) {
            int64_t chunk = line < whole ? line / STEP_LINES * STEP_LINES + l : line;
            int64_t pair = line < whole ? line % STEP_LINES : l;
            _mm512_mask_storeu_ps(to + chunk * n_x * 16 + pair * n_half, rows, r[l]);
        }
    }
}

static void pack(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t)
{
    (void)t;
    if (n_x <= FEW_ROWS) {
        pack_few(out, x, n_x, n);
        return;
    }
    pack_half(out, x, MIN(n_x, X_ROWS), n_x, n);
    if (n_x > X_ROWS) {
        pack_half((float *)out + SUMS, x + X_ROWS, n_x - X_ROWS, n_x, n);
    }
}

/* A block of W_ROWS rows that is transposed, to [chunk][row], while the block in front
 * of it is multiplied. Memory is read as a few streams: FETCH_ROWS rows at a time, from
 * their first step to their last. */
struct unit {
    const char *row[W_ROWS]; /* where the block begins; the last rows may be the same */
    char *to;                /* [chunk][W_BYTES]; NULL: prefetched alone */
    int32_t n_lines;
    int32_t first, step, next; /* to be copied: row first + next, at the step */
};

/* Block `block` of the rows from `first` on. */
INLINE struct unit unit_at(const struct dot_rows *w, int32_t first, int32_t block, int32_t n_lines,
                           char *to)
{
    int32_t before = block * (K_BLOCK / TILE_CHUNK);
    struct unit u = {.to = to, .n_lines = MIN(n_lines - before, K_BLOCK / TILE_CHUNK)};

    for (int32_t i = 0; i < W_ROWS; i++) {
        u.row[i] = (const char *)w->row[MIN(first + i, w->n - 1)] + 2 * w->first +
                   (int64_t)before * LINE_BYTES;
    }
    return u;
}

/* What follows the last rows in memory, which the next call is likely to read. */
INLINE struct unit unit_behind(const struct dot_rows *w, int32_t n_lines)
{
    struct unit u = {.n_lines = MIN(n_lines, K_BLOCK / TILE_CHUNK)};

    for (int32_t i = 0; i < W_ROWS; i++) {
        const char *last = w->row[MAX(w->n - FETCH_ROWS + i % FETCH_ROWS, 0)];
        u.row[i] = last + (int64_t)(1 + i / FETCH_ROWS) * n_lines * LINE_BYTES;
    }
    return u;
}

/* One step of one row, if any is left. */
INLINE void copy_step(struct unit *u, int64_t ahead)
{
    if (u->first == W_ROWS) {
        return;
    }
    int32_t row = u->first + u->next;
    const char *from = u->row[row] + (int64_t)u->step * STEP_BYTES;
    int32_t n_lines = MIN(u->n_lines - u->step * STEP_LINES, STEP_LINES);
    for (int i = 0; i < n_lines; i++) {
        __builtin_prefetch(from + (u->to ? ahead : 0) + (int64_t)i * LINE_BYTES, 0, 2);
    }
    if (u->to) {
        turn_step(u->to + (int64_t)u->step * STEP_LINES * W_BYTES + (int64_t)row * AMX_BYTES, from,
                  n_lines);
    }
    u->next = (u->next + 1) % FETCH_ROWS;
    u->step += u->next == 0;
    if (u->step * STEP_LINES >= u->n_lines) {
        u->step = 0;
        u->first += FETCH_ROWS;
    }
}

/* sum [W_ROWS][n_x] = the copied rows . x, while `next` is copied. */
INLINE void multiply(float *sum, const struct unit *u, const char *x, int32_t n_x,
                     const bool halves, struct unit *next, int64_t ahead)
{
    int32_t n_chunks = u->n_lines;
    int32_t low = MIN(n_x, X_ROWS);
    const char *w = u->to;

    _tile_zero(C00);
    if (halves) {
        _tile_zero(C01);
    }
    for (int32_t c = 0; c < n_chunks; c++, w += W_BYTES, x += (int64_t)n_x * AMX_BYTES) {
        copy_step(next, ahead);
        _tile_loadd(W0, w, AMX_BYTES);
        _tile_loadd(X0, x, 4 * low);
        _tile_dpbf16ps(C00, W0, X0);
        if (halves) {
            _tile_loadd(X1, x + W_BYTES, 4 * (n_x - low));
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
                     const bool halves, int32_t n_lines, bool add, int64_t ahead)
{
    _Alignas(64) char copy[2][BLOCK_STEPS * STEP_LINES * W_BYTES];
    int32_t n_blocks = (int32_t)div_ceil(n_lines, K_BLOCK / TILE_CHUNK);
    int32_t n_units = (int32_t)div_ceil(w->n, W_ROWS) * n_blocks;
    struct unit u = unit_at(w, 0, 0, n_lines, copy[0]);

    while (u.first < W_ROWS) {
        copy_step(&u, ahead);
    }
    for (int32_t i = 0; i < n_units; i++) {
        int32_t first = i / n_blocks * W_ROWS, block = i % n_blocks;
        float part[2 * SUMS];
        struct unit next = unit_behind(w, n_lines);
        if (i + 1 < n_units) {
            next = unit_at(w, (i + 1) / n_blocks * W_ROWS, (i + 1) % n_blocks, n_lines,
                           copy[(i + 1) % 2]);
        }
        amx_order();
        multiply(part, &u, x + (int64_t)block * K_BLOCK * 2 * n_x, n_x, halves, &next, ahead);
        put_sums(sum + (int64_t)first * n_x, part, MIN(W_ROWS, w->n - first) * n_x,
                 add || block > 0);
        while (next.to && next.first < W_ROWS) {
            copy_step(&next, ahead);
        }
        u = next;
    }
}

static void dots_many(float *sum, const struct dot_rows *w, const char *x, int32_t n_x,
                      int32_t n_lines, bool add, int64_t ahead)
{
    struct amx_config t = amx_config();
    int32_t low = MIN(n_x, X_ROWS), high = n_x - low;

    amx_shape(&t, W0, W_ROWS, AMX_BYTES);
    amx_shape(&t, X0, AMX_ROWS, 4 * low);
    amx_shape(&t, C00, W_ROWS, 4 * low);
    if (high > 0) {
        amx_shape(&t, X1, AMX_ROWS, 4 * high);
        amx_shape(&t, C01, W_ROWS, 4 * high);
    }
    amx_begin(&t);
    if (high > 0) {
        all_rows(sum, w, x, n_x, true, n_lines, add, ahead);
    } else {
        all_rows(sum, w, x, n_x, false, n_lines, add, ahead);
    }
    amx_end();
}

static void dots(float *sum, const struct dot_rows *w, const void *x, int32_t n_x, int32_t n_chunks,
                 bool add, const struct prefetch *ahead)
{
    enum { FLUSH_TO_ZERO = 1 << 15, DENORMALS_ARE_ZERO = 1 << 6 };
    int64_t bytes = ahead->period == 1 ? ahead->distance : 0;

    if (w->n == 0) {
        return;
    }
    if (n_x > FEW_ROWS) {
        dots_many(sum, w, x, n_x, n_chunks, add, bytes);
        return;
    }
    unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
    dots_few(sum, w, x, n_x, n_chunks, add, bytes);
    _mm_setcsr(modes);
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
}

#endif
