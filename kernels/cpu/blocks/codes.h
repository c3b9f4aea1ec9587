/* The scales and zero points of 256 codes of a row whose scales are apart, as products
 * of every instruction set take them. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_CODES_H
#define QUIRE_KERNELS_CPU_BLOCKS_CODES_H

#include <string.h>

#include "kernels/cpu/simd/kernels.h"

/* Of each FORMAT_GROUP codes; zeros behind the end of the row. */
struct code_groups {
    _Alignas(64) float scale[FORMAT_BLOCK_MAX / FORMAT_GROUP];
    float min[FORMAT_BLOCK_MAX / FORMAT_GROUP];   /* scale * zero point, of FORMAT_INT8 */
    int8_t zero[FORMAT_BLOCK_MAX / FORMAT_GROUP]; /* zero point of FORMAT_INT4 */
};

/* Whether a weight has minima: int8 codes less a zero point do not fit into int8. */
static inline bool codes_have_minima(enum weight_format_id f, const struct weight_scales *s)
{
    return f == FORMAT_INT8 && s->zero;
}

/* The groups of the codes [at, at + 256) of a row of n; `at` is a multiple of 256, and
 * groups are whole multiples of FORMAT_GROUP columns. Products of FORMAT_FP4 use codes
 * that are doubled. */
static inline void code_groups_of(const struct row_scales *r, enum weight_format_id f, int32_t at,
                                  int32_t n, struct code_groups *ret)
{
    const struct weight_scales *s = r->of;
    int32_t end = MIN(at + FORMAT_BLOCK_MAX, n), width = s->group_cols > 0 ? s->group_cols : n;
    int64_t i = s->group_rows > 0 ? r->row / s->group_rows : 0;

    memset(ret, 0, sizeof(*ret));
    for (int32_t from = at; from < end;) {
        int32_t j = from / width, stop = MIN((j + 1) * width, end);
        float scale = s->factor * weight_scale_load(s, i * s->stride + j);
        uint8_t zero = s->zero ? s->zero[i * s->zero_stride + j] : f == FORMAT_INT4 ? 8 : 0;
        scale = f == FORMAT_FP4 ? 0.5f * scale : scale;
        for (int32_t k = (from - at) / FORMAT_GROUP; k * FORMAT_GROUP < stop - at; k++) {
            ret->scale[k] = scale;
            ret->zero[k] = f == FORMAT_INT4 ? (int8_t)zero : 0;
            ret->min[k] = f == FORMAT_INT8 ? scale * (float)(int8_t)zero : 0;
        }
        from = stop;
    }
}

#endif
