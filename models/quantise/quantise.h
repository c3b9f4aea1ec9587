/* `quire quantize`: a directory of quantised weights made of one of floats.
 *
 * The linear layers are rounded to nearest and written as compressed-tensors does, so
 * that other engines read them too:
 *
 *   fp8    float-quantized: e4m3 and a scale a row; activations e4m3, a scale a token
 *   int8   int-quantized: symmetric, a scale a row; activations int8, a scale a token
 *   int4   pack-quantized: symmetric, a scale for 128, 64 or 32 columns, whichever is the
 *          largest that divides all layers' columns
 *
 * Embeddings, the output head, norms, routers and experts are copied as they are. / */
#ifndef QUIRE_MODELS_QUANTISE_QUANTISE_H
#define QUIRE_MODELS_QUANTISE_QUANTISE_H

#include <stdio.h>

#include "kernels/weight_format.h"

struct tensor; /* weights.h */

/* How the weights of a directory are rounded. */
struct rounding {
    enum weight_format_id format; /* FORMAT_FP8, FORMAT_INT8 or FORMAT_INT4 */
    int32_t group;                /* columns that share a scale; 0: all of a row */
};

/* Round a row of n values: codes as weight_format.h says, scale[n / group] or scale[1].
 * Adds to sum[0] the squares of the errors, to sum[1] those of the values. */
void round_row(const struct rounding *k, const float *x, int64_t n, uint8_t *codes, float *scale,
               double sum[2]);

/* Read the directory `from` and write `to`, which must not exist. One line a layer goes
 * to `report`: the error of each of its weights, root mean square, as a share of
 * theirs. */
int quantise_directory(const char *from, const char *to, enum weight_format_id format, FILE *report,
                       struct err *e);

#endif
