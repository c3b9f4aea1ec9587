/* The row functions of kernels.h for NEON, those that pay: four floats at a time. The
 * rest stays plain. */
#include <math.h>

#include "kernels/cpu/simd/neon.h"

/* 1 / (1 + e^-x), from e^-|x| so that nothing overflows. */
INLINE float32x4_t sigmoid4(float32x4_t x)
{
    float32x4_t one = vdupq_n_f32(1.0f);
    float32x4_t e = vec_exp(vnegq_f32(vabsq_f32(x)));

    return vdivq_f32(vbslq_f32(vcltzq_f32(x), e, one), vaddq_f32(one, e));
}

INLINE float32x4_t activate4(enum activation act, float32x4_t x)
{
    switch (act) {
    case ACT_RELU:
        return vmaxq_f32(x, vdupq_n_f32(0));
    case ACT_SILU:
        return vmulq_f32(x, sigmoid4(x));
    case ACT_GELU_TANH: { /* (1 + tanh y) / 2 = sigmoid(2y) */
        float32x4_t y = vfmaq_f32(x, vmulq_f32(vmulq_f32(x, x), x), vdupq_n_f32(0.044715f));
        return vmulq_f32(x, sigmoid4(vmulq_n_f32(y, 1.59576912f)));
    }
    case ACT_GELU_ERF: {
        float v[4];
        vst1q_f32(v, x);
        for (int i = 0; i < 4; i++) {
            v[i] = 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678f));
        }
        return vld1q_f32(v);
    }
    default:
        return x;
    }
}

/* ---- loads and stores of any type ---- */

INLINE uint16x4_t to_half(float32x4_t x, enum dtype t)
{
    if (t == DTYPE_F16) {
        return vreinterpret_u16_f16(vcvt_f16_f32(x));
    }
    uint32x4_t u = vreinterpretq_u32_f32(x);
    uint32x4_t lsb = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(vaddq_u32(u, lsb), vdupq_n_u32(0x7FFF));
    uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

static void load_row(float *out, const void *x, enum dtype t, int32_t n, float scale)
{
    int32_t i = 0;

    for (; i + 4 <= n; i += 4) {
        vst1q_f32(out + i, vmulq_n_f32(vec_load_type(x, t, i), scale));
    }
    for (; i < n; i++) {
        out[i] = dtype_load(x, t, i) * scale;
    }
}

static void store_row(void *out, enum dtype t, const float *x, int32_t n)
{
    int32_t i = 0;

    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vld1q_f32(x + i);
        if (t == DTYPE_F32) {
            vst1q_f32((float *)out + i, v);
        } else {
            vst1_u16((uint16_t *)out + i, to_half(v, t));
        }
    }
    for (; i < n; i++) {
        dtype_store(out, t, i, x[i]);
    }
}

/* ---- norm, activation ---- */

static float mean_row(const float *x, int32_t n)
{
    float32x4_t sum = vdupq_n_f32(0);

    for (int32_t i = 0; i < n; i += 4) {
        sum = vaddq_f32(sum, load_some(x + i, n - i));
    }
    return vaddvq_f32(sum) / (float)n;
}

static float square_sum_row(const float *x, int32_t n, float mean)
{
    float32x4_t m = vdupq_n_f32(mean);
    float32x4_t a = vdupq_n_f32(0);
    int32_t i = 0;

    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vsubq_f32(vld1q_f32(x + i), m);
        a = vfmaq_f32(a, v, v);
    }
    float sum = vaddvq_f32(a);
    for (; i < n; i++) {
        sum += (x[i] - mean) * (x[i] - mean);
    }
    return sum;
}

static void norm_row(float *out, const float *x, int32_t n, const struct norm *k)
{
    const float *w = k->weight.data;
    const float *bias = k->bias.data;
    float mean = k->kind == NORM_LAYER ? mean_row(x, n) : 0;
    float inv = 1.0f / sqrtf(square_sum_row(x, n, mean) / (float)n + k->eps);

    for (int32_t i = 0; i < n; i += 4) {
        int32_t left = n - i;
        float32x4_t v = vmulq_n_f32(vsubq_f32(load_some(x + i, left), vdupq_n_f32(mean)), inv);
        v = vmulq_f32(v, vaddq_f32(load_some(w + i, left), vdupq_n_f32(k->weight_offset)));
        v = bias ? vaddq_f32(v, load_some(bias + i, left)) : v;
        store_some(out + i, v, left);
    }
}

static void gate_row(float *out, const float *gate, const float *up, int32_t n, enum activation act)
{
    for (int32_t i = 0; i < n; i += 4) {
        int32_t left = n - i;
        float32x4_t v = activate4(act, load_some(gate + i, left));
        store_some(out + i, vmulq_f32(v, load_some(up + i, left)), left);
    }
}

static void epilogue_row(float *out, const float *sum, const float *bias, const float *residual,
                         int32_t n, enum activation act)
{
    for (int32_t i = 0; i < n; i += 4) {
        int32_t left = n - i;
        float32x4_t v = load_some(sum + i, left);
        v = bias ? vaddq_f32(v, load_some(bias + i, left)) : v;
        v = act != ACT_NONE ? activate4(act, v) : v;
        v = residual ? vaddq_f32(v, load_some(residual + i, left)) : v;
        store_some(out + i, v, left);
    }
}

static void rotate_row(float *head, const float *cos_sin, int32_t half)
{
    for (int32_t i = 0; i < half; i += 4) {
        int32_t left = half - i;
        float32x4_t x = load_some(head + i, left);
        float32x4_t y = load_some(head + half + i, left);
        float32x4_t c = load_some(cos_sin + i, left);
        float32x4_t s = load_some(cos_sin + half + i, left);
        store_some(head + i, vfmsq_f32(vmulq_f32(x, c), y, s), left);
        store_some(head + half + i, vfmaq_f32(vmulq_f32(y, c), x, s), left);
    }
}

/* ---- scans of logits ---- */

static struct row_scan scan_row(const float *x, int32_t n)
{
    struct row_scan s = {.max = -INFINITY};
    float32x4_t best = vdupq_n_f32(-INFINITY);
    uint32x4_t good = vdupq_n_u32(UINT32_MAX);
    int32_t i = 0;

    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vld1q_f32(x + i);
        best = vmaxnmq_f32(best, v);
        good = vandq_u32(good, vcltq_f32(v, vdupq_n_f32(INFINITY)));
    }
    s.max = vmaxvq_f32(best);
    s.bad = vminvq_u32(good) == 0;
    for (; i < n; i++) {
        s.bad = s.bad || !(x[i] < INFINITY);
        s.max = x[i] > s.max ? x[i] : s.max;
    }
    return s;
}

/* Lanes are added up in double every 1024 elements, so that a wide vocabulary loses
 * nothing. */
static double sum_exp_row(const float *x, int32_t n, float max)
{
    double total = 0;

    for (int32_t from = 0; from < n; from += 1024) {
        int32_t end = MIN(n, from + 1024);
        float32x4_t a = vdupq_n_f32(0);
        int32_t i = from;
        for (; i + 4 <= end; i += 4) {
            a = vaddq_f32(a, vec_exp(vsubq_f32(vld1q_f32(x + i), vdupq_n_f32(max))));
        }
        total += (double)vaddvq_f32(a);
        for (; i < end; i++) {
            total += (double)expf(x[i] - max);
        }
    }
    return total;
}

void cpu_kernels_neon(struct cpu_kernels *k)
{
    k->norm = norm_row;
    k->gate = gate_row;
    k->epilogue = epilogue_row;
    k->load = load_row;
    k->store = store_row;
    k->rotate = rotate_row;
    k->scan = scan_row;
    k->sum_exp = sum_exp_row;
}
