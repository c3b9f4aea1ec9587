/* Factors that move the size of a product's input columns into its weight, where they
 * can be rounded with less loss (SmoothQuant, arXiv 2211.10438; AWQ, arXiv
 * 2306.00978).
 *
 * Column j of the input is divided by s[j], column j of the weight multiplied by it.
 * The division costs nothing where the input is made by rows of its own: a norm's
 * weights, or up's rows for down. */
#ifndef QUIRE_MODELS_QUANTISE_FOLD_H
#define QUIRE_MODELS_QUANTISE_FOLD_H

#include "models/quantise/inputs.h"
#include "models/quantise/quantise.h"

/* A matrix among the values of a stored tensor of floats: all of them, or an expert's
 * part of a tensor of all. */
struct weight_view {
    const struct tensor *t;
    int64_t rows, cols;
    int64_t first, row_step, col_step; /* in values of t */
};

/* All of a stored matrix. */
struct weight_view weight_view_of(const struct tensor *t);

/* The weights that read one input, [rows of each, cols]. */
struct readers {
    const struct weight_view **v; /* [n] */
    int32_t n;
};

/* Row `row` of a matrix; all of a stored vector. */
void fold_load_row(const struct weight_view *v, int64_t row, float *ret);
void fold_load_vector(const struct tensor *t, float *ret);
/* A norm's weight divided by s, as it is written: a value of bfloat16. */
float fold_norm_weight(float weight, float offset, float s);
/* Change the factors s[n] of a norm's outputs so that its weights, with `offset` added
 * as struct norm has it, divided by them are the values of fold_norm_weight: the
 * product then is what it was. 0 or ERR_NOMEM. */
int fold_round_factors(const struct tensor *norm, float offset, float *s, struct err *e);

/* s[cols] of SmoothQuant's formula: greatest input^alpha / greatest weight^(1 - alpha),
 * divided by their geometric mean. 0 or ERR_NOMEM. */
int fold_smooth(const struct readers *r, const struct inputs *in, float alpha, float *s,
                struct err *e);
/* The nearest power of two of each factor: what is multiplied with it keeps its
 * bits. */
void fold_to_powers(float *s, int32_t n);
/* s[cols] of the exponent, of 0, 0.1 .. 1, with the least error of the products:
 * SmoothQuant's formula where inputs are rounded as well (int8), else AWQ's, mean
 * input^alpha; `powers`: rounded by fold_to_powers. All 1 where nothing is better. The
 * error is that of up to FOLD_ROWS rows of each weight, fewer where there are more than
 * FOLD_WEIGHTS weights, of inputs whose columns are taken as independent. 0 or
 * ERR_NOMEM. */
int fold_search(const struct readers *r, const struct inputs *in, const struct rounding *k,
                bool powers, float *s, struct err *e);

enum { FOLD_ROWS = 256, FOLD_WEIGHTS = 4, FOLD_LEAST_ROWS = 8 };

/* The share of a product's output that its rounding makes: the root of the expected
 * square of the error, over that of the output, were the inputs' columns independent.
 * `s` NULL: all 1. */
int fold_error(const struct readers *r, const struct inputs *in, const struct rounding *k,
               const float *s, double *ret, struct err *e);

#endif
