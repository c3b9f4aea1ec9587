/* `quire quantize`: a directory of quantised weights made of one of floats.
 *
 * The linear layers are rounded to nearest and written as compressed-tensors does, so
 * that other engines read them too:
 *
 *   fp8    float-quantized: e4m3 and a scale a row; activations e4m3, a scale a token
 *   int8   int-quantized: symmetric, a scale a row; activations int8, a scale a token
 *   int4   pack-quantized: symmetric, a scale for 128, 64 or 32 columns, whichever is the
 *          largest that divides all layers' columns
 *   nvfp4  nvfp4-pack-quantized: e2m1 and a scale of e4m3 for 16 columns, over one of
 *          the whole weight
 *   mxfp4  mxfp4-pack-quantized: e2m1 and a power of two for 32 columns
 *
 * Embeddings, the output head, norms, routers and experts are copied as they are.
 *
 * Factors (fold.h) move what is large in the inputs of q, k and v, of gate and up, and
 * of down into the weights; the norms before them and up's rows take the inverse. */
#ifndef QUIRE_MODELS_QUANTISE_QUANTISE_H
#define QUIRE_MODELS_QUANTISE_QUANTISE_H

#include <stdio.h>

#include "kernels/weight_format.h"

struct tensor; /* weights.h */

/* How the weights of a directory are rounded. */
struct rounding {
    enum weight_format_id format; /* FORMAT_FP8 .. FORMAT_FP4 */
    int32_t group;                /* columns that share a scale; 0: all of a row */
    /* of FORMAT_FP4: scales times this are values of e4m3; 0: scales are powers of
     * two */
    float over;
};

/* Round a row of n values: codes as weight_format.h says, scale[n / group] or scale[1];
 * ret_value[n], unless NULL, the values of the codes. Adds to sum[0] the squares of the
 * errors, to sum[1] those of the values. */
void round_row(const struct rounding *k, const float *x, int64_t n, uint8_t *codes, float *scale,
               float *ret_value, double sum[2]);

struct quantise_options {
    enum weight_format_id format; /* FORMAT_FP8 .. FORMAT_FP4 */
    int32_t fp4_group;            /* of FORMAT_FP4: 16 for nvfp4, 32 for mxfp4 */
    /* A text: its first half shows the inputs of products, the second half is scored
     * before and after. n_tokens 0: there is none, then neither of the next is set. */
    const int32_t *token;
    int32_t n_tokens;
    float smooth; /* of int8, the exponent of SmoothQuant, above 0 and below 1; 0: no factors */
    bool search;  /* of int8 and int4: factors of the least error (fold.h) */
};

/* Read the directory `from` and write `to`, which must not exist. To `report` goes one
 * line a weight: the error, root mean square, as a share of the weight's own; with
 * factors one line before for each product that has some, with the error of its output
 * without and with them (fold_error); and with a text one line of its perplexity before
 * and after. With int8 and fp8 the latter rounds activations as well, a scale a
 * token. */
int quantise_directory(const char *from, const char *to, const struct quantise_options *o,
                       FILE *report, struct err *e);

#endif
