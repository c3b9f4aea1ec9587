/* The formats in which weights are stored: a table, and their values decoded.
 *
 * A quantised row is a sequence of blocks. A block holds the codes of its values, small
 * integers, and scales that groups of them share; in formats with minima a group has an
 * offset as well. All are affine:
 *
 *     value = scale * code - minimum
 *
 * Code that treats formats alike reads this table; a new format is a row in it, the
 * function that unpacks a block (weight_blocks.c), and in each backend the inner loops
 * that multiply it. Where a backend has none, the loader decodes the weight.
 */
#ifndef QUIRE_KERNELS_WEIGHT_FORMAT_H
#define QUIRE_KERNELS_WEIGHT_FORMAT_H

#include "config/base/base.h"

/* Formats by number, for tables of functions. */
enum weight_format_id {
    FORMAT_F32, /* plain floats, in the order of enum dtype */
    FORMAT_F16,
    FORMAT_BF16,
    FORMAT_I32,
    FORMAT_Q4_0, /* blocks from here on */
    FORMAT_Q4_1,
    FORMAT_Q5_0,
    FORMAT_Q5_1,
    FORMAT_Q8_0,
    FORMAT_IQ4_NL,
    FORMAT_MXFP4,
    FORMAT_Q2_K,
    FORMAT_Q3_K,
    FORMAT_Q4_K,
    FORMAT_Q5_K,
    FORMAT_Q6_K,
    FORMAT_IQ4_XS,
    WEIGHT_FORMATS, /* their number */
};

/* X(name) for each format of blocks. */
#define EACH_BLOCK_FORMAT(X) \
    X(Q4_0)                  \
    X(Q4_1)                  \
    X(Q5_0) X(Q5_1) X(Q8_0) X(IQ4_NL) X(MXFP4) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS)

enum {
    FORMAT_BLOCK_MAX = 256,      /* values of a block, at most; a multiple of every block's */
    FORMAT_GROUP = 16,           /* values of the smallest group */
    FORMAT_BLOCK_BYTES_MAX = 272 /* bytes of FORMAT_BLOCK_MAX values, at most */
};

/* A block unpacked, or the first block_values of one. */
struct weight_codes {
    int16_t code[FORMAT_BLOCK_MAX];               /* -128 .. 127 */
    float scale[FORMAT_BLOCK_MAX / FORMAT_GROUP]; /* of each FORMAT_GROUP values */
    float min[FORMAT_BLOCK_MAX / FORMAT_GROUP];   /* likewise; 0 in formats without minima */
};

struct weight_format {
    const char *name; /* as its makers write it: "Q4_K" */
    enum weight_format_id id;
    int32_t bits;         /* of a code */
    int32_t block_values; /* neighbours in a row that make a block; a row has whole blocks */
    int32_t block_bytes;  /* of a block, which may lie at any address */
    int32_t group_values; /* neighbours in a row that share a scale */
    bool minima;          /* groups have an offset beside their scale */
    /* the codes and scales of one block; NULL: plain floats */
    void (*unpack)(const uint8_t *block, struct weight_codes *ret);
};

const struct weight_format *weight_format_of(enum weight_format_id id);

/* Bytes of n values, whole blocks. */
static inline int64_t weight_format_bytes(const struct weight_format *f, int64_t n)
{
    return n / f->block_values * f->block_bytes;
}

/* out[i] = value i of the n values, whole blocks, at src. Not for plain floats. */
void weight_format_decode(const struct weight_format *f, const void *src, int64_t n, float *out);

/* The float of two bytes, little-endian. */
float weight_format_f16(const uint8_t *p);

/* The levels that the four bits of a code select: of IQ4_NL and IQ4_XS, denser around
 * zero; of MXFP4, twice the values of E2M1. */
extern const int8_t weight_levels_iq4[16], weight_levels_mxfp4[16];

/* Scale of an MXFP4 block: half of 2^(e - 127), because its levels are doubled. */
float weight_format_half_e8m0(uint8_t e);

#endif
