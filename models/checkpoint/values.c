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
