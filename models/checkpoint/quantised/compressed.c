/* Weights whose codes lie row by row: of compressed-tensors, transformers' fp8,
 * ModelOpt and MXFP4. The names of their tensors:
 *
 *     weight           e4m3, int8, or bytes of two e2m1
 *     weight_packed    int32 of eight or four unsigned codes, or bytes of two e2m1
 *     weight_shape     [2] rows and columns, where codes are packed into int32
 *     weight_scale, weight_scale_inv   by which codes are multiplied, both of them
 *     weight_zero_point                int8, or packed into int32 along the rows
 *     weight_g_idx                     the group of each column
 *     weight_scale_2, weight_global_scale   of the whole tensor: a factor, a divisor
 *     input_scale      of activations
 *
 * Sources: compressed-tensors' compressors, ModelOpt's export, OCP Microscaling 1.0.
 */
#include <string.h>

#include "models/checkpoint/quantised/quantised_internal.h"

/* Rows and columns of a weight packed into int32, from weight_shape. */
static int packed_shape(struct quant_assembly *a, const struct tensor *codes, struct err *e)
{
    struct quant_tensor *q = a->q;
    const struct tensor *t;
    int64_t shape[2] = {0};
    int rc = quant_need(a, ".weight_shape", "I64 I32", &t, e);

    rc = rc < 0 ? rc : quant_check_shape(t, 2, 1, e);
    if (rc < 0) {
        return rc;
    }
    for (int32_t i = 0; i < 2; i++) {
        if (quant_is(t, "I64")) {
            memcpy(&shape[i], (const char *)t->data + 8 * i, 8);
        } else {
            int32_t n;
            memcpy(&n, (const char *)t->data + 4 * i, 4);
            shape[i] = n;
        }
    }
    int32_t bits = q->format->bits;
    if (codes->n_dims != 2 || shape[0] < 1 || shape[1] < 1 || shape[1] > INT32_MAX ||
        codes->dim[0] != shape[0] || codes->dim[1] != div_ceil(shape[1] * bits, 32)) {
        return err_set(e, ERR_INVALID, "%.200s does not hold [%lld, %lld] codes of %d bits",
                       codes->name, (long long)shape[0], (long long)shape[1], bits);
    }
    q->rows = shape[0];
    q->cols = shape[1];
    q->stride = codes->dim[1] * 32 / bits;
    q->layout = bits == 8 ? CODES_OFFSET : CODES_ROWS;
    return 0;
}

/* The codes, by their type and the scheme's. */
static int take_codes(struct quant_assembly *a, struct err *e)
{
    struct quant_tensor *q = a->q;
    const struct tensor *t = quant_part(a, ".weight_packed");
    enum weight_format_id f = q->format->id;

    t = t ? t : quant_part(a, ".weight");
    bool int32 = quant_is(t, "I32") && (f == FORMAT_INT4 || f == FORMAT_INT8);
    bool pairs = quant_is(t, "U8") && f == FORMAT_FP4;
    bool bytes =
        (quant_is(t, "F8_E4M3") && f == FORMAT_FP8) || (quant_is(t, "I8") && f == FORMAT_INT8);
    if ((!int32 && !pairs && !bytes) || t->n_dims != 2) {
        return err_set(e, ERR_INVALID, "%.200s is %s of %d axes: no codes of %s", t->name,
                       t->stored_type, t->n_dims, q->format->name);
    }
    q->codes = t->data;
    q->n_bytes = t->n_bytes;
    if (int32) {
        return packed_shape(a, t, e);
    }
    q->rows = t->dim[0];
    q->cols = t->dim[1] * (pairs ? 2 : 1);
    q->stride = q->cols;
    return 0;
}

/* Where a part lies, or a copy of it if it is not aligned. */
static const void *aligned(struct quant_tensor *q, int32_t owned, const struct tensor *t,
                           int32_t element)
{
    if ((uintptr_t)t->data % (uintptr_t)element == 0) {
        return t->data;
    }
    void *copy = quant_own(q, owned, t->n_bytes);
    return copy ? memcpy(copy, t->data, (size_t)t->n_bytes) : NULL;
}

/* Scales of the right shape, of which t->n_dims alone may differ from 2. */
static int take_scales(struct quant_assembly *a, const struct tensor *t, struct err *e)
{
    struct quant_tensor *q = a->q;
    int rc = quant_scale_type(t, &q->scales.type, e);

    rc = rc < 0 ? rc : quant_check_scales(a, t, e);
    if (rc < 0) {
        return rc;
    }
    q->scales.stride = quant_col_groups(q);
    q->scales.data = aligned(q, 0, t, scale_type_bytes(q->scales.type));
    return q->scales.data ? 0 : err_nomem(e, t->name);
}

/* Zero points packed into int32 along the rows: [rows * bits / 32][groups], each plus
 * half its range. */
static void unpack_zeros(const struct quant_tensor *q, const struct tensor *t, int64_t rows,
                         int64_t cols, uint8_t *ret)
{
    int32_t bits = q->format->bits;

    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            uint32_t word;
            memcpy(&word, (const char *)t->data + 4 * (i * bits / 32 * cols + j), sizeof(word));
            word >>= i * bits % 32;
            ret[i * cols + j] = bits == 4 ? word & 15 : (word & 255) ^ 0x80;
        }
    }
}

static int take_zeros(struct quant_assembly *a, struct err *e)
{
    struct quant_tensor *q = a->q;
    const struct tensor *t;
    int64_t rows = quant_row_groups(q), cols = quant_col_groups(q);
    int rc = quant_need(a, ".weight_zero_point", "I8 I32", &t, e);

    if (rc < 0) {
        return rc;
    }
    q->scales.zero_stride = cols;
    if (quant_is(t, "I8")) {
        if (q->format->id != FORMAT_INT8) {
            return err_set(e, ERR_INVALID, "%.200s is I8, must be I32", t->name);
        }
        q->scales.zero = t->data;
        return quant_check_shape(t, rows, cols, e);
    }
    rc = quant_check_shape(t, div_ceil(rows * q->format->bits, 32), cols, e);
    if (rc < 0) {
        return rc;
    }
    uint8_t *zero = quant_own(q, 1, rows * cols);
    if (!zero) {
        return err_nomem(e, t->name);
    }
    unpack_zeros(q, t, rows, cols, zero);
    q->scales.zero = zero;
    return 0;
}

/* Symmetric codes may have zero points in the file all the same: of 0, which packed
 * into int32 is half their range. */
static int check_no_zeros(struct quant_assembly *a, struct err *e)
{
    const struct tensor *t = quant_part(a, ".weight_zero_point");
    uint8_t middle = a->q->format->bits == 4 ? 0x88 : 0x80;

    for (int64_t i = 0; t && i < t->n_bytes; i++) {
        uint8_t byte = ((const uint8_t *)t->data)[i];
        if (byte != 0 && (byte != middle || !quant_is(t, "I32"))) {
            return err_set(e, ERR_INVALID,
                           "%.200s has zero points, but quantization_config says that the codes "
                           "are symmetric",
                           t->name);
        }
    }
    return 0;
}

/* The scale of the whole tensor, of FP4 in groups of 16, and that of activations. */
static int take_factors(struct quant_assembly *a, struct err *e)
{
    struct weight_scales *s = &a->q->scales;
    const struct tensor *factor = quant_part(a, ".weight_scale_2"),
                        *divisor = quant_part(a, ".weight_global_scale"),
                        *input = quant_part(a, ".input_scale");
    int rc = 0;

    quant_part(a, ".input_global_scale"); /* of activations in four bits, which */
    quant_part(a, ".input_zero_point");   /* are not rounded */
    s->factor = 1;
    if (s->type == SCALE_E4M3 && !factor && !divisor) {
        return err_set(e, ERR_INVALID, "%.200s has no scale of the whole tensor", a->module);
    }
    if (factor || divisor) {
        rc = quant_read_factor(factor ? factor : divisor, &s->factor, e);
        if (!factor) {
            a->q->divisor = s->factor;
            s->factor = 1 / s->factor;
        }
    }
    if (rc == 0 && s->act == ACT_SCALE_TENSOR) {
        if (!input) {
            return err_set(e, ERR_INVALID, "%.200s lacks input_scale", a->module);
        }
        rc = quant_read_factor(input, &s->act_scale, e);
    }
    return rc;
}

int quant_compressed(struct quant_assembly *a, struct err *e)
{
    struct quant_tensor *q = a->q;
    bool inverse = quant_part(a, ".weight_scale_inv") != NULL;
    const struct tensor *scales, *order;
    int rc = take_codes(a, e);

    rc = rc < 0 ? rc
                : quant_need(a, inverse ? ".weight_scale_inv" : ".weight_scale",
                             "F32 F16 BF16 F8_E4M3 F8_E8M0 U8", &scales, e);
    rc = rc < 0 ? rc : quant_check_shape(scales, quant_row_groups(q), quant_col_groups(q), e);
    rc = rc < 0 ? rc : take_scales(a, scales, e);
    rc = rc < 0 ? rc : a->scheme.zeros ? take_zeros(a, e) : check_no_zeros(a, e);
    rc = rc < 0 ? rc : take_factors(a, e);
    order = quant_part(a, ".weight_g_idx");
    if (rc == 0 && order) {
        rc = quant_is(order, "I32") ? quant_take_order(a, order, e)
                                    : err_set(e, ERR_INVALID, "%.200s is %s, must be I32",
                                              order->name, order->stored_type);
    }
    return rc;
}

int quant_experts(struct quant_assembly *a, struct err *e)
{
    struct quant_tensor *q = a->q;
    const struct tensor *codes, *scales;
    int rc = quant_need(a, "_blocks", "U8", &codes, e);

    rc = rc < 0 ? rc : quant_need(a, "_scales", "U8 F8_E8M0", &scales, e);
    if (rc < 0) {
        return rc;
    }
    const int64_t *d = codes->dim;
    if (codes->n_dims != 4 || d[3] != 16 || scales->n_dims != 3 || scales->dim[0] != d[0] ||
        scales->dim[1] != d[1] || scales->dim[2] != d[2] || d[0] > INT32_MAX ||
        codes->n_bytes == 0) {
        return err_set(e, ERR_INVALID,
                       "%.200s_blocks must be [experts, rows, groups, 16], its scales "
                       "[experts, rows, groups]",
                       a->module);
    }
    q->codes = codes->data;
    q->n_bytes = codes->n_bytes;
    q->n_stacked = (int32_t)d[0];
    q->rows = d[0] * d[1];
    q->cols = q->stride = d[2] * 32;
    q->scales.factor = 1;
    return take_scales(a, scales, e);
}
