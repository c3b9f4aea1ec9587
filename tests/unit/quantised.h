/* Weights of codes with scales of their own for the operation tests: made up, with the
 * values that they stand for. */
#ifndef QUIRE_TESTS_UNIT_QUANTISED_H
#define QUIRE_TESTS_UNIT_QUANTISED_H

#include "tests/unit/ops.h"

/* How such a weight is stored. */
struct quant_case {
    enum weight_format_id format;
    enum scale_type type;
    int32_t group_rows, group_cols; /* as in struct weight_scales */
    bool experts;                   /* of all experts of a layer */
    bool zeros;
    enum act_scheme act;
    float factor; /* 0: 1 */
};

static inline bool rig_multiplies(const struct rig *r, enum weight_format_id format)
{
    return r->b->ops->supports(r->b, weight_format_of(format)).as_stored;
}

static inline uint8_t quant_code(struct rig *r, enum weight_format_id format)
{
    uint8_t code = (uint8_t)rig_next(r);

    return format == FORMAT_FP8 && (code & 0x7F) == 0x7F ? 0 : code;
}

/* A scale near `scale`, as it is stored. */
static inline void quant_scale(struct rig *r, enum scale_type type, float scale, uint8_t *ret)
{
    float f = scale * (1.0f + 0.5f * rig_uniform(r));
    uint16_t half = type == SCALE_F16 ? f16_store(f) : bf16_store(f);

    if (type == SCALE_F32) {
        memcpy(ret, &f, sizeof(f));
    } else if (type == SCALE_F16 || type == SCALE_BF16) {
        memcpy(ret, &half, sizeof(half));
    } else if (type == SCALE_E8M0) {
        *ret = (uint8_t)(127 + ilogbf(f));
    } else { /* 0.5 to 1.9, some of them zero or subnormal */
        *ret = (uint8_t)(rig_below(r, 8) == 0 ? rig_below(r, 8) : 0x30 + rig_below(r, 16));
    }
}

/* A weight [rows, cols] of values of about +-range; host [rows, cols] becomes these
 * values. Of two pieces where `parts` is 2, as fused weights are. */
static inline struct mat rig_quantised(struct rig *r, const struct quant_case *k, int32_t rows,
                                       int32_t cols, float range, int32_t parts, float *host)
{
    const struct weight_format *f = weight_format_of(k->format);
    struct weight_piece piece[2];
    uint8_t *owned[6] = {0};
    struct err e = {0};
    struct mat m;
    float most = k->format == FORMAT_FP8    ? 448.0f
                 : k->format == FORMAT_INT8 ? 128.0f
                 : k->format == FORMAT_INT4 ? 8.0f
                                            : 6.0f;
    for (int32_t i = 0; i < parts; i++) {
        int32_t n = i == 0 ? rows - (parts - 1) * (rows / 2) : rows / 2;
        int64_t row_bytes = weight_format_bytes(f, cols),
                down = k->group_rows > 0 ? div_ceil(n, k->group_rows) : 1,
                across = k->group_cols > 0 ? div_ceil(cols, k->group_cols) : 1;
        uint8_t *codes = owned[i] = rig_alloc((size_t)(row_bytes * n)),
                *scale = owned[2 + i] = rig_alloc((size_t)(down * across) * 4),
                *zero = owned[4 + i] = rig_alloc((size_t)(down * across));
        for (int64_t j = 0; j < row_bytes * n; j++) {
            codes[j] = quant_code(r, k->format);
        }
        for (int64_t j = 0; j < down * across; j++) {
            quant_scale(r, k->type, range / most, scale + j * scale_type_bytes(k->type));
            zero[j] = (uint8_t)rig_below(r, 16);
        }
        piece[i] = (struct weight_piece){.data = codes,
                                         .rows = n,
                                         .cols = cols,
                                         .stride = (cols + f->block_values - 1) / f->block_values *
                                                   f->block_values,
                                         .format = f,
                                         .scales = {.data = scale,
                                                    .type = k->type,
                                                    .group_rows = k->group_rows,
                                                    .group_cols = k->group_cols,
                                                    .stride = across,
                                                    .zero = k->zeros ? zero : NULL,
                                                    .zero_stride = across,
                                                    .factor = k->factor != 0 ? k->factor : 1,
                                                    .act = k->act}};
        for (int32_t row = 0; row < n; row++, host += cols) {
            weight_scales_decode(f, &piece[i].scales, codes + row * row_bytes, row, cols, host);
        }
    }
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .rows = rows,
                            .cols = cols,
                            .piece = piece,
                            .n_pieces = parts,
                            .experts = k->experts};
    if (r->b->ops->weight(r->b, &d, &m, &e) < 0) {
        fail_msg("%s", e.text);
    }
    if (r->b->ops->ready) {
        assert_int_equal(r->b->ops->ready(r->b, &e), 0);
    }
    for (int i = 0; i < 6; i++) {
        free(owned[i]);
    }
    return m;
}

/* x's row rounded to e4m3, its greatest magnitude to 448. */
static inline void quant_row(const float *x, int32_t n, double *ret)
{
    float most = 0;

    for (int32_t i = 0; i < n; i++) {
        most = fmaxf(most, fabsf(x[i]));
    }
    for (int32_t i = 0; i < n; i++) {
        double v = most > 0 ? x[i] * (448.0 / most) : 0;
        double step = ldexp(1, MAX(v != 0 ? ilogb(v) : -6, -6) - 3);
        ret[i] = nearbyint(v / step) * step * (most / 448.0);
    }
}

#endif
