/* `quire quantize`: a directory of quantised weights made of one of floats.
 *
 * The linear layers are rounded to nearest and written as compressed-tensors does, so
 * that other engines read them too:
 *
 *   fp8    float-quantized: e4m3 and a scale a row; activations e4m3
 *   int8   int-quantized: a scale a row, perhaps a zero point; activations int8
 *   int4   pack-quantized: a scale, perhaps a zero point, for 128, 64 or 32 columns,
 *          whichever is the largest that divides all layers' columns
 *   nvfp4  nvfp4-pack-quantized: e2m1 and a scale of e4m3 for 16 columns, over one of
 *          the whole weight
 *   mxfp4  mxfp4-pack-quantized: e2m1 and a power of two for 32 columns
 *
 * Activations of fp8 and int8 get a scale a token, found while the model runs, or one
 * that is written beside the weight: what brings the greatest input of a text to the
 * greatest code.
 *
 * Embeddings, the output head, norms, routers and what makes keys and values of latents
 * are copied as they are; `ignore` of config.json lists the matrices among them.
 * Experts are written one by one, also where the old file holds all of a layer in one
 * tensor.
 *
 * Factors (fold.h) move what is large in the inputs of q, k and v, of gate and up, and
 * of down into the weights; the norms before them and up's rows take the inverse. What
 * experts read their router reads too, whose columns take the factors: powers of
 * two. */
#ifndef QUIRE_MODELS_QUANTISE_QUANTISE_H
#define QUIRE_MODELS_QUANTISE_QUANTISE_H

#include <stdio.h>
#include <sys/types.h>

#include "kernels/weight_format.h"

#define QUANTISE_REPORT "quantise.txt"

struct tensor; /* weights.h */

/* How the weights of a directory are rounded. */
struct rounding {
    enum weight_format_id format; /* FORMAT_FP8 .. FORMAT_FP4 */
    int32_t group;                /* columns that share a scale; 0: all of a row */
    /* of FORMAT_INT8 and FORMAT_INT4: the codes range from the least value of a group,
     * or 0, to the greatest, or 0, with a zero point; false: from minus the greatest
     * magnitude to plus it */
    bool zeros;
    /* of FORMAT_FP4: scales times this are values of e4m3; 0: scales are powers of
     * two */
    float over;
};

/* What round_row makes of a row. */
struct rounded_row {
    uint8_t *codes; /* as weight_format.h says */
    float *scale;   /* [n / group] or [1] */
    /* [n / group] or [1] zero points as weight_format.h says, of struct rounding's
     * zeros; NULL: not wanted */
    uint8_t *zero;
    float *value; /* [n] the values of the codes; NULL: not wanted */
};

/* Round a row of n values. Adds to sum[0] the squares of the errors, to sum[1] those of
 * the values. */
void round_row(const struct rounding *k, const float *x, int64_t n, const struct rounded_row *ret,
               double sum[2]);

struct quantise_options {
    enum weight_format_id format; /* FORMAT_FP8 .. FORMAT_FP4 */
    int32_t fp4_group;            /* of FORMAT_FP4: 16 for nvfp4, 32 for mxfp4 */
    /* A text: its first half shows the inputs of products, the second half is scored
     * before and after. n_tokens 0: there is none, then neither factors nor fixed
     * scales. */
    const int32_t *token;
    int32_t n_tokens;
    float smooth; /* of int8, the exponent of SmoothQuant, above 0 and below 1; 0: no factors */
    bool search;  /* of int8 and int4: factors of the least error (fold.h) */
    bool zeros;   /* of int8 and int4: zero points */
    /* of fp8 and int8: a scale for all activations of a product, of a layer's experts
     * one for all, by the text's first half; false: a scale a token */
    bool fixed;
};

/* Raised whenever the same source and options make other files. */
enum { QUANTISE_VERSION = 1 };

/* Whether `from` can be a source: ERR_UNSUPPORTED for a GGUF file, ERR_INVALID for a
 * directory whose weights are quantised. Reads no weights. */
int quantise_check_source(const char *from, struct err *e);

/* Where a process writes before the directory `to` is complete: a name beside it.
 * ERR_INVALID: it does not fit in `cap` bytes. */
int quantise_partial(char *ret, size_t cap, const char *to, pid_t pid, struct err *e);
/* Remove such a directory with its files, if it is there. */
void quantise_discard(const char *partial);

/* Read the directory `from` and write `to`, which must not exist and does so only when
 * it is complete. To `report`, or with NULL to the file QUANTISE_REPORT in `to`, goes
 * one line a weight: the error, root mean square, as a share of the weight's own; with
 * factors one line before for each product that has some, with the error of its output
 * without and with them (fold_error); with fixed scales one for each product's; with
 * either, how many experts no token of the text came to; and with a text one line of
 * its perplexity before and after. With int8 and fp8 the latter rounds activations as
 * well, with the scales that the file asks for. */
int quantise_directory(const char *from, const char *to, const struct quantise_options *o,
                       FILE *report, struct err *e);

#endif
