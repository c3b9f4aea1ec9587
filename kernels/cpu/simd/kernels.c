/* The plain row functions, which are the specification of the others, and the table of
 * each instruction set. */
#include "kernels/cpu/simd/kernels.h"

#include <math.h>

#include "kernels/cpu/simd/convert.h"
#include "kernels/noise.h"

/* ---- rows ---- */

/* cpu_weight makes float32 of all vectors. */
static void norm_row(float *out, const float *x, int32_t n, const struct norm *k)
{
    const float *w = k->weight.data;
    const float *bias = k->bias.data;
    float mean = 0;

    if (k->kind == NORM_LAYER) {
        for (int32_t i = 0; i < n; i++) {
            mean += x[i];
        }
        mean /= (float)n;
    }
    float sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += (x[i] - mean) * (x[i] - mean);
    }
    float inv = 1.0f / sqrtf(sum / (float)n + k->eps);
    for (int32_t i = 0; i < n; i++) {
        out[i] = (x[i] - mean) * inv * (w[i] + k->weight_offset) + (bias ? bias[i] : 0);
    }
}

static void add_row(float *x, const float *y, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        x[i] += y[i];
    }
}

static float activate(enum activation act, float x)
{
    switch (act) {
    case ACT_NONE:
        return x;
    case ACT_RELU:
        return x > 0 ? x : 0;
    case ACT_GELU_ERF:
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case ACT_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case ACT_SILU:
        return x / (1.0f + expf(-x));
    }
    return x;
}

static void gate_row(float *out, const float *gate, const float *up, int32_t n, enum activation act)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = activate(act, gate[i]) * up[i];
    }
}

static void epilogue_row(float *out, const float *sum, const float *bias, const float *residual,
                         int32_t n, enum activation act)
{
    for (int32_t i = 0; i < n; i++) {
        float v = activate(act, bias != NULL ? sum[i] + bias[i] : sum[i]);
        out[i] = residual ? v + residual[i] : v;
    }
}

static void load_row(float *out, const void *x, enum dtype t, int32_t n, float scale)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = dtype_load(x, t, i) * scale;
    }
}

static void store_row(void *out, enum dtype t, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        dtype_store(out, t, i, x[i]);
    }
}

static void rotate_row(float *head, const float *cos_sin, int32_t half)
{
    for (int32_t i = 0; i < half; i++) {
        float x = head[i];
        float y = head[half + i];
        head[i] = x * cos_sin[i] - y * cos_sin[half + i];
        head[half + i] = y * cos_sin[i] + x * cos_sin[half + i];
    }
}

static struct row_scan scan_row(const float *x, int32_t n)
{
    struct row_scan s = {.max = -INFINITY};

    for (int32_t i = 0; i < n; i++) {
        s.bad = s.bad || !(x[i] < INFINITY);
        s.max = x[i] > s.max ? x[i] : s.max;
    }
    return s;
}

static double sum_exp_row(const float *x, int32_t n, float max)
{
    double sum = 0;

    for (int32_t i = 0; i < n; i++) {
        sum += (double)expf(x[i] - max);
    }
    return sum;
}

static int32_t survivors(struct cpu_survivor *out, const float *logits, int32_t n, float max,
                         float inv_temperature, float least, uint64_t *ret_total)
{
    int32_t found = 0;
    uint64_t total = 0;

    for (int32_t t = 0; t < n; t++) {
        float z = (logits[t] - max) * inv_temperature;
        uint64_t mass = sample_mass(z);
        total += mass;
        if (mass > 0 && z > least) {
            out[found++] = (struct cpu_survivor){.z = z, .token = t, .mass = mass};
        }
    }
    *ret_total = total;
    return found;
}

static void transpose_sums(float *out, int32_t stride, const float *sum, int32_t n, int32_t n_x)
{
    for (int32_t i = 0; i < n; i++) {
        for (int32_t x = 0; x < n_x; x++) {
            out[x * stride + i] = sum[i * n_x + x];
        }
    }
}

void cpu_kernels_plain(struct cpu_kernels *k)
{
    *k = (struct cpu_kernels){.norm = norm_row,
                              .add = add_row,
                              .gate = gate_row,
                              .epilogue = epilogue_row,
                              .load = load_row,
                              .store = store_row,
                              .rotate = rotate_row,
                              .scan = scan_row,
                              .sum_exp = sum_exp_row,
                              .survivors = survivors,
                              .transpose_sums = transpose_sums};
}

/* ---- panels of codes ---- */

/* Groups of n columns of panels as a format has them, and their width. */
static int64_t panel_groups(enum weight_format_id as, int32_t n, int32_t *ret_width)
{
    int32_t of_blocks = weight_format_of(as)->group_values;

    *ret_width = of_blocks > 0 ? of_blocks : 32; /* of codes whose scales are apart */
    return div_ceil(n, FORMAT_BLOCK_MAX) * (FORMAT_BLOCK_MAX / *ret_width);
}

int64_t cpu_code_tile_bytes(const struct cpu_code_panels *p, enum weight_format_id as, int32_t n)
{
    int32_t width;
    int64_t groups = panel_groups(as, n, &width);

    return (p->wide ? 2 : 1) * groups * code_tile_entry(width, p->tile_rows);
}

int64_t cpu_code_panel_bytes(const struct cpu_code_panels *p, enum weight_format_id as, int32_t n)
{
    int32_t width;
    int64_t groups = panel_groups(as, n, &width);
    int32_t bytes = p->digits > 0 ? p->digits : p->wide ? 2 : 1;

    return bytes * groups * code_panel_entry(width, weight_format_of(as)->minima);
}

/* ---- tables ---- */

void cpu_kernels_for(struct cpu_kernels *k, enum cpu_isa isa, enum cpu_bf16 way)
{
    cpu_kernels_plain(k);
    cpu_blocks_plain(k);
    cpu_codes_plain(k);
#if defined(__x86_64__)
    bool floats = isa == CPU_AVX512_BF16 && way == CPU_BF16_FLOATS;
    if (isa >= CPU_AVX2 && isa <= CPU_AMX) {
        cpu_kernels_avx2(k);
        cpu_tiles_avx2(k);
        cpu_attention_avx2(k);
        cpu_blocks_avx2(k);
        cpu_code_panels_avx2(k);
    }
    if (isa == CPU_AVX2) {
        cpu_panels_avx2(k); /* AVX-512's tiles sum in another order, and have their own */
    }
    if (isa == CPU_AVX512 || isa == CPU_AVX512_VNNI || floats) {
        cpu_tiles_avx512(k);
    }
    if (isa >= CPU_AVX512_VNNI && isa <= CPU_AMX) {
        k->other[OTHER_BLOCKS_AVX2] = k->blocks;
        cpu_blocks_256_avx512vnni(k);
        if (__builtin_cpu_supports("gfni")) {
            cpu_blocks_gfni_avx512vnni(k);
        }
        cpu_blocks_avx512vnni(k);
        cpu_panels_avx512vnni(k);
    }
    if (isa == CPU_AMX) {
        cpu_panels_amx(k);
    }
    if ((isa == CPU_AVX512_BF16 && !floats) || isa == CPU_AMX) {
        cpu_tiles_avx512bf16(k);
    }
    if (isa >= CPU_AVX2 && isa <= CPU_AMX) {
        cpu_codes_avx2(k);
    }
    if (isa >= CPU_AVX512_VNNI && isa <= CPU_AMX) {
        cpu_codes_avx512vnni(k);
        if (__builtin_cpu_supports("avx512vbmi")) {
            cpu_codes_vbmi_avx512vnni(k);
        }
    }
#elif defined(__aarch64__)
    if (isa == CPU_NEON) {
        cpu_kernels_neon(k);
        cpu_tiles_neon(k);
        cpu_attention_neon(k);
        cpu_blocks_neon(k);
        cpu_codes_plain(k);
    }
#endif
    (void)way;
    k->linear_bf16 = k->linear;
    k->panels_bf16 = k->panels;
#if defined(__x86_64__)
    if (isa == CPU_AMX) {
        cpu_tiles_amx(k);
        cpu_panels_amx_bf16(k);
        cpu_attention_amx(k);
    }
#endif
}
