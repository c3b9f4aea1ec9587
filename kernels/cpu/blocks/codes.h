/* The scales and zero points of codes of a row whose scales are apart, as products of
 * every instruction set take them. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_CODES_H
#define QUIRE_KERNELS_CPU_BLOCKS_CODES_H

#include <string.h>

#include "kernels/cpu/simd/kernels.h"

enum {
    CODES_SPAN = 2048, /* columns whose scales are read at a time: whole blocks */
    CODES_GROUPS = CODES_SPAN / FORMAT_GROUP,
};

/* Of each group of a span; zeros behind the end of the row, to the end of its block. */
struct code_groups {
    _Alignas(64) float scale[CODES_GROUPS];
    float min[CODES_GROUPS];   /* scale * zero point, of FORMAT_INT8 */
    int8_t zero[CODES_GROUPS]; /* zero point of FORMAT_INT4 */
};

/* What the integers that are multiplied are units of: codes of FORMAT_FP4 are doubled,
 * those of FORMAT_FP8 are multiples of their smallest number. */
static inline float codes_unit(enum weight_format_id f)
{
    return f == FORMAT_FP4 ? 0.5f : f == FORMAT_FP8 ? 0x1p-9f : 1.0f;
}

/* The groups of the codes [at, at + CODES_SPAN) of a row of n; `at` is a multiple of
 * CODES_SPAN, and groups are whole multiples of `group` columns, codes_group. */
static inline void code_groups_of(const struct row_scales *r, enum weight_format_id f,
                                  int32_t group, int32_t at, int32_t n, struct code_groups *ret)
{
    const struct weight_scales *s = r->of;
    int32_t end = MIN(at + CODES_SPAN, n), width = s->group_cols > 0 ? s->group_cols : n;
    int64_t i = s->group_rows > 0 ? r->row / s->group_rows : 0;

    memset(ret, 0, sizeof(*ret));
    for (int32_t from = at; from < end;) {
        int32_t j = from / width, stop = MIN((j + 1) * width, end);
        float scale = s->factor * weight_scale_load(s, i * s->stride + j) * codes_unit(f);
        uint8_t zero = s->zero ? s->zero[i * s->zero_stride + j] : f == FORMAT_INT4 ? 8 : 0;
        for (int32_t k = (from - at) / group; k * group < stop - at; k++) {
            ret->scale[k] = scale;
            ret->zero[k] = f == FORMAT_INT4 ? (int8_t)zero : 0;
            ret->min[k] = f == FORMAT_INT8 ? scale * (float)(int8_t)zero : 0;
        }
        from = stop;
    }
}

#endif
