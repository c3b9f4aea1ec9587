/* Between the files that write a quantised directory. */
#ifndef QUIRE_MODELS_QUANTISE_QUANTISE_INTERNAL_H
#define QUIRE_MODELS_QUANTISE_QUANTISE_INTERNAL_H

#include "models/families/layers.h"
#include "models/quantise/fold.h"

/* What a tensor of the checkpoint is. */
struct place {
    bool linear;          /* it is quantised */
    int32_t layer;        /* of the model */
    enum product product; /* the weight is part of it; PRODUCTS: of none that has factors */
    /* its rows from here on make the input of down; of other tensors the number of its
     * rows */
    int64_t up_from;
    bool norm; /* weights of the norm that makes the input of `product` */
};

struct conversion {
    const char *from, *to; /* directories */
    const struct quantise_options *options;
    struct rounding rounding;
    struct model_config config;
    const struct model_family *family;
    struct checkpoint *c;
    struct place *place;   /* [tensors of c] owned */
    struct inputs *inputs; /* [n_layers * PRODUCTS] owned; NULL: there is no text */
    /* [n_layers * PRODUCTS] owned, as is each: the factors of the columns of a
     * product's input; NULL: all 1 */
    float **factor;
    /* [n_layers * PRODUCTS] owned: the scale of all inputs of a product, written beside
     * each of its weights; NULL: a token has its own */
    float *input_scale;
    FILE *out; /* WEIGHTS of `to` */
    FILE *report;
};

/* Whether FORMAT_FP4 is written with scales of e4m3, else with powers of two. */
static inline bool quantise_nvfp4(const struct conversion *k)
{
    return k->rounding.format == FORMAT_FP4 && k->rounding.group == 16;
}

/* Message of a failure to write `name`; ERR_IO. */
int quantise_failed(const struct conversion *k, const char *name, struct err *e);
/* A new file of the directory; NULL: it failed. */
FILE *quantise_create(const struct conversion *k, const char *name, struct err *e);
/* config.c: config.json and what is copied. */
int quantise_write_files(const struct conversion *k, struct err *e);
/* writing.c: WEIGHTS, to k->out. */
int quantise_write_weights(struct conversion *k, struct err *e);

static inline const float *conversion_factors(const struct conversion *k, int32_t layer,
                                              enum product p)
{
    return k->factor && p < PRODUCTS ? k->factor[layer * PRODUCTS + p] : NULL;
}

#define QUANTISE_WEIGHTS "model.safetensors"

#endif
