/* The frame of attention's inner loops, the same for every instruction set with
 * vectors: keys are transposed, so that the scores of TILE_KEYS keys are rows of an
 * outer product.
 *
 * An attention_*.c file includes it once, after the primitives vec_* of its instruction
 * set and after defining
 *     SCORE_KEYS        keys of a tile that all rows of q use before the next ones
 *     ACCUMULATE_ROWS   rows of weights that share the loads of values: 1 or 2
 *     vec_between(v, first, lo, hi, other)
 *                       lane i of v where lo <= first + i < hi, else of other
 */
#ifdef VEC_LANES

INLINE void transpose_type(float *out, const void *const *key, int32_t dim, const enum dtype t)
{
    for (int32_t first = 0; first < TILE_KEYS; first += VEC_LANES) {
        int32_t d = 0;
        for (; d + VEC_LANES <= dim; d += VEC_LANES) {
            vec r[VEC_LANES];
#pragma GCC unroll 8
            for (int i = 0; i < VEC_LANES; i++) {
                r[i] = vec_load_type(key[first + i], t, d);
            }
            vec_transpose(r);
#pragma GCC unroll 8
            for (int i = 0; i < VEC_LANES; i++) {
                vec_store_aligned(out + (d + i) * TILE_KEYS + first, r[i]);
            }
        }
        for (; d < dim; d++) {
            for (int i = 0; i < VEC_LANES; i++) {
                out[d * TILE_KEYS + first + i] = dtype_load(key[first + i], t, d);
            }
        }
    }
}

static void transpose_keys(float *out, const void *const *key, int32_t dim, enum dtype t)
{
    if (t == DTYPE_BF16) {
        transpose_type(out, key, dim, DTYPE_BF16);
    } else if (t == DTYPE_F16) {
        transpose_type(out, key, dim, DTYPE_F16);
    } else if (t == DTYPE_F8) {
        transpose_type(out, key, dim, DTYPE_F8);
    } else if (t == DTYPE_I8) {
        transpose_type(out, key, dim, DTYPE_I8);
    } else {
        transpose_type(out, key, dim, DTYPE_F32);
    }
}

/* ---- scores ---- */

/* n_rows of q with n_v vectors of the tile's keys, in registers over the dimensions. */
INLINE void score_tile(float *score, const float *const *q, const float *keys, int32_t dim,
                       float scale, const int n_rows, const int n_v)
{
    vec a[16];

#pragma GCC unroll 16
    for (int i = 0; i < n_rows * n_v; i++) {
        a[i] = vec_set1(0);
    }
    for (int32_t d = 0; d < dim; d++) {
        vec k[8];
#pragma GCC unroll 8
        for (int i = 0; i < n_v; i++) {
            k[i] = vec_load_aligned(keys + (int64_t)d * TILE_KEYS + VEC_LANES * i);
        }
#pragma GCC unroll 2
        for (int r = 0; r < n_rows; r++) {
            vec x = vec_broadcast(q[r] + d);
#pragma GCC unroll 8
            for (int i = 0; i < n_v; i++) {
                a[r * n_v + i] = vec_fma(x, k[i], a[r * n_v + i]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < n_rows * n_v; i++) {
        vec_store_aligned(score + i / n_v * TILE_KEYS + i % n_v * VEC_LANES,
                          vec_mul(a[i], vec_set1(scale)));
    }
}

static void scores(float *score, const float *const *q, int32_t rows, const float *keys,
                   int32_t dim, float scale)
{
    enum { PAIR_KEYS = 32 }; /* in registers with two rows */

    for (int32_t first = 0; first < TILE_KEYS; first += SCORE_KEYS) {
        int32_t r = 0;
        for (; r + 2 <= rows; r += 2) {
#pragma GCC unroll 2
            for (int32_t at = first; at < first + SCORE_KEYS; at += PAIR_KEYS) {
                score_tile(score + r * TILE_KEYS + at, q + r, keys + at, dim, scale, 2,
                           PAIR_KEYS / VEC_LANES);
            }
        }
        if (r < rows) {
            score_tile(score + r * TILE_KEYS + first, q + r, keys + first, dim, scale, 1,
                       SCORE_KEYS / VEC_LANES);
        }
    }
}

/* ---- softmax ---- */

/* Scores outside [lo, hi) count as -infinity. */
static float softmax(float *s, int32_t lo, int32_t hi, float *max, float *sum)
{
    const vec minus = vec_set1(-INFINITY);
    vec v[TILE_KEYS / VEC_LANES];
    vec best = minus;

    for (int i = 0; i < TILE_KEYS / VEC_LANES; i++) {
        v[i] = vec_between(vec_load_aligned(s + VEC_LANES * i), VEC_LANES * i, lo, hi, minus);
        best = vec_max(best, v[i]);
    }
    float old = *max;
    *max = MAX(old, vec_max_lane(best));
    vec m = vec_set1(*max);
    vec total = vec_set1(0);
    for (int i = 0; i < TILE_KEYS / VEC_LANES; i++) {
        vec p = vec_exp(vec_sub(v[i], m));
        vec_store_aligned(s + VEC_LANES * i, p);
        total = vec_add(total, p);
    }
    float keep = old == *max ? 1.0f : expf(old - *max);
    *sum = *sum * keep + vec_sum(total);
    return keep;
}

/* ---- weighted sums of values ---- */

/* Columns [at, at + n_v vectors) of n_rows rows of acc, in registers over the keys. */
INLINE void accumulate_tile(float *acc, int32_t stride, const float *keep, const float *p,
                            const void *const *value, int32_t lo, int32_t hi, int64_t at,
                            const enum dtype t, const int n_rows, const int n_v)
{
    vec a[8];

#pragma GCC unroll 8
    for (int i = 0; i < n_rows * n_v; i++) {
        a[i] = vec_mul(vec_load(acc + i / n_v * stride + at + i % n_v * VEC_LANES),
                       vec_set1(keep[i / n_v]));
    }
    for (int32_t j = lo; j < hi; j++) {
        vec v[8];
#pragma GCC unroll 8
        for (int i = 0; i < n_v; i++) {
            v[i] = vec_load_type(value[j], t, at + VEC_LANES * i);
        }
#pragma GCC unroll 2
        for (int r = 0; r < n_rows; r++) {
            vec w = vec_broadcast(p + r * TILE_KEYS + j);
#pragma GCC unroll 8
            for (int i = 0; i < n_v; i++) {
                a[r * n_v + i] = vec_fma(w, v[i], a[r * n_v + i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_rows * n_v; i++) {
        vec_store(acc + i / n_v * stride + at + i % n_v * VEC_LANES, a[i]);
    }
}

INLINE void accumulate_rows(float *acc, int32_t dim, const float *keep, const float *p,
                            const void *const *value, int32_t lo, int32_t hi, const enum dtype t,
                            const int n_rows)
{
    enum { COLS = 32 }; /* in registers */
    int32_t at = 0;

    for (; at + COLS <= dim; at += COLS) {
        accumulate_tile(acc, dim, keep, p, value, lo, hi, at, t, n_rows, COLS / VEC_LANES);
    }
    for (; at + VEC_LANES <= dim; at += VEC_LANES) {
        accumulate_tile(acc, dim, keep, p, value, lo, hi, at, t, n_rows, 1);
    }
    for (; at < dim; at++) {
        for (int r = 0; r < n_rows; r++) {
            float a = acc[r * dim + at] * keep[r];
            for (int32_t j = lo; j < hi; j++) {
                a = fmaf(p[r * TILE_KEYS + j], dtype_load(value[j], t, at), a);
            }
            acc[r * dim + at] = a;
        }
    }
}

INLINE void accumulate_type(float *acc, int32_t dim, const float *keep, const float *p,
                            int32_t rows, const void *const *value, int32_t lo, int32_t hi,
                            const enum dtype t)
{
    int32_t r = 0;

    for (; r + ACCUMULATE_ROWS <= rows; r += ACCUMULATE_ROWS) {
        accumulate_rows(acc + (int64_t)r * dim, dim, keep + r, p + r * TILE_KEYS, value, lo, hi, t,
                        ACCUMULATE_ROWS);
    }
    if (r < rows) {
        accumulate_rows(acc + (int64_t)r * dim, dim, keep + r, p + r * TILE_KEYS, value, lo, hi, t,
                        1);
    }
}

static void accumulate(float *acc, int32_t dim, const float *keep, const float *p, int32_t rows,
                       const void *const *value, int32_t lo, int32_t hi, enum dtype t)
{
    if (t == DTYPE_BF16) {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_BF16);
    } else if (t == DTYPE_F16) {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_F16);
    } else if (t == DTYPE_F8) {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_F8);
    } else if (t == DTYPE_I8) {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_I8);
    } else {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_F32);
    }
}

#endif
