/* What the families share: the weights and activations of a decoder stack, and how a
 * table of tensors becomes them.
 *
 * A family is two things: rows of `struct tensor_spec`, which say what the checkpoint
 * must hold and where it goes, and a forward pass over `struct transformer`. The loader
 * does the rest: it checks the whole checkpoint against the table, names everything
 * wrong at once, cuts this rank's part out of each tensor, stacks what shares a target.
 */
#ifndef QUIRE_MODELS_FAMILIES_LAYERS_H
#define QUIRE_MODELS_FAMILIES_LAYERS_H

#include "models/checkpoint/weights.h"
#include "models/model.h"

struct layer {
    struct norm attn_norm, mlp_norm;
    /* of what is added to the residual stream (Gemma-2) */
    struct norm attn_post_norm, mlp_post_norm;
    struct mat qkv, qkv_bias; /* [(n_heads + 2 n_kv_heads) * head_dim, hidden] */
    struct mat o, o_bias;     /* [hidden, n_heads * head_dim] */
    struct mat up, up_bias;   /* [intermediate or 2 * intermediate (gate, up), hidden] */
    struct mat down, down_bias;
    struct rope rope; /* the model's, with this layer's q and k norms */
    struct attention attention;
};

/* Sizes are this rank's. */
struct transformer {
    struct mat embed;                   /* [n_vocab, embed_dim] */
    struct mat positions;               /* [max_positions + offset, hidden], learned */
    struct mat project_in, project_out; /* OPT-350m, where embed_dim is not hidden */
    struct mat head;                    /* [n_vocab, embed_dim]; data NULL: tied */
    struct norm final_norm;
    struct mat cos_sin;  /* [max_len, rot_dim] */
    float *cos_sin_host; /* what cos_sin may read in place */
    struct layer *layer; /* [n_layers]: from first_layer on of the model's */
    int32_t first_layer, n_layers;
    bool first; /* this stage of a pipeline, or the only one, embeds */
    int32_t n_heads, n_kv_heads, intermediate;
    int32_t vocab_first, n_vocab; /* ids of embed and head */
    bool partial;                 /* there are more ranks: o and down give one summand of several */
    /* activations, [max_tokens, ..] */
    struct mat x;         /* residual stream, hidden */
    struct mat h;         /* normed, hidden */
    struct mat y;         /* what is added to the residual, hidden */
    struct mat qkv, attn; /* attn: [n_heads * head_dim] */
    struct mat up, act;   /* act: [intermediate] */
    struct mat narrow;    /* embed_dim, only where it is not hidden */
};

/* One axis of a stored tensor. */
enum tensor_dim {
    DIM_ONE, /* as columns: the tensor has one axis */
    DIM_HIDDEN,
    DIM_EMBED,
    DIM_Q,       /* n_heads * head_dim */
    DIM_KV,      /* n_kv_heads * head_dim */
    DIM_QKV,     /* q, k, v one after another */
    DIM_HEAD,    /* head_dim */
    DIM_MLP,     /* intermediate */
    DIM_GATE_UP, /* gate, up one after another */
    DIM_VOCAB,
    DIM_POSITIONS,   /* max_position_embeddings */
    DIM_POSITIONS_2, /* and OPT's two more */
};

enum tensor_split {
    SPLIT_NONE,  /* every rank holds all of it */
    SPLIT_OUT,   /* each its output features: whole heads, or a slice of the MLP */
    SPLIT_IN,    /* each its input features: the results are summed over the ranks */
    SPLIT_VOCAB, /* each its ids; what is looked up is summed, logits are put side by side */
    SPLIT_FIRST, /* the first rank alone: a bias that is added to such a sum once */
};

/* When a tensor is wanted. */
enum tensor_when {
    WHEN_ALWAYS,
    WHEN_UNTIED,
    WHEN_QKV_BIAS,
    WHEN_O_BIAS,
    WHEN_MLP_BIAS,
    WHEN_QK_NORM,
    WHEN_FINAL_NORM,
    WHEN_PROJECTED, /* embed_dim is not hidden */
};

/* One tensor, or one a layer. Rows with the same target stand together and are stacked
 * in their order. */
struct tensor_spec {
    const char *
        /* Hugging Face's; %d is the layer; the leading "model." or "transformer." may
         * be absent from a file */
        name;
    enum tensor_dim rows, cols; /* [out, in] */
    enum tensor_split split;
    enum weight_kind kind;
    /* of a struct mat, in struct layer when the name has a %d, else in struct
     * transformer */
    size_t target;
    enum tensor_when when;
    bool transposed; /* stored [in, out] */
};

extern const struct model_family llama_family, phi3_family, gemma2_family, starcoder2_family,
    opt_family, gpt2_family;

/* The forward passes of llama.c and gpt2.c, for families that differ in their tensors
 * alone. */
void llama_forward(struct model *m, const struct batch *b);
void gpt2_forward(struct model *m, const struct batch *b);

#define IN_MODEL(member) offsetof(struct transformer, member)
#define IN_LAYER(member) offsetof(struct layer, member)

/* Rows that several families have, for their tables. */
#define ROW(name, rows, cols, split, kind, target, when) \
    {name, rows, cols, split, kind, target, when, false}
/* What a model named as LLaMA's has outside its layers. */
#define LLAMA_LAYER "model.layers.%d."
#define ROWS_LLAMA_ENDS                                                                          \
    ROW("model.embed_tokens.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_EMBEDDING,       \
        IN_MODEL(embed), WHEN_ALWAYS),                                                           \
        ROW("model.norm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,                 \
            IN_MODEL(final_norm.weight), WHEN_ALWAYS),                                           \
        ROW("lm_head.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_LINEAR, IN_MODEL(head), \
            WHEN_UNTIED)
/* The weight of a norm in a layer. */
#define ROW_NORM(name, norm)                                                                   \
    ROW(name ".weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(norm.weight), \
        WHEN_ALWAYS)
#define ROW_NORM_BIAS(name, norm)                                                          \
    ROW(name ".bias", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(norm.bias), \
        WHEN_ALWAYS)
/* Attention's: q, k and v each a tensor of its own, their biases, and o. */
#define ROW_QKV(name, rows) \
    ROW(name ".weight", rows, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(qkv), WHEN_ALWAYS)
#define ROWS_QKV(attn) \
    ROW_QKV(attn "q_proj", DIM_Q), ROW_QKV(attn "k_proj", DIM_KV), ROW_QKV(attn "v_proj", DIM_KV)
#define ROW_QKV_BIAS(name, rows) \
    ROW(name ".bias", rows, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(qkv_bias), WHEN_QKV_BIAS)
#define ROWS_QKV_BIAS(attn)                                                  \
    ROW_QKV_BIAS(attn "q_proj", DIM_Q), ROW_QKV_BIAS(attn "k_proj", DIM_KV), \
        ROW_QKV_BIAS(attn "v_proj", DIM_KV)
#define ROW_O(name) \
    ROW(name ".weight", DIM_HIDDEN, DIM_Q, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(o), WHEN_ALWAYS)
/* The MLP's: up (gate and up are stacked), down; and both of a gated one with a tensor
 * each. */
#define ROW_UP(name, rows) \
    ROW(name ".weight", rows, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(up), WHEN_ALWAYS)
#define ROW_DOWN(name) \
    ROW(name ".weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(down), WHEN_ALWAYS)
#define ROWS_GATED_MLP(mlp) \
    ROW_UP(mlp "gate_proj", DIM_MLP), ROW_UP(mlp "up_proj", DIM_MLP), ROW_DOWN(mlp "down_proj")

/* Whether `c` fits the family's table; every tensor that is missing, of another shape
 * or type, or unknown is named. */
int transformer_check(const struct model_family *f, const struct model_config *c,
                      const struct checkpoint *checkpoint, struct err *e);
/* Make m->weights on m->backend from m->checkpoint (NULL: dummies), checked before. */
int transformer_load(struct model *m, struct err *e);
void transformer_free(struct transformer *t);

/* The end of layer i: x += y, and h = what reads it next, the norm of the layer after,
 * or the last one; nothing where there is none or another stage has it. `partial` as in
 * add_norm. */
void transformer_end_layer(struct model *m, int32_t i, struct mat h, struct mat x, struct mat y,
                           bool partial);
/* out [n_tokens, embed_dim] = the step's embeddings, times `scale`. */
void transformer_embed(struct model *m, struct mat out, float scale);
/* logits [rows, vocab] = the head of x [rows, embed_dim], capped where the model does;
 * whole on the rank that samples. */
void transformer_head(struct model *m, struct mat logits, struct mat x);

/* The stored shape of a tensor: [rows, cols], cols 1 for one axis. */
void tensor_spec_shape(const struct tensor_spec *s, const struct model_config *c, int64_t *ret_rows,
                       int64_t *ret_cols);
bool tensor_spec_wanted(const struct tensor_spec *s, const struct model_config *c);
/* The name for a layer; `layer` < 0 writes a '*' in its place. */
enum { TENSOR_NAME_BYTES = 256 };
void tensor_spec_name(const struct tensor_spec *s, int32_t layer, char *ret);
/* The tensor of the row for `layer`, under its full name or without the leading part;
 * NULL. */
const struct tensor *tensor_spec_find(const struct tensor_spec *s, const struct checkpoint *c,
                                      int32_t layer);

/* Cosines and sines of positions [0, n_positions): out [n_positions, rot_dim], rot_dim
 * / 2 cosines, then sines. */
void rope_fill(float *out, const struct rope_config *r, int32_t n_positions);

#endif
