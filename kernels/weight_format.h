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
    FORMAT_FP8, /* codes whose scales are a tensor of their own, from here on */
    FORMAT_INT8,
    FORMAT_INT4,
    FORMAT_FP4,
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
    int32_t group_values; /* neighbours in a row that share a scale, where it is in the block */
    bool minima;          /* groups have an offset beside their scale */
    /* the codes and scales of one block; NULL: plain floats, or codes whose scales are
     * a tensor of their own */
    void (*unpack)(const uint8_t *block, struct weight_codes *ret);
};

/* ---- scales apart from the codes ---- */

/* How the scales of a weight are written. */
enum scale_type {
    SCALE_F32,
    SCALE_F16,
    SCALE_BF16,
    SCALE_E8M0, /* a power of two: 2^(byte - 127) */
    SCALE_E4M3,
};

/* What becomes of a product's activations. */
enum act_scheme {
    ACT_AS_THEY_ARE,  /* weights alone are quantised */
    ACT_SCALE_TOKEN,  /* to the codes' type, a scale a row, found while it runs */
    ACT_SCALE_GROUP,  /* the same, a scale for a row's group_cols values */
    ACT_SCALE_TENSOR, /* the same, with act_scale for all */
};

/* The scales of a weight [rows, cols] of FORMAT_FP8 .. FORMAT_FP4, whose codes lie row
 * by row, at four bits two in a byte, the first one low:
 *
 *     value = factor * scale * (code - zero)
 *
 * Values that share a scale and a zero point form a group of group_rows x group_cols;
 * groups at the end of a row or column may be cut. Element (i, j) of `data` and `zero`
 * belongs to the group of rows i * group_rows .. and columns j * group_cols ... */
struct weight_scales {
    const void *data;     /* of type `type`; NULL: there are none */
    enum scale_type type; /* of an element of data */
    int32_t group_rows;   /* 0: all rows share them */
    int32_t group_cols;   /* 0: all columns do */
    int64_t stride;       /* elements of data between groups of rows */
    /* 0 to 15 of FORMAT_INT4, an int8 of FORMAT_INT8; NULL: 8 for FORMAT_INT4, whose
     * codes are unsigned, else 0 */
    const uint8_t *zero;
    int64_t zero_stride; /* elements of zero between groups of rows */
    float factor;        /* of the whole tensor (NVFP4); else 1 */
    enum act_scheme act; /* of a product with this weight */
    float act_scale;     /* of ACT_SCALE_TENSOR: activation = act_scale * its code */
};

/* Bytes of an element of data. */
int32_t scale_type_bytes(enum scale_type t);
/* Element i of data as a float; data need not be aligned. */
float weight_scale_load(const struct weight_scales *s, int64_t i);
/* The scales of the rows from `row` on and the columns from `col` on, where groups
 * begin. */
struct weight_scales weight_scales_slice(const struct weight_scales *s, int32_t row, int32_t col);
/* The code of e4m3 that is nearest to a finite value, ties to even; at most 448. */
uint8_t weight_e4m3_of(float f);
/* The code of e2m1 that is nearest to f, ties to an even mantissa; at most 6. */
uint8_t weight_e2m1_of(float f);
/* The value of each code, without scale and zero point; NaN for e4m3's two. */
float weight_code_value(enum weight_format_id id, uint8_t code);
/* An activation rounded to scale * code of FORMAT_FP8 or FORMAT_INT8: to the nearest
 * code, ties to even, of at most 448 or 127. NaN stays. */
float weight_act_round(enum weight_format_id id, float scale, float x);
/* The first of n codes of e4m3 that is a NaN; -1: there is none. */
int64_t weight_e4m3_find_nan(const uint8_t *codes, int64_t n);
/* out[j] = value (row, j) of the n values whose codes begin at `codes`: the columns of
 * one row from the first on. */
void weight_scales_decode(const struct weight_format *f, const struct weight_scales *s,
                          const uint8_t *codes, int64_t row, int64_t n, float *out);

/* Whether the scales of a format are a tensor of their own (struct weight_scales). */
static inline bool weight_format_has_scales(const struct weight_format *f)
{
    return f->id >= FORMAT_FP8;
}

/* Whether values are elements of enum dtype, whose number is the format's. */
static inline bool weight_format_is_plain(const struct weight_format *f)
{
    return f->id <= FORMAT_I32;
}

const struct weight_format *weight_format_of(enum weight_format_id id);

/* Bytes of n values, whole blocks; the last one may be cut. */
static inline int64_t weight_format_bytes(const struct weight_format *f, int64_t n)
{
    return (n + f->block_values - 1) / f->block_values * f->block_bytes;
}

/* out[i] = value i of the n values, whole blocks, at src. Only for blocks. */
void weight_format_decode(const struct weight_format *f, const void *src, int64_t n, float *out);

/* Of the n values at data, whole blocks, the first of the block, or of codes the one,
 * that is no number whatever the scales: a NaN of e4m3, a block with a scale or minimum
 * that is not finite. -1: there is none. Reads all blocks. */
int64_t weight_format_find_nan(const struct weight_format *f, const void *data, int64_t n);

/* The float of two bytes, little-endian. */
float weight_format_f16(const uint8_t *p);

/* The levels that the four bits of a code select: of IQ4_NL and IQ4_XS, denser around
 * zero; of MXFP4, twice the values of E2M1. */
extern const int8_t weight_levels_iq4[16], weight_levels_mxfp4[16];

/* Scale of an MXFP4 block: half of 2^(e - 127), because its levels are doubled. */
float weight_format_half_e8m0(uint8_t e);

#endif
