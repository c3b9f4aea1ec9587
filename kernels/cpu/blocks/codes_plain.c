/* The specification of products with codes whose scales are apart (weight_format.h).
 *
 * They are those of blocks (blocks_plain.c), with groups of 32 codes, or of 16 where
 * scales of the weight are not of whole 32 columns:
 *
 *     acc[g] = fma(sum, scale_w * scale_x, acc[g])
 *     acc[g] = fma(-min_w, sum_x, acc[g])
 *
 * Codes of e4m3 are integers too, multiples of its smallest number with up to 18 bits,
 * so that a group's sum is exact in 32 bits.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/blocks/codes.h"
#include "kernels/cpu/blocks/plain.h"

enum { BLOCK = FORMAT_BLOCK_MAX };

/* The integers of the `here` values at `codes`, zeros behind them. */
static void integers_of(int32_t *ret, enum weight_format_id f, const uint8_t *codes, int32_t here,
                        const int8_t *zero, int32_t group)
{
    memset(ret, 0, BLOCK * sizeof(*ret));
    for (int32_t i = 0; i < here; i++) {
        bool bytes = f == FORMAT_INT8 || f == FORMAT_FP8;
        uint8_t code = bytes ? codes[i] : codes[i / 2] >> i % 2 * 4 & 15;
        ret[i] = f == FORMAT_INT8   ? (int8_t)code
                 : f == FORMAT_FP8  ? (int32_t)(weight_code_value(f, code) * 0x1p9f)
                 : f == FORMAT_INT4 ? code - zero[i / group]
                                    : weight_levels_mxfp4[code];
    }
}

/* Add the groups of a block to acc; min: of each group, NULL where there are none. */
static void add_groups(float *acc, const int32_t *w, const float *scale, const float *min,
                       const struct act_block *x, int32_t group)
{
    const float *of_x = group == GROUP ? x->sum32 : x->sum16;

    for (int32_t g = 0; g < BLOCK / group; g++) {
        int32_t sum = 0;
        for (int32_t i = g * group; i < (g + 1) * group; i++) {
            sum += w[i] * x->code[i];
        }
        acc[g] = fmaf((float)sum, scale[g] * x->scale[g * group / GROUP], acc[g]);
        if (min) {
            acc[g] = fmaf(-min[g], of_x[g], acc[g]);
        }
    }
}

static void row_dots(float *sum, enum weight_format_id f, const uint8_t *row,
                     const struct row_scales *scales, int32_t n, const struct act_block *x,
                     int32_t n_x)
{
    float acc[TILE_ROWS][LANES] = {{0}};
    bool minima = codes_have_minima(f, scales->of);
    int32_t group = codes_group(scales->of), w[BLOCK];
    struct code_groups of;

    for (int32_t at = 0; at < n; at += BLOCK, x += n_x) {
        int32_t g = at % CODES_SPAN / group;
        if (g == 0) {
            code_groups_of(scales, f, group, at, n, &of);
        }
        integers_of(w, f, row + weight_format_bytes(weight_format_of(f), at), MIN(BLOCK, n - at),
                    of.zero + g, group);
        for (int32_t j = 0; j < n_x; j++) {
            add_groups(acc[j], w, of.scale + g, minima ? of.min + g : NULL, x + j, group);
        }
    }
    for (int32_t j = 0; j < n_x; j++) {
        sum[j] = tree(acc[j], BLOCK / group);
    }
}

#define DOTS(NAME)                                                                                \
    static void dots_##NAME(float *sum, const struct dot_rows *w, int32_t n,                      \
                            const struct act_block *x, int32_t n_x, const struct prefetch *ahead) \
    {                                                                                             \
        (void)ahead;                                                                              \
        for (int32_t i = 0; i < w->n; i++) {                                                      \
            row_dots(sum + i * n_x, FORMAT_##NAME, w->row[i], &w->scales[i], n, x, n_x);          \
        }                                                                                         \
    }
DOTS(FP8)
DOTS(INT8)
DOTS(INT4)
DOTS(FP4)

void cpu_codes_plain(struct cpu_kernels *k)
{
    k->blocks.codes_name = "plain loops";
    k->blocks.dots[FORMAT_FP8] = dots_FP8;
    k->blocks.dots[FORMAT_INT8] = dots_INT8;
    k->blocks.dots[FORMAT_INT4] = dots_INT4;
    k->blocks.dots[FORMAT_FP4] = dots_FP4;
}
