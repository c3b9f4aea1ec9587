/* Blocks of GGUF's formats for tests: random codes with scales that are finite. */
#ifndef QUIRE_TESTS_UNIT_BLOCKS_H
#define QUIRE_TESTS_UNIT_BLOCKS_H

#include "tests/unit/ops.h"

#include "kernels/weight_format.h"

/* Where the float16 scales of a block lie; -1 ends the list. */
static inline const int8_t *scales_at(enum weight_format_id f)
{
    static const int8_t NONE[] = {-1}, ONE[] = {0, -1}, TWO[] = {0, 2, -1}, Q2[] = {80, 82, -1},
                        Q3[] = {108, -1};

    switch (f) {
    case FORMAT_MXFP4:
    case FORMAT_Q6_K:
        return NONE;
    case FORMAT_Q4_1:
    case FORMAT_Q5_1:
    case FORMAT_Q4_K:
    case FORMAT_Q5_K:
        return TWO;
    case FORMAT_Q2_K:
        return Q2;
    case FORMAT_Q3_K:
        return Q3;
    default:
        return ONE;
    }
}

static inline void put_half(struct rig *r, uint8_t *p, float most)
{
    uint16_t h = f16_store(rig_uniform(r) * most);

    memcpy(p, &h, sizeof(h));
}

/* Give the blocks of n_bytes at `out` finite scales, of magnitudes up to `most`. */
static inline void put_scales(struct rig *r, const struct weight_format *f, uint8_t *out,
                              int64_t n_bytes, float most)
{
    for (int64_t at = 0; at < n_bytes; at += f->block_bytes) {
        for (const int8_t *s = scales_at(f->id); *s >= 0; s++) {
            put_half(r, out + at + *s, most);
        }
        if (f->id == FORMAT_Q6_K) {
            put_half(r, out + at + 208, most);
        } else if (f->id == FORMAT_MXFP4) {
            out[at] = (uint8_t)(110 + rig_below(r, 12));
        }
    }
}

/* n values of random codes and finite scales. */
static inline uint8_t *random_blocks(struct rig *r, const struct weight_format *f, int64_t n)
{
    int64_t n_bytes = weight_format_bytes(f, n);
    uint8_t *out = rig_alloc((size_t)n_bytes);

    for (int64_t i = 0; i < n_bytes; i++) {
        out[i] = (uint8_t)rig_next(r);
    }
    put_scales(r, f, out, n_bytes, 0.01f);
    return out;
}

#endif
