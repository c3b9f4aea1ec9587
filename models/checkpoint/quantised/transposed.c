/* GPTQ's and AWQ's weights: [in, out], with scales [groups, out].
 *
 * Sources: the packing formulas of AutoGPTQ and AutoAWQ. GPTQ's first version stores
 * zero points minus 1 and reads them back as (stored + 1) modulo the codes' range. */
#include <string.h>

#include "models/checkpoint/quantised/quantised_internal.h"

/* The output that each four bits of a word of AWQ belongs to, from the lowest bits
 * up. */
static const uint8_t AWQ_ORDER[8] = {0, 2, 4, 6, 1, 3, 5, 7};

static uint32_t word_at(const void *data, int64_t i)
{
    uint32_t word;

    memcpy(&word, (const char *)data + 4 * i, sizeof(word));
    return word;
}

static int take_codes(struct quant_assembly *a, struct err *e)
{
    struct quant_tensor *q = a->q;
    const struct tensor *t;
    int rc = quant_need(a, ".qweight", "I32", &t, e);

    if (rc < 0) {
        return rc;
    }
    int64_t n = 32 / q->format->bits;
    if (t->n_dims != 2 || t->n_bytes == 0 || t->dim[0] > INT32_MAX || t->dim[1] > INT32_MAX) {
        return err_set(e, ERR_INVALID, "%.200s is no matrix", t->name);
    }
    bool awq = q->layout == CODES_AWQ;
    q->rows = t->dim[1] * (awq ? n : 1);
    q->cols = t->dim[0] * (awq ? 1 : n);
    q->stride = div_ceil(q->cols, n) * n;
    q->codes = t->data;
    q->n_bytes = t->n_bytes;
    return 0;
}

/* Scales [groups, out] into [out, groups]. */
static int take_scales(struct quant_assembly *a, struct err *e)
{
    struct quant_tensor *q = a->q;
    const struct tensor *t;
    int64_t groups = quant_col_groups(q);
    int rc = quant_need(a, ".scales", "F16 BF16 F32", &t, e);

    rc = rc < 0 ? rc : quant_scale_type(t, &q->scales.type, e);
    rc = rc < 0 ? rc : quant_check_shape(t, groups, q->rows, e);
    rc = rc < 0 ? rc : quant_check_scales(a, t, e);
    if (rc < 0) {
        return rc;
    }
    size_t bytes = (size_t)scale_type_bytes(q->scales.type);
    char *to = quant_own(q, 0, t->n_bytes);
    if (!to) {
        return err_nomem(e, t->name);
    }
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t r = 0; r < q->rows; r++) {
            memcpy(to + (size_t)(r * groups + g) * bytes,
                   (const char *)t->data + (size_t)(g * q->rows + r) * bytes, bytes);
        }
    }
    q->scales.data = to;
    q->scales.stride = groups;
    q->scales.factor = 1;
    return 0;
}

/* Zero point r of a group, from the words of its outputs. */
static uint8_t zero_point(const struct quant_assembly *a, const struct tensor *t, int64_t word,
                          int64_t r)
{
    const struct quant_tensor *q = a->q;
    int32_t bits = q->format->bits, n = 32 / bits, at = (int32_t)(r % n);

    if (q->layout == CODES_AWQ) {
        for (at = 0; AWQ_ORDER[at] != r % n; at++) {
        }
    }
    uint32_t z = word_at(t->data, word) >> bits * at;
    z = (z + (a->config->stores_less_one ? 1 : 0)) & ((1u << bits) - 1);
    return bits == 4 ? (uint8_t)z : (uint8_t)(z ^ 0x80);
}

/* Zero points [groups, out / n] into [out, groups]; dropped where all are the middle of
 * the codes. */
static int take_zeros(struct quant_assembly *a, struct err *e)
{
    struct quant_tensor *q = a->q;
    const struct tensor *t = quant_part(a, ".qzeros");
    int64_t groups = quant_col_groups(q), n = 32 / q->format->bits;
    uint8_t middle = q->format->bits == 4 ? 8 : 0;
    bool needed = false;

    if (!t && !a->scheme.zeros) {
        return 0;
    }
    int rc = quant_need(a, ".qzeros", "I32", &t, e);
    rc = rc < 0 ? rc : quant_check_shape(t, groups, div_ceil(q->rows, n), e);
    if (rc < 0) {
        return rc;
    }
    uint8_t *zero = quant_own(q, 1, q->rows * groups);
    if (!zero) {
        return err_nomem(e, t->name);
    }
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t r = 0; r < q->rows; r++) {
            uint8_t z = zero_point(a, t, g * t->dim[1] + r / n, r);
            needed = needed || z != middle;
            zero[r * groups + g] = z;
        }
    }
    if (needed) {
        q->scales.zero = zero;
        q->scales.zero_stride = groups;
    }
    return 0;
}

int quant_transposed(struct quant_assembly *a, struct err *e)
{
    const struct tensor *order;

    a->q->layout = a->config->method == QUANT_AWQ ? CODES_AWQ : CODES_GPTQ;
    int rc = take_codes(a, e);
    rc = rc < 0 ? rc : take_scales(a, e);
    rc = rc < 0 ? rc : take_zeros(a, e);
    order = quant_part(a, ".g_idx");
    if (rc == 0 && order) {
        rc = quant_is(order, "I32") ? quant_take_order(a, order, e)
                                    : err_set(e, ERR_INVALID, "%.200s is %s, must be I32",
                                              order->name, order->stored_type);
    }
    return rc;
}
