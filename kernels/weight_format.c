/* The table of weight formats (see weight_format.h). */
#include "kernels/weight_format.h"

#include "kernels/weight_blocks.h"

#define ROW(NAME, bits, values, bytes, group, minima, unpack) \
    [FORMAT_##NAME] = {#NAME, FORMAT_##NAME, bits, values, bytes, group, minima, unpack}

static const struct weight_format FORMATS[WEIGHT_FORMATS] = {
    ROW(F32, 32, 1, 4, 1, false, NULL),
    ROW(F16, 16, 1, 2, 1, false, NULL),
    ROW(BF16, 16, 1, 2, 1, false, NULL),
    ROW(I32, 32, 1, 4, 1, false, NULL),
    ROW(Q4_0, 4, 32, 18, 32, false, unpack_q4_0),
    ROW(Q4_1, 4, 32, 20, 32, true, unpack_q4_1),
    ROW(Q5_0, 5, 32, 22, 32, false, unpack_q5_0),
    ROW(Q5_1, 5, 32, 24, 32, true, unpack_q5_1),
    ROW(Q8_0, 8, 32, 34, 32, false, unpack_q8_0),
    ROW(IQ4_NL, 4, 32, 18, 32, false, unpack_iq4_nl),
    ROW(MXFP4, 4, 32, 17, 32, false, unpack_mxfp4),
    ROW(Q2_K, 2, 256, 84, 16, true, unpack_q2_k),
    ROW(Q3_K, 3, 256, 110, 16, false, unpack_q3_k),
    ROW(Q4_K, 4, 256, 144, 32, true, unpack_q4_k),
    ROW(Q5_K, 5, 256, 176, 32, true, unpack_q5_k),
    ROW(Q6_K, 6, 256, 210, 16, false, unpack_q6_k),
    ROW(IQ4_XS, 4, 256, 136, 32, false, unpack_iq4_xs),
    ROW(FP8, 8, 1, 1, 1, false, NULL),
    ROW(INT8, 8, 1, 1, 1, false, NULL),
    ROW(INT4, 4, 2, 1, 1, false, NULL),
    ROW(FP4, 4, 2, 1, 1, false, NULL),
};

const struct weight_format *weight_format_of(enum weight_format_id id)
{
    return &FORMATS[id];
}

int64_t weight_format_find_nan(const struct weight_format *f, const void *data, int64_t n)
{
    if (f->id == FORMAT_FP8) {
        return weight_e4m3_find_nan(data, n);
    }
    int64_t i = f->unpack ? weight_blocks_find_nan(f, data, div_ceil(n, f->block_values)) : -1;
    return i < 0 ? -1 : i * f->block_values;
}

void weight_format_decode(const struct weight_format *f, const void *src, int64_t n, float *out)
{
    const uint8_t *block = src;
    struct weight_codes c;

    for (int64_t at = 0; at < n; at += f->block_values, block += f->block_bytes) {
        f->unpack(block, &c);
        for (int32_t i = 0; i < f->block_values; i++) {
            float product = c.scale[i / FORMAT_GROUP] * (float)c.code[i];
            out[at + i] = product - c.min[i / FORMAT_GROUP];
        }
    }
}
