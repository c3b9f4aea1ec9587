/* Products of many rows of x with weights in blocks with AVX2: sixteen rows of a weight
 * are unpacked such that a vector has neighbouring codes of eight of them, and are
 * multiplied with as many codes of a row of x at a time. A group's sums of eight rows
 * then lie in one vector.
 *
 * Codes of up to 6 bits are bytes without a sign, four to a row in a vector. Their
 * products are summed in 16 bits over the whole group: sums may wrap on the way, but
 * what comes out fits, since a sum begins with what the codes are too high by. Only the
 * codes of 5 bits of formats with minima take two such sums. Codes of 8 bits do not fit
 * and are words, two to a row in a vector, whose products are summed in 32 bits.
 *
 * Accumulators are taken one after another over all blocks of the row, in the order in
 * which the tree adds them, as in panels_avx512vnni.c. A tile is divided into parts of
 * four rows of x, which is what registers hold; a lane of a panel stays in the
 * first-level cache for all of them. The last part has as many rows as are left.
 * Entries:
 *
 *     panel: scales [16], minima [16] of formats with minima, codes [..][2][8][4 or 2]
 *     part:  codes [4][group], scales [4], and of each row of x what the sum begins
 *            with, or with minima what they are multiplied with
 */
#include "kernels/cpu/blocks/codes_panels_x86.h"
#include "kernels/cpu/blocks/panels_x86.h"

#ifdef __AVX2__

enum {
    TILE = CODE_TILE_ROWS, /* rows of x in a tile, at most */
    FROM = 5,              /* rows of x, from which a panel pays */
    PART = 4,              /* rows of x that are multiplied together */
    WIDTH = 8,             /* rows of a weight in a vector */
    HALVES = CODE_PANEL_ROWS / WIDTH,
};

/* Codes that are words. */
INLINE bool is_wide(const enum weight_format_id f)
{
    return f == FORMAT_Q8_0 || f == FORMAT_IQ4_NL || f == FORMAT_IQ4_XS;
}

/* Bytes that are split after they are transposed, two codes in each till then. */
INLINE bool splits_late(const enum weight_format_id f)
{
    return f == FORMAT_Q4_K || (is_turned(f) && f != FORMAT_Q5_0 && f != FORMAT_Q5_1);
}

/* What codes in a panel are above those of the format. */
INLINE int above_of(const enum weight_format_id f)
{
    return f == FORMAT_MXFP4 ? 12 : zero_point(f);
}

/* Bytes in front of an entry's codes, and of an entry. */
INLINE int64_t head_of(const enum weight_format_id f)
{
    return 4 * CODE_PANEL_ROWS * (has_minima(f) ? 2 : 1);
}

INLINE int64_t panel_entry(const enum weight_format_id f)
{
    return head_of(f) + CODE_PANEL_ROWS * group_of(f) * (is_wide(f) ? 2 : 1);
}

INLINE int64_t part_entry(const enum weight_format_id f)
{
    return PART * (group_of(f) * (is_wide(f) ? 2 : 1) + 8);
}

/* ---- panels ---- */

/* Columns for rows within the halves of vectors: v[i] gets lanes i and 4 + i of the
 * first four, v[4 + i] those of the last four. */
INLINE void transpose_halves(__m256i v[8])
{
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        __m256i a = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        __m256i b = _mm256_unpackhi_epi32(v[i], v[i + 1]);
        __m256i c = _mm256_unpacklo_epi32(v[i + 2], v[i + 3]);
        __m256i d = _mm256_unpackhi_epi32(v[i + 2], v[i + 3]);
        v[i] = _mm256_unpacklo_epi64(a, c);
        v[i + 1] = _mm256_unpackhi_epi64(a, c);
        v[i + 2] = _mm256_unpacklo_epi64(b, d);
        v[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
}

/* Columns for rows: v[i] gets lane i of each. */
INLINE void transpose(__m256i v[8])
{
    transpose_halves(v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256i a = v[i], b = v[i + 4];
        v[i] = _mm256_permute2x128_si256(a, b, 0x20);
        v[i + 4] = _mm256_permute2x128_si256(a, b, 0x31);
    }
}

INLINE void store(char *to, __m256i v)
{
    _mm256_store_si256((__m256i *)to, v);
}

/* Write the four codes of eight rows that begin at `at`. Of words, the first and third,
 * then the others. */
INLINE void put_codes(const struct entries *e, const enum weight_format_id f, const int at,
                      int half, __m256i v)
{
    const int group = group_of(f), in_group = at % group / 4;
    char *to = e->at[at / group] + head_of(f) + 32 * half;

    if (is_wide(f)) {
        store(to + 128 * in_group, _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8));
        store(to + 128 * in_group + 64, _mm256_srai_epi16(v, 8));
    } else {
        store(to + 64 * in_group, v);
    }
}

/* Where the i-th 16 bytes of codes are, of a format that is split late. */
INLINE const uint8_t *late_at(const enum weight_format_id f, const uint8_t *s, const int i)
{
    return f == FORMAT_Q4_K ? s + 16 + 16 * i : group_at(f, s, i);
}

/* The codes of the i-th 16 bytes of rows 0 to 3 of s, each beside those of the row that
 * is four behind it. */
INLINE void load_late(__m256i v[4], const enum weight_format_id f, const uint8_t *const *s,
                      const int i)
{
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        v[j] = _mm256_set_m128i(_mm_loadu_si128((const __m128i *)late_at(f, s[j + 4], i)),
                                _mm_loadu_si128((const __m128i *)late_at(f, s[j], i)));
    }
}

/* The codes of the low or the high four bits of each byte. */
INLINE __m256i split(const enum weight_format_id f, __m256i v, const bool high)
{
    v = _mm256_and_si256(high ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
    if (f == FORMAT_MXFP4) {
        return _mm256_add_epi8(look_up(weight_levels_mxfp4, v), _mm256_set1_epi8(12));
    }
    return f == FORMAT_IQ4_NL || f == FORMAT_IQ4_XS ? look_up(weight_levels_iq4, v) : v;
}

/* Write groups 2p and 2p + 1 of eight rows. */
INLINE void put_late(const struct entries *e, const enum weight_format_id f,
                     const uint8_t *const *s, const int p, int half)
{
    const int apart = f == FORMAT_Q4_K ? 32 : 16; /* of the codes of a byte */
    __m256i v[WIDTH];

    load_late(v, f, s, 2 * p);
    load_late(v + 4, f, s, 2 * p + 1);
    transpose_halves(v);
#pragma GCC unroll 8
    for (int d = 0; d < 8; d++) {
        int at = 64 * p + d / (apart / 4) * 2 * apart + d % (apart / 4) * 4;
        put_codes(e, f, at, half, split(f, v[d], false));
        put_codes(e, f, at + apart, half, split(f, v[d], true));
    }
}

/* Write group g of 32 codes of eight rows. */
INLINE void put_group(const struct entries *e, const enum weight_format_id f,
                      const uint8_t *const *s, const int g, int half)
{
    __m256i v[WIDTH];

#pragma GCC unroll 8
    for (int i = 0; i < WIDTH; i++) {
        v[i] = stored_codes(f, s[i], g);
    }
    transpose(v);
#pragma GCC unroll 8
    for (int d = 0; d < 8; d++) {
        put_codes(e, f, 32 * g + 4 * d, half, v[d]);
    }
}

/* Write v[i][l] of eight rows `at` bytes into the entries from the first one on. */
INLINE void put_floats(char *const *entry, int64_t at, const __m256 *v)
{
    __m256i t[WIDTH];

#pragma GCC unroll 8
    for (int i = 0; i < WIDTH; i++) {
        t[i] = _mm256_castps_si256(v[i]);
    }
    transpose(t);
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) {
        store(entry[l] + at, t[l]);
    }
}

INLINE void put_scales(const struct entries *e, const enum weight_format_id f,
                       const uint8_t *const *s, int half)
{
    __m256 low[WIDTH], high[WIDTH];
    int64_t at = 32 * half, minima_at = 4 * CODE_PANEL_ROWS + at;

    for (int i = 0; i < WIDTH; i++) {
        __m256 w[2];
        if (has_halves(f)) {
            half_scales_of(f, s[i], w, false);
        } else {
            w[0] = scales_of(f, s[i], GROUPS, false);
            w[1] = has_minima(f) ? minima_of(f, s[i], GROUPS, false) : w[0];
        }
        low[i] = w[0];
        high[i] = w[1];
    }
    put_floats(e->at, at, low);
    if (has_halves(f)) {
        put_floats(e->at + 8, at, high);
    } else if (has_minima(f)) {
        put_floats(e->at, minima_at, high);
    }
    if (has_halves(f) && has_minima(f)) {
        for (int i = 0; i < WIDTH; i++) {
            __m256 min[2];
            half_minima_of(s[i], min, false);
            low[i] = min[0];
            high[i] = min[1];
        }
        put_floats(e->at, minima_at, low);
        put_floats(e->at + 8, minima_at, high);
    }
}

/* Write the first `groups` groups of 32 codes of a block of eight rows, an even number,
 * and all scales. */
INLINE void put_block(const struct entries *e, const enum weight_format_id f,
                      const uint8_t *const *s, int half, int32_t groups)
{
    put_scales(e, f, s, half);
#pragma GCC unroll 4
    for (int p = 0; p < GROUPS / 2; p++) {
        if (2 * p >= groups) {
            return;
        }
        if (splits_late(f)) {
            put_late(e, f, s, p, half);
        } else {
            put_group(e, f, s, 2 * p, half);
            put_group(e, f, s, 2 * p + 1, half);
        }
    }
}

/* The same of the end of rows, `rest` < 256 values. */
INLINE void put_end(const struct entries *e, const enum weight_format_id f, const uint8_t *const *s,
                    int half, int32_t rest)
{
    uint8_t last[WIDTH][FORMAT_BLOCK_BYTES_MAX] = {{0}};
    const uint8_t *row[WIDTH];

    for (int i = 0; i < WIDTH; i++) {
        row[i] = memcpy(last[i], s[i], (size_t)(rest / 32 * (bytes_of(f) / GROUPS)));
    }
    put_block(e, f, row, half, (int32_t)div_ceil(rest, 64) * 2);
}

INLINE void pack_rows(void *panel, const enum weight_format_id f, const void *const *row, int32_t n,
                      int64_t ahead)
{
    const int group = group_of(f);
    int32_t blocks = (int32_t)div_ceil(n, FORMAT_BLOCK_MAX);
    struct entries e = first_entries(panel, group, panel_entry(f), blocks);
    const uint8_t *s[CODE_PANEL_ROWS];

    for (int i = 0; i < CODE_PANEL_ROWS; i++) {
        s[i] = row[i];
    }
    for (int32_t at = 0; at < n; at += FORMAT_BLOCK_MAX) {
        for (int half = 0; half < HALVES; half++) {
            const uint8_t **of_half = s + WIDTH * half;
            if (n - at < FORMAT_BLOCK_MAX) {
                put_end(&e, f, of_half, half, n - at);
                continue;
            }
            put_block(&e, f, of_half, half, GROUPS);
            for (int i = 0; i < WIDTH; i++) {
                for (int line = 0; line < bytes_of(f); line += 64) {
                    __builtin_prefetch(of_half[i] + ahead + line, 0, 2);
                }
                of_half[i] += bytes_of(f);
            }
        }
        next_entries(&e, group, panel_entry(f));
    }
}

#define PACK_ROWS(NAME)                                                                    \
    static void pack_##NAME(void *panel, const void *const *row, int32_t n, int64_t ahead) \
    {                                                                                      \
        pack_rows(panel, FORMAT_##NAME, row, n, ahead);                                    \
    }
EACH_BLOCK_FORMAT(PACK_ROWS)

/* ---- panels of codes whose scales are apart ---- */

/* Write the block at `at` of rows [8 * half, 8 * half + 8). */
INLINE void put_span(const struct entries *e, const enum weight_format_id as,
                     const struct panel_rows *r, int half, int32_t at)
{
    struct code_span span[WIDTH];
    __m256 low[WIDTH], high[WIDTH];
    __m256i v[WIDTH];

    for (int i = 0; i < WIDTH; i++) {
        const float *scale = row_block(&span[i], r, WIDTH * half + i, at);
        low[i] = _mm256_loadu_ps(scale);
        high[i] = has_halves(as) ? _mm256_loadu_ps(scale + 8) : low[i];
    }
    put_floats(e->at, 32 * half, low);
    if (has_halves(as)) {
        put_floats(e->at + 8, 32 * half, high);
    }
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        for (int i = 0; i < WIDTH; i++) {
            v[i] = _mm256_add_epi8(load32((const uint8_t *)span[i].code + 32 * g),
                                   _mm256_set1_epi8((char)above_of(as)));
        }
        transpose(v);
#pragma GCC unroll 8
        for (int d = 0; d < 8; d++) {
            put_codes(e, as, 32 * g + 4 * d, half, v[d]);
        }
    }
}

INLINE void pack_spans(char *panel, const enum weight_format_id as, struct panel_rows *r)
{
    const int group = group_of(as);
    struct entries e =
        first_entries(panel, group, panel_entry(as), (int32_t)div_ceil(r->n, FORMAT_BLOCK_MAX));

    for (int32_t at = 0; at < r->n; at += FORMAT_BLOCK_MAX) {
        rows_at(r, at);
        put_span(&e, as, r, 0, at);
        put_span(&e, as, r, 1, at);
        next_entries(&e, group, panel_entry(as));
    }
}

static void pack_apart_16(void *panel, enum weight_format_id f, const void *const *row,
                          const struct row_scales *scales, int32_t n, int64_t ahead)
{
    struct code_groups of[CODE_PANEL_ROWS];
    struct panel_rows r = {
        .row = row, .scales = scales, .f = f, .n = n, .group = 16, .ahead = ahead, .of = of};

    pack_spans(panel, FORMAT_Q6_K, &r);
}

static void pack_apart_32(void *panel, enum weight_format_id f, const void *const *row,
                          const struct row_scales *scales, int32_t n, int64_t ahead)
{
    struct code_groups of[CODE_PANEL_ROWS];
    struct panel_rows r = {
        .row = row, .scales = scales, .f = f, .n = n, .group = 32, .ahead = ahead, .of = of};

    pack_spans(panel, FORMAT_Q8_0, &r);
}

/* ---- tiles ---- */

/* What the sums of a group begin with, two words: -above times the sum of the codes
 * that each of them adds up. ret[i]: of the i-th 16 codes, or 32. */
static void beginnings(int32_t ret[16], const struct act_block *x, const int group, int32_t above)
{
    const __m256i ones = _mm256_set1_epi8(1), by = _mm256_set1_epi16((short)-above);

    for (int i = 0; i < GROUPS; i++) {
        __m256i code = _mm256_load_si256((const __m256i *)(x->code + 32 * i));
        __m256i v = _mm256_maddubs_epi16(ones, code);
        v = _mm256_add_epi16(v, _mm256_shuffle_epi32(v, 0x4E));
        v = _mm256_mullo_epi16(_mm256_add_epi16(v, _mm256_shuffle_epi32(v, 0xB1)), by);
        __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
        if (group == 16) {
            ret[2 * i] = _mm_cvtsi128_si32(low);
            ret[2 * i + 1] = _mm_cvtsi128_si32(high);
        } else {
            ret[i] = _mm_cvtsi128_si32(_mm_add_epi16(low, high));
        }
    }
}

/* 32 codes as words, in the order of those of a panel. */
INLINE void put_words(char *to, const int8_t *code)
{
    __m256i v = _mm256_load_si256((const __m256i *)code);
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
    __m256i a = _mm256_unpacklo_epi32(even, odd), b = _mm256_unpackhi_epi32(even, odd);

    store(to, _mm256_permute2x128_si256(a, b, 0x20));
    store(to + 32, _mm256_permute2x128_si256(a, b, 0x31));
}

/* Write row j of a part: 256 values. */
INLINE void put_x(const struct entries *e, const struct act_block *x, const enum weight_format_id f,
                  int32_t above, int32_t j)
{
    const int group = group_of(f), bytes = group * (is_wide(f) ? 2 : 1);
    int32_t third[16] = {0};

    if (has_minima(f)) {
        memcpy(third, group == 16 ? x->sum16 : x->sum32, (size_t)(1024 / group));
    } else if (!is_wide(f)) {
        beginnings(third, x, group, above);
    }
    for (int l = 0; l < FORMAT_BLOCK_MAX / group; l++) {
        char *to = e->at[l];
        if (is_wide(f)) {
            put_words(to + j * bytes, x->code + l * group);
        } else {
            memcpy(to + j * bytes, x->code + l * group, (size_t)group);
        }
        memcpy(to + PART * bytes + 4 * j, &x->scale[l * group / 32], sizeof(float));
        memcpy(to + PART * (bytes + 4) + 4 * j, &third[l], sizeof(*third));
    }
}

/* f: any format of the same groups, minima and words. */
INLINE void pack_rows_x(char *tile, const enum weight_format_id f, int32_t above,
                        const float *const *x, int32_t n_x, int32_t n, int32_t planes)
{
    const int group = group_of(f);
    int32_t blocks = (int32_t)div_ceil(n, FORMAT_BLOCK_MAX);
    int32_t parts = (int32_t)div_ceil(n_x, PART);

    for (int32_t j = 0; j < n_x; j++) {
        char *part = tile + j / PART * blocks * part_entry(f);
        struct entries e = first_entries(part, group, part_entry(f), parts * blocks);
        for (int32_t b = 0; b < blocks; b++) {
            struct act_block a;
            quantise_plane(&a, x[j / planes], b * FORMAT_BLOCK_MAX, n, j % planes);
            put_x(&e, &a, f, above, j % PART);
            next_entries(&e, group, part_entry(f));
        }
    }
}

static void pack_x(void *tile, enum weight_format_id f, const float *const *x, int32_t n_x,
                   int32_t n, int32_t planes)
{
    int32_t above = above_of(f);

    if (is_wide(f)) {
        pack_rows_x(tile, FORMAT_Q8_0, above, x, n_x, n, planes);
    } else if (has_halves(f) && has_minima(f)) {
        pack_rows_x(tile, FORMAT_Q2_K, above, x, n_x, n, planes);
    } else if (has_halves(f)) {
        pack_rows_x(tile, FORMAT_Q6_K, above, x, n_x, n, planes);
    } else if (has_minima(f)) {
        pack_rows_x(tile, FORMAT_Q4_1, above, x, n_x, n, planes);
    } else {
        pack_rows_x(tile, FORMAT_Q4_0, above, x, n_x, n, planes);
    }
}

/* ---- products ---- */

INLINE __m256i broadcast(const char *p)
{
    int32_t v;

    memcpy(&v, p, sizeof(v));
    return _mm256_set1_epi32(v);
}

INLINE __m256 broadcast_float(const char *p)
{
    return _mm256_castsi256_ps(broadcast(p));
}

INLINE __m256i load(const char *p)
{
    return _mm256_load_si256((const __m256i *)p);
}

/* The compiler may not put off the sum that it has so far: it would take all products
 * first, which registers do not hold, and add them as a tree. */
#define TAKE_NOW(sum) __asm__("" : "+x"(sum))

/* Add the products of steps [from, end) of an entry, four codes each, or of words two:
 * in 16 bits, or of words in 32. */
INLINE void add_steps(__m256i sum[PART][HALVES], const int rows, const char *w, const char *x,
                      const int x_bytes, const bool wide, const int from, const int end)
{
#pragma GCC unroll 16
    for (int i = from; i < end; i++) {
        __m256i low = load(w + 64 * i), high = load(w + 64 * i + 32);
#pragma GCC unroll 4
        for (int j = 0; j < rows; j++) {
            __m256i of_x = broadcast(x + j * x_bytes + 4 * i);
            if (wide) {
                sum[j][0] = _mm256_add_epi32(sum[j][0], _mm256_madd_epi16(low, of_x));
                sum[j][1] = _mm256_add_epi32(sum[j][1], _mm256_madd_epi16(high, of_x));
            } else {
                sum[j][0] = _mm256_add_epi16(sum[j][0], _mm256_maddubs_epi16(low, of_x));
                sum[j][1] = _mm256_add_epi16(sum[j][1], _mm256_maddubs_epi16(high, of_x));
            }
            TAKE_NOW(sum[j][0]);
            TAKE_NOW(sum[j][1]);
        }
    }
}

/* The sums of an entry. */
INLINE void entry_sums(__m256i sum[PART][HALVES], const int rows, const enum weight_format_id f,
                       const char *w, const char *x)
{
    const bool twice = f == FORMAT_Q5_1 || f == FORMAT_Q5_K;
    const int x_bytes = group_of(f) * (is_wide(f) ? 2 : 1), steps = x_bytes / 4;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i rest[PART][HALVES];

#pragma GCC unroll 8
    for (int i = 0; i < rows * HALVES; i++) {
        sum[i / HALVES][i % HALVES] = has_minima(f) || is_wide(f)
                                          ? _mm256_setzero_si256()
                                          : broadcast(x + PART * (x_bytes + 4) + i / HALVES * 4);
        rest[i / HALVES][i % HALVES] = _mm256_setzero_si256();
    }
    add_steps(sum, rows, w, x, x_bytes, is_wide(f), 0, twice ? steps / 2 : steps);
    if (is_wide(f)) {
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows * HALVES; i++) {
        sum[i / HALVES][i % HALVES] = _mm256_madd_epi16(sum[i / HALVES][i % HALVES], ones);
    }
    if (twice) {
        add_steps(rest, rows, w, x, x_bytes, false, steps / 2, steps);
#pragma GCC unroll 8
        for (int i = 0; i < rows * HALVES; i++) {
            sum[i / HALVES][i % HALVES] = _mm256_add_epi32(
                sum[i / HALVES][i % HALVES], _mm256_madd_epi16(rest[i / HALVES][i % HALVES], ones));
        }
    }
}

/* Add the sums of an entry, with the scales of both sides. */
INLINE void add_entry(__m256 acc[PART][HALVES], const int rows, const enum weight_format_id f,
                      const char *w, const char *x)
{
    const char *scale = x + PART * group_of(f) * (is_wide(f) ? 2 : 1), *third = scale + 4 * PART;
    __m256i sum[PART][HALVES];

    entry_sums(sum, rows, f, w + head_of(f), x);
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) {
        __m256 of_w = _mm256_castsi256_ps(load(w + 32 * h));
#pragma GCC unroll 4
        for (int j = 0; j < rows; j++) {
            __m256 by = _mm256_mul_ps(of_w, broadcast_float(scale + 4 * j));
            acc[j][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[j][h]), by, acc[j][h]);
        }
        if (has_minima(f)) {
            __m256 min = _mm256_castsi256_ps(load(w + 4 * CODE_PANEL_ROWS + 32 * h));
#pragma GCC unroll 4
            for (int j = 0; j < rows; j++) {
                acc[j][h] = _mm256_fnmadd_ps(min, broadcast_float(third + 4 * j), acc[j][h]);
            }
        }
    }
}

/* Sums that wait to be added, of a part. */
struct waiting {
    __m256 v[DEPTH][PART][HALVES];
};

/* Add lane l's sums to those that they meet in the tree, and let them wait. */
INLINE void meet(struct waiting *wait, __m256 acc[PART][HALVES], const int rows, int l)
{
    int depth = __builtin_popcount((unsigned)l);

    for (int pairs = l; pairs % 2 != 0; pairs /= 2) {
        depth--;
#pragma GCC unroll 8
        for (int i = 0; i < rows * HALVES; i++) {
            acc[i / HALVES][i % HALVES] =
                _mm256_add_ps(wait->v[depth][i / HALVES][i % HALVES], acc[i / HALVES][i % HALVES]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows * HALVES; i++) {
        wait->v[depth][i / HALVES][i % HALVES] = acc[i / HALVES][i % HALVES];
    }
}

/* Lane l of `rows` rows of a part. */
INLINE void part_lane(struct waiting *wait, const int rows, const enum weight_format_id f,
                      const char *w, const char *x, int32_t entries, int l)
{
    __m256 acc[PART][HALVES];

#pragma GCC unroll 8
    for (int i = 0; i < rows * HALVES; i++) {
        acc[i / HALVES][i % HALVES] = _mm256_setzero_ps();
    }
    for (int32_t b = 0; b < entries; b++) {
        add_entry(acc, rows, f, w + b * panel_entry(f), x + b * part_entry(f));
    }
    meet(wait, acc, rows, l);
}

/* The same of the rows that are left, fewer than a part. */
INLINE void last_lane(struct waiting *wait, int32_t rows, const enum weight_format_id f,
                      const char *w, const char *x, int32_t entries, int l)
{
    switch (rows) {
    case 1:
        part_lane(wait, 1, f, w, x, entries, l);
        break;
    case 2:
        part_lane(wait, 2, f, w, x, entries, l);
        break;
    case 3:
        part_lane(wait, 3, f, w, x, entries, l);
        break;
    default:
        break;
    }
}

INLINE void tile_dots(float *sum, int32_t stride, const enum weight_format_id f, const char *w,
                      const char *x, int32_t n_x, int32_t n)
{
    const int group = group_of(f), lanes = FORMAT_BLOCK_MAX / group;
    int32_t blocks = (int32_t)div_ceil(n, FORMAT_BLOCK_MAX);
    int32_t parts = (int32_t)div_ceil(n_x, PART);
    int64_t part = blocks * part_entry(f);
    struct waiting wait[TILE / PART];

    for (int l = 0; l < lanes; l++, w += blocks * panel_entry(f), x += parts * part) {
        bool in_last = turn_of(l, lanes) * group < n % FORMAT_BLOCK_MAX;
        int32_t entries = n / FORMAT_BLOCK_MAX + in_last;
        for (int32_t p = 0; p < n_x / PART; p++) {
            part_lane(&wait[p], PART, f, w, x + p * part, entries, l);
        }
        last_lane(&wait[n_x / PART], n_x % PART, f, w, x + n_x / PART * part, entries, l);
    }
    for (int32_t i = 0; i < n_x; i++) {
        float *to = sum + (int64_t)i * stride;
        _mm256_storeu_ps(to, wait[i / PART].v[0][i % PART][0]);
        _mm256_storeu_ps(to + WIDTH, wait[i / PART].v[0][i % PART][1]);
    }
}

static void dots(float *sum, int32_t stride, enum weight_format_id f, const void *panel,
                 const void *tile, int32_t n_x, int32_t n)
{
    if (is_wide(f)) {
        tile_dots(sum, stride, FORMAT_Q8_0, panel, tile, n_x, n);
    } else if (f == FORMAT_Q5_1 || f == FORMAT_Q5_K) {
        tile_dots(sum, stride, FORMAT_Q5_1, panel, tile, n_x, n);
    } else if (has_halves(f) && has_minima(f)) {
        tile_dots(sum, stride, FORMAT_Q2_K, panel, tile, n_x, n);
    } else if (has_halves(f)) {
        tile_dots(sum, stride, FORMAT_Q6_K, panel, tile, n_x, n);
    } else if (has_minima(f)) {
        tile_dots(sum, stride, FORMAT_Q4_1, panel, tile, n_x, n);
    } else {
        tile_dots(sum, stride, FORMAT_Q4_0, panel, tile, n_x, n);
    }
}

void cpu_code_panels_avx2(struct cpu_kernels *k)
{
    EACH_BLOCK_FORMAT(CODE_PANELS)
    for (enum weight_format_id f = 0; f < WEIGHT_FORMATS; f++) {
        k->code_panels[f].wide = is_wide(f);
    }
    k->code_panels[FORMAT_Q8_0].pack_apart = pack_apart_32;
    k->code_panels[FORMAT_Q6_K].pack_apart = pack_apart_16;
}

#endif
