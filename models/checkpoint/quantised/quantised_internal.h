/* Between the files that put quantised weights together. */
#ifndef QUIRE_MODELS_CHECKPOINT_QUANTISED_QUANTISED_INTERNAL_H
#define QUIRE_MODELS_CHECKPOINT_QUANTISED_QUANTISED_INTERNAL_H

#include "models/checkpoint/quantised/quantised.h"
#include "models/checkpoint/weights_internal.h"

/* A weight being put together. */
struct quant_assembly {
    struct checkpoint *c;
    const struct quant_config *config;
    const char *module; /* its name, the weight's without ".weight" */
    struct quant_scheme scheme;
    struct quant_tensor *q;
    float most_scale; /* the greatest magnitude of a scale (quant_check_scales) */
};

/* The tensor `module`.`part`, which from now on is a part of the weight; NULL: there is
 * none. */
const struct tensor *quant_part(struct quant_assembly *a, const char *part);
/* The same; ERR_INVALID where it is missing, or has another type than those named in
 * `types` ("F16 BF16"). */
int quant_need(struct quant_assembly *a, const char *part, const char *types,
               const struct tensor **ret, struct err *e);
bool quant_is(const struct tensor *t, const char *type);
/* ERR_INVALID unless t is [rows, cols]. */
int quant_check_shape(const struct tensor *t, int64_t rows, int64_t cols, struct err *e);
/* One float of a tensor of one element. ERR_INVALID: it is not above 0 and finite. */
int quant_read_factor(const struct tensor *t, float *ret, struct err *e);
/* Groups of rows and of columns. */
int64_t quant_row_groups(const struct quant_tensor *q);
int64_t quant_col_groups(const struct quant_tensor *q);
/* The type of stored scales; ERR_UNSUPPORTED. */
int quant_scale_type(const struct tensor *t, enum scale_type *ret, struct err *e);
/* Check that no scale is NaN, infinite or, in a type of 16 or 32 bits, zero. */
int quant_check_scales(struct quant_assembly *a, const struct tensor *t, struct err *e);
/* Take over g_idx, the group of each column; nothing where groups are neighbours. */
int quant_take_order(struct quant_assembly *a, const struct tensor *t, struct err *e);
/* Memory of q->owned[i]. */
void *quant_own(struct quant_tensor *q, int32_t i, int64_t n_bytes);

/* compressed.c: codes row by row, with `weight_packed` or `weight` and their scales. */
int quant_compressed(struct quant_assembly *a, struct err *e);
/* transposed.c: GPTQ's and AWQ's `qweight`. */
int quant_transposed(struct quant_assembly *a, struct err *e);
/* compressed.c: `blocks` of MXFP4 experts, "..._blocks" and "..._scales". */
int quant_experts(struct quant_assembly *a, struct err *e);

#endif
