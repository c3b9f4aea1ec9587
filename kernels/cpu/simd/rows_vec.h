/* The frame of the row functions (kernels.h), the same for every instruction set with
 * vectors.
 *
 * A rows_*.c file includes it once, after the primitives vec_* of its instruction set
 * and after defining
 *     load_some(x, n), store_some(x, v, n)
 *                        the first n lanes, n >= 1; VEC_LANES where n is more
 *     vec_sigmoid(x)     1 / (1 + e^-x)
 *     vec_store_type(out, t, i, v)
 *                        elements [i, i + VEC_LANES) of an array of t
 *     square_sum_row(x, n, mean)
 *                        the sum of (x[i] - mean)^2
 *     vec_mul2_sub(a, b, c, d), vec_mul2_add(a, b, c, d)
 *                        a b - c d, a b + c d
 */
#ifdef VEC_LANES

INLINE vec activate(enum activation act, vec x)
{
    switch (act) {
    case ACT_RELU:
        return vec_max(x, vec_set1(0));
    case ACT_SILU:
        return vec_mul(x, vec_sigmoid(x));
    case ACT_GELU_TANH: { /* (1 + tanh y) / 2 = sigmoid(2y) */
        vec cube = vec_mul(vec_mul(x, x), x);
        vec y = vec_fma(cube, vec_set1(0.044715f), x);
        return vec_mul(x, vec_sigmoid(vec_mul(y, vec_set1(1.59576912f))));
    }
    case ACT_GELU_ERF: {
        float v[VEC_LANES];
        vec_store(v, x);
        for (int i = 0; i < VEC_LANES; i++) {
            v[i] = 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678f));
        }
        return vec_load(v);
    }
    default:
        return x;
    }
}

/* ---- loads and stores of any type ---- */

static void load_row(float *out, const void *x, enum dtype t, int32_t n, float scale)
{
    vec s = vec_set1(scale);
    int32_t i = 0;

    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        vec_store(out + i, vec_mul(vec_load_type(x, t, i), s));
    }
    for (; i < n; i++) {
        out[i] = dtype_load(x, t, i) * scale;
    }
}

static void store_row(void *out, enum dtype t, const float *x, int32_t n)
{
    int32_t i = 0;

    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        vec_store_type(out, t, i, vec_load(x + i));
    }
    for (; i < n; i++) {
        dtype_store(out, t, i, x[i]);
    }
}

/* ---- norm, activation, rotation ---- */

static float mean_row(const float *x, int32_t n)
{
    vec sum = vec_set1(0);

    for (int32_t i = 0; i < n; i += VEC_LANES) {
        sum = vec_add(sum, load_some(x + i, n - i));
    }
    return vec_sum(sum) / (float)n;
}

static void norm_row(float *out, const float *x, int32_t n, const struct norm *k)
{
    const float *w = k->weight.data;
    const float *bias = k->bias.data;
    float mean = k->kind == NORM_LAYER ? mean_row(x, n) : 0;
    float inv = 1.0f / sqrtf(square_sum_row(x, n, mean) / (float)n + k->eps);
    vec vm = vec_set1(mean);
    vec vi = vec_set1(inv);
    vec off = vec_set1(k->weight_offset);

    for (int32_t i = 0; i < n; i += VEC_LANES) {
        int32_t left = n - i;
        vec v = vec_mul(vec_sub(load_some(x + i, left), vm), vi);
        v = vec_mul(v, vec_add(load_some(w + i, left), off));
        v = bias ? vec_add(v, load_some(bias + i, left)) : v;
        store_some(out + i, v, left);
    }
}

static void gate_row(float *out, const float *gate, const float *up, int32_t n, enum activation act)
{
    for (int32_t i = 0; i < n; i += VEC_LANES) {
        int32_t left = n - i;
        vec v = activate(act, load_some(gate + i, left));
        store_some(out + i, vec_mul(v, load_some(up + i, left)), left);
    }
}

static void epilogue_row(float *out, const float *sum, const float *bias, const float *residual,
                         int32_t n, enum activation act)
{
    for (int32_t i = 0; i < n; i += VEC_LANES) {
        int32_t left = n - i;
        vec v = load_some(sum + i, left);
        v = bias ? vec_add(v, load_some(bias + i, left)) : v;
        v = act != ACT_NONE ? activate(act, v) : v;
        v = residual ? vec_add(v, load_some(residual + i, left)) : v;
        store_some(out + i, v, left);
    }
}

static void rotate_row(float *head, const float *cos_sin, int32_t half)
{
    for (int32_t i = 0; i < half; i += VEC_LANES) {
        int32_t left = half - i;
        vec x = load_some(head + i, left);
        vec y = load_some(head + half + i, left);
        vec c = load_some(cos_sin + i, left);
        vec s = load_some(cos_sin + half + i, left);
        store_some(head + i, vec_mul2_sub(x, c, y, s), left);
        store_some(head + half + i, vec_mul2_add(y, c, x, s), left);
    }
}

/* ---- sums over logits ---- */

/* Lanes are added up in double every 1024 elements, so that a wide vocabulary loses
 * no precision. */
static double sum_exp_row(const float *x, int32_t n, float max)
{
    vec m = vec_set1(max);
    double total = 0;

    for (int32_t from = 0; from < n; from += 1024) {
        int32_t end = MIN(n, from + 1024);
        vec a = vec_set1(0);
        int32_t i = from;
        for (; i + VEC_LANES <= end; i += VEC_LANES) {
            a = vec_add(a, vec_exp(vec_sub(vec_load(x + i), m)));
        }
        total += (double)vec_sum(a);
        for (; i < end; i++) {
            total += (double)expf(x[i] - max);
        }
    }
    return total;
}

#endif
