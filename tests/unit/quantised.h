/* Weights of codes with scales of their own for the operation tests: made up, with the
 * values that they stand for. */
#ifndef QUIRE_TESTS_UNIT_QUANTISED_H
#define QUIRE_TESTS_UNIT_QUANTISED_H

#include "tests/unit/blocks.h"

/* How such a weight is stored; of blocks and floats the format alone counts. */
struct quant_case {
    enum weight_format_id format;
    enum scale_type type;
    int32_t group_rows, group_cols; /* as in struct weight_scales */
    bool experts;                   /* of all experts of a layer */
    bool zeros;
    enum act_scheme act;
    float factor;    /* 0: 1 */
    float act_scale; /* of ACT_SCALE_TENSOR */
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

/* What the codes of a format reach, scales within a block included. */
static inline float quant_most(enum weight_format_id format)
{
    switch (format) {
    case FORMAT_FP8:
        return 448;
    case FORMAT_INT8:
    case FORMAT_Q8_0:
    case FORMAT_IQ4_NL:
        return 128;
    case FORMAT_FP4:
        return 6;
    case FORMAT_INT4:
    case FORMAT_Q4_0:
        return 8;
    case FORMAT_Q4_1:
    case FORMAT_Q5_0:
        return 16;
    case FORMAT_Q5_1:
    case FORMAT_Q2_K:
        return 32;
    case FORMAT_Q3_K:
        return 32 * 4;
    case FORMAT_Q4_K:
        return 64 * 15;
    case FORMAT_Q5_K:
        return 64 * 31;
    default: /* Q6_K, IQ4_XS */
        return 32 * 128;
    }
}

/* A piece of n rows, and in *value what they stand for [n, cols]. */
struct quant_piece {
    struct weight_piece p;
    uint8_t *owned[3];
};

static inline void quant_piece_free(struct quant_piece *q)
{
    for (int i = 0; i < 3; i++) {
        free(q->owned[i]);
    }
}

/* Of codes whose scales are apart. */
static inline struct quant_piece quant_codes(struct rig *r, const struct quant_case *k, int32_t n,
                                             int32_t cols, float range, float *value)
{
    const struct weight_format *f = weight_format_of(k->format);
    int64_t row_bytes = weight_format_bytes(f, cols),
            down = k->group_rows > 0 ? div_ceil(n, k->group_rows) : 1,
            across = k->group_cols > 0 ? div_ceil(cols, k->group_cols) : 1;
    uint8_t *codes = rig_alloc((size_t)(row_bytes * n)),
            *scale = rig_alloc((size_t)(down * across) * 4),
            *zero = rig_alloc((size_t)(down * across));

    for (int64_t j = 0; j < row_bytes * n; j++) {
        codes[j] = quant_code(r, k->format);
    }
    for (int64_t j = 0; j < down * across; j++) {
        quant_scale(r, k->type, range / quant_most(k->format),
                    scale + j * scale_type_bytes(k->type));
        zero[j] = (uint8_t)rig_below(r, 16);
    }
    struct quant_piece q = {
        .p = {.data = codes,
              .rows = n,
              .cols = cols,
              .stride = (cols + f->block_values - 1) / f->block_values * f->block_values,
              .format = f,
              .scales = {.data = scale,
                         .type = k->type,
                         .group_rows = k->group_rows,
                         .group_cols = k->group_cols,
                         .stride = across,
                         .zero = k->zeros ? zero : NULL,
                         .zero_stride = across,
                         .factor = k->factor != 0 ? k->factor : 1,
                         .act = k->act,
                         .act_scale = k->act_scale}},
        .owned = {codes, scale, zero}};
    for (int32_t row = 0; row < n; row++) {
        weight_scales_decode(f, &q.p.scales, codes + row * row_bytes, row, cols,
                             value + (int64_t)row * cols);
    }
    return q;
}

/* Of blocks; cols: whole ones. */
static inline struct quant_piece quant_blocks(struct rig *r, enum weight_format_id format,
                                              int32_t n, int32_t cols, float range, float *value)
{
    const struct weight_format *f = weight_format_of(format);
    uint8_t *blocks = random_blocks(r, f, (int64_t)n * cols);
    struct quant_piece q = {
        .p = {.data = blocks, .rows = n, .cols = cols, .stride = cols, .format = f},
        .owned = {blocks}};

    put_scales(r, f, blocks, weight_format_bytes(f, (int64_t)n * cols),
               2 * range / quant_most(format));
    weight_format_decode(f, blocks, (int64_t)n * cols, value);
    return q;
}

/* Of floats, as bf16. */
static inline struct quant_piece quant_floats(struct rig *r, int32_t n, int32_t cols, float range,
                                              float *value)
{
    uint16_t *half = rig_alloc((size_t)n * (size_t)cols * sizeof(*half));

    for (int64_t i = 0; i < (int64_t)n * cols; i++) {
        half[i] = bf16_store(rig_uniform(r) * range);
        value[i] = bf16_load(half[i]);
    }
    return (struct quant_piece){
        .p = {.data = half, .dtype = DTYPE_BF16, .rows = n, .cols = cols, .stride = cols},
        .owned = {(uint8_t *)half}};
}

static inline struct quant_piece quant_piece(struct rig *r, const struct quant_case *k, int32_t n,
                                             int32_t cols, float range, float *value)
{
    return k->format <= FORMAT_I32  ? quant_floats(r, n, cols, range, value)
           : k->format < FORMAT_FP8 ? quant_blocks(r, k->format, n, cols, range, value)
                                    : quant_codes(r, k, n, cols, range, value);
}

/* The weight of these pieces, which are freed. */
static inline struct mat quant_weight_of(struct rig *r, struct quant_piece *q, int32_t parts,
                                         bool experts)
{
    struct weight_piece piece[4];
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .cols = q[0].p.cols,
                            .piece = piece,
                            .n_pieces = parts,
                            .experts = experts};
    struct err e = {0};
    struct mat m;

    for (int32_t i = 0; i < parts; i++) {
        piece[i] = q[i].p;
        d.rows += piece[i].rows;
    }
    if (r->b->ops->weight(r->b, &d, &m, &e) < 0) {
        fail_msg("%s", e.text);
    }
    if (r->b->ops->ready) {
        assert_int_equal(r->b->ops->ready(r->b, &e), 0);
    }
    for (int i = 0; i < parts; i++) {
        quant_piece_free(&q[i]);
    }
    return m;
}

/* A weight [rows, cols] of values of about +-range; host [rows, cols] becomes these
 * values. Of two pieces where `parts` is 2, as fused weights are. */
static inline struct mat rig_quantised(struct rig *r, const struct quant_case *k, int32_t rows,
                                       int32_t cols, float range, int32_t parts, float *host)
{
    struct quant_piece q[2];

    for (int32_t i = 0; i < parts; i++) {
        int32_t n = i == 0 ? rows - (parts - 1) * (rows / 2) : rows / 2;
        q[i] = quant_piece(r, k, n, cols, range, host);
        host += (int64_t)n * cols;
    }
    return quant_weight_of(r, q, parts, k->experts);
}

/* Whether the device rounds so many rows of inputs of products with w by the file's
 * scale: a CPU does always, a GPU where it multiplies codes by codes. */
static inline bool rig_rounds_inputs(const struct rig *r, struct mat w, int32_t rows,
                                     int32_t least_rows)
{
    if (strcmp(r->b->name, "cpu") == 0) {
        return true;
    }
    const char *kernel = r->b->ops->use ? r->b->ops->use(r->b, w, 0).kernel : "";
    return strncmp(kernel, "e4m3", 4) == 0 && rows >= least_rows;
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
