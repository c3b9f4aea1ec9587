/* What llama.cpp's architectures are called and hold; for the readers of a GGUF file's
 * metadata and tensors. */
#ifndef QUIRE_MODELS_CHECKPOINT_GGUF_FAMILIES_H
#define QUIRE_MODELS_CHECKPOINT_GGUF_FAMILIES_H

#include "models/checkpoint/gguf/gguf.h"

/* The axes of a tensor, where Hugging Face's has others. */
enum gguf_shape {
    GGUF_AS_IS,
    GGUF_ONE_AXIS,    /* [n], of any number */
    GGUF_TWO_AXES,    /* [a * b, c], of [a, b, c] */
    GGUF_CONVOLUTION, /* [channels, 1, kernel], of [channels, kernel] */
};

/* A tensor's name, without .weight or .bias, and without "blk.N." or the prefix of a
 * layer. */
struct gguf_rename {
    const char *from; /* the file's */
    /* Hugging Face's; with %d: the tensor has an expert along its first axis, and each
     * is a tensor of its own */
    const char *to;
    enum tensor_order order; /* of the weight; of the bias too when it is ORDER_ROTARY_PAIRS */
    bool whole;              /* `to` has no .weight or .bias after it */
    enum gguf_shape shape;
};

/* A key of the metadata after the architecture's name and a dot, and config.json's. */
struct gguf_key {
    const char *gguf, *json;
};

/* An array of the metadata with one float for each layer. */
struct gguf_values {
    const char *key; /* whole: the architecture's name is not before it */
    /* Hugging Face's tensor of one value in each layer, without the prefix of a layer;
     * NULL: there is none, and the file may leave the array out */
    const char *to;
    float is; /* with `to` NULL: what every layer must have, up to the rounding of bfloat16 */
};

struct gguf_family {
    const char *gguf;                /* general.architecture */
    const char *name;                /* of config.json's architectures */
    const char *when;                /* a key that must be there and not 0; NULL: always */
    int64_t is;                      /* and that has this value; 0: any */
    const char *without;             /* a key that must be absent or 0; NULL: none */
    const char *layers;              /* what a layer's names begin with; NULL: model.layers */
    bool tiled;                      /* recurrent heads are ordered for struct recurrence's tiled */
    bool latent;                     /* attention over latents */
    bool halved;                     /* heads rotate by halves: rows of q and k are in this order */
    bool scan;                       /* recurrent layers have Mamba-1 (Jamba) */
    const struct gguf_rename *layer; /* of tensors in layers; NULL: the common ones alone */
    const struct gguf_rename *outer; /* of the others; likewise */
    bool apart;                      /* no tensor in a layer has a common name */
    const struct gguf_key *keys;     /* numbers and bools beside the common ones, or NULL */
    const char *json;                /* members that follow from the architecture where the file
                                      * does not say, each after a comma; or NULL */
    const char *rope_json;           /* likewise of rope_scaling */
    /* the members that say whether the tensors of the first layer have a bias, and
     * whether q and k are normed per head; NULL: it follows from the architecture */
    const char *qkv_bias, *o_bias, *mlp_bias, *head_norms;
    const char *head_bias;  /* likewise, of logits */
    const char *state_norm; /* likewise, of a norm behind the first layer's recurrence */
    /* Every layer is one of a recurrence, attention, which has key/value heads, and an
     * MLP or experts, which have a width: of this kind, as in layer_types; NULL: layers
     * are not so. */
    const char *parts;
    const struct gguf_values *values; /* of the metadata; NULL: none */
    bool two_heads; /* layers without a window have heads of their own (Gemma-4) */
};

/* The family of a file. ERR_INVALID: the file names none; ERR_UNSUPPORTED: it is not
 * known, and the message lists those that are. */
int gguf_family(const struct gguf_family **ret, const struct gguf *g, struct err *e);
/* The entry for a tensor inside or outside of the layers; NULL: unknown. */
const struct gguf_rename *gguf_rename_find(const struct gguf_family *f, bool of_layer,
                                           const char *stem, size_t len);

#endif
