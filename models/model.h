/* A model: its configuration, its weights on a backend, and its forward pass.
 *
 * A family is one file: a tensor table and a straight-line `forward` (see llama.c and the README's
 * "anatomy of a model"). registry.c lists the families by the names config.json uses.
 */
#ifndef QUIRE_MODELS_MODEL_H
#define QUIRE_MODELS_MODEL_H

#include "config/limits.h"
#include "kernels/backend.h"

enum rope_scaling { ROPE_DEFAULT, ROPE_LINEAR, ROPE_DYNAMIC, ROPE_LLAMA3, ROPE_YARN, ROPE_LONGROPE };

/* config.json, both styles (rope_theta/rope_scaling/torch_dtype and transformers 5's rope_parameters/dtype), checked. */
struct model_config {
    char architecture[64]; /* architectures[0], e.g. LlamaForCausalLM */
    int32_t hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, vocab;
    int32_t max_positions;  /* longest context the model was made for */
    int32_t sliding_window; /* 0: none */
    enum dtype dtype;       /* as stored */
    enum norm_kind norm;
    float norm_eps;
    enum activation act;
    bool tied; /* output head is the embedding */
    bool qkv_bias, o_bias, mlp_bias;
    struct {
        enum rope_scaling kind;
        double theta, factor;
        int32_t rot_dim;
        double low_freq_factor, high_freq_factor; /* llama3 */
        int32_t original_positions;
    } rope;
    int32_t bos, eos[LIMIT_EOS_IDS], n_eos; /* -1 / 0: none; generation_config.json's list wins */
    int64_t n_parameters;                   /* filled by model_open */
};

/* generation_config.json: what a request inherits. NaN / -1 where it says nothing. */
struct generation_defaults {
    float temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
};

int model_config_read(struct model_config *ret, struct generation_defaults *ret_gen, const char *dir, struct err *e);

struct model_options {
    enum dtype dtype;   /* weights on the device */
    bool dummy;         /* load_format: dummy */
    int32_t max_tokens; /* of a step */
    int32_t max_logits; /* rows of the head at once */
    int32_t max_len;    /* positions to prepare (rope table) */
    int32_t rank, n_ranks;
};

struct model {
    struct model_config config;
    const struct model_family *family;
    struct backend *backend;
    struct model_options options;
    void *weights;       /* the family's own struct */
    struct mat hidden;   /* [max_tokens, hidden] after the last norm */
    struct mat head;     /* [vocab of this rank, hidden] */
    struct mat logits;   /* [max_logits, vocab], float32 */
    struct mat gathered; /* [max_logits, hidden] */
};

struct checkpoint; /* weights.h: the tensors of a checkpoint by name */

struct model_family {
    const char *const *architectures; /* NULL-terminated */
    /* Create weights and scratch on model->backend from `c`. */
    int (*load)(struct model *m, const struct checkpoint *c, struct err *e);
    /* Enqueue the whole stack for the batch begun: tokens in, model->hidden [n_tokens, hidden] out (normed). */
    void (*forward)(struct model *m, const struct batch *b);
    void (*release)(struct model *m);
    /* Attention shape of this rank, for the cache. */
    int32_t (*n_kv_heads)(const struct model_config *c, int32_t n_ranks);
};

/* All families; unknown architectures are refused with this list. */
extern const struct model_family *const model_families[];

/* Read config, map weights, place them on the backend. `backend` must outlive the model. */
int model_open(struct model **ret, const char *dir, const struct model_config *c, const struct model_options *o,
               struct backend *backend, struct err *e);
void model_free(struct model *m);
/* Stages 7 and 8 between step_begin and step_end: forward, then head and sampling in chunks of max_logits rows. */
void model_step(struct model *m, const struct batch *b);

#endif
