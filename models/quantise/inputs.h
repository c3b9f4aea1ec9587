/* What a text shows of the inputs of a model's products: how large each column gets,
 * and a sample of rows. */
#ifndef QUIRE_MODELS_QUANTISE_INPUTS_H
#define QUIRE_MODELS_QUANTISE_INPUTS_H

#include "kernels/weight_format.h"
#include "models/quantise/scorer.h"

/* The products of a layer, by what they read. */
enum product {
    PRODUCT_NONE = -1,
    PRODUCT_QKV,
    PRODUCT_O,
    PRODUCT_UP, /* of an MLP, as is the next one */
    PRODUCT_DOWN,
    PRODUCT_EXPERTS, /* gate and up of all experts and of the shared one */
    PRODUCT_SHARED_DOWN,
    PRODUCTS, /* their number; behind them down of expert 0, 1 .. */
};

enum { INPUT_SAMPLES = 64 }; /* rows of a sample, at most */

/* Of one product, over all tokens of a text. */
struct inputs {
    int32_t cols;    /* 0: the layer has no such product, or no token came to it */
    int64_t n;       /* tokens */
    float *most;     /* [cols] greatest magnitude; owned, as are the next three */
    double *sum;     /* [cols] of magnitudes */
    double *squares; /* [cols] sum of squares */
    float *sample;   /* [n_samples, cols] rows at equal distances in the text */
    int32_t n_samples;
};

/* Products of a layer, those of its experts included. */
static inline int32_t inputs_per_layer(const struct model_config *c)
{
    return PRODUCTS + c->experts.n;
}

/* Compute the n tokens in windows and gather the inputs of each layer's products: *ret
 * [n_layers * inputs_per_layer()], which inputs_free frees. */
int inputs_gather(struct scorer *s, const int32_t *token, int32_t n, struct inputs **ret,
                  struct err *e);
void inputs_free(struct inputs *in, int32_t n);

/* How inputs are rounded. */
struct input_rounding {
    enum weight_format_id format; /* FORMAT_INT8, FORMAT_FP8 */
    /* [n_layers * inputs_per_layer()] one for all inputs of a product, of a layer's
     * experts the first one's for all; NULL: a token's */
    const float *scale;
};

/* The scale that brings the greatest magnitude, with the inputs' columns divided by
 * factor[cols] (NULL: all 1), to the greatest code of `format`. */
float inputs_scale(const struct inputs *in, const float *factor, enum weight_format_id format);
/* scorer_loss, with the inputs of all products rounded: what W8A8 makes of the text. */
int inputs_rounded_loss(struct scorer *s, const struct input_rounding *how, const int32_t *token,
                        int32_t n, double *ret_loss, int32_t *ret_n, struct err *e);

#endif
