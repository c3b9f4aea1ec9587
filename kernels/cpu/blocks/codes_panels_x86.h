/* Rows of codes whose scales are apart, as panels of each instruction set take them. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_CODES_PANELS_X86_H
#define QUIRE_KERNELS_CPU_BLOCKS_CODES_PANELS_X86_H

#include "kernels/cpu/blocks/codes_x86.h"

#ifdef __AVX2__ /* empty where a header is compiled alone */

/* 256 codes of a row, with their sign. */
struct code_span {
    _Alignas(64) int8_t code[FORMAT_BLOCK_MAX];
};

/* The codes at `codes`, of which the row has `here`; zero: of their groups. */
static void codes_of_row(struct code_span *ret, enum weight_format_id f, const uint8_t *codes,
                         int32_t here, const int8_t *zero, int32_t group)
{
    uint8_t last[FORMAT_BLOCK_MAX];

    if (here < FORMAT_BLOCK_MAX) { /* what follows the row is not read */
        memset(last, 0, sizeof(last));
        codes = memcpy(last, codes, (size_t)codes_bytes(f, here));
    }
    for (int g = 0; g < GROUPS; g++) {
        __m256i v = f == FORMAT_INT8  ? signed_codes(FORMAT_INT8, codes, g, zero, group)
                    : f == FORMAT_FP4 ? signed_codes(FORMAT_FP4, codes, g, zero, group)
                                      : signed_codes(FORMAT_INT4, codes, g, zero, group);
        _mm256_store_si256((__m256i *)(ret->code + 32 * g), v);
    }
}

/* Rows of a panel, a span at a time. */
struct panel_rows {
    const void *const *row;
    const struct row_scales *scales;
    enum weight_format_id f;
    int32_t n, group;
    int64_t ahead;          /* bytes behind what is read, that are prefetched */
    struct code_groups *of; /* [CODE_PANEL_ROWS] of the span */
};

/* Get ready for the block at `at`. */
static void rows_at(struct panel_rows *r, int32_t at)
{
    for (int32_t i = 0; i < CODE_PANEL_ROWS && at % CODES_SPAN == 0; i++) {
        groups_of_span(&r->of[i], &r->scales[i], r->f, r->group, at, r->n);
    }
}

/* The block at `at` of row i; its scales are where the result points. */
static const float *row_block(struct code_span *ret, const struct panel_rows *r, int32_t i,
                              int32_t at)
{
    const uint8_t *codes = (const uint8_t *)r->row[i] + codes_bytes(r->f, at);
    int32_t g = at % CODES_SPAN / r->group;

    for (int line = 0; line < codes_bytes(r->f, FORMAT_BLOCK_MAX); line += 64) {
        __builtin_prefetch(codes + r->ahead + line, 0, 2);
    }
    if (ret) {
        codes_of_row(ret, r->f, codes, MIN(FORMAT_BLOCK_MAX, r->n - at),
                     r->scales[i].of->zero ? r->of[i].zero + g : NULL, r->group);
    }
    return r->of[i].scale + g;
}

#endif
#endif
