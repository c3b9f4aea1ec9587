/* The specification of products with codes whose scales are apart (weight_format.h).
 *
 * Integers and e2m1 are multiplied in groups of 16 codes that share a scale, as eight
 * sums of four products of each group of 32, exact in 32-bit integers: sum l of group g
 * is scaled and added to the float accumulator 8 * (g % 2) + l. Minima have
 * accumulators of their own. Codes of e4m3 become floats, which is exact: lane l of a
 * group of 32 takes its values l, l + 8, l + 16 and l + 24, the first two and the last
 * two with the scale of their half:
 *
 *     acc = fma(fma(w1, x1, w0 * x0), scale0, acc), then the same of w2, w3 and scale1
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/blocks/codes.h"
#include "kernels/cpu/blocks/plain.h"

/* As add_block sees formats of groups of 16, without and with minima. */
static const struct weight_format HALVES[2] = {{.group_values = FORMAT_GROUP},
                                               {.group_values = FORMAT_GROUP, .minima = true}};

/* Sixteen-bit codes of the `here` values at `codes`, zeros behind them. */
static void integers_of(enum weight_format_id f, const uint8_t *codes, int32_t here,
                        const struct code_groups *g, struct weight_codes *ret)
{
    memset(ret->code, 0, sizeof(ret->code));
    for (int32_t i = 0; i < here; i++) {
        uint8_t code = f == FORMAT_INT8 ? codes[i] : codes[i / 2] >> i % 2 * 4 & 15;
        ret->code[i] = (int16_t)(f == FORMAT_INT8  ? (int8_t)code
                                 : f == FORMAT_FP4 ? weight_levels_mxfp4[code]
                                                   : code - g->zero[i / FORMAT_GROUP]);
    }
    memcpy(ret->scale, g->scale, sizeof(ret->scale));
    memcpy(ret->min, g->min, sizeof(ret->min));
}

static void add_floats(float *acc, const uint8_t *codes, int32_t here, const struct code_groups *g,
                       const struct act_block *x)
{
    float w[FORMAT_BLOCK_MAX] = {0};

    for (int32_t i = 0; i < here; i++) {
        w[i] = weight_code_value(FORMAT_FP8, codes[i]);
    }
    for (int32_t at = 0; at < here; at += GROUP) {
        for (int32_t k = at; k < at + GROUP; k += GROUP / 2) {
            float scale = g->scale[k / FORMAT_GROUP] * x->scale[at / GROUP];
            for (int32_t l = 0; l < 8; l++) {
                float sum = w[k + l] * (float)x->code[k + l];
                float *to = &acc[at / 4 % LANES + l];
                sum = fmaf(w[k + l + 8], (float)x->code[k + l + 8], sum);
                *to = fmaf(sum, scale, *to);
            }
        }
    }
}

static void row_dots(float *sum, enum weight_format_id f, const uint8_t *row,
                     const struct row_scales *scales, int32_t n, const struct act_block *x,
                     int32_t n_x)
{
    float acc[TILE_ROWS][LANES] = {{0}}, min[TILE_ROWS][LANES] = {{0}};
    bool minima = codes_have_minima(f, scales->of);
    struct code_groups g;
    struct weight_codes c;

    for (int32_t at = 0; at < n; at += FORMAT_BLOCK_MAX, x += n_x) {
        int32_t here = MIN(FORMAT_BLOCK_MAX, n - at), whole = (here + GROUP - 1) / GROUP * GROUP;
        const uint8_t *codes = row + weight_format_bytes(weight_format_of(f), at);
        code_groups_of(scales, f, at, n, &g);
        if (f != FORMAT_FP8) {
            integers_of(f, codes, here, &g, &c);
        }
        for (int32_t j = 0; j < n_x; j++) {
            if (f == FORMAT_FP8) {
                add_floats(acc[j], codes, here, &g, x + j);
            } else {
                add_block(acc[j], min[j], &HALVES[minima], &c, x + j, whole);
            }
        }
    }
    for (int32_t j = 0; j < n_x; j++) {
        sum[j] = tree(acc[j], LANES);
        if (minima) {
            sum[j] -= tree(min[j], LANES);
        }
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
