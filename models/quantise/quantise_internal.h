/* Between the files that write a quantised directory. */
#ifndef QUIRE_MODELS_QUANTISE_QUANTISE_INTERNAL_H
#define QUIRE_MODELS_QUANTISE_QUANTISE_INTERNAL_H

#include "models/families/layers.h"
#include "models/quantise/fold.h"

/* A tensor of the new file: one of the old file, or an expert's part of one that holds
 * all experts of a layer. */
struct output {
    const struct tensor *t;  /* where its values are */
    char *name;              /* owned; NULL: that of t */
    struct weight_view view; /* of a matrix, and of a part; else empty */
    bool part;               /* of t; false: all of it */
    bool linear;             /* it is quantised */
    bool product_alone;      /* a product's weight that is not, as a router */
    bool norm;               /* weights of the norm that makes the input of `product` */
    int32_t layer;           /* of the model */
    int32_t product;         /* it reads the input of, or PRODUCT_NONE */
    /* the product whose input its rows from up_from on make, or PRODUCT_NONE */
    int32_t makes;
    int64_t up_from;
};

struct conversion {
    const char *from, *to; /* directories */
    const char *partial;   /* what becomes `to` when it is complete (target.c) */
    const struct quantise_options *options;
    struct rounding rounding;
    struct model_config config;
    /* that has the checkpoint's tensors, and the architecture's first one */
    const struct model_family *family, *root;
    struct checkpoint *c;
    struct output *output; /* [n_outputs] owned, in the order of c's tensors */
    int32_t n_outputs;
    int32_t per_layer;     /* inputs_per_layer() */
    struct inputs *inputs; /* [n_layers * per_layer] owned; NULL: there is no text */
    /* [n_layers * per_layer] owned, as is each: the factors of the columns of a
     * product's input; NULL: all 1 */
    float **factor;
    /* [n_layers * per_layer] owned: the scale of all inputs of a product, written
     * beside each of its weights; NULL: a token has its own */
    float *input_scale;
    FILE *out;    /* WEIGHTS of `partial` */
    FILE *report; /* the caller's, or REPORT of `partial` */
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
/* Close such a file, all of which is on disk then; false: it failed. */
bool quantise_close(FILE *f);
/* target.c: make the directory `partial` for quantise_create; ERR_IO if it or `to`
 * exists. */
int target_begin(const struct conversion *k, struct err *e);
/* Call it `to`: all of it is there. */
int target_finish(const struct conversion *k, struct err *e);
/* outputs.c: k->output. ERR_UNSUPPORTED: no tensor is to be quantised. */
int quantise_list_outputs(struct conversion *k, struct err *e);
void quantise_free_outputs(struct conversion *k);
/* config.c: config.json and what is copied. */
int quantise_write_files(const struct conversion *k, struct err *e);
/* writing.c: WEIGHTS, to k->out. */
int quantise_write_weights(struct conversion *k, struct err *e);

static inline const char *output_name(const struct output *o)
{
    return o->name ? o->name : o->t->name;
}

/* Whether experts read what factors of the layer's norm would change: then these are
 * powers of two, which leave the router as it is. */
static inline bool product_is_routed(int32_t product)
{
    return product == PRODUCT_EXPERTS;
}

static inline const float *conversion_factors(const struct conversion *k, int32_t layer,
                                              int32_t product)
{
    return k->factor && product != PRODUCT_NONE ? k->factor[layer * k->per_layer + product] : NULL;
}

#define QUANTISE_WEIGHTS "model.safetensors"

#endif
