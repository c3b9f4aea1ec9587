/* GGUF's encodings of tensors, by their number in the file: plain floats, or one of the
 * formats of kernels/weight_format.h. */
#include "models/checkpoint/gguf/gguf.h"

#include <string.h>

static float load_bits(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* The format of each encoding, plus one; 0: not supported. */
static const uint8_t FORMATS[] = {
    [0] = 1 + FORMAT_F32,     [1] = 1 + FORMAT_F16,     [2] = 1 + FORMAT_Q4_0,
    [3] = 1 + FORMAT_Q4_1,    [6] = 1 + FORMAT_Q5_0,    [7] = 1 + FORMAT_Q5_1,
    [8] = 1 + FORMAT_Q8_0,    [10] = 1 + FORMAT_Q2_K,   [11] = 1 + FORMAT_Q3_K,
    [12] = 1 + FORMAT_Q4_K,   [13] = 1 + FORMAT_Q5_K,   [14] = 1 + FORMAT_Q6_K,
    [20] = 1 + FORMAT_IQ4_NL, [23] = 1 + FORMAT_IQ4_XS, [30] = 1 + FORMAT_BF16,
    [39] = 1 + FORMAT_MXFP4,
};

const char *gguf_encoding_name(uint32_t encoding)
{
    bool known = encoding < ARRAY_LEN(FORMATS) && FORMATS[encoding] > 0;

    return known ? gguf_encoding_format(encoding)->name : NULL;
}

const char *gguf_encoding_list(void)
{
    return "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, "
           "IQ4_XS, MXFP4";
}

const char *gguf_encoding_refused(uint32_t encoding)
{
    static const char *const NAMES[] = {
        [15] = " (Q8_K)",  [16] = " (IQ2_XXS)", [17] = " (IQ2_XS)", [18] = " (IQ3_XXS)",
        [19] = " (IQ1_S)", [21] = " (IQ3_S)",   [22] = " (IQ2_S)",  [24] = " (I8)",
        [25] = " (I16)",   [26] = " (I32)",     [27] = " (I64)",    [28] = " (F64)",
        [29] = " (IQ1_M)", [34] = " (TQ1_0)",   [35] = " (TQ2_0)",  [40] = " (NVFP4)",
    };

    return encoding < ARRAY_LEN(NAMES) && NAMES[encoding] ? NAMES[encoding] : "";
}

const struct weight_format *gguf_encoding_format(uint32_t encoding)
{
    return weight_format_of((enum weight_format_id)(FORMATS[encoding] - 1));
}

int32_t gguf_block_values(uint32_t encoding)
{
    return gguf_encoding_format(encoding)->block_values;
}

int32_t gguf_block_bytes(uint32_t encoding)
{
    return gguf_encoding_format(encoding)->block_bytes;
}

bool gguf_encoding_dtype(uint32_t encoding, enum dtype *ret)
{
    const struct weight_format *f = gguf_encoding_format(encoding);

    if (f->unpack) {
        return false;
    }
    *ret = (enum dtype)f->id;
    return true;
}

void gguf_decode(uint32_t encoding, const uint8_t *src, int64_t n, float *ret)
{
    const struct weight_format *f = gguf_encoding_format(encoding);

    if (f->unpack) {
        weight_format_decode(f, src, n, ret);
        return;
    }
    for (int64_t i = 0; i < n; i++, src += f->block_bytes) {
        uint32_t low = (uint32_t)src[0] | (uint32_t)src[1] << 8;
        if (f->id == FORMAT_F16) {
            ret[i] = weight_format_f16(src);
        } else if (f->id == FORMAT_BF16) {
            ret[i] = load_bits(low << 16);
        } else {
            ret[i] = load_bits(low | (uint32_t)src[2] << 16 | (uint32_t)src[3] << 24);
        }
    }
}
