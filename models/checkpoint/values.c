/* The values of tensors that are quantised in their files. */
#include <string.h>

#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/quantised/quantised.h"
#include "models/checkpoint/weights_internal.h"

/* Round to nearest, ties to even; NaN stays NaN. */
static uint16_t to_bf16(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return (uint16_t)(bits >> 16 | 0x40);
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_f16(float f)
{
    uint32_t bits, magnitude;

    memcpy(&bits, &f, sizeof(bits));
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return sign | 0x7e00;
    }
    if (magnitude >= 0x477ff000) { /* 65520 and over */
        return sign | 0x7c00;
    }
    if (magnitude <
        /* below 2^-14: adding 2^-1 rounds to steps of 2^-24, those of subnormals */
        0x38800000) {
        float small;
        memcpy(&small, &magnitude, sizeof(small));
        small += 0.5f;
        memcpy(&magnitude, &small, sizeof(magnitude));
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude >> 13) - (112 << 10)));
}

void tensor_store(void *ret, enum dtype dtype, int64_t first, int64_t stride, const float *x,
                  int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t at = first + i * stride;
        if (dtype == DTYPE_F32) {
            ((float *)ret)[at] = x[i];
        } else {
            ((uint16_t *)ret)[at] = dtype == DTYPE_BF16 ? to_bf16(x[i]) : to_f16(x[i]);
        }
    }
}

int tensor_decode(const struct tensor *t, void *ret)
{
    return t->quantised ? quant_tensor_decode(t->quantised, t->dtype, ret)
                        : gguf_tensor_decode(t, ret);
}

int tensor_check(const struct tensor *t, const void *codes, int64_t rows, int64_t cols,
                 int64_t stride, struct err *e)
{
    const struct weight_format *f = t->format;
    const uint8_t *at = codes, *begin = t->quantised ? t->quantised->codes : t->blocks;

    for (int64_t r = 0; r < rows; r++, at += weight_format_bytes(f, stride)) {
        int64_t i = weight_format_find_nan(f, at, cols);
        if (i >= 0) {
            int64_t n = (at - begin) / f->block_bytes * f->block_values + i;
            return err_set(e, ERR_INVALID,
                           "%.200s (%s): the %s in row %lld, column %lld is no number", t->name,
                           f->name, f->unpack ? "scale of the block" : "code",
                           (long long)(n / stride), (long long)(n % stride));
        }
    }
    return 0;
}

int tensor_check_all(const struct tensor *t, struct err *e)
{
    const struct quant_tensor *q = t->quantised;
    int64_t cols = t->order == ORDER_TRANSPOSED ? t->dim[0] : t->dim[t->n_dims - 1];

    if (q) {
        return tensor_check(t, q->codes, q->rows, q->cols, q->stride, e);
    }
    return cols == 0 ? 0
                     : tensor_check(t, t->blocks, t->n_bytes / dtype_bytes(t->dtype) / cols, cols,
                                    cols, e);
}
