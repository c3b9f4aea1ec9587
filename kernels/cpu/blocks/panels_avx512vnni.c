/* Products of many rows of x with weights in blocks: sixteen rows of a weight are
 * unpacked to bytes such that a vector has four neighbouring codes of each, and are
 * multiplied with four codes of a row of x at a time. A group's sums of sixteen rows
 * then lie in one vector, so that scaling them costs as much as it does for one row.
 *
 * The accumulators that blocks_plain.c specifies are taken one after another, each
 * over all blocks of the row, in the order in which the tree adds them: one vector a
 * row of x is under way, and few wait to be added. Panels and tiles have this order
 * too, entry by entry:
 *
 *     panel: scales [16], minima [16] of formats with minima, codes [group / 4][16][4]
 *     tile:  codes [n_x][group], scales [n_x], and of each row of x what the sum
 *            begins with, or with minima what they are multiplied with
 *
 * Codes of e4m3 are three digits in panels, all of the greatest ones of an entry first;
 * between two digits the sum is shifted.
 */
#include "kernels/cpu/blocks/codes_panels_x86.h"
#include "kernels/cpu/blocks/e4m3_avx512.h"
#include "kernels/cpu/blocks/panels_avx512.h"

#ifdef __AVX512VNNI__

enum {
    TILE = 12, /* rows of x in a tile, at most */
    FROM = 5,  /* rows of x, from which a panel pays */
};

/* ---- panels ---- */

/* Formats whose codes are split after they are transposed, two in a byte till then. */
INLINE bool splits_late(const enum weight_format_id f)
{
    return f == FORMAT_Q4_K || (is_turned(f) && f != FORMAT_Q5_0 && f != FORMAT_Q5_1);
}

/* The codes of a row's 256 values, and its scales: of sixteen groups, or of eight and
 * their minima. */
struct unpacked {
    /* a quarter of the codes of each row; of formats that are split late half of them,
     * of which there are two */
    __m512i code[4][ROWS];
    __m512i scale[ROWS];
    __m512i min[ROWS]; /* of sixteen groups */
};

INLINE void unpack_codes(struct unpacked *u, int i, const enum weight_format_id f, const uint8_t *s,
                         const int32_t groups)
{
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        if (splits_late(f)) {
            if (p < 2) {
                u->code[p][i] = 4 * p >= groups    ? _mm512_setzero_si512()
                                : f == FORMAT_Q4_K ? _mm512_loadu_si512(s + 16 + 64 * p)
                                                   : load_groups(f, s, 4 * p, groups - 4 * p);
            }
        } else if (is_turned(f) && p % 2 == 0) {
            __m512i two[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            if (2 * p < groups) {
                turned_codes(f, s, 2 * p, groups - 2 * p, two);
            }
            u->code[p][i] = two[0];
            u->code[p + 1][i] = two[1];
        } else if (!is_turned(f)) {
            u->code[p][i] = 2 * p < groups ? pair_codes(f, s, p) : _mm512_setzero_si512();
        }
    }
}

INLINE void unpack_row(struct unpacked *u, int i, const enum weight_format_id f, const uint8_t *s,
                       const int32_t groups)
{
    __m256 w[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

    unpack_codes(u, i, f, s, groups);
    if (has_halves(f)) {
        half_scales_of(f, s, w, false);
        u->scale[i] = join(w);
        if (has_minima(f)) {
            half_minima_of(s, w, false);
            u->min[i] = join(w);
        }
        return;
    }
    w[0] = scales_of(f, s, groups, false);
    w[1] = has_minima(f) ? minima_of(f, s, groups, false) : w[1];
    u->scale[i] = join(w);
}

/* Write half of the codes of a block of a format that is split late. */
INLINE void put_late(const struct entries *e, __m512i v[16], const enum weight_format_id f,
                     const int q)
{
    const int head = has_minima(f) ? 128 : 64, high = f == FORMAT_Q4_K ? 32 : 16;

    transpose(v);
#pragma GCC unroll 16
    for (int d = 0; d < 16; d++) { /* what is `high` codes apart is in one byte */
        int at = 128 * q + d / (high / 4) * 2 * high + d % (high / 4) * 4;
        __m512i code[2];
        split_codes(f, v[d], code);
        _mm512_store_si512(e->at[at / 32] + head + at % 32 * 16, code[0]);
        at += high;
        _mm512_store_si512(e->at[at / 32] + head + at % 32 * 16, code[1]);
    }
}

/* Write a quarter of the codes of a block. */
INLINE void put_codes(const struct entries *e, __m512i v[16], const enum weight_format_id f,
                      const int q)
{
    const int group = group_of(f), head = has_minima(f) ? 128 : 64;

    transpose(v);
#pragma GCC unroll 16
    for (int d = 0; d < 16; d++) { /* the four codes that begin at `at` */
        int at = is_turned(f) ? q / 2 * 128 + d / 4 * 32 + q % 2 * 16 + d % 4 * 4 : 64 * q + 4 * d;
        _mm512_store_si512(e->at[at / group] + head + at % group * 16, v[d]);
    }
}

/* Write a block to the panel's entries. */
INLINE void put_block(const struct entries *e, struct unpacked *u, const enum weight_format_id f)
{
    const int lanes = FORMAT_BLOCK_MAX / group_of(f);

    if (splits_late(f)) {
        put_late(e, u->code[0], f, 0);
        put_late(e, u->code[1], f, 1);
    } else {
        put_codes(e, u->code[0], f, 0);
        put_codes(e, u->code[1], f, 1);
        put_codes(e, u->code[2], f, 2);
        put_codes(e, u->code[3], f, 3);
    }
    transpose(u->scale);
    if (has_minima(f) && has_halves(f)) {
        transpose(u->min);
    }
#pragma GCC unroll 16
    for (int l = 0; l < lanes; l++) {
        _mm512_store_si512(e->at[l], u->scale[l]);
        if (has_minima(f)) {
            _mm512_store_si512(e->at[l] + 64, has_halves(f) ? u->min[l] : u->scale[8 + l]);
        }
    }
}

/* Unpack block b of the rows. */
INLINE void unpack_block(struct unpacked *u, const enum weight_format_id f, const void *const *row,
                         int32_t b, int64_t ahead)
{
    for (int i = 0; i < ROWS; i++) {
        const uint8_t *s = (const uint8_t *)row[i] + (int64_t)b * bytes_of(f);
        for (int line = 0; line < bytes_of(f); line += 64) {
            __builtin_prefetch(s + ahead + line, 0, 2);
        }
        unpack_row(u, i, f, s, GROUPS);
    }
}

/* The same of a block that is cut after `groups` groups. */
INLINE void unpack_last(struct unpacked *u, const enum weight_format_id f, const void *const *row,
                        int32_t b, int32_t groups)
{
    for (int i = 0; i < ROWS; i++) {
        uint8_t last[FORMAT_BLOCK_BYTES_MAX] = {0};
        memcpy(last, (const uint8_t *)row[i] + (int64_t)b * bytes_of(f),
               (size_t)(groups * (bytes_of(f) / GROUPS)));
        unpack_row(u, i, f, last, (groups + 1) / 2 * 2);
    }
}

INLINE void pack_rows(void *panel, const enum weight_format_id f, const void *const *row, int32_t n,
                      int64_t ahead)
{
    const int group = group_of(f);
    const int64_t entry = code_panel_entry(group, has_minima(f));
    int32_t whole = n / FORMAT_BLOCK_MAX, rest = n % FORMAT_BLOCK_MAX;
    struct entries e = first_entries(panel, group, entry, whole + (rest > 0));
    struct unpacked u;

    for (int32_t b = 0; b < whole; b++) {
        unpack_block(&u, f, row, b, ahead);
        put_block(&e, &u, f);
        next_entries(&e, group, entry);
    }
    if (rest > 0) {
        unpack_last(&u, f, row, whole, rest / 32);
        put_block(&e, &u, f);
    }
}

#define PACK_ROWS(NAME)                                                                    \
    static void pack_##NAME(void *panel, const void *const *row, int32_t n, int64_t ahead) \
    {                                                                                      \
        pack_rows(panel, FORMAT_##NAME, row, n, ahead);                                    \
    }
EACH_BLOCK_FORMAT(PACK_ROWS)

/* ---- panels of codes whose scales are apart ---- */

/* What stored codes of groups of 16, or of 32, are above those with a sign. */
INLINE __m512i above_codes(const int group)
{
    return _mm512_set1_epi8(group == 16 ? 32 : (char)0x80);
}

INLINE void pack_codes(char *panel, struct panel_rows *r, const int group)
{
    const enum weight_format_id as = group == 16 ? FORMAT_Q6_K : FORMAT_Q8_0;
    const int64_t entry = code_panel_entry(group, false);
    struct entries e =
        first_entries(panel, group, entry, (int32_t)div_ceil(r->n, FORMAT_BLOCK_MAX));
    struct code_span span;
    struct unpacked u;

    for (int32_t at = 0; at < r->n; at += FORMAT_BLOCK_MAX) {
        rows_at(r, at);
        for (int32_t i = 0; i < ROWS; i++) {
            const float *scale = row_block(&span, r, i, at);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                __m512i v = _mm512_load_si512(span.code + 64 * q);
                u.code[q][i] = _mm512_add_epi8(v, above_codes(group));
            }
            u.scale[i] = group == 16 ? _mm512_loadu_si512(scale)
                                     : _mm512_zextsi256_si512(load32((const uint8_t *)scale));
        }
        put_block(&e, &u, as);
        next_entries(&e, group, entry);
    }
}

static void pack_apart_16(void *panel, enum weight_format_id f, const void *const *row,
                          const struct row_scales *scales, int32_t n, int64_t ahead)
{
    struct code_groups of[CODE_PANEL_ROWS];
    struct panel_rows r = {
        .row = row, .scales = scales, .f = f, .n = n, .group = 16, .ahead = ahead, .of = of};

    pack_codes(panel, &r, 16);
}

static void pack_apart_32(void *panel, enum weight_format_id f, const void *const *row,
                          const struct row_scales *scales, int32_t n, int64_t ahead)
{
    struct code_groups of[CODE_PANEL_ROWS];
    struct panel_rows r = {
        .row = row, .scales = scales, .f = f, .n = n, .group = 32, .ahead = ahead, .of = of};

    pack_codes(panel, &r, 32);
}

/* Bytes of an entry of a panel. */
INLINE int64_t panel_entry(const int group, const bool minima, const int digits)
{
    return code_panel_entry(group, minima) + (digits - 1) * CODE_PANEL_ROWS * group;
}

/* Digits of 256 codes of e4m3 of sixteen rows. */
struct digits {
    _Alignas(64) uint8_t v[ROWS][DIGITS][FORMAT_BLOCK_MAX];
    __m512i scale[ROWS];
};

INLINE void digits_of_row(struct digits *d, int32_t i, const struct panel_rows *r, int32_t at)
{
    const uint8_t *codes = (const uint8_t *)r->row[i] + at;
    uint8_t last[FORMAT_BLOCK_MAX] = {0};

    d->scale[i] = _mm512_zextsi256_si512(load32((const uint8_t *)row_block(NULL, r, i, at)));
    if (r->n - at < FORMAT_BLOCK_MAX) { /* what follows the row is not read */
        codes = memcpy(last, codes, (size_t)(r->n - at));
    }
    for (int g = 0; g < FORMAT_BLOCK_MAX / 32; g++) {
        e4m3_digits(d->v[i][0] + 32 * g, FORMAT_BLOCK_MAX, codes + 32 * g);
    }
}

INLINE void put_digits(const struct entries *e, struct digits *d)
{
    __m512i v[ROWS];

    for (int digit = 0; digit < DIGITS; digit++) {
        for (int q = 0; q < 4; q++) {
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) {
                v[i] = _mm512_load_si512(d->v[i][digit] + 64 * q);
            }
            transpose(v);
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) {
                _mm512_store_si512(e->at[2 * q + k / 8] + 64 * (1 + 8 * digit + k % 8), v[k]);
            }
        }
    }
    transpose(d->scale);
#pragma GCC unroll 8
    for (int l = 0; l < FORMAT_BLOCK_MAX / 32; l++) {
        _mm512_store_si512(e->at[l], d->scale[l]);
    }
}

static void pack_e4m3(void *panel, enum weight_format_id f, const void *const *row,
                      const struct row_scales *scales, int32_t n, int64_t ahead)
{
    struct code_groups of[CODE_PANEL_ROWS];
    struct panel_rows r = {
        .row = row, .scales = scales, .f = f, .n = n, .group = 32, .ahead = ahead, .of = of};
    const int64_t entry = panel_entry(32, false, DIGITS);
    struct entries e = first_entries(panel, 32, entry, (int32_t)div_ceil(n, FORMAT_BLOCK_MAX));
    struct digits d;

    for (int32_t at = 0; at < n; at += FORMAT_BLOCK_MAX) {
        rows_at(&r, at);
        for (int32_t i = 0; i < ROWS; i++) {
            digits_of_row(&d, i, &r, at);
        }
        put_digits(&e, &d);
        next_entries(&e, 32, entry);
    }
}

/* ---- tiles ---- */

/* What the codes of a panel are above those of the format; 0 of those with minima. */
INLINE int32_t above_of(const enum weight_format_id f)
{
    return has_minima(f) ? 0 : f == FORMAT_FP8 ? DIGITS_ABOVE : 1 << zero_shift(f);
}

/* What the integer sums are too high by, with its sign turned. */
INLINE __m512i sums_above(__m512i total, const int32_t above)
{
    return _mm512_mullo_epi32(total, _mm512_set1_epi32(-above));
}

/* Write row j of a tile's n_x: 256 values. */
INLINE void put_x(const struct entries *e, const struct act_block *x, const int group,
                  const int32_t above, int32_t j, int32_t n_x)
{
    _Alignas(64) int32_t third[16];
    int64_t third_at = (int64_t)n_x * group + 4 * (n_x + j);
    const int32_t *total = group == 16 ? x->total16 : x->total32;

    if (above == 0) {
        memcpy(third, group == 16 ? x->sum16 : x->sum32, (size_t)(1024 / group));
    } else if (group == 16) {
        _mm512_store_si512(third, sums_above(_mm512_load_si512(total), above));
    } else {
        _mm512_store_si512(
            third, sums_above(_mm512_castsi256_si512(load32((const uint8_t *)total)), above));
    }
#pragma GCC unroll 16
    for (int l = 0; l < FORMAT_BLOCK_MAX / group; l++) {
        char *to = e->at[l];
        memcpy(to + j * group, x->code + l * group, (size_t)group);
        memcpy(to + third_at - 4 * n_x, &x->scale[l * group / 32], sizeof(float));
        memcpy(to + third_at, &third[l], sizeof(*third));
    }
}

INLINE void pack_rows_x(char *tile, const float *const *x, int32_t n_x, int32_t n, int32_t planes,
                        const int group, const int32_t above)
{
    int32_t blocks = (int32_t)div_ceil(n, FORMAT_BLOCK_MAX), padded = (n_x + 3) / 4 * 4;
    int64_t entry = code_tile_entry(group, padded);
    struct act_block zero;

    memset(&zero, 0, sizeof(zero));
    for (int32_t j = 0; j < padded; j++) {
        struct entries e = first_entries(tile, group, entry, blocks);
        for (int32_t b = 0; b < blocks; b++) {
            struct act_block a;
            if (j < n_x) {
                quantise_plane(&a, x[j / planes], b * FORMAT_BLOCK_MAX, n, j % planes);
            }
            put_x(&e, j < n_x ? &a : &zero, group, above, j, padded);
            next_entries(&e, group, entry);
        }
    }
}

static void pack_x(void *tile, enum weight_format_id f, const float *const *x, int32_t n_x,
                   int32_t n, int32_t planes)
{
    if (!has_halves(f)) {
        pack_rows_x(tile, x, n_x, n, planes, 32, above_of(f));
    } else {
        pack_rows_x(tile, x, n_x, n, planes, 16, above_of(f));
    }
}

/* ---- products ---- */

INLINE int32_t load_i32(const char *p)
{
    int32_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

INLINE float load_f32(const char *p)
{
    float v;

    memcpy(&v, p, sizeof(v));
    return v;
}

/* Add the products of an entry's codes, or of one of their digits, to sum[n_x]. */
INLINE void add_products(__m512i *sum, const char *w, const char *x, const int n_x, const int group)
{
#pragma GCC unroll 8
    for (int i = 0; i < group / 4; i++) {
        __m512i code = _mm512_load_si512(w + 64 * i);
#pragma GCC unroll 12
        for (int j = 0; j < n_x; j++) {
            __m512i of_x = _mm512_set1_epi32(load_i32(x + j * group + 4 * i));
            sum[j] = _mm512_dpbusd_epi32(sum[j], code, of_x);
        }
    }
}

/* The compiler may not keep what it has read of x: registers do not hold it. */
#define READ_AGAIN(x) __asm__("" : "+r"(x))

/* The same of all digits that follow the first. */
INLINE void add_digits(__m512i *sum, const char *w, const char *x, const int n_x, const int group,
                       const int digits)
{
#pragma GCC unroll 1
    for (int d = 1; d < digits; d++) {
        w += CODE_PANEL_ROWS * group;
        READ_AGAIN(x);
#pragma GCC unroll 12
        for (int j = 0; j < n_x; j++) {
            sum[j] = _mm512_slli_epi32(sum[j], DIGIT_BITS);
        }
        add_products(sum, w, x, n_x, group);
    }
}

/* Add the sums of an entry to acc[n_x]. */
INLINE void add_entry(__m512 *acc, const char *w, const char *x, const int n_x, const int group,
                      const bool minima, const int digits)
{
    const char *scale = x + n_x * group, *third = scale + 4 * n_x;
    const char *codes = w + (minima ? 128 : 64);
    __m512i sum[TILE];

#pragma GCC unroll 12
    for (int j = 0; j < n_x; j++) {
        sum[j] = minima || digits > 1 ? _mm512_setzero_si512()
                                      : _mm512_set1_epi32(load_i32(third + 4 * j));
    }
    add_products(sum, codes, x, n_x, group);
    if (digits > 1) {
        add_digits(sum, codes, x, n_x, group, digits);
#pragma GCC unroll 12
        for (int j = 0; j < n_x; j++) {
            sum[j] = _mm512_add_epi32(sum[j], _mm512_set1_epi32(load_i32(third + 4 * j)));
        }
    }
    __m512 of_w = _mm512_load_ps(w);
#pragma GCC unroll 12
    for (int j = 0; j < n_x; j++) {
        __m512 by = _mm512_mul_ps(of_w, _mm512_set1_ps(load_f32(scale + 4 * j)));
        acc[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[j]), by, acc[j]);
        if (minima) {
            acc[j] = _mm512_fnmadd_ps(_mm512_load_ps(w + 64),
                                      _mm512_set1_ps(load_f32(third + 4 * j)), acc[j]);
        }
    }
}

INLINE void tile_dots(float *sum, int32_t stride, const char *w, const char *x, const int n_x,
                      const int group, const bool minima, const int digits, int32_t blocks)
{
    __m512 wait[DEPTH][TILE];
    int depth = 0;

    for (int l = 0; l < FORMAT_BLOCK_MAX / group; l++) {
        __m512 acc[TILE];
#pragma GCC unroll 12
        for (int j = 0; j < n_x; j++) {
            acc[j] = _mm512_setzero_ps();
        }
        for (int32_t b = 0; b < blocks; b++) {
            add_entry(acc, w, x, n_x, group, minima, digits);
            w += panel_entry(group, minima, digits);
            x += code_tile_entry(group, n_x);
        }
        for (int pairs = l; pairs % 2 != 0; pairs /= 2) { /* the tree */
            depth--;
#pragma GCC unroll 12
            for (int j = 0; j < n_x; j++) {
                acc[j] = _mm512_add_ps(wait[depth][j], acc[j]);
            }
        }
#pragma GCC unroll 12
        for (int j = 0; j < n_x; j++) {
            wait[depth][j] = acc[j];
        }
        depth++;
    }
#pragma GCC unroll 12
    for (int j = 0; j < n_x; j++) {
        _mm512_storeu_ps(sum + (int64_t)j * stride, wait[0][j]);
    }
}

INLINE void rows_dots(float *sum, int32_t stride, const char *w, const char *x, const int n_x,
                      enum weight_format_id f, int32_t blocks)
{
    if (has_halves(f) && has_minima(f)) {
        tile_dots(sum, stride, w, x, n_x, 16, true, 1, blocks);
    } else if (has_halves(f)) {
        tile_dots(sum, stride, w, x, n_x, 16, false, 1, blocks);
    } else if (has_minima(f)) {
        tile_dots(sum, stride, w, x, n_x, 32, true, 1, blocks);
    } else if (f == FORMAT_FP8) {
        tile_dots(sum, stride, w, x, n_x, 32, false, DIGITS, blocks);
    } else {
        tile_dots(sum, stride, w, x, n_x, 32, false, 1, blocks);
    }
}

static void dots(float *sum, int32_t stride, enum weight_format_id f, const void *panel,
                 const void *tile, int32_t n_x, int32_t n)
{
    int32_t blocks = (int32_t)div_ceil(n, FORMAT_BLOCK_MAX);

    if (n_x > 8) {
        rows_dots(sum, stride, panel, tile, 12, f, blocks);
    } else if (n_x > 4) {
        rows_dots(sum, stride, panel, tile, 8, f, blocks);
    } else {
        rows_dots(sum, stride, panel, tile, 4, f, blocks);
    }
}

void cpu_panels_avx512vnni(struct cpu_kernels *k)
{
    EACH_BLOCK_FORMAT(CODE_PANELS)
    k->code_panels[FORMAT_FP8] = (struct cpu_code_panels){.tile_rows = TILE,
                                                          .from = FROM,
                                                          .digits = DIGITS,
                                                          .pack_apart = pack_e4m3,
                                                          .pack_x = pack_x,
                                                          .dots = dots};
    k->code_panels[FORMAT_Q8_0].pack_apart = pack_apart_32;
    k->code_panels[FORMAT_Q6_K].pack_apart = pack_apart_16;
}

#endif
