/* What the families share: the weights and activations of a decoder stack, and the
 * loader that fills them from a table of tensors.
 *
 * A family is a table of `struct tensor_spec`, which says what the checkpoint must hold
 * and where each tensor goes, and a forward pass over `struct transformer`. The loader
 * checks the whole checkpoint against the table and reports all problems at once, takes
 * this rank's slice of each tensor, and stacks the tensors that share a target.
 */
#ifndef QUIRE_MODELS_FAMILIES_LAYERS_H
#define QUIRE_MODELS_FAMILIES_LAYERS_H

#include "models/checkpoint/weights.h"
#include "models/model.h"

/* Of a draft head whose checkpoint has them beside its layer (heads/): head_load moves
 * them to struct head_parts. */
struct head_layer {
    struct norm embed_norm, hidden_norm, final_norm;
    struct mat join;
};

/* Of a layer with Mamba-1 (Gu and Dao 2023, section 3.6), beside its recurrence. */
struct scan_parts {
    struct mat in;   /* [step rank + 2 key_dim, values], of what the convolution makes */
    struct mat step; /* [values, step rank] */
    struct norm step_norm, k_norm, q_norm; /* of the parts of what `in` makes */
};

/* Sizes are this rank's. A bias is [1, rows of its weight], data NULL if there is
 * none. */
struct layer {
    struct norm attn_norm, mlp_norm;           /* before attention and MLP (OPT-350m: after) */
    struct norm attn_post_norm, mlp_post_norm; /* after them, before the residual (Gemma-2) */
    /* [(n_heads + 2 n_kv_heads) * head_dim, hidden]; with gated attention the rows of
     * q's gates follow */
    struct mat qkv, qkv_bias;
    struct mat o, o_bias; /* [hidden, n_heads * head_dim] */
    /* Of a recurrent layer, in place of qkv: the rows that give q, k, v, z and the
     * gates (delta), or z, v, k, q and the gates (ssd), where z gates the norm. Its o
     * is [hidden, n_heads * value_dim]. */
    struct mat mixer;
    struct recurrence recurrence; /* n_heads 0: the layer has attention */
    struct gated_norm mixer_norm; /* of the recurrence's output */
    bool mixer_norm_shared;       /* it runs over the columns of all ranks */
    struct scan_parts scan;       /* of RECURRENCE_SCAN */
    struct mat mixer_out;         /* its product, in place of o, where attention is beside it */
    struct mat up, up_bias;       /* [intermediate, hidden], or gate and up: twice the rows */
    struct mat xielu; /* [1, 2], float32: of the MLP's activation; data NULL: it is act(u) * u */
    struct mat down, down_bias; /* [hidden, intermediate] */
    struct experts experts;     /* n > 0: in place of up and down */
    struct rope rope;           /* the model's, with this layer's q and k norms */
    struct attention attention;
    struct mat sinks; /* [1, n_heads], of attention; data NULL: none */
    /* With latents, in place of `attention` (deepseek.c). qkv then has the rows of the
     * queries, or of their latent [q_rank], and behind them those of the latent and the
     * rotated key. */
    struct latent_attention latent;
    /* Gemma-4: norms of what the router and the experts read, of what they and the MLP
     * beside them make; the gate of the layer's own input, its product and its norm; a
     * factor of the residual stream, [1, 1]. */
    struct norm router_norm, experts_norm, experts_post_norm, mlp_own_norm;
    /* Of experts of another width than hidden's: [expert width, hidden] and its
     * reverse. */
    struct mat expert_in, expert_out;
    struct mat input_gate, input_project; /* [layer_input, hidden], [hidden, layer_input] */
    struct norm input_norm;
    struct mat scalar;
    struct norm q_norm, k_norm; /* of the queries' latent; of all q and all k (OLMo-2) */
    struct mat q_up;        /* [n_heads * head_dim, q_rank]; data NULL: queries have no latent */
    struct head_layer head; /* only of a draft head */
};

/* What a draft head reads and leaves behind, beside its layer. */
struct head_parts {
    struct hidden_pool pool;             /* the target's; data NULL: the head is not bound */
    struct norm embed_norm, hidden_norm; /* of the embedding and of the hidden state */
    struct mat join;     /* [hidden, 2 hidden], of both together (MTP); data NULL: qkv reads both */
    struct mat combine;  /* [hidden, n_taps * target_hidden] (EAGLE-3); data NULL: none */
    struct mat masked;   /* [1, n_taps * target_hidden] (P-EAGLE) in place of hidden states */
    struct mat id;       /* [1, draft_vocab] the target's ids; data NULL: all, in order */
    float *id_host;      /* owned; `id` may refer to it */
    bool feeds;          /* the step's tokens were drafted in the step before, and read `own` */
    struct mat taps;     /* [max_tokens, width of the pool]; only with `combine` */
    struct mat embedded; /* [max_tokens, hidden] */
    struct mat joined;   /* [max_tokens, 2 hidden] normed embedding and hidden state */
    struct mat own;      /* [max_tokens, hidden] what the step leaves for the next one */
    struct mat logits;   /* [max_logits, draft_vocab], float32; only with `id` */
};

/* A table of rotation and what its rows are computed from. */
struct rope_table {
    float *out;                     /* [n_positions, cols] */
    float freq[LIMIT_HEAD_DIM / 2]; /* angle of each pair from a position to the next */
    float scale;                    /* of cosines and sines */
    double query_beta;              /* as in struct rope_config, with original_positions */
    int32_t original_positions, query_offset;
    int32_t rot_dim, cols, n_positions; /* cols: rope_table_cols */
    int32_t n_filled;                   /* rows written, from the first on */
};

static inline size_t rope_table_bytes(const struct rope_table *t)
{
    return (size_t)t->n_positions * (size_t)t->cols * sizeof(*t->out);
}

/* Tensors of one format that are multiplied in one way. */
struct format_use {
    enum weight_format_id format;
    bool quantised; /* while they were loaded */
    struct weight_use use;
    int32_t n; /* tensors */
};
enum { FORMAT_USES = 32 };

/* How a backend multiplies experts under a division among ranks, from worst to best. */
enum expert_way {
    EXPERTS_REFUSED,   /* the division cuts groups of quantised weights */
    EXPERTS_ANY_SHAPE, /* floats, by a slow kernel for any shape */
    EXPERTS_FLOATS,    /* floats, stored or decoded, by the fast kernels */
    EXPERTS_CODES,     /* as stored or quantised */
};

/* What load/expert_division.c found out about a model. */
struct expert_division {
    bool known;                         /* the model has experts */
    enum expert_way whole, sliced;      /* of the tensor that loses most by slices */
    const struct weight_format *format; /* in which it is stored; NULL: floats, or a dummy */
    bool by_itself;                     /* it set options.expert_parallel */
};

/* Columns of the sums of norms over ranks, of which two are used at most: GPUs write 16
 * bytes at a time into each other's memory. */
enum { SUM_COLUMNS = 4 };

/* Weights and activations of one rank and one pipeline stage; sizes are this rank's. */
struct transformer {
    struct mat embed;                   /* [n_vocab, embed_dim] */
    struct mat positions;               /* [max_positions + offset, hidden], learned */
    struct mat project_in, project_out; /* OPT-350m, where embed_dim is not hidden */
    struct mat head;                    /* [n_vocab, embed_dim]; data NULL: tied */
    struct mat head_bias;               /* [1, n_vocab], of logits; data NULL: none */
    /* Gemma-4: the embeddings of each layer's own input, [n_vocab, n_layers *
     * layer_input], what is added to them, [n_layers * layer_input, hidden], and its
     * norm. */
    struct mat inputs_table, inputs_project;
    struct norm inputs_norm;
    struct norm final_norm;        /* weight.data NULL: none, or on another stage */
    struct mat cos_sin;            /* [max_len, rot_dim]; data NULL: no rotation */
    struct mat window_cos_sin;     /* of windowed layers; data NULL: cos_sin */
    struct mat still_cos_sin;      /* of layers that rotate nothing: factors of queries */
    struct mat ones;               /* [1, head_dim], in place of a norm's weights; data NULL */
    float one[LIMIT_HEAD_DIM];     /* to which it may refer */
    struct rope_table rope[2];     /* their rows; `out` mapped, owned */
    struct layer *layer;           /* [n_layers] */
    int32_t first_layer, n_layers; /* this stage's, of all layers of the model */
    bool first;                    /* the first stage: it embeds the tokens */
    int32_t n_heads, n_kv_heads;   /* of this rank */
    int32_t full_kv_heads;         /* of layers without a window, if theirs differ */
    int32_t intermediate;          /* of this rank: its slice of the MLP */
    int32_t expert_intermediate;   /* of this rank: its slice of every expert's MLP */
    int32_t shared_intermediate;   /* of this rank: its slice of the shared expert's */
    int32_t vocab_first, n_vocab;  /* ids in embed and head */
    bool partial;                  /* n_ranks > 1: o and down give partial sums */
    struct mat factors;            /* [1, LAYER_FACTORS], float32; data NULL: none */
    struct mat sums;               /* [max_tokens, SUM_COLUMNS], float32; for norms over ranks */
    /* Tensors of each format: read as they are stored, and converted or decoded. */
    int32_t n_stored[WEIGHT_FORMATS], n_decoded[WEIGHT_FORMATS];
    /* Why the first of these was decoded; constants. */
    const char *why_decoded[WEIGHT_FORMATS];
    enum dtype decoded_to[WEIGHT_FORMATS]; /* of the first one of a format */
    int32_t n_quantised;                   /* tensors of floats, to model_options.quantise */
    struct format_use use[FORMAT_USES];    /* [n_uses] of those in blocks or codes */
    int32_t n_uses;
    struct expert_division division; /* of the experts among ranks */

    /* Activations, [max_tokens, ..]. */
    struct mat x;                  /* residual stream, [hidden] */
    struct mat h;                  /* normed, [hidden] */
    struct mat y;                  /* output of attention or MLP, to be added to x, [hidden] */
    struct mat qkv, attn;          /* [(n_heads + 2 n_kv_heads) * head_dim], [n_heads * head_dim] */
    struct mat up, act;            /* [rows of layer.up], [intermediate] */
    struct mat narrow;             /* [embed_dim]; only if that is not hidden */
    struct mat mixer;              /* [rows of layer.mixer]; only with recurrent layers */
    struct mat scan;               /* [values + rows of layer.scan.in]; only with Mamba-1 */
    struct head_parts draft;       /* only of a draft head */
    struct expert_scratch experts; /* only if a layer has experts */
    struct mat q;                  /* [n_heads * head_dim]; only if queries have a latent */
    struct latent_scratch latent;  /* only with latents; fewer rows */
    /* Gemma-4: the inputs of all layers, their embeddings, and a layer's, gated; what
     * the experts beside an MLP make, and what their router reads, [hidden]. */
    struct mat inputs, inputs_embed, input;
    struct mat beside, router_x;   /* (with scaled inputs: what they read) */
    struct mat expert_x, expert_y; /* what experts read and make, [expert width] */
};

/* One axis of a stored tensor. */
enum tensor_dim {
    DIM_ONE, /* for the columns: the tensor has one axis */
    DIM_HIDDEN,
    DIM_EMBED,
    DIM_Q,   /* n_heads * head_dim */
    DIM_KV,  /* n_kv_heads * head_dim */
    DIM_QKV, /* q, k and v one after another */
    /* The same by key/value head: the queries of each, then its key and its value; a
     * row of the table takes one of them. */
    DIM_GROUPED_Q,
    DIM_GROUPED_K,
    DIM_GROUPED_V,
    DIM_HEAD,           /* head_dim */
    DIM_MLP,            /* intermediate */
    DIM_GATE_UP,        /* gate and up one after another */
    DIM_EXPERTS,        /* experts of a layer */
    DIM_EXPERT,         /* intermediate of an expert */
    DIM_EXPERT_WIDTH,   /* of what experts read and make */
    DIM_SHARED,         /* intermediate of the shared expert */
    DIM_SHARED_GATE_UP, /* its gate and up one after another */
    DIM_HEADS,          /* n_heads */
    /* Of tensors that hold all experts of a layer, one after another: the gate's part
     * of an expert's rows, which are stored in turn with up's, up's part, and hidden;
     * an expert's rows where gate and up are stored one behind the other. */
    DIM_STACKED_EXPERT, /* (an expert's rows where it has no gate) */
    DIM_STACKED_WIDTH,  /* (what experts make) */
    DIM_STACKED_GATE,
    DIM_STACKED_UP,
    DIM_STACKED_HIDDEN,
    DIM_STACKED_GATE_UP,
    DIM_V,          /* n_heads * the dims of a value, with latents */
    DIM_Q_RANK,     /* of the queries' latent */
    DIM_LATENT,     /* of the latent */
    DIM_LATENT_KEY, /* of the latent and of the rotated key */
    /* Of each head the rows that make its key, then those that make its value; the
     * weight takes the former (DIM_K_UP), transposed, or the latter. */
    DIM_K_UP,
    DIM_V_UP,
    /* The two as they are used, apart: the keys', transposed, n_heads * the latent,
     * each row as long as the part of a key that does not rotate; n_heads * the dims of
     * a value is DIM_V. */
    DIM_HEAD_LATENTS,
    DIM_NOPE,
    DIM_FULL_Q, /* as DIM_Q, DIM_KV and DIM_HEAD, of layers without a window */
    DIM_FULL_KV,
    DIM_FULL_HEAD,
    DIM_WIDE_MLP,     /* twice the intermediate */
    DIM_LAYER_INPUT,  /* width of a layer's own input */
    DIM_LAYER_INPUTS, /* of all layers' */
    DIM_VOCAB,
    DIM_POSITIONS,   /* max_position_embeddings */
    DIM_POSITIONS_2, /* the same and OPT's offset of 2 */
    /* q and its gates, head by head; a row of the table takes one of them. */
    DIM_GATED_Q_QUERY,
    DIM_GATED_Q_GATE,
    /* Of a recurrent layer (struct recurrence). q, k, v and the norm's gates z, or the
     * gates b and a, group by group; a row of the table takes one of them. */
    DIM_QKVZ_Q,
    DIM_QKVZ_K,
    DIM_QKVZ_V,
    DIM_QKVZ_Z,
    DIM_BA_B,
    DIM_BA_A,
    DIM_CHANNELS,    /* of the convolution */
    DIM_CONV,        /* channels * kernel, stored [channels, 1, kernel] */
    DIM_VALUES,      /* n_heads * value_dim */
    DIM_VALUE,       /* value_dim */
    DIM_STATE_HEADS, /* n_heads */
    DIM_SSD_IN,      /* Mamba-2: values, channels and heads one after another */
    DIM_CONV_IN,     /* LFM2: the channels' gates, gates of the result, and channels */
    DIM_SCAN_IN,     /* Mamba-1: channels and gates of the result */
    DIM_SCAN_GATES,  /* Mamba-1: the steps' own input, a key and a query */
    DIM_STEP_RANK,   /* Mamba-1: the steps' own input */
    DIM_STATE_KEY,   /* key_dim */
    /* Of a draft head: its input, hidden states of the target, ids that it drafts. */
    DIM_JOINED,
    DIM_TAPS,
    DIM_DRAFT_VOCAB,
};

/* How a tensor is divided among tensor-parallel ranks. */
enum tensor_split {
    SPLIT_NONE,  /* every rank holds all of it */
    SPLIT_OUT,   /* by output features: whole heads, or a slice of the MLP */
    SPLIT_IN,    /* by input features: outputs are partial sums, added over the ranks */
    SPLIT_VOCAB, /* by ids: embeddings are added over the ranks, logits gathered */
    SPLIT_FIRST, /* rank 0 alone: a bias that is added once to a sum over the ranks; of
                  * layers without experts the others have zeros */
};

/* Which models, and which of their layers, have a tensor. */
enum tensor_when {
    WHEN_ALWAYS,
    WHEN_UNTIED,
    WHEN_QKV_BIAS,
    WHEN_O_BIAS,
    WHEN_MLP_BIAS,
    WHEN_HEAD_BIAS,
    WHEN_QK_NORM,
    WHEN_FINAL_NORM,
    WHEN_PROJECTED,     /* embed_dim is not hidden */
    WHEN_DENSE,         /* the layer has an MLP */
    WHEN_EXPERTS,       /* the layer has experts */
    WHEN_SHARED,        /* and a shared one */
    WHEN_CHOICE_BIAS,   /* the layer's experts are chosen with a bias */
    WHEN_EXPERT_LATENT, /* they are of another width than hidden's */
    WHEN_GATE_COPIED,   /* and up stands for the gate too */
    WHEN_Q_RANK,        /* the queries have a latent */
    WHEN_NO_Q_RANK,     /* they have none */
    /* Of models whose layers without a window have other heads: the layer has a window,
     * or none; and keys and values of its own; and a tensor for values, or that of the
     * keys for both. */
    WHEN_WINDOWED,
    WHEN_FULL,
    WHEN_WINDOWED_KV,
    WHEN_FULL_KV,
    WHEN_FULL_V,
    WHEN_FULL_KEY_IS_V,
    WHEN_PLAIN_MLP,   /* the layer's MLP has the usual width */
    WHEN_WIDE_MLP,    /* it has twice that */
    WHEN_LAYER_INPUT, /* layers have inputs of their own */
    WHEN_ATTENTION,   /* the layer has attention */
    WHEN_RECURRENT,   /* the layer has a recurrence */
    WHEN_CONV_BIAS,   /* and its convolution a bias */
    WHEN_FIRST_LAYER, /* of a draft head: it is its first layer, or a later one */
    WHEN_LATER_LAYER,
    WHEN_MIXER_NORM, /* and its output a norm */
    WHEN_MLP_ALONE,  /* the layer is an MLP */
};

/* One tensor of the checkpoint, or one of each layer, or one of each expert of each
 * layer. Tensors with the same target are neighbours in the table and are stacked in
 * its order, expert by expert. */
struct tensor_spec {
    /* Hugging Face's; the first %d is the layer, a second one the expert. A file may
     * omit the leading "model." or "transformer.". */
    const char *name;
    enum tensor_dim rows, cols; /* [out, in] */
    enum tensor_split split;
    enum weight_kind kind; /* how the backend will use it */
    /* offset of a struct mat: in struct layer if the name has a %d, else in struct
     * transformer */
    size_t target;
    enum tensor_when when;
    bool transposed; /* stored [in, out] (GPT-2's Conv1D) */
};

/* Of draft heads, which have no architectures. */
extern const struct model_family mtp_family, latent_mtp_family, qwen_mtp_family, eagle3_family,
    peagle_family;

/* The family of a draft head; NULL: there is none of its kind. */
const struct model_family *head_family(const struct model_config *c);
/* What a head has besides weights: tables and memory. */
int head_load(struct model *m, struct err *e);
void head_release(struct transformer *t);
/* In place of the embedding: out [n_tokens, hidden] = what the head's layer begins
 * with. */
void head_input(struct model *m, struct mat out);
/* Before a step and behind its forward pass. */
void head_begin(struct model *m, const struct batch *b);
void head_end(struct model *m, const struct batch *b);
/* Keep hidden states for a head, if the model does: x [n_tokens, hidden] in front of
 * layer i of the stage, and h, the final norm's output behind the last one (data NULL:
 * not there yet). */
void transformer_tap(struct model *m, int32_t i, struct mat x, struct mat h);
/* Whether transformer_tap keeps anything there. */
bool transformer_taps(const struct model *m, int32_t i);

extern const struct model_family llama_family, qwen_moe_family, mixtral_family, olmoe_family,
    granite_moe_family, minimax_family, ernie_moe_family, exaone_family, glm_moe_family,
    gpt_oss_family, phi3_family, deepseek_family, olmo2_family, exaone4_family, cohere_family,
    glm_family, glm4_family, gemma2_family, stablelm_family, starcoder2_family, opt_family,
    gpt2_family, qwen_next_family, qwen35_family, qwen35_moe_family, bamba_family,
    granite_hybrid_family, gemma4_family, nemotron_family, falcon_family, lfm2_family,
    lfm2_moe_family, arcee_family, hunyuan_family, hunyuan_moe_family, ling_family, phi_moe_family,
    internlm2_family, nemotron_dense_family, big_code_family, neox_family, gptj_family, phi_family,
    falcon_parallel_family, jamba_family, exaone_moe_family, hy3_family, vault_gemma_family,
    clova_family, flex_olmo_family, afmoe_family, granite_swa_family, granite_moe_swa_family,
    apertus_family, llama4_family;

/* The forward passes of llama.c, gemma2.c and gpt2.c, for families that differ only in
 * their tensors. */
void llama_forward(struct model *m, const struct batch *b);
void deepseek_forward(struct model *m, const struct batch *b);
void hybrid_forward(struct model *m, const struct batch *b);
void gemma2_forward(struct model *m, const struct batch *b);
void gpt2_forward(struct model *m, const struct batch *b);

#define IN_MODEL(member) offsetof(struct transformer, member)
#define IN_LAYER(member) offsetof(struct layer, member)

/* Rows that the tables of several families share. */
#define ROW(name, rows, cols, split, kind, target, when) \
    {name, rows, cols, split, kind, target, when, false}
/* The tensors outside the layers: the embedding, the final norm and the head; biases of
 * the latter two; and the three with LLaMA's names. */
#define LLAMA_LAYER "model.layers.%d."
#define ROWS_ENDS(embedding, norm, head_name)                                       \
    ROW(embedding ".weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_EMBEDDING,  \
        IN_MODEL(embed), WHEN_ALWAYS),                                              \
        ROW(norm ".weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,         \
            IN_MODEL(final_norm.weight), WHEN_ALWAYS),                              \
        ROW(head_name ".weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_LINEAR, \
            IN_MODEL(head), WHEN_UNTIED)
#define ROW_FINAL_NORM_BIAS(norm)                                                                \
    ROW(norm ".bias", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_MODEL(final_norm.bias), \
        WHEN_ALWAYS)
#define ROW_HEAD_BIAS(name)                                                                \
    ROW(name ".bias", DIM_VOCAB, DIM_ONE, SPLIT_VOCAB, WEIGHT_VECTOR, IN_MODEL(head_bias), \
        WHEN_HEAD_BIAS)
#define ROWS_LLAMA_ENDS ROWS_ENDS("model.embed_tokens", "model.norm", "lm_head")
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
/* The three in one tensor, by key/value head. */
#define ROWS_GROUPED_QKV(name) \
    ROW_QKV(name, DIM_GROUPED_Q), ROW_QKV(name, DIM_GROUPED_K), ROW_QKV(name, DIM_GROUPED_V)
#define ROWS_GROUPED_QKV_BIAS(name)                                       \
    ROW_QKV_BIAS(name, DIM_GROUPED_Q), ROW_QKV_BIAS(name, DIM_GROUPED_K), \
        ROW_QKV_BIAS(name, DIM_GROUPED_V)
/* The norms of q and k per head. */
#define ROW_HEAD_NORM(name, norm)                                                                 \
    ROW(name ".weight", DIM_HEAD, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(rope.norm.weight), \
        WHEN_QK_NORM)
#define ROWS_QK_NORM(attn) \
    ROW_HEAD_NORM(attn "q_norm", q_norm), ROW_HEAD_NORM(attn "k_norm", k_norm)
#define ROW_O(name) \
    ROW(name ".weight", DIM_HIDDEN, DIM_Q, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(o), WHEN_ALWAYS)
#define ROW_O_BIAS(name)                                                                 \
    ROW(name ".bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR, IN_LAYER(o_bias), \
        WHEN_O_BIAS)
/* All of a layer's attention with LLaMA's names, and the norms before it and the
 * MLP. */
#define ROWS_LLAMA_ATTENTION                                                                \
    ROW_NORM(LLAMA_LAYER "input_layernorm", attn_norm), ROWS_QKV(LLAMA_LAYER "self_attn."), \
        ROWS_QKV_BIAS(LLAMA_LAYER "self_attn."), ROWS_QK_NORM(LLAMA_LAYER "self_attn."),    \
        ROW_O(LLAMA_LAYER "self_attn.o_proj"), ROW_O_BIAS(LLAMA_LAYER "self_attn.o_proj"),  \
        ROW_NORM(LLAMA_LAYER "post_attention_layernorm", mlp_norm)
/* A LLaMA that stores q, k and v as one tensor, and gate and up as another. */
#define ROWS_LLAMA_JOINED                                                \
    ROWS_LLAMA_ENDS, ROW_NORM(LLAMA_LAYER "input_layernorm", attn_norm), \
        ROW_QKV(LLAMA_LAYER "self_attn.qkv_proj", DIM_QKV),              \
        ROW_QKV_BIAS(LLAMA_LAYER "self_attn.qkv_proj", DIM_QKV),         \
        ROW_O(LLAMA_LAYER "self_attn.o_proj"),                           \
        ROW_NORM(LLAMA_LAYER "post_attention_layernorm", mlp_norm),      \
        ROW_UP(LLAMA_LAYER "mlp.gate_up_proj", DIM_GATE_UP), ROW_DOWN(LLAMA_LAYER "mlp.down_proj")
/* Attention over latents with DeepSeek's names: the norm before it, what makes queries
 * and latents, and the tensor that makes keys and values of the heads. */
#define ROW_LATENT_NORM(name, dim, target, when) \
    ROW(name ".weight", dim, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(target.weight), when)
#define ROWS_LATENT_DOWN(layer)                                                                  \
    ROW_NORM(layer "input_layernorm", attn_norm),                                                \
        ROW_MATRIX(layer "self_attn.q_proj", DIM_Q, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_NO_Q_RANK), \
        ROW_MATRIX(layer "self_attn.q_a_proj", DIM_Q_RANK, DIM_HIDDEN, SPLIT_NONE, qkv,          \
                   WHEN_Q_RANK),                                                                 \
        ROW_MATRIX(layer "self_attn.kv_a_proj_with_mqa", DIM_LATENT_KEY, DIM_HIDDEN, SPLIT_NONE, \
                   qkv, WHEN_ALWAYS),                                                            \
        ROW_LATENT_NORM(layer "self_attn.q_a_layernorm", DIM_Q_RANK, q_norm, WHEN_Q_RANK),       \
        ROW_MATRIX(layer "self_attn.q_b_proj", DIM_Q, DIM_Q_RANK, SPLIT_OUT, q_up, WHEN_Q_RANK), \
        ROW_LATENT_NORM(layer "self_attn.kv_a_layernorm", DIM_LATENT, latent.norm, WHEN_ALWAYS)
#define ROWS_LATENT_UP(layer)                                                                 \
    ROW_MATRIX(layer "self_attn.kv_b_proj", DIM_K_UP, DIM_LATENT, SPLIT_OUT, latent.k_up,     \
               WHEN_ALWAYS),                                                                  \
        ROW_MATRIX(layer "self_attn.kv_b_proj", DIM_V_UP, DIM_LATENT, SPLIT_OUT, latent.v_up, \
                   WHEN_ALWAYS)
/* The MLP's: up (or gate and up as one tensor), down; and a gated one with three
 * tensors. */
#define ROW_UP(name, rows) \
    ROW(name ".weight", rows, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(up), WHEN_ALWAYS)
#define ROW_DOWN(name) \
    ROW(name ".weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(down), WHEN_ALWAYS)
#define ROW_UP_BIAS(name) \
    ROW(name ".bias", DIM_MLP, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(up_bias), WHEN_MLP_BIAS)
#define ROW_DOWN_BIAS(name)                                                                 \
    ROW(name ".bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR, IN_LAYER(down_bias), \
        WHEN_MLP_BIAS)
#define ROWS_GATED_MLP(mlp) \
    ROW_UP(mlp "gate_proj", DIM_MLP), ROW_UP(mlp "up_proj", DIM_MLP), ROW_DOWN(mlp "down_proj")

/* Norms of q and k over all heads together. */
#define ROW_WIDE_NORM(name, dim, norm) \
    ROW(name ".weight", dim, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(norm.weight), WHEN_ALWAYS)
#define ROWS_WIDE_NORMS(attn) \
    ROW_WIDE_NORM(attn "q_norm", DIM_Q, q_norm), ROW_WIDE_NORM(attn "k_norm", DIM_KV, k_norm)
/* One matrix of a layer. */
#define ROW_MATRIX(name, rows, cols, split, target, when) \
    ROW(name ".weight", rows, cols, split, WEIGHT_LINEAR, IN_LAYER(target), when)
/* A gated MLP in layers without experts; experts, each a tensor of its own, or all of a
 * layer in one, gate and up one behind the other; an MLP or experts with their router;
 * and an expert that all tokens have. */
#define ROWS_DENSE_MLP(mlp)                                                        \
    ROW_MATRIX(mlp "gate_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),   \
        ROW_MATRIX(mlp "up_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE), \
        ROW_MATRIX(mlp "down_proj", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down, WHEN_DENSE)
#define ROWS_EXPERTS(mlp)                                                                      \
    ROW_MATRIX(mlp "experts.%d.gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, experts.up,      \
               WHEN_EXPERTS),                                                                  \
        ROW_MATRIX(mlp "experts.%d.up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, experts.up,    \
                   WHEN_EXPERTS),                                                              \
        ROW_MATRIX(mlp "experts.%d.down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, experts.down, \
                   WHEN_EXPERTS)
#define ROWS_STACKED_EXPERTS(mlp)                                                              \
    ROW(mlp "experts.gate_up_proj", DIM_STACKED_GATE_UP, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, \
        IN_LAYER(experts.up), WHEN_EXPERTS),                                                   \
        ROW(mlp "experts.down_proj", DIM_STACKED_HIDDEN, DIM_EXPERT, SPLIT_IN, WEIGHT_LINEAR,  \
            IN_LAYER(experts.down), WHEN_EXPERTS)
#define ROW_ROUTER(name) \
    ROW_MATRIX(name, DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, experts.router, WHEN_EXPERTS)
#define ROWS_MLP_OR_EXPERTS(mlp) ROWS_DENSE_MLP(mlp), ROWS_EXPERTS(mlp), ROW_ROUTER(mlp "gate")
#define ROWS_SHARED_EXPERT(name)                                                            \
    ROW_MATRIX(name "gate_proj", DIM_SHARED, DIM_HIDDEN, SPLIT_OUT, experts.shared_up,      \
               WHEN_SHARED),                                                                \
        ROW_MATRIX(name "up_proj", DIM_SHARED, DIM_HIDDEN, SPLIT_OUT, experts.shared_up,    \
                   WHEN_SHARED),                                                            \
        ROW_MATRIX(name "down_proj", DIM_HIDDEN, DIM_SHARED, SPLIT_IN, experts.shared_down, \
                   WHEN_SHARED)
/* Granite's experts, each a tensor of its own (GGUF), or all of a layer in one, gate
 * and up one behind the other; and its shared expert. */
#define GRANITE_MOE LLAMA_LAYER "block_sparse_moe."
#define ROW_GRANITE_ROUTER ROW_ROUTER(GRANITE_MOE "router.layer")
#define ROWS_GRANITE_EXPERTS                                                              \
    ROW_GRANITE_ROUTER,                                                                   \
        ROW_MATRIX(GRANITE_MOE "experts.%d.gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, \
                   experts.up, WHEN_EXPERTS),                                             \
        ROW_MATRIX(GRANITE_MOE "experts.%d.up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT,   \
                   experts.up, WHEN_EXPERTS),                                             \
        ROW_MATRIX(GRANITE_MOE "experts.%d.down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN,  \
                   experts.down, WHEN_EXPERTS)
#define ROWS_GRANITE_STACKED                                                               \
    ROW_GRANITE_ROUTER,                                                                    \
        ROW_MATRIX(GRANITE_MOE "input_linear", DIM_STACKED_GATE_UP, DIM_HIDDEN, SPLIT_OUT, \
                   experts.up, WHEN_EXPERTS),                                              \
        ROW_MATRIX(GRANITE_MOE "output_linear", DIM_STACKED_HIDDEN, DIM_EXPERT, SPLIT_IN,  \
                   experts.down, WHEN_EXPERTS)
#define ROWS_GRANITE_SHARED                                                                      \
    ROW_MATRIX(LLAMA_LAYER "shared_mlp.input_linear", DIM_SHARED_GATE_UP, DIM_HIDDEN, SPLIT_OUT, \
               experts.shared_up, WHEN_SHARED),                                                  \
        ROW_MATRIX(LLAMA_LAYER "shared_mlp.output_linear", DIM_HIDDEN, DIM_SHARED, SPLIT_IN,     \
                   experts.shared_down, WHEN_SHARED)
/* A bias that counts for the choice of experts alone. */
#define ROW_CHOICE_BIAS(mlp)                                                                 \
    ROW(mlp "gate.e_score_correction_bias", DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, \
        IN_LAYER(experts.choice_bias), WHEN_CHOICE_BIAS)

/* Whether a tensor may be one of the model's, or of the draft head's that `c` is of:
 * heads may be in their target's files. */
bool tensor_is_read(const char *name, const struct model_config *c);
/* Whether the head is the embedding where the configuration says so: not if the
 * checkpoint has a head of other values beside it, as with transformers. */
bool transformer_is_tied(const struct model_family *f, const struct checkpoint *c);
/* Check a checkpoint against the family's table. The error names all tensors that are
 * missing, unknown, or of another shape or type. */
int transformer_check(const struct model_family *f, const struct model_config *c,
                      const struct checkpoint *checkpoint, struct err *e);
/* Make m->weights on m->backend from m->checkpoint, which was checked; NULL: dummy
 * weights. */
int transformer_load(struct model *m, struct err *e);
void transformer_free(struct transformer *t);

/* A range of an axis: [first, first + n). */
struct axis_range {
    int32_t first, n;
};
/* recurrent.c: the size of an axis of a recurrent layer or of gated q; -1: it is
 * another. */
int64_t recurrent_dim_size(enum tensor_dim dim, const struct model_config *c);
/* The ranges of such an axis that this rank holds, into ret[LIMIT_HEADS]; returns their
 * number. */
int32_t recurrent_ranges(const struct model *m, enum tensor_dim dim, bool split,
                         struct axis_range *ret);
/* The most ranges that recurrent_ranges gives for the model. */
int32_t recurrent_most_ranges(const struct model_config *c);
/* Set what the layer's recurrence has besides weights. */
void transformer_set_recurrence(const struct model *m, struct layer *l, int32_t group,
                                int32_t index);
/* y = the recurrent layer's mixer of h [n_tokens, hidden]. */
void transformer_mix(struct model *m, const struct layer *l, struct mat y, struct mat h);
/* y = attention of h [n_tokens, hidden], gated if the model's is: that of models with
 * recurrent layers beside it. */
void transformer_attend(struct model *m, const struct layer *l, struct mat y, struct mat h);

/* After the last attention only tokens that have logits are needed: of a prefill, few.
 * Sets x and attn to the gathered rows of n tokens, and y to memory of their size.
 * `free`: memory that is not needed any more, at least as wide as attn. */
void transformer_gather_rows(struct model *m, int32_t n, struct mat *x, struct mat *y,
                             struct mat *attn, struct mat free);
/* out = norm of y. Partial sums are first added over the ranks, because the norm is not
 * linear. */
void transformer_post_norm(struct model *m, struct mat out, struct mat y, const struct norm *n);
/* y = the layer's MLP, or its experts, of h [rows, hidden]; gated. */
void transformer_mlp(struct model *m, const struct layer *l, struct mat y, struct mat h);
/* The same of an MLP without a gate: y = down (act(u) * u), or down xielu(u), u = up h;
 * with `add`, y is added to. */
void transformer_ungated_mlp(struct model *m, const struct layer *l, struct mat y, struct mat h,
                             bool add);
/* Whether the backend gets the blocks of tensor t (NULL: a dummy), not its values. */
bool tensor_stays_in_blocks(const struct model *m, const struct tensor_spec *s,
                            const struct tensor *t);
/* The same where the MLP of an expert is so wide on a rank. */
bool tensor_stays_at_width(const struct model *m, const struct tensor_spec *s,
                           const struct tensor *t, int32_t expert_width);
/* The same of the whole tensor: what one rank would get. */
bool tensor_stays_on_one_rank(const struct model *m, const struct tensor_spec *s,
                              const struct tensor *t);

/* ---- quantising while loading (quantise.c) ---- */

/* A weight's codes and what belongs to them, until the backend has its own copy. */
struct quantised {
    uint8_t *codes;            /* owned, [rows, cols] as struct weight_scales says */
    void *scale;               /* owned; its type depends on the format */
    uint8_t *zero;             /* owned; NULL: none */
    float *values;             /* owned; NULL: the backend takes codes */
    struct weight_piece piece; /* the weight, in place of its pieces of floats */
};
/* Whether weights of this row of the table, of so many columns, are to be quantised. */
bool model_quantises(const struct model *m, const struct tensor_spec *s, int32_t cols);
/* The same of one rank, which holds all columns of an expert's MLP. */
bool model_quantises_on_one_rank(const struct model *m, const struct tensor_spec *s, int32_t cols);
/* The same where the MLP of an expert is so wide on a rank. */
bool model_quantises_at_width(const struct model *m, const struct tensor_spec *s, int32_t cols,
                              int32_t expert_width);
/* Whether the tensors are the matrices of experts. */
bool tensor_spec_of_expert(const struct tensor_spec *s);
/* Whether the backend multiplies the model's experts, `width` columns of the MLP of
 * each, in this format; group_cols: columns that share a scale apart from the codes, 0:
 * all of them. */
bool model_keeps_expert_format(const struct model *m, const struct weight_format *f,
                               int32_t group_cols, int32_t width);
/* The same of dummies in the format that the directory says its experts have. */
bool model_keeps_dummy_format(const struct model *m, int32_t width);
/* Quantises the weight: its pieces are replaced by q->piece, which points into q.
 * Pieces in a format of their own stay; a dummy gets its format. */
int quantised_init(struct quantised *q, const struct model *m, struct weight_desc *d,
                   struct err *e);
void quantised_release(struct quantised *q);

/* Count a tensor of row s that was loaded, for model_log_formats. */
void model_count_format(const struct model *m, const struct tensor_spec *s,
                        const struct tensor *tensor, bool as_stored);
/* Note how a tensor in blocks or codes is multiplied, which begins at row `row` of the
 * weight w; quantised: while it was loaded. */
void model_note_use(const struct model *m, const struct weight_format *f, bool quantised,
                    struct mat w, int32_t row);

/* The norms of q and of k over all of their heads together, in place, if the layer has
 * them. qkv [rows, (n_heads + 2 n_kv_heads) * head_dim]. */
void transformer_norm_heads(struct model *m, const struct layer *l, struct mat qkv);
/* A matrix whose rows are normed together with their columns on the other ranks. */
struct norm_part {
    struct mat x;
    const struct norm *norm; /* NORM_RMS; its weight is of the columns of x */
};
/* Norm the n parts in place, at most two, of equally many rows; every rank has columns
 * of all of them, equally many. */
void transformer_norm_parts(struct model *m, const struct norm_part *part, int32_t n);
/* out = the layer's recurrence over x and gates (backend_ops.recurrence), normed and
 * gated by z of out's shape. */
void transformer_recur(struct model *m, const struct layer *l, struct mat out, struct mat x,
                       struct mat gates, struct mat z);
/* The beginning of the stage's layers: x = the embeddings, on the first stage, and h =
 * the first layer's norm of x. */
void transformer_begin(struct model *m, struct mat x, struct mat h);
/* The end of layer i of this stage: x += y, and h = the next layer's or the final norm
 * of x. h is left alone where no norm follows or the next stage has it. `partial` as in
 * backend_ops.add_norm. */
void transformer_end_layer(struct model *m, int32_t i, struct mat h, struct mat x, struct mat y,
                           bool partial);
/* out [n_tokens, embed_dim] = the step's embeddings, times `scale`. */
void transformer_embed(struct model *m, struct mat out, float scale);
/* logits [rows, vocab] = x [rows, embed_dim] times the output head, soft-capped if the
 * model's are; with several ranks complete on the rank that samples. */
void transformer_head(struct model *m, struct mat logits, struct mat x);

/* The stored shape of a tensor: [rows, cols]; cols is 1 if it has one axis. */
void tensor_spec_shape(const struct tensor_spec *s, const struct model_config *c, int64_t *ret_rows,
                       int64_t *ret_cols);
/* Whether a layer of a model of this configuration has the tensor (s->when); of a
 * tensor outside the layers, whether the model has it. */
bool tensor_spec_wanted(const struct tensor_spec *s, const struct model_config *c, int32_t layer);
/* How many indices the name has: 0, 1 (the layer) or 2 (the layer and the expert). */
int32_t tensor_spec_indices(const struct tensor_spec *s);
/* Tensors that the spec stands for in one layer: 1, or one an expert. */
int32_t tensor_spec_count(const struct tensor_spec *s, const struct model_config *c);
/* Whether one tensor holds all experts of a layer. */
bool tensor_spec_stacked(const struct tensor_spec *s);
/* Values of a stacked tensor for each of the spec's: 2 where gate and up are stored in
 * turn. */
int32_t tensor_spec_step(const struct tensor_spec *s);
enum { TENSOR_NAME_BYTES = 256 };
/* Which tensor of those that a spec stands for; indices that its name does not have are
 * not read. */
struct tensor_index {
    int32_t layer, expert; /* below 0: any, '*' in a name */
};
/* The tensor's name, into ret[TENSOR_NAME_BYTES]. */
void tensor_spec_name(const struct tensor_spec *s, struct tensor_index at, char *ret);
/* The tensor, by its full name or without the leading "model." or "transformer."; NULL
 * if it is absent. */
const struct tensor *tensor_spec_find(const struct tensor_spec *s, const struct checkpoint *c,
                                      struct tensor_index at);

/* Columns of a rotation table: rot_dim, or more with factors of queries. */
int32_t rope_table_cols(const struct rope_config *r);
/* Begin the rotation table of positions [0, n_positions): out [n_positions,
 * rope_table_cols], borrowed, in each row rot_dim / 2 cosines, then as many sines, then
 * the factor of queries if there is one. No row is written. */
void rope_table_init(struct rope_table *t, float *out, const struct rope_config *r,
                     int32_t n_positions);
/* Write the rows of positions below n that are not written yet; as table_rows.reach of
 * backend.h. */
void rope_table_reach(void *table, int32_t n);

#endif
