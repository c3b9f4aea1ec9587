/* Products of many rows of x with weights in blocks by AMX, of formats with groups of
 * 32: one instruction takes the sums of a group of sixteen rows of a weight with
 * sixteen rows of x, exactly, which are then scaled and added as blocks_plain.c
 * specifies.
 *
 * Rows of a weight lie in the panel as they are stored, so that unpacking them hardly
 * moves codes between lanes; rows of x, which are few beside them, lie four codes side
 * by side. A vector has the sums of one row of the weight with sixteen rows of x. Codes
 * have a sign here, which AMX's products take on both sides.
 *
 * Accumulators are taken one after another over all blocks of the row, as in
 * panels_avx512vnni.c. Groups g and g + 4, whose accumulators follow each other, share
 * the vectors of a panel, so that they are stored whole:
 *
 *     panel: scales [2][16], minima [2][16] of formats with minima, codes [16][2][32]
 *     tile:  codes [8][16][4], scales [16], scaled sums [16]
 *
 * Groups of 16 take twice the instructions of floats for a product, and are not faster
 * this way.
 */
#include "kernels/cpu/blocks/codes_panels_x86.h"
#include "kernels/cpu/blocks/panels_avx512.h"

#if defined(__AMX_INT8__) || defined(__AMXINT8__)

#include "kernels/cpu/simd/amx.h"

enum {
    TILE = CODE_TILE_ROWS, /* rows of x in a tile */
    FROM = 5,              /* rows of x, from which a panel pays */
    GROUP = 32,
    PAIRS = FORMAT_BLOCK_MAX / GROUP / 2,
};

/* X(name) for each format with groups of 32. */
#define EACH_FORMAT(X) \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(IQ4_NL) X(MXFP4) X(Q4_K) X(Q5_K) X(IQ4_XS)

/* ---- panels ---- */

/* The codes of groups g and g + 4, 16 bytes each, the first half of a group low. */
INLINE __m512i split_pair(const enum weight_format_id f, const uint8_t *s, const int g)
{
    const __m512i shift = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0,
                                            0x0004000400040004, 0x0004000400040004);
    __m256i a = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)group_at(f, s, g)));
    __m256i b =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)group_at(f, s, g + 4)));
    __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);

    v = _mm512_and_si512(_mm512_srlv_epi16(v, shift), _mm512_set1_epi8(15));
    if (f == FORMAT_Q5_0 || f == FORMAT_Q5_1) {
        uint64_t fifth = (uint64_t)load_u32(group_at(f, s, g + 4) - 4) << 32;
        fifth |= load_u32(group_at(f, s, g) - 4);
        v = _mm512_or_si512(v, _mm512_maskz_mov_epi8(fifth, _mm512_set1_epi8(16)));
    }
    return v;
}

INLINE __m512i levels_of(const int8_t *level, __m512i code)
{
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)level)),
                               code);
}

/* 32 bytes at s, and those 64 behind them: in Q4_K and Q5_K the same bits of both are
 * groups g and g + 4. */
INLINE __m512i two_quarters(const uint8_t *s)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(s)), load32(s + 64), 1);
}

/* The codes of groups g and g + 4, with their sign. */
INLINE __m512i signed_pair(const enum weight_format_id f, const uint8_t *s, const int g)
{
    const __m512i four = _mm512_set1_epi8(15);
    __m512i v;

    switch (f) {
    case FORMAT_Q8_0:
        return _mm512_inserti64x4(_mm512_castsi256_si512(load32(s + 34 * g + 2)),
                                  load32(s + 34 * (g + 4) + 2), 1);
    case FORMAT_Q4_K:
    case FORMAT_Q5_K:
        v = two_quarters(s + (f == FORMAT_Q4_K ? 16 : 48) + g / 2 * 32);
        v = _mm512_and_si512(g % 2 == 0 ? v : _mm512_srli_epi16(v, 4), four);
        return f == FORMAT_Q4_K ? v : with_bits(v, spread_bits(both(s + 16), g, g + 4, 4), 16);
    case FORMAT_MXFP4:
        return levels_of(weight_levels_mxfp4, split_pair(f, s, g));
    case FORMAT_IQ4_NL:
    case FORMAT_IQ4_XS:
        return levels_of(weight_levels_iq4, split_pair(f, s, g));
    default:
        return _mm512_sub_epi8(split_pair(f, s, g), _mm512_set1_epi8((char)zero_point(f)));
    }
}

/* The first group of the pair that comes at place `pair`: the tree's order. */
INLINE int pair_group(const int pair)
{
    return (pair & 1) << 1 | pair >> 1;
}

/* Bytes of an entry of a panel, which is a pair's. */
INLINE int64_t pair_entry(const bool minima)
{
    return 2 * code_panel_entry(GROUP, minima);
}

/* Where the codes begin in an entry. */
INLINE int64_t pair_codes_at(const bool minima)
{
    return minima ? 256 : 128;
}

/* Write v[i], the scales and minima of eight groups of row i. Entries of pairs are
 * `step` bytes apart. */
INLINE void put_numbers(char *at, int64_t step, __m512i v[ROWS], const bool minima)
{
    transpose(v);
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++, at += step) {
        int g = pair_group(p);
        _mm512_store_si512(at, v[g]);
        _mm512_store_si512(at + 64, v[g + 4]);
        if (minima) {
            _mm512_store_si512(at + 128, v[g + 8]);
            _mm512_store_si512(at + 192, v[g + 12]);
        }
    }
}

/* Write the scales of a block of sixteen rows, and the minima. */
INLINE void put_scales(char *at, int64_t step, const enum weight_format_id f,
                       const uint8_t *const *s)
{
    __m512i v[ROWS];

#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        __m256 w[2] = {scales_of(f, s[i], GROUPS, false), _mm256_setzero_ps()};
        w[1] = has_minima(f) ? minima_of(f, s[i], GROUPS, false) : w[1];
        v[i] = join(w);
    }
    put_numbers(at, step, v, has_minima(f));
}

INLINE void put_block(char *at, int64_t step, const enum weight_format_id f,
                      const uint8_t *const *s, int64_t ahead)
{
    for (int32_t i = 0; i < ROWS; i++) {
        char *to = at + pair_codes_at(has_minima(f)) + 64 * i;
        for (int line = 0; line < bytes_of(f); line += 64) {
            __builtin_prefetch(s[i] + ahead + line, 0, 2);
        }
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++) {
            _mm512_store_si512(to + p * step, signed_pair(f, s[i], pair_group(p)));
        }
    }
    put_scales(at, step, f, s);
}

/* The same of a block that is cut after `groups` groups; what is behind them is
 * multiplied with zeros. */
INLINE void put_last(char *at, int64_t step, const enum weight_format_id f, const uint8_t *const *s,
                     int32_t groups)
{
    uint8_t last[ROWS][FORMAT_BLOCK_BYTES_MAX] = {{0}};
    const uint8_t *row[ROWS];

    for (int32_t i = 0; i < ROWS; i++) {
        memcpy(last[i], s[i], (size_t)(groups * (bytes_of(f) / GROUPS)));
        row[i] = last[i];
    }
    put_block(at, step, f, row, 0);
}

INLINE void pack_rows(char *panel, const enum weight_format_id f, const void *const *row, int32_t n,
                      int64_t ahead)
{
    const int64_t entry = pair_entry(has_minima(f)), step = div_ceil(n, FORMAT_BLOCK_MAX) * entry;
    const uint8_t *s[ROWS];

    for (int32_t i = 0; i < ROWS; i++) {
        s[i] = row[i];
    }
    for (; n >= FORMAT_BLOCK_MAX; n -= FORMAT_BLOCK_MAX, panel += entry) {
        put_block(panel, step, f, s, ahead);
        for (int32_t i = 0; i < ROWS; i++) {
            s[i] += bytes_of(f);
        }
    }
    if (n > 0) {
        put_last(panel, step, f, s, n / GROUP);
    }
}

#define PACK_ROWS(NAME)                                                                    \
    static void pack_##NAME(void *panel, const void *const *row, int32_t n, int64_t ahead) \
    {                                                                                      \
        pack_rows(panel, FORMAT_##NAME, row, n, ahead);                                    \
    }
EACH_FORMAT(PACK_ROWS)

/* Of codes whose scales are apart. */
static void pack_apart(void *panel, enum weight_format_id f, const void *const *row,
                       const struct row_scales *scales, int32_t n, int64_t ahead)
{
    struct code_groups of[CODE_PANEL_ROWS];
    struct panel_rows r = {
        .row = row, .scales = scales, .f = f, .n = n, .group = GROUP, .ahead = ahead, .of = of};
    const int64_t entry = pair_entry(false), step = div_ceil(n, FORMAT_BLOCK_MAX) * entry;
    struct code_span span;
    char *to = panel;
    __m512i v[ROWS];

    for (int32_t at = 0; at < n; at += FORMAT_BLOCK_MAX, to += entry) {
        rows_at(&r, at);
        for (int32_t i = 0; i < ROWS; i++) {
            v[i] = _mm512_zextsi256_si512(load32((const uint8_t *)row_block(&span, &r, i, at)));
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) {
                const uint8_t *code = (const uint8_t *)span.code + GROUP * pair_group(p);
                __m512i two = _mm512_castsi256_si512(load32(code));
                two = _mm512_inserti64x4(two, load32(code + 4 * GROUP), 1);
                _mm512_store_si512(to + p * step + pair_codes_at(false) + 64 * i, two);
            }
        }
        put_numbers(to, step, v, false);
    }
}

/* ---- tiles ---- */

/* 256 values of the rows of a tile. */
struct tile_block {
    __m512i code[4][TILE]; /* a quarter of each row's */
    __m512i scale[TILE];   /* of the eight groups, and their scaled sums */
};

INLINE void put_x_row(struct tile_block *t, int32_t j, const struct act_block *a)
{
    __m256 scale[2] = {_mm256_load_ps(a->scale), _mm256_load_ps(a->sum32)};

#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        t->code[q][j] = _mm512_load_si512(a->code + 64 * q);
    }
    t->scale[j] = join(scale);
}

/* Write a block of the rows to the tile's entries. */
INLINE void put_x_block(const struct entries *e, struct tile_block *t)
{
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        transpose(t->code[q]);
#pragma GCC unroll 16
        for (int d = 0; d < 16; d++) {
            int at = 64 * q + 4 * d;
            _mm512_store_si512(e->at[at / GROUP] + at % GROUP * TILE, t->code[q][d]);
        }
    }
    transpose(t->scale);
#pragma GCC unroll 8
    for (int l = 0; l < GROUPS; l++) {
        char *to = e->at[l] + TILE * GROUP;
        _mm512_store_si512(to, t->scale[l]);
        _mm512_store_si512(to + 4 * TILE, t->scale[8 + l]);
    }
}

static void pack_x(void *tile, enum weight_format_id f, const float *const *x, int32_t n_x,
                   int32_t n, int32_t planes)
{
    int32_t blocks = (int32_t)div_ceil(n, FORMAT_BLOCK_MAX);
    struct entries e = first_entries(tile, GROUP, code_tile_entry(GROUP, TILE), blocks);
    struct tile_block t;

    (void)f;
    for (int32_t b = 0; b < blocks; b++) {
        memset(&t, 0, sizeof(t));
        for (int32_t j = 0; j < n_x; j++) {
            struct act_block a;
            quantise_plane(&a, x[j / planes], b * FORMAT_BLOCK_MAX, n, j % planes);
            put_x_row(&t, j, &a);
        }
        put_x_block(&e, &t);
        next_entries(&e, GROUP, code_tile_entry(GROUP, TILE));
    }
}

/* ---- products ---- */

/* A panel and a tile, from an entry on. */
struct factors {
    const char *w, *x;
    int32_t second; /* 1: the second group of the panel's entry */
};

/* The integer sums of an entry, by row of w and row of x. */
struct sums {
    _Alignas(64) int32_t v[ROWS][TILE];
};

/* Sums of accumulators that wait to be added. */
struct lanes {
    __m512 wait[DEPTH][ROWS];
    int32_t depth; /* of those that wait */
    int32_t ended; /* accumulators */
};

/* Tiles, which must be numbers in calls: sums 0 and 1, the weight's 2 and 3, x's 4 and
 * 5, the first of each for even entries. */
enum { SUMS = 0, OF_W = 2, OF_X = 4 };

/* All blocks of one group, then all of the other of its pair. */
INLINE struct factors next_factors(struct factors at, const bool minima, int32_t blocks,
                                   int32_t *in_lane)
{
    at.w += pair_entry(minima);
    at.x += code_tile_entry(GROUP, TILE);
    if (++*in_lane == blocks) {
        *in_lane = 0;
        at.second ^= 1;
        at.w -= at.second * blocks * pair_entry(minima);
    }
    return at;
}

/* Multiply the entry at `at`; entries take turns with tiles. */
INLINE void multiply_even(struct factors at, const bool minima)
{
    _tile_loadd(4, at.x, 64);
    _tile_loadd(2, at.w + pair_codes_at(minima) + at.second * GROUP, 64);
    _tile_zero(0);
    _tile_dpbssd(0, 2, 4);
}

INLINE void multiply_odd(struct factors at, const bool minima)
{
    _tile_loadd(5, at.x, 64);
    _tile_loadd(3, at.w + pair_codes_at(minima) + at.second * GROUP, 64);
    _tile_zero(1);
    _tile_dpbssd(1, 3, 5);
}

/* Add the sums of an entry to acc[ROWS]. */
INLINE void add_entry(__m512 *acc, const struct sums *s, struct factors at, const bool minima)
{
    const float *of_w = (const float *)at.w + at.second * ROWS;
    __m512 of_x = _mm512_load_ps(at.x + TILE * GROUP);
    __m512 sum_x = _mm512_load_ps(at.x + TILE * (GROUP + 4));

    amx_order();
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        __m512 by = _mm512_mul_ps(of_x, _mm512_set1_ps(of_w[i]));
        acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(s->v[i])), by, acc[i]);
        if (minima) {
            acc[i] = _mm512_fnmadd_ps(sum_x, _mm512_set1_ps(of_w[2 * ROWS + i]), acc[i]);
        }
    }
}

/* Add an accumulator to those that wait, by the tree, and begin the next one. */
INLINE void end_lane(struct lanes *l, __m512 *acc)
{
    for (int32_t pairs = l->ended; pairs % 2 != 0; pairs /= 2) {
        l->depth--;
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            acc[i] = _mm512_add_ps(l->wait[l->depth][i], acc[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        l->wait[l->depth][i] = acc[i];
        acc[i] = _mm512_setzero_ps();
    }
    l->depth++;
    l->ended++;
}

/* All entries, of which there are an even number. While one is added up, the next is
 * stored, and the one behind that multiplied. */
INLINE void add_entries(struct lanes *l, struct factors at, const bool minima, int32_t blocks)
{
    struct factors next = at;
    struct sums even, odd;
    __m512 acc[ROWS];
    int32_t in_lane = 0, next_in_lane = 0;

#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        acc[i] = _mm512_setzero_ps();
    }
    multiply_even(next, minima);
    next = next_factors(next, minima, blocks, &next_in_lane);
    multiply_odd(next, minima);
    _tile_stored(0, even.v, sizeof(even.v[0]));
    for (int32_t left = GROUPS * blocks - 2; left >= 0; left -= 2) {
        next = next_factors(next, minima, blocks, &next_in_lane);
        if (left > 0) {
            multiply_even(next, minima);
        }
        _tile_stored(1, odd.v, sizeof(odd.v[0]));
        add_entry(acc, &even, at, minima);
        at = next_factors(at, minima, blocks, &in_lane);
        if (in_lane == 0) {
            end_lane(l, acc);
        }
        next = next_factors(next, minima, blocks, &next_in_lane);
        if (left > 0) {
            multiply_odd(next, minima);
            _tile_stored(0, even.v, sizeof(even.v[0]));
        }
        add_entry(acc, &odd, at, minima);
        at = next_factors(at, minima, blocks, &in_lane);
        if (in_lane == 0) {
            end_lane(l, acc);
        }
    }
}

INLINE void tile_dots(float *sum, int32_t stride, struct factors at, const bool minima,
                      int32_t blocks)
{
    struct lanes l;
    __m512i v[ROWS];

    l.depth = 0;
    l.ended = 0;
    add_entries(&l, at, minima, blocks);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        v[i] = _mm512_castps_si512(l.wait[0][i]);
    }
    transpose(v);
#pragma GCC unroll 16
    for (int j = 0; j < TILE; j++) {
        _mm512_storeu_si512(sum + (int64_t)j * stride, v[j]);
    }
}

static void dots(float *sum, int32_t stride, enum weight_format_id f, const void *panel,
                 const void *tile, int32_t n_x, int32_t n)
{
    struct amx_config t = amx_config();
    struct factors at = {panel, tile, 0};
    int32_t blocks = (int32_t)div_ceil(n, FORMAT_BLOCK_MAX);

    (void)n_x;
    for (int32_t i = 0; i < 2; i++) {
        amx_shape(&t, SUMS + i, ROWS, 4 * TILE);
        amx_shape(&t, OF_W + i, ROWS, GROUP);
        amx_shape(&t, OF_X + i, GROUP / 4, 4 * TILE);
    }
    amx_begin(&t);
    if (has_minima(f)) {
        tile_dots(sum, stride, at, true, blocks);
    } else {
        tile_dots(sum, stride, at, false, blocks);
    }
    amx_end();
}

void cpu_panels_amx(struct cpu_kernels *k)
{
    EACH_FORMAT(CODE_PANELS)
    k->code_panels[FORMAT_Q8_0].pack_apart = pack_apart;
}

#endif
