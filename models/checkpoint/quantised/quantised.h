/* Quantised weights of safetensors files: the tensors that make one, put together.
 *
 * A quantised weight is stored as several tensors: codes, scales, perhaps zero points,
 * an order of columns, a factor. They are checked and become one tensor of the
 * checkpoint with the name of the weight, whose `quantised` says where everything is;
 * the families know of nothing else. Codes stay in the mapped file. Scales and zero
 * points that are not in the order of struct weight_scales are copied into it, which
 * takes little; codes that are not are brought into it when a backend asks for them.
 *
 *     CODES_ROWS     compressed-tensors, fp8, ModelOpt, MXFP4: as weight_format.h says
 *     CODES_OFFSET   8 bits of pack-quantized: the same, each plus 128
 *     CODES_GPTQ     int32 [in / n][out], n = 4 or 8 neighbours along the input in each,
 *                    the first one lowest
 *     CODES_AWQ      int32 [in][out / 8], eight along the output in each, in the order
 *                    0 2 4 6 1 3 5 7 from the lowest bits up
 *
 * With act-order (GPTQ's desc_act) the columns of a group are not neighbours. Such a
 * weight can only be decoded. */
#ifndef QUIRE_MODELS_CHECKPOINT_QUANTISED_QUANTISED_H
#define QUIRE_MODELS_CHECKPOINT_QUANTISED_QUANTISED_H

#include "models/checkpoint/quantised/quant_config.h"
#include "models/checkpoint/weights.h"

enum code_layout { CODES_ROWS, CODES_OFFSET, CODES_GPTQ, CODES_AWQ };

/* A weight [rows, cols], of stacked experts [n * rows, cols]. Owned by its
 * checkpoint. */
struct quant_tensor {
    const struct weight_format *format;
    enum code_layout layout;
    int64_t rows, cols; /* rows of all stacked matrices */
    int32_t n_stacked;  /* matrices one after another; 1: not stacked */
    int64_t stride;     /* values between rows, once the codes lie row by row */
    const void *codes;  /* in the mapping */
    int64_t n_bytes;    /* of codes */
    struct weight_scales scales;
    /* above 0: scales are divided by it, where scales.factor is its rounded inverse */
    float divisor;
    int32_t *column_group; /* [cols] owned; the group of each column; NULL: neighbours */
    void *owned[2];        /* memory that scales refers to, or NULL */
};

/* Find the quantised weights of `c`, as config.json or hf_quant_config.json in `dir`
 * says they are stored. Nothing where neither says so. Values will be decoded to
 * `dtype`. */
int checkpoint_read_quantised(struct checkpoint *c, const char *dir, enum dtype dtype,
                              struct err *e);
/* The same with a configuration that was read; for the fuzzer, too. */
int checkpoint_add_quantised(struct checkpoint *c, const struct quant_config *config,
                             enum dtype dtype, struct err *e);
/* Where groups of columns are no neighbours (act-order), so that the weight will be
 * decoded to BF16, have it decoded to F16 instead, which is nearer to its values; not
 * where F16 might not hold them. */
void checkpoint_decode_finer(struct checkpoint *c);
/* The format in which config.json in `dir` says that experts are stored, where it
 * speaks of them alone (MXFP4); else NULL. For models without weights. */
int checkpoint_expert_format(const struct weight_format **ret, const char *dir, struct err *e);
void quant_tensor_free(struct quant_tensor *q);

/* The codes row by row, as weight_format.h says, `stride` values apart. *ret_copy,
 * where that takes a copy, is the caller's. NULL: out of memory. */
const uint8_t *quant_tensor_codes(const struct quant_tensor *q, void **ret_copy);
/* Write the values as elements of `dtype`: [rows, cols], or of stacked matrices
 * [n_stacked][cols][rows of one], the order of Hugging Face's decoder. 0 or
 * ERR_NOMEM. */
int quant_tensor_decode(const struct quant_tensor *q, enum dtype dtype, void *ret);
/* The same of matrix i of those of MXFP4, which may be one: [cols][rows of one]. */
int quant_tensor_decode_one(const struct quant_tensor *q, int32_t i, enum dtype dtype, void *ret);

#endif
