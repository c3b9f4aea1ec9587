/* Products with blocks with NEON: blocks are unpacked to bytes by the functions of the
 * format table, once for all rows of x, and multiplied as the plain loops do: four
 * vectors of four accumulators, one of each group. */
#ifdef __aarch64__

#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/simd/fetch.h"
#include "kernels/cpu/simd/kernels.h"

enum { BLOCK = FORMAT_BLOCK_MAX, VECTORS = 4 };

struct sums {
    float32x4_t acc[VECTORS]; /* of groups 0 to 15; formats of 8 use the first two */
};

/* FORMAT_BLOCK_MAX values of a row, or fewer. */
struct codes {
    int8_t code[BLOCK];
    float scale[BLOCK / FORMAT_GROUP], min[BLOCK / FORMAT_GROUP]; /* of each group */
};

static void unpack(const struct weight_format *f, const uint8_t *src, int32_t n, struct codes *ret)
{
    struct weight_codes one;
    int32_t wide = f->group_values / FORMAT_GROUP;

    memset(ret, 0, sizeof(*ret));
    for (int32_t i = 0; i < n; i += f->block_values, src += f->block_bytes) {
        f->unpack(src, &one);
        for (int32_t k = 0; k < f->block_values; k += 8) {
            vst1_s8(ret->code + i + k, vmovn_s16(vld1q_s16(one.code + k)));
        }
        for (int32_t k = 0; k < f->block_values / f->group_values; k++) {
            ret->scale[i / f->group_values + k] = one.scale[k * wide];
            ret->min[i / f->group_values + k] = one.min[k * wide];
        }
    }
}

/* Sums of four neighbouring products, of 16 values. */
INLINE int32x4_t products(const int8_t *w, const int8_t *x)
{
    int8x16_t a = vld1q_s8(w), b = vld1q_s8(x);
    int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
    int16x8_t high = vmull_high_s8(a, b);

    return vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}

/* The sums of four groups from 4 * i on. */
static int32x4_t four_groups(const struct codes *c, const struct act_block *x, int32_t i,
                             bool halves)
{
    int32x4_t v[4];

    for (int32_t k = 0; k < 4; k++) {
        int32_t at = halves ? 64 * i + 16 * k : 128 * i + 32 * k;
        v[k] = products(c->code + at, x->code + at);
        if (!halves) {
            v[k] = vaddq_s32(v[k], products(c->code + at + 16, x->code + at + 16));
        }
    }
    return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

/* Two scales, each twice. */
static float32x4_t of_two(const float *scale)
{
    float32x2_t d = vld1_f32(scale);

    return vcombine_f32(vdup_lane_f32(d, 0), vdup_lane_f32(d, 1));
}

/* Add a block's groups; those behind the end of a row have codes and scales of zero. */
static void add_block(struct sums *s, const struct weight_format *f, const struct codes *c,
                      const struct act_block *x)
{
    bool halves = f->group_values == FORMAT_GROUP;
    const float *sum = halves ? x->sum16 : x->sum32;

    for (int32_t i = 0; i < BLOCK / f->group_values / 4; i++) {
        float32x4_t d = halves ? of_two(x->scale + 2 * i) : vld1q_f32(x->scale + 4 * i);
        float32x4_t scale = vmulq_f32(vld1q_f32(c->scale + 4 * i), d);
        float32x4_t of = vcvtq_f32_s32(four_groups(c, x, i, halves));
        s->acc[i] = vfmaq_f32(s->acc[i], of, scale);
        if (f->minima) {
            s->acc[i] = vfmsq_f32(s->acc[i], vld1q_f32(c->min + 4 * i), vld1q_f32(sum + 4 * i));
        }
    }
}

/* The sum of the accumulators of a format's groups. */
static float tree(const float32x4_t v[VECTORS], const struct weight_format *f)
{
    float32x4_t a = f->group_values == FORMAT_GROUP
                        ? vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]))
                        : vaddq_f32(v[0], v[1]);
    float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));

    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}

static void row_dots(float *sum, const struct weight_format *f, const uint8_t *row, int32_t n,
                     const struct act_block *x, int32_t n_x)
{
    struct sums s[TILE_ROWS];
    struct codes c;

    memset(s, 0, sizeof(s));
    for (int32_t at = 0; at < n; at += BLOCK, x += n_x) {
        int32_t here = MIN(BLOCK, n - at);
        unpack(f, row + weight_format_bytes(f, at), here, &c);
        for (int32_t j = 0; j < n_x; j++) {
            add_block(&s[j], f, &c, x + j);
        }
    }
    for (int32_t j = 0; j < n_x; j++) {
        sum[j] = tree(s[j].acc, f);
    }
}

/* ---- activations ---- */

INLINE void quantise_group(struct act_block *out, int32_t g, const float *x)
{
    uint32x4_t max = vdupq_n_u32(0);
    int32_t half[2] = {0};
    float most;

    for (int i = 0; i < 32; i += 4) {
        uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + i));
        max = vmaxq_u32(max, vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF)));
    }
    uint32_t bits = vmaxvq_u32(max);
    memcpy(&most, &bits, sizeof(most));
    bool finite = bits < 0x7F800000u;
    bool some = finite && !(most < 1e-30f);
    float inverse = some ? 127.0f / most : 0;
    for (int i = 0; i < 32; i += 4) {
        int32x4_t v =
            some ? vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), inverse)) : vdupq_n_s32(0);
        int32_t code[4];
        vst1q_s32(code, v);
        for (int k = 0; k < 4; k++) {
            out->code[32 * g + i + k] = (int8_t)code[k];
        }
        int32_t four = vaddvq_s32(v);
        half[i / 16] += four;
    }
    float scale = some ? most / 127.0f : finite ? 0 : NAN;
    out->scale[g] = scale;
    out->sum16[2 * g] = scale * (float)half[0];
    out->sum16[2 * g + 1] = scale * (float)half[1];
    out->sum32[g] = scale * (float)(half[0] + half[1]);
}

static void quantise(struct act_block *out, int32_t n_x, const float *x, int32_t n)
{
    for (int32_t at = 0; at < n; at += BLOCK, out += n_x) {
        memset(out, 0, sizeof(*out));
        for (int32_t i = 0; i < MIN(BLOCK, n - at); i += 32) {
            quantise_group(out, i / 32, x + at + i);
        }
    }
}

#define DOTS(NAME)                                                                                \
    static void dots_##NAME(float *sum, const struct dot_rows *w, int32_t n,                      \
                            const struct act_block *x, int32_t n_x, const struct prefetch *ahead) \
    {                                                                                             \
        (void)ahead;                                                                              \
        for (int32_t i = 0; i < w->n; i++) {                                                      \
            row_dots(sum + i * n_x, weight_format_of(FORMAT_##NAME), w->row[i], n, x, n_x);       \
        }                                                                                         \
    }
EACH_BLOCK_FORMAT(DOTS)

#define ENTRY(NAME) [FORMAT_##NAME] = dots_##NAME,

void cpu_blocks_neon(struct cpu_kernels *k)
{
    k->blocks = (struct cpu_blocks){
        .name = "int8, neon", .quantise = quantise, .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}

#endif
