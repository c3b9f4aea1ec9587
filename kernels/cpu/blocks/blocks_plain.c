/* The specification of products with weights in blocks.
 *
 * The products of the codes of a group, of the 16 or 32 values that share a scale, are
 * summed as integers, which is exact in any order. Each group of a block of
 * FORMAT_BLOCK_MAX values has a float accumulator of its own, to which its sum is added
 * with the scales of both sides, and from which its minimum is then taken:
 *
 *     acc[g] = fma(sum, scale_w * scale_x, acc[g])
 *     acc[g] = fma(-min_w, sum_x, acc[g])
 *
 * The accumulators are added in one tree at the end of the row. So the order of groups
 * in an accumulator is fixed, and nothing else: instruction sets take the products of a
 * group, and the groups of a block, as their vectors have them.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/blocks/plain.h"
#include "kernels/cpu/simd/convert.h"

enum { BLOCK = FORMAT_BLOCK_MAX };

/* ---- activations ---- */

static void quantise_group(struct act_block *out, int32_t g, const float *x)
{
    uint32_t max = 0; /* bits of the greatest magnitude; those of a NaN are greater */

    for (int32_t i = 0; i < GROUP; i++) {
        max = MAX(max, bits_of_f32(x[i]) & 0x7FFFFFFFu);
    }
    float most = f32_of_bits(max);
    bool finite = max < 0x7F800000u;
    bool zero = finite && most < 1e-30f;
    float inverse = zero ? 0 : 127.0f / most;
    int32_t half[2] = {0};
    for (int32_t i = 0; i < GROUP; i++) {
        int8_t code = finite && !zero ? (int8_t)nearbyintf(x[i] * inverse) : 0;
        out->code[GROUP * g + i] = code;
        half[i / 16] += code;
    }
    float scale = zero ? 0 : finite ? most / 127.0f : NAN;
    out->scale[g] = scale;
    out->sum16[2 * g] = scale * (float)half[0];
    out->sum16[2 * g + 1] = scale * (float)half[1];
    out->sum32[g] = scale * (float)(half[0] + half[1]);
}

static void quantise(struct act_block *out, int32_t n_x, const float *x, int32_t n)
{
    for (int32_t at = 0; at < n; at += BLOCK, out += n_x) {
        memset(out, 0, sizeof(*out));
        for (int32_t i = 0; i < MIN(BLOCK, n - at); i += GROUP) {
            quantise_group(out, i / GROUP, x + at + i);
        }
    }
}

/* ---- products ---- */

/* The blocks of n <= BLOCK values at `src`, as if they were one. */
static void unpack(const struct weight_format *f, const uint8_t *src, int32_t n,
                   struct weight_codes *ret)
{
    struct weight_codes one;

    for (int32_t i = 0; i < n; i += f->block_values, src += f->block_bytes) {
        f->unpack(src, &one);
        memcpy(ret->code + i, one.code, (size_t)f->block_values * sizeof(*one.code));
        size_t groups = (size_t)f->block_values / FORMAT_GROUP;
        memcpy(ret->scale + i / FORMAT_GROUP, one.scale, groups * sizeof(*one.scale));
        memcpy(ret->min + i / FORMAT_GROUP, one.min, groups * sizeof(*one.min));
    }
}

/* Add the n / group_values groups of a block to acc. */
static void add_groups(float *acc, const struct weight_format *f, const struct weight_codes *c,
                       const struct act_block *x, int32_t n)
{
    int32_t wide = f->group_values / FORMAT_GROUP; /* entries of c->scale to a group */
    const float *of_x = wide == 1 ? x->sum16 : x->sum32;

    for (int32_t g = 0; g < n / f->group_values; g++) {
        int32_t at = g * f->group_values, sum = 0;
        for (int32_t i = at; i < at + f->group_values; i++) {
            sum += c->code[i] * x->code[i];
        }
        acc[g] = fmaf((float)sum, c->scale[g * wide] * x->scale[at / GROUP], acc[g]);
        if (f->minima) {
            acc[g] = fmaf(-c->min[g * wide], of_x[g], acc[g]);
        }
    }
}

static void row_dots(float *sum, const struct weight_format *f, const uint8_t *row, int32_t n,
                     const struct act_block *x, int32_t n_x)
{
    float acc[TILE_ROWS][LANES] = {{0}};
    struct weight_codes c;

    for (int32_t at = 0; at < n; at += BLOCK, x += n_x) {
        int32_t here = MIN(BLOCK, n - at);
        unpack(f, row + weight_format_bytes(f, at), here, &c);
        for (int32_t j = 0; j < n_x; j++) {
            add_groups(acc[j], f, &c, x + j, here);
        }
    }
    for (int32_t j = 0; j < n_x; j++) {
        sum[j] = tree(acc[j], BLOCK / f->group_values);
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

void cpu_blocks_plain(struct cpu_kernels *k)
{
    k->blocks = (struct cpu_blocks){
        .name = "plain loops", .quantise = quantise, .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}
