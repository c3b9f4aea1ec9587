/* A model: its configuration, its weights on a backend, and its forward pass.
 *
 * A family is one file: a tensor table and a straight-line `forward` (see llama.c and
 * the README's "anatomy of a model"). registry.c lists the families by the names
 * config.json uses.
 */
#ifndef QUIRE_MODELS_MODEL_H
#define QUIRE_MODELS_MODEL_H

#include "config/base/limits.h"
#include "kernels/backend.h"

enum rope_scaling {
    ROPE_DEFAULT,
    ROPE_LINEAR,
    ROPE_DYNAMIC,
    ROPE_LLAMA3,
    ROPE_YARN,
    ROPE_LONGROPE
};

/* How positions turn (config.json: rope_theta, rope_scaling; transformers 5:
 * rope_parameters). */
struct rope_config {
    enum rope_scaling kind;
    double theta, factor;
    int32_t rot_dim;            /* leading dims of a head that turn; 0: learned positions */
    int32_t original_positions; /* longest context before scaling */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn */
    double mscale, mscale_all_dim;            /* yarn; 0: not given */
    double attention_factor;                  /* yarn, longrope; 0: derived */
    bool truncate;                            /* yarn */
    /* longrope, [rot_dim / 2] */
    float short_factor[LIMIT_HEAD_DIM / 2], long_factor[LIMIT_HEAD_DIM / 2];
};

/* config.json, both styles (rope_theta/rope_scaling/torch_dtype and transformers 5's
 * rope_parameters/dtype), checked. */
struct model_config {
    char architecture[64]; /* architectures[0], e.g. LlamaForCausalLM */
    int32_t hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, vocab;
    int32_t embed_dim;      /* width of the embedding: hidden, but for OPT-350m */
    int32_t max_positions;  /* longest context, RoPE scaling included */
    int32_t sliding_window; /* of the layers that have one; 0: none has */
    bool windowed[LIMIT_LAYERS];
    enum dtype dtype; /* as stored */
    enum norm_kind norm;
    float norm_eps;
    float norm_offset; /* added to the weights of norms: 1 for Gemma */
    float embed_scale; /* embeddings are multiplied by it: 1, or Gemma\'s sqrt(hidden) */
    bool norm_before;  /* norms stand before attention and MLP (OPT-350m: after) */
    bool final_norm;
    enum activation act;
    bool tied; /* output head is the embedding */
    bool qkv_bias, o_bias, mlp_bias;
    bool qk_norm;                      /* q and k are normed per head */
    float attn_softcap, final_softcap; /* of attention scores and of logits; 0: none */
    float query_scalar;  /* attention is divided by its root: head_dim, or what Gemma-2 says */
    bool scale_by_layer; /* attention is divided by the layer's number, from 1 (GPT-2 variants) */
    struct rope_config rope;
    int32_t bos, eos[LIMIT_EOS_IDS], n_eos; /* -1 / 0: none; generation_config.json's list wins */
    int64_t n_parameters;                   /* filled by model_open */
};

/* generation_config.json: what a request inherits. NaN / -1 where it says nothing. */
struct generation_defaults {
    float temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
};

/* `dir`: a Hugging Face directory, or a GGUF file. */
int model_config_read(struct model_config *ret, struct generation_defaults *ret_gen,
                      const char *dir, struct err *e);

struct model_options {
    enum dtype dtype;   /* weights on the device */
    bool dummy;         /* load_format: dummy */
    int32_t max_tokens; /* of a step */
    int32_t max_logits; /* rows of the head at once */
    int32_t max_len;    /* positions to prepare (rope table) */
    int32_t rank, n_ranks;
    int32_t stage, n_stages; /* of a pipeline */
};

struct checkpoint; /* weights.h: the tensors of a checkpoint by name */

struct model {
    struct model_config config;
    const struct model_family *family;
    struct backend *backend;
    struct model_options options;
    struct checkpoint *
        /* mapped while the model lives: a backend may read weights in place; NULL:
         * dummies */
        checkpoint;
    struct transformer *weights; /* layers.h */
    /* Of the last stage. */
    struct mat hidden; /* [max_tokens, embed_dim] after the last norm; its rows: model_gathers */
    struct mat head;   /* [vocab, embed_dim]; this rank's ids of it */
    struct mat logits; /* [max_logits, vocab], float32 */
    /* [max_logits, this rank's ids], float32; only where there are more ranks */
    struct mat logits_part;
    struct mat gathered; /* [max_logits, embed_dim] */
};

/* One name that config.json's "architectures" may hold, and what holds where the file
 * is silent. */
struct architecture {
    const char *name;
    enum norm_kind norm;
    float norm_eps;
    enum activation act;
    double rope_theta; /* 0: learned positions, no rotation */
    bool tied;
    bool qkv_bias, o_bias, mlp_bias;
    bool qk_norm;
    int32_t sliding_window; /* 0: none */
    bool window_switch;     /* a window counts only with use_sliding_window */
    /* every other layer has the window, the first one among them (Gemma-2) */
    bool window_alternates;
    bool gemma; /* norms weigh by 1 + w, embeddings are scaled by sqrt(hidden) */
};

struct tensor_spec; /* layers.h */

/* A family: two tables of tensors and a forward pass. */
struct model_family {
    const struct architecture *architectures; /* ends with a NULL name */
    const struct tensor_spec *tensors;        /* ends with a NULL name */
    /* endings of tensor names that old checkpoints hold for nothing; NULL-terminated */
    const char *const *ignored;
    /* Enqueue the whole stack for the batch begun: tokens in, model->hidden [n_tokens,
     * embed_dim] out (normed). Of several stages each does its layers: later ones find
     * the residual stream in weights->x [n_tokens, hidden], earlier ones leave it
     * there. */
    void (*forward)(struct model *m, const struct batch *b);
    /* When fewer tokens than all have logits, forward goes on with those alone after
     * the last layer's attention, and leaves hidden [n_logits, embed_dim]. */
    bool gathers;
};

/* All families, NULL-terminated; unknown architectures are refused with this list. */
extern const struct model_family *const model_families[];
/* The family that knows `name`, and its row; NULL: none. */
const struct model_family *model_family_find(const char *name, const struct architecture **ret);
/* Key/value heads of one rank, for the cache: at least one each, so small counts are
 * held by several ranks. */
int32_t model_n_kv_heads(const struct model_config *c, int32_t n_ranks);
/* Whether n ranks can share the model: whole heads, equal slices of the MLP, some of
 * the vocabulary for each. */
int model_check_ranks(const struct model_config *c, int32_t n, struct err *e);
/* Whether there is a layer for each of n stages. */
int model_check_stages(const struct model_config *c, int32_t n, struct err *e);
/* The first layer of a stage; that of stage n_stages is the number of layers. Where
 * they do not divide, early stages hold one more: the last one has the head. */
static inline int32_t model_first_layer(const struct model_config *c, int32_t stage,
                                        int32_t n_stages)
{
    return (int32_t)div_ceil((int64_t)c->n_layers * stage, n_stages);
}

/* Map the weights and place them on the backend, which may read them in the mapped file
 * for as long as it lives: the model is freed after it. Missing, extra, misshapen and
 * mistyped tensors are named all at once. */
int model_open(struct model **ret, const char *dir, const struct model_config *c,
               const struct model_options *o, struct backend *backend, struct err *e);
void model_free(struct model *m);
/* Of its configuration and of its tensors' names, types and shapes: equal on all ranks
 * of a model. */
uint64_t model_digest(const struct model *m);
static inline bool model_is_last(const struct model *m)
{
    return m->options.stage == m->options.n_stages - 1;
}
/* Whether row i of hidden is that of logits row i, not of token i. */
static inline bool model_gathers(const struct model *m, const struct batch *b)
{
    return m->family->gathers && b->n_logits < b->n_tokens && model_is_last(m);
}
/* Stages 7 and 8 between step_begin and step_end: forward, then head and sampling in
 * chunks of max_logits rows; or, of a pipeline, this stage's share of that. */
void model_step(struct model *m, const struct batch *b);

#endif
