/* Attention over a cache of bfloat16 by AMX, TILE_KEYS keys at a time for rows in sets
 * of 16, with an online softmax whose exponents are base 2.
 *
 *     scores [key][row]  = keys [key][dim] . queries [dim][row]
 *     sums [dim][row]   += values turned [dim][key] . weights [key][row]
 *
 * A vector holds one number of each row of the set, so maxima and sums need nothing
 * across lanes, and keys are multiplied as they lie in the cache. Values are turned
 * once for all rows.
 *
 * Queries and weights are float32: each is the sum of three numbers of bfloat16 (its
 * upper 8 bits, the next 8, the rest), multiplied one after another. So nothing is
 * rounded to bfloat16 but what the cache holds.
 *
 * Keys that a row does not see have the weight 0, and groups of keys that no row sees
 * are left out: the bits of a row do not depend on the rows beside it.
 */
#include <math.h>

#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/avx512.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)

enum {
    ROWS = ATTENTION_TILE_ROWS,
    LANES = 16, /* rows of a set */
    PLANES = 3, /* of bfloat16 that make a float */
    CHUNK = 32, /* elements of a product of two registers: dimensions or keys */
    CHUNKS = TILE_KEYS / CHUNK,
    TILE_BYTES = AMX_ROWS * AMX_BYTES,
    TILE_FLOATS = AMX_ROWS * LANES,
    GROUPS = TILE_KEYS / KEY_GROUP,
    MAX_DIM = 256,
    TURNED_STRIDE = CHUNKS * AMX_BYTES, /* bytes of a dimension's values */
};

/* Tile registers, whose numbers are part of the instructions: 0 to 3 are sums. */
#define A 4
#define B0 5
#define B1 6
#define B2 7

/* Greater scores below the maximum count as so far below: their weight is 0. */
static const float LEAST = -200;
static const float LOG2_E = 1.44269504f;

static void begin_tiles(void)
{
    struct amx_config t = amx_config();

    for (int i = 0; i < AMX_TILES; i++) {
        amx_shape(&t, i, AMX_ROWS, AMX_BYTES);
    }
    amx_begin(&t);
}

#define SUMS(i) (c + (int64_t)(i) * TILE_FLOATS)
#define BEGIN(i)                            \
    if (add) {                              \
        _tile_loadd(i, SUMS(i), AMX_BYTES); \
    } else {                                \
        _tile_zero(i);                      \
    }
#define MULTIPLY(i)                    \
    _tile_loadd(A, a[i] + at, stride); \
    _tile_dpbf16ps(i, A, B0);          \
    _tile_dpbf16ps(i, A, B1);          \
    _tile_dpbf16ps(i, A, B2);

/* c [n][TILE_FLOATS] = or += n registers, `stride` bytes from row to row, times b
 * [chunk][plane]. */
INLINE void products(float *c, const char *const *a, int64_t stride, const char *b,
                     int32_t n_chunks, const int n, const bool add)
{
    int64_t at = 0;

    BEGIN(0)
    if (n > 1) {
        BEGIN(1)
    }
    if (n > 2) {
        BEGIN(2)
    }
    if (n > 3) {
        BEGIN(3)
    }
    for (int32_t k = 0; k < n_chunks; k++, at += AMX_BYTES, b += PLANES * TILE_BYTES) {
        _tile_loadd(B0, b, AMX_BYTES);
        _tile_loadd(B1, b + TILE_BYTES, AMX_BYTES);
        _tile_loadd(B2, b + 2 * TILE_BYTES, AMX_BYTES);
        MULTIPLY(0)
        if (n > 1) {
            MULTIPLY(1)
        }
        if (n > 2) {
            MULTIPLY(2)
        }
        if (n > 3) {
            MULTIPLY(3)
        }
    }
    _tile_stored(0, SUMS(0), AMX_BYTES);
    if (n > 1) {
        _tile_stored(1, SUMS(1), AMX_BYTES);
    }
    if (n > 2) {
        _tile_stored(2, SUMS(2), AMX_BYTES);
    }
    if (n > 3) {
        _tile_stored(3, SUMS(3), AMX_BYTES);
    }
}

/* ---- queries ---- */

/* The upper halves of thirty-two floats. */
INLINE __m512i upper_halves(__m512 a, __m512 b)
{
    const __m512i odd =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);

    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), odd, _mm512_castps_si512(b));
}

/* What is left of a number without its upper half, which is exact. */
INLINE __m512 rest_of(__m512 x)
{
    __m512i upper = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-65536));

    return _mm512_sub_ps(x, _mm512_castsi512_ps(upper));
}

static int64_t query_floats(int32_t dim)
{
    return ROWS / LANES * div_ceil(dim, CHUNK) * PLANES * TILE_FLOATS;
}

/* [set][chunk][plane] of [pair][row]. */
static void pack(void *out, const float *const *q, int32_t n, int32_t dim, float scale)
{
    float *to = out;

    for (int32_t first = 0; first < n; first += LANES) {
        for (int32_t d = 0; d < dim; d += CHUNK) {
            __m512 low[LANES], high[LANES];
            for (int32_t i = 0; i < LANES; i++) {
                bool is = first + i < n;
                const __m512 by = _mm512_set1_ps(scale);
                low[i] =
                    is ? _mm512_mul_ps(_mm512_loadu_ps(q[first + i] + d), by) : _mm512_setzero_ps();
                high[i] = is && d + LANES < dim
                              ? _mm512_mul_ps(_mm512_loadu_ps(q[first + i] + d + LANES), by)
                              : _mm512_setzero_ps();
            }
            for (int p = 0; p < PLANES; p++, to += TILE_FLOATS) {
                __m512 word[LANES];
                for (int i = 0; i < LANES; i++) {
                    word[i] = _mm512_castsi512_ps(upper_halves(low[i], high[i]));
                    low[i] = rest_of(low[i]);
                    high[i] = rest_of(high[i]);
                }
                transpose16(word);
                for (int i = 0; i < LANES; i++) {
                    _mm512_store_ps(to + (int64_t)i * LANES, word[i]);
                }
            }
        }
    }
}

/* ---- values ---- */

/* Thirty-two dimensions of a chunk's values: pair i is of keys i and KEY_GROUP + i.
 * `high`: of each eight dimensions the last four. */
INLINE void turn_half(char *to, const uint16_t *v, const uint16_t *w, int32_t width,
                      const bool high)
{
    __m512 r[KEY_GROUP];

#pragma GCC unroll 16
    for (int i = 0; i < KEY_GROUP; i++) {
        __m512i x = _mm512_loadu_si512(v + (int64_t)i * width);
        __m512i y = _mm512_loadu_si512(w + (int64_t)i * width);
        r[i] =
            _mm512_castsi512_ps(high ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y));
    }
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < KEY_GROUP; i++) {
        int d = i / 4 * 8 + i % 4 + (high ? 4 : 0);
        _mm512_store_ps(to + (int64_t)d * TURNED_STRIDE, r[i]);
    }
}

/* to [dim][chunk][pair] of the chunks that some row sees. */
static void turn_values(char *to, const struct attention_tile *t, int32_t width)
{
    static const uint16_t none[KEY_GROUP * MAX_DIM];

    for (int32_t c = t->lo / 2; c < (t->hi + 1) / 2; c++, to += AMX_BYTES) {
        const uint16_t *v = 2 * c >= t->lo ? t->value[2 * c] : none;
        const uint16_t *w = 2 * c + 1 < t->hi ? t->value[2 * c + 1] : none;
        for (int32_t d = 0; d < width; d += CHUNK) {
            char *at = to + (int64_t)d * TURNED_STRIDE;
            turn_half(at, v + d, w + d, width, false);
            turn_half(at, v + d, w + d, width, true);
        }
    }
}

/* ---- a set of rows ---- */

/* A tile's keys and a set of rows. */
struct fold {
    const struct attention_rows *r;
    const struct attention_tile *t;
    const char *turned; /* values, from chunk t->lo / 2 on */
    int32_t width;      /* of keys and values */
    int32_t first, n;   /* of the set's rows */
    int32_t lo, hi;     /* groups [lo, hi) are seen by some row of the set */
    bool whole;         /* all rows see all keys of these */
    float *max, *sum;   /* [LANES] */
    float *acc;         /* [dim][LANES] */
    /* [key][row], and the planes of weights, [chunk][plane][pair][row] */
    _Alignas(64) float score[TILE_KEYS * LANES];
    _Alignas(64) char weight[CHUNKS * PLANES * TILE_BYTES];
};

/* Which groups the set sees; false: none. */
static bool set_range(struct fold *f)
{
    const struct attention_tile *t = f->t;
    int32_t window = f->r->window;
    int32_t early = f->r->at[f->first] - t->first; /* in the tile */
    int32_t late = f->r->at[f->first + f->n - 1] - t->first;
    int32_t from = window > 0 ? MAX(early + 1 - window, 0) : 0;

    f->lo = MAX(t->lo, from / KEY_GROUP);
    f->hi = late < 0 ? 0 : MIN(t->hi, late / KEY_GROUP + 1);
    f->whole = early >= f->hi * KEY_GROUP - 1 && (window == 0 || late - window < f->lo * KEY_GROUP);
    return f->lo < f->hi;
}

INLINE void score_groups(struct fold *f, const int n)
{
    const struct attention_rows *r = f->r;
    const char *key[GROUPS];
    int32_t n_chunks = f->width / CHUNK;
    const float *query = r->query;

    for (int i = 0; i < n; i++) {
        key[i] = (const char *)f->t->key[f->lo + i];
    }
    query += (int64_t)f->first / LANES * n_chunks * PLANES * TILE_FLOATS;
    products(f->score + (int64_t)f->lo * TILE_FLOATS, key, 2 * (int64_t)f->width,
             (const char *)query, n_chunks, n, false);
}

static void score_keys(struct fold *f)
{
    amx_order();
    switch (f->hi - f->lo) {
    case 1:
        score_groups(f, 1);
        break;
    case 2:
        score_groups(f, 2);
        break;
    case 3:
        score_groups(f, 3);
        break;
    default:
        score_groups(f, 4);
        break;
    }
    amx_order();
}

/* Soft caps and masks; the groups of a chunk that the set does not see are masked. */
static void mask_scores(struct fold *f)
{
    const __m512 minus = _mm512_set1_ps(-INFINITY);
    float cap = f->r->softcap;
    int32_t window = f->r->window;
    _Alignas(64) int32_t index[LANES];

    for (int32_t i = f->lo * TILE_FLOATS; i < f->hi * TILE_FLOATS && cap > 0; i++) {
        f->score[i] = LOG2_E * cap * tanhf(f->score[i] / cap);
    }
    if (!f->whole) {
        for (int32_t i = 0; i < LANES; i++) {
            index[i] = f->r->at[f->first + MIN(i, f->n - 1)] - f->t->first;
        }
        __m512i at = _mm512_load_si512(index);
        for (int32_t i = f->lo * KEY_GROUP; i < f->hi * KEY_GROUP; i++) {
            __mmask16 hidden = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(i));
            if (window > 0) {
                hidden |= _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(i + window));
            }
            _mm512_mask_store_ps(f->score + (int64_t)i * LANES, hidden, minus);
        }
    }
    for (int32_t i = 0; i < KEY_GROUP; i++) {
        if (f->lo % 2 != 0) {
            _mm512_store_ps(f->score + ((f->lo - 1) * KEY_GROUP + i) * LANES, minus);
        }
        if (f->hi % 2 != 0) {
            _mm512_store_ps(f->score + (f->hi * KEY_GROUP + i) * LANES, minus);
        }
    }
}

/* 2^x for x <= 0, 0 from LEAST down; exactly 1 for 0. Polynomial of Cephes. */
INLINE __m512 power_of_2(__m512 x)
{
    __m512 y = _mm512_max_ps(_mm512_set1_ps(LEAST), x); /* a NaN stays */
    __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(y, n);
    __m512 p = _mm512_set1_ps(1.535336188319500e-4f);

    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.339887440266574e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618437357674640e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550332471162809e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402264791363012e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931472028550421e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* The planes of a pair of weights; they are not negative. */
INLINE void put_weights(char *to, __m512 a, __m512 b)
{
    for (int p = 0; p < PLANES; p++, to += TILE_BYTES) {
        __m512i first = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
        _mm512_store_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, first, _mm512_castps_si512(b)));
        a = rest_of(a);
        b = rest_of(b);
    }
}

/* Scores become weights; returns the factors of what was summed before. */
static __m512 weigh(struct fold *f)
{
    int32_t lo = f->lo / 2, hi = (f->hi + 1) / 2;
    __m512 old = _mm512_loadu_ps(f->max), best = old, other = old;

    for (int32_t i = lo * CHUNK; i < hi * CHUNK; i += 2) {
        best = _mm512_max_ps(best, _mm512_load_ps(f->score + (int64_t)i * LANES));
        other = _mm512_max_ps(other, _mm512_load_ps(f->score + (int64_t)(i + 1) * LANES));
    }
    best = _mm512_max_ps(best, other);
    _mm512_storeu_ps(f->max, best);
    /* a row that has seen nothing yet */
    __mmask16 none = _mm512_cmpeq_ps_mask(best, _mm512_set1_ps(-INFINITY));
    best = _mm512_mask_mov_ps(best, none, _mm512_setzero_ps());
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int32_t c = lo; c < hi; c++) {
        const float *s = f->score + (int64_t)c * 2 * TILE_FLOATS;
        char *to = f->weight + (int64_t)c * PLANES * TILE_BYTES;
        for (int i = 0; i < KEY_GROUP; i++, s += LANES, to += AMX_BYTES) {
            __m512 a = power_of_2(_mm512_sub_ps(_mm512_load_ps(s), best));
            __m512 b = power_of_2(_mm512_sub_ps(_mm512_load_ps(s + TILE_FLOATS), best));
            total[0] = _mm512_add_ps(total[0], a);
            total[1] = _mm512_add_ps(total[1], b);
            put_weights(to, a, b);
        }
    }
    __m512 keep = power_of_2(_mm512_sub_ps(old, best));
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(f->sum), keep);
    _mm512_storeu_ps(f->sum, _mm512_add_ps(sum, _mm512_add_ps(total[0], total[1])));
    return keep;
}

INLINE void accumulate_dims(struct fold *f, int32_t d, const int n)
{
    int32_t c = f->lo / 2;
    const char *a[4];

    for (int i = 0; i < n; i++) {
        a[i] = f->turned + (int64_t)(d + i * AMX_ROWS) * TURNED_STRIDE +
               (int64_t)(c - f->t->lo / 2) * AMX_BYTES;
    }
    products(f->acc + (int64_t)d * LANES, a, TURNED_STRIDE,
             f->weight + (int64_t)c * PLANES * TILE_BYTES, (f->hi + 1) / 2 - c, n, true);
}

static void accumulate(struct fold *f, __m512 keep)
{
    int32_t dim = f->r->dim, d = 0;

    if (_mm512_cmpneq_ps_mask(keep, _mm512_set1_ps(1)) != 0) {
        for (int32_t i = 0; i < dim; i++) {
            float *acc = f->acc + (int64_t)i * LANES;
            _mm512_storeu_ps(acc, _mm512_mul_ps(_mm512_loadu_ps(acc), keep));
        }
    }
    amx_order();
    for (; d + 4 * AMX_ROWS <= dim; d += 4 * AMX_ROWS) {
        accumulate_dims(f, d, 4);
    }
    for (; d + 2 * AMX_ROWS <= dim; d += 2 * AMX_ROWS) {
        accumulate_dims(f, d, 2);
    }
    for (; d < dim; d += AMX_ROWS) {
        accumulate_dims(f, d, 1);
    }
    amx_order();
}

/* Apart from its caller, which sets how denormal numbers count. */
static __attribute__((noinline)) void fold_sets(float *state, const struct attention_rows *r,
                                                const struct attention_tile *t)
{
    _Alignas(64) char turned[MAX_DIM * TURNED_STRIDE];
    struct fold f;

    f.r = r;
    f.t = t;
    f.turned = turned;
    f.width = (int32_t)div_ceil(r->dim, CHUNK) * CHUNK;
    turn_values(turned, t, f.width);
    for (f.first = 0; f.first < r->n; f.first += LANES) {
        f.n = MIN(LANES, r->n - f.first);
        f.max = state + f.first;
        f.sum = state + ROWS + f.first;
        f.acc = state + 2 * ROWS + (int64_t)f.first * r->dim;
        if (set_range(&f)) {
            score_keys(&f);
            mask_scores(&f);
            accumulate(&f, weigh(&f));
        }
    }
}

static void fold(float *state, const struct attention_rows *r, const struct attention_tile *t)
{
    enum { FLUSH_TO_ZERO = 1 << 15, DENORMALS_ARE_ZERO = 1 << 6 };
    unsigned modes = _mm_getcsr();

    _mm_setcsr(modes | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
    begin_tiles();
    fold_sets(state, r, t);
    amx_end();
    _mm_setcsr(modes);
}

/* ---- states ---- */

static void merge(float *into, const float *from, int32_t n, int32_t dim)
{
    for (int32_t first = 0; first < n; first += LANES) {
        float *a = into + first;
        const float *b = from + first;
        __m512 a_max = _mm512_loadu_ps(a), b_max = _mm512_loadu_ps(b);
        __m512 b_sum = _mm512_loadu_ps(b + ROWS);
        __mmask16 some = _mm512_cmpneq_ps_mask(b_sum, _mm512_setzero_ps());
        __m512 max = _mm512_mask_max_ps(a_max, some, a_max, b_max);
        __m512 keep =
            _mm512_mask_mov_ps(_mm512_set1_ps(1), some, power_of_2(_mm512_sub_ps(a_max, max)));
        __m512 take = _mm512_maskz_mov_ps(some, power_of_2(_mm512_sub_ps(b_max, max)));
        _mm512_storeu_ps(a, max);
        _mm512_storeu_ps(a + ROWS, _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(a + ROWS), keep),
                                                 _mm512_mul_ps(b_sum, take)));
        a = into + 2 * ROWS + (int64_t)first * dim;
        b = from + 2 * ROWS + (int64_t)first * dim;
        for (int32_t i = 0; i < dim * LANES; i += LANES) {
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(a + i), keep);
            __m512 y = _mm512_mul_ps(_mm512_loadu_ps(b + i), take);
            _mm512_storeu_ps(a + i, _mm512_add_ps(x, y));
        }
    }
}

static void put(float *const *out, const float *state, const float *scale, int32_t n, int32_t dim)
{
    for (int32_t first = 0; first < n; first += LANES) {
        const float *acc = state + 2 * ROWS + (int64_t)first * dim;
        for (int32_t d = 0; d < dim; d += LANES, acc += TILE_FLOATS) {
            __m512 r[LANES];
            for (int i = 0; i < LANES; i++) {
                r[i] = _mm512_loadu_ps(acc + (int64_t)i * LANES);
            }
            transpose16(r);
            for (int32_t i = 0; i < MIN(LANES, n - first); i++) {
                _mm512_storeu_ps(out[first + i] + d,
                                 _mm512_mul_ps(r[i], _mm512_set1_ps(scale[first + i])));
            }
        }
    }
}

void cpu_attention_amx(struct cpu_kernels *k)
{
    k->attention = (struct cpu_attention){.rows = ROWS,
                                          .query_floats = query_floats,
                                          .pack = pack,
                                          .fold = fold,
                                          .merge = merge,
                                          .put = put};
}

#endif
