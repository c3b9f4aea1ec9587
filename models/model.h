/* A model: its configuration, its weights on a backend, and its forward pass.
 *
 * A family (models/families/) is a table of tensors and a straight-line `forward`, its
 * own or another family's; llama.c is the one to read first. registry.c lists the
 * families; each names the architectures of config.json that it computes.
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
    ROPE_LONGROPE,
    ROPE_PROPORTIONAL /* `share` of the pairs turn, the others stand still */
};

/* Rotary positions (config.json: rope_theta, rope_scaling; transformers 5:
 * rope_parameters). */
struct rope_config {
    enum rope_scaling kind;
    double theta;               /* base of the frequencies */
    double factor;              /* by which the context is extended */
    int32_t rot_dim;            /* leading dimensions of a head that rotate; 0: no rotation */
    int32_t original_positions; /* longest context before scaling */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn: rotations at the ends of the ramp */
    double mscale, mscale_all_dim;            /* yarn; 0: not given */
    double attention_factor;                  /* yarn, longrope; 0: derived */
    double share;                             /* proportional */
    /* queries are multiplied by 1 + query_beta * ln(1 + floor((position +
     * query_offset) / original_positions)); 0: they are not */
    double query_beta;
    int32_t query_offset;
    bool truncate; /* yarn: the ramp's ends are whole pairs */
    /* longrope, [rot_dim / 2]: divide the frequencies, for contexts up to
     * original_positions and beyond */
    float short_factor[LIMIT_HEAD_DIM / 2], long_factor[LIMIT_HEAD_DIM / 2];
};

/* Layers of experts (mixture of experts, Shazeer et al. 2017): n MLPs, of which each
 * token goes through those that its router scores highest. */
struct expert_config {
    int32_t n;                   /* experts of a layer; 0: the model has none */
    int32_t top;                 /* that a token goes through */
    int32_t intermediate;        /* width of an expert's MLP */
    int32_t shared_intermediate; /* width of the MLP that all tokens go through; 0: none */
    bool normalised;             /* the weights of a token's experts sum to 1 */
    float swiglu_limit;          /* of gpt-oss's experts; 0: none */
    enum expert_scores scores;
    float mixer_jitter; /* of SCORES_MIXER, as in struct experts */
    bool choice_bias;   /* the choice has a bias of its own */
    int32_t latent;     /* width of what experts read and make, if not hidden's; else 0 */
    bool self_gated;    /* an expert has no gate: act(u) * u, where u is what up makes */
    bool scaled_inputs; /* of the one expert of a token, by its router's sigmoid; weights are 1 */
    bool gate_copied;   /* and the weights of up stand for the gate's too (model_open) */
    bool groups_by_two; /* as in struct experts */
    int32_t n_groups, top_groups; /* as in struct experts; 0: no groups */
    float factor;                 /* of the weights: routed_scaling_factor, or 1 */
    bool layer[LIMIT_LAYERS];     /* [n_layers] the layer has experts in place of its MLP */
};

/* Multi-head latent attention (DeepSeek-V2, section 2.1): sizes of the whole model. */
struct latent_config {
    int32_t rank;            /* of the latent (kv_lora_rank); 0: the model has none */
    int32_t q_rank;          /* of the queries' own latent (q_lora_rank); 0: they have none */
    int32_t rot_dim;         /* of a head's rotated part (qk_rope_head_dim) */
    int32_t nope_dim, v_dim; /* of its other part and of its value */
};

/* Factors of parts of a layer (Falcon-H1): of what the recurrence gets, of what it and
 * attention make, of the MLP's gate and of what it makes. */
enum layer_factor {
    FACTOR_Z,
    FACTOR_V,
    FACTOR_K,
    FACTOR_Q,
    FACTOR_STEP,
    FACTOR_STATES,
    FACTOR_ATTENTION,
    FACTOR_GATE,
    FACTOR_DOWN,
    LAYER_FACTORS
};

/* Layers with a recurrent state in place of keys and values (backend.h's struct
 * recurrence). */
struct recurrent_config {
    enum recurrence_kind kind;
    int32_t n_heads, n_groups, key_dim, value_dim, kernel; /* n_heads 0: the model has none */
    int32_t step_rank;    /* of Mamba-1: width of what the steps of the channels come from */
    bool conv_bias;       /* its convolution has a bias */
    bool tiled;           /* as in struct recurrence */
    float dt_min, dt_max; /* of Mamba-2's steps */
    float norm_eps;       /* of the gated norm */
    bool normed;          /* its output has a gated norm; else a gate alone */
    bool gate_first;      /* as in struct gated_norm */
    bool beside;          /* all layers are recurrent and have attention beside that (Falcon-H1) */
    bool layer[LIMIT_LAYERS]; /* [n_layers] the layer is recurrent */
};
/* Sizes of a rank's part of a recurrent layer, and its kind; the rest is 0. */
struct recurrence model_recurrence(const struct recurrent_config *c, int32_t n_ranks);
/* Check that n ranks can divide recurrent layers: whole heads, and whole groups, or
 * groups that several ranks hold alike. */
int model_check_recurrence(const struct recurrent_config *c, int32_t n, struct err *e);
/* Whether the norm of a recurrence's output runs over heads of several ranks. */
bool model_shares_mixer_norm(const struct recurrent_config *c, int32_t n_ranks);

/* Heads that draft tokens from hidden states of the model they belong to, its
 * target. */
enum head_kind {
    HEAD_NONE,   /* a model of its own */
    HEAD_MTP,    /* a layer behind the target's last (DeepSeek-V3, section 2.2) */
    HEAD_EAGLE3, /* EAGLE-3 (Li et al. 2025) */
};
struct head_config {
    enum head_kind kind;
    int32_t layer; /* number of its layer in the names of the checkpoint's tensors (MTP) */
    /* Its tensors have names of their own (Qwen's MTP); drafts go on from its last
     * norm, not from what it norms. */
    bool named, normed;
    /* Of EAGLE-3: layers whose hidden states it reads, as in struct model_taps, -1: the
     * usual three; ids that it can draft, 0: all; whether its residual stream begins
     * with the normed input; the width of the target's hidden states, 0: its own. */
    int32_t n_taps, tap[LIMIT_TAPS];
    int32_t draft_vocab;
    bool norm_before_residual;
    int32_t target_hidden;
    /* It drafts all tokens in one step (P-EAGLE, arXiv 2602.01469): behind the known
     * ones stand mask_token and one hidden state, learned, that stands for all. */
    bool parallel;
    int32_t mask_token;
};
/* What a model keeps of its tokens' hidden states, for a head. */
struct model_taps {
    int32_t n; /* layers; 0: nothing is kept, unless `final` */
    /* [n] the residual stream in front of layer tap[i], counted from 0; n_layers:
     * behind the last */
    int32_t tap[LIMIT_TAPS];
    bool final; /* in their place the output of the final norm */
};

/* config.json, checked, in either style: rope_theta/rope_scaling/torch_dtype, or
 * transformers 5's rope_parameters/dtype. */
struct model_config {
    char architecture[64]; /* architectures[0], e.g. LlamaForCausalLM */
    /* Of the whole model; intermediate is the width of the MLP. */
    int32_t hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, vocab;
    /* Of layers without a window, where theirs differ from the others (Gemma-4); 0:
     * they do not. */
    int32_t full_head_dim, full_kv_heads;
    bool keys_are_values; /* these layers have one tensor for keys and values */
    /* Layers from this one on read the keys and values of the last layer of their kind
     * before it; n_layers: all have their own. */
    int32_t sharing_from;
    bool wide_mlp;                /* these have MLPs of twice the width */
    int32_t layer_input;          /* width of the embeddings that each layer has; 0: none */
    int32_t embed_dim;            /* width of the embedding: hidden, except in OPT-350m */
    int32_t max_positions;        /* longest context, RoPE scaling included */
    int32_t sliding_window;       /* tokens, in the layers that have one; 0: none has */
    bool chunked;                 /* in place of windows these layers have chunks of so many */
    bool windowed[LIMIT_LAYERS];  /* [n_layers] the layer has the sliding window */
    bool unrotated[LIMIT_LAYERS]; /* [n_layers] the layer rotates nothing (NoPE) */
    /* queries of these are multiplied by 1 + unrotated_beta * ln(1 + floor((position +
     * 1) / unrotated_span)); 0: they are not */
    double unrotated_beta;
    int32_t unrotated_span;
    /* [n_layers] the layer is an MLP or experts and has neither attention nor a state
     * (Nemotron-H) */
    bool mlp_alone[LIMIT_LAYERS];
    enum dtype dtype; /* of the stored weights */

    enum norm_kind norm; /* of all norms */
    float norm_eps;      /* added to the variance */
    float norm_offset;   /* added to the weights of norms: 1 for Gemma */
    float embed_scale;   /* factor of the embeddings: 1, or Gemma's sqrt(hidden) */
    bool norm_before;    /* norms precede attention and MLP; false: they follow (OPT-350m) */
    bool final_norm;     /* the last layer is followed by a norm */
    enum activation act; /* of the MLP */
    bool tied;           /* the output head is the embedding */
    bool qkv_bias, o_bias, mlp_bias; /* these products have a bias */
    bool head_bias;                  /* logits have one */
    bool parallel;                   /* attention and MLP both read what is in front of the layer */
    bool qk_norm;                    /* q and k are normed per head */
    bool norm_last;                  /* behind the rotation */
    bool plain_qk_norm;              /* without weights, in layers that rotate */
    bool ungated_mlp;                /* MLPs have no gate: act(u) * u, where u is what up makes */
    bool xielu;                      /* but xielu(u) (backend.h), with factors of each layer */
    float attn_softcap, final_softcap; /* of attention scores and of logits; 0: none */
    float query_scalar; /* scores are divided by its root: head_dim, or Gemma-2's setting */
    /* of the logits (Cohere's logit_scale, Granite's 1 / logits_scaling); the final
     * norm's weights carry it */
    float logit_scale;
    bool scale_by_layer; /* scores are divided by the layer's number, from 1 (GPT-2) */
    struct rope_config rope;
    double window_theta;   /* of windowed layers, unscaled; 0: they rotate as the others */
    bool rope_interleaved; /* pairs (2i, 2i+1) are rotated */
    struct expert_config experts;
    struct recurrent_config recurrent;
    float factor[LAYER_FACTORS]; /* only with recurrent.beside */
    bool gated_attention;        /* attention's output is gated, by gates beside q */
    /* with a rank: head_dim is of queries with their rotated part, n_kv_heads is 1 */
    struct latent_config latent;
    int32_t n_draft_layers;  /* behind the last layer in the checkpoint, for drafts (MTP) */
    struct head_config head; /* of a head; kind HEAD_NONE: it is none */
    bool wide_qk_norm;       /* q and k are normed over all heads together (OLMo-2) */
    bool wrapped;            /* the text model of a vision checkpoint: its tensors have a prefix */
    int32_t bos, eos[LIMIT_EOS_IDS], n_eos; /* bos -1: none; generation_config.json's ids win */
    int64_t n_parameters;                   /* of this rank and stage; set by model_open */
};

/* generation_config.json: the sampling defaults of requests. */
struct generation_defaults {
    float temperature, top_p, min_p, repetition_penalty; /* NaN: not given */
    int32_t top_k;                                       /* -1: not given, or off */
};

/* Read the configuration of `dir`, a Hugging Face directory or a GGUF file. */
int model_config_read(struct model_config *ret, struct generation_defaults *ret_gen,
                      const char *dir, struct err *e);

struct model_options {
    enum dtype dtype; /* of weights on the device */
    bool dummy;       /* load_format: dummy */
    /* to which weights of linear layers are quantised, one of FORMAT_FP8 .. FORMAT_FP4;
     * NULL: not */
    const struct weight_format *quantise;
    int32_t quantise_group;  /* columns that share a scale; 0: all of a row */
    bool quantise_zeros;     /* with zero points (FORMAT_INT8, FORMAT_INT4) */
    int32_t max_tokens;      /* of a step */
    int32_t max_logits;      /* rows of logits computed at once */
    int32_t max_len;         /* positions of the rotation table */
    int32_t rank, n_ranks;   /* of tensor parallelism */
    int32_t stage, n_stages; /* of pipeline parallelism */
    bool expert_parallel;    /* a rank has whole experts, in place of a slice of each */
    /* model_open sets the former where slices would be refused or slower kernels' */
    bool expert_parallel_auto;
    bool fp8_cache;         /* keys and values are cached as e4m3, by the checkpoint's scales */
    bool one_kv_group;      /* all layers are in one KV group, whatever their windows */
    struct model_taps taps; /* hidden states that are kept for a draft head */
};

/* In place of a window: the group holds recurrent states. */
enum { MODEL_KV_STATES = -1 };

/* The KV groups of a model, on one pipeline stage. */
struct model_kv_groups {
    int32_t n;          /* groups; 1: all layers are in one, which never gives blocks back */
    int32_t n_full;     /* of several, those without a window, which come first */
    int32_t n_windowed; /* and those with one, which come next; then those of states */
    int32_t n_layers;   /* places for layers in a block of any group */
    int32_t window[LIMIT_KV_GROUPS]; /* [n] tokens seen, 0: all, or MODEL_KV_STATES */
};
void model_kv_groups(struct model_kv_groups *ret, const struct model_config *c,
                     const struct model_options *o);
/* Tokens of a block whose keys and values, of the type `kv`, take as much memory as a
 * recurrent state, so that both fill their blocks; 1 without states. */
int32_t model_state_tokens(const struct model_config *c, int32_t n_ranks, enum dtype kv);
/* The layout of each group's blocks, ret[n], with keys and values of the type `kv`. */
void model_kv_layouts(struct kv_layout *ret, const struct model_config *c,
                      const struct model_options *o, int32_t block_size, enum dtype kv);
/* The group of a layer, and its place in the group's blocks, of its recurrence
 * (`state`) or of its attention. `first`: the first layer of the stage. */
void model_kv_place(const struct model_kv_groups *g, const struct model_config *c, int32_t first,
                    int32_t layer, bool state, int32_t *ret_group, int32_t *ret_index);

struct checkpoint; /* weights.h: the tensors of a checkpoint by name */

struct model {
    struct model_config config;        /* with n_parameters */
    const struct model_family *family; /* that the architecture belongs to */
    struct backend *backend;           /* not owned; freed before the model */
    struct model_options options;
    /* owned, mapped while the model lives: a backend may read weights in place; NULL:
     * dummy weights */
    struct checkpoint *checkpoint;
    const struct weight_format *expert_format; /* of dummy weights of experts; NULL: floats */
    struct transformer *weights;               /* owned; layers.h */

    /* Of the last pipeline stage. */
    struct mat hidden;       /* [max_tokens, embed_dim] after the final norm; see model_gathers */
    struct mat head;         /* [ids of this rank, embed_dim] */
    struct mat logits;       /* [max_logits, vocab], float32 */
    struct mat local_logits; /* [max_logits, ids of this rank], float32; only if n_ranks > 1 */
    struct mat gathered;     /* [max_logits, embed_dim] rows of hidden that have logits */
};

/* One name in config.json's "architectures", and the defaults of what the file may
 * omit; fields as in struct model_config. */
struct architecture {
    const char *name;   /* NULL ends a table */
    const char *models; /* what people call them: "Qwen2, Qwen2.5" */
    enum norm_kind norm;
    float norm_eps; /* default */
    enum activation act;
    double rope_theta;               /* default; 0: learned positions, no rotation */
    bool tied;                       /* default */
    bool qkv_bias, o_bias, mlp_bias; /* defaults */
    bool qk_norm;                    /* q and k are normed per head */
    int32_t sliding_window;          /* default; 0: none */
    bool windows;                    /* sliding_window is heeded; so it is with any of the next */
    bool window_switch;              /* the window counts only with use_sliding_window */
    bool window_listed;              /* or only in layers that layer_types names */
    int32_t window_pattern;          /* every so many layers one has no window; 0: no pattern */
    bool full_layers_first;          /* of so many layers that is the first, else the last */
    double window_theta;             /* default of windowed layers; 0: as the others */
    double rope_partial;             /* default share of a head that rotates; 0: all of it */
    bool rope_interleaved;
    int32_t unrotated_pattern; /* every so many layers one rotates nothing; 0: none */
    bool bias_apart;           /* attention_bias is of q, k and v alone, attention_out_bias of o */
    bool gemma;                /* norm weights are 1 + w, embeddings are scaled by sqrt(hidden) */
    bool experts;              /* its layers have experts */
    bool normalises_experts;   /* default of expert_config.normalised */
    bool latent;               /* attention is over latents */
    /* experts are chosen as in DeepSeek-V3: by sigmoid scores and a bias, from groups
     * that are ranked by their two best */
    bool sigmoid_experts;
    bool wide_qk_norm;    /* as in struct model_config */
    bool windows_rotate;  /* if any layer has a window, those without one rotate nothing */
    bool wrapper;         /* config.json has the text model's in its text_config */
    float logit_scale;    /* default; 0: 1 */
    int32_t dense_layers; /* default: so many layers from the first on have no experts */
    int32_t n_shared;     /* default: experts that all tokens have, each as wide as the others */
    float swiglu_limit;   /* default of expert_config.swiglu_limit */
    bool qk_norm_switch;  /* use_qk_norm tells whether q and k are normed */
    bool norm_from_one;   /* norm weights are 1 + w */
    bool gated_attention;
    bool delta, ssd, conv, scan;  /* its recurrent layers are of this kind */
    bool granite;                 /* an MLP called shared; rotates only where told to */
    bool clova;                   /* logits_scaling is a factor, not a divisor */
    int32_t full_attention_every; /* default: every so many layers one is not recurrent */
    bool optional_experts;        /* some of its models have none */
    bool gemma4;
    bool llama4;
    bool choice_bias;      /* experts are chosen with a bias, whatever their scores are */
    bool falcon;           /* a recurrence beside attention in every layer, with factors */
    bool nemotron;         /* a layer is one of a recurrence, attention, an MLP and experts */
    bool ungated_mlp;      /* as in struct model_config */
    bool xielu;            /* likewise; with ungated_mlp */
    bool norm_last;        /* as in struct model_config */
    bool head_bias;        /* default */
    bool parallel;         /* default; others have their MLP behind attention */
    bool multi_query;      /* default: there is one key/value head */
    bool mixer_experts;    /* experts are chosen by SCORES_MIXER */
    int32_t max_positions; /* default; 0: the file must say */
};

struct tensor_spec; /* layers.h */

/* A family of architectures: its tensors and its forward pass. */
struct model_family {
    const struct architecture *architectures; /* ends with a NULL name */
    const struct tensor_spec *tensors;        /* ends with a NULL name */
    /* In its place for checkpoints that store the same weights otherwise, as all
     * experts of a layer in one tensor: those with a tensor whose name ends in the
     * variant's `marker`. NULL: there is no other. */
    const struct model_family *variant;
    const char *marker;         /* of a variant */
    const char *const *ignored; /* endings of tensor names that are not used; NULL-terminated */
    /* Enqueue the whole stack for the current batch: tokens in, model->hidden
     * [n_tokens, embed_dim] out, normed. Each stage of a pipeline computes its layers:
     * all but the first read the residual stream from weights->x [n_tokens, hidden],
     * all but the last leave it there. */
    void (*forward)(struct model *m, const struct batch *b);
    /* If only some tokens have logits, forward goes on with those alone after the last
     * layer's attention and leaves hidden as [n_logits, embed_dim]. */
    bool gathers;
};

/* Checkpoints whose text model is another architecture's (families/wrappers.c). */
struct wrapper {
    const char *name;   /* architectures[0]; NULL ends the table */
    const char *models; /* what people call them */
};
extern const struct wrapper model_wrappers[];
/* Whether the name is one of them. */
bool model_is_wrapper(const char *name);

/* A text model inside: its architecture, and the sizes of a text_config that leaves
 * them out; 0: it may not. */
struct wrapped_text {
    const char *type; /* model_type */
    const char *architecture;
    int32_t hidden, intermediate, layers, heads, kv_heads, vocab, positions;
};
/* The text model of a model_type; NULL: unknown. */
const struct wrapped_text *model_wrapped_text(const char *type);

/* All families, NULL-terminated; the refusal of an unknown architecture lists them. */
extern const struct model_family *const model_families[];
/* The family of the architecture `name`, which *ret then is; NULL: unknown. */
const struct model_family *model_family_find(const char *name, const struct architecture **ret);
/* f or the variant of it that has the checkpoint's tensors. */
const struct model_family *model_family_stored(const struct model_family *f,
                                               const struct checkpoint *c,
                                               const struct model_config *config);
/* Sizes of a layer's heads, of the whole model. */
static inline bool model_is_full(const struct model_config *c, int32_t layer)
{
    return c->full_head_dim > 0 && !c->windowed[layer];
}
static inline int32_t model_head_dim(const struct model_config *c, int32_t layer)
{
    return model_is_full(c, layer) ? c->full_head_dim : c->head_dim;
}
/* Whether a layer has attention. */
static inline bool model_attends(const struct model_config *c, int32_t layer)
{
    return !c->mlp_alone[layer] && (!c->recurrent.layer[layer] || c->recurrent.beside);
}
/* Width of what the experts of the model read and make. */
static inline int32_t model_expert_width(const struct model_config *c)
{
    return c->experts.latent > 0 ? c->experts.latent : c->hidden;
}
/* Key/value heads in the cache of one rank: at least one, so with more ranks than heads
 * several ranks hold the same head. */
int32_t model_n_kv_heads(const struct model_config *c, int32_t n_ranks);
/* The same of layers without a window, where theirs differ. */
int32_t model_full_kv_heads(const struct model_config *c, int32_t n_ranks);
/* Check that the model can be divided among n tensor-parallel ranks: whole heads, equal
 * slices of the MLP, a part of the vocabulary for each; with `by_expert` equally many
 * experts. */
int model_check_ranks(const struct model_config *c, int32_t n, bool by_expert, struct err *e);
/* Whether norms of the model, divided among n ranks, run over columns of several of
 * them: those of queries and keys over all heads, and model_shares_mixer_norm. Not all
 * backends compute them. */
bool model_norms_over_ranks(const struct model_config *c, int32_t n);
/* Check that each of n pipeline stages has a layer. */
int model_check_stages(const struct model_config *c, int32_t n, struct err *e);
/* The first layer of a stage; for stage n_stages the number of layers. If the layers do
 * not divide evenly, early stages hold one more, because the last one has the head.
 * Layers that read the keys and values of others are on the last stage with those. */
int32_t model_first_layer(const struct model_config *c, int32_t stage, int32_t n_stages);

/* Map the weights and load them onto the backend. The backend may read them in the
 * mapped files for as long as it lives, so the model is freed after it. The error names
 * all tensors that are missing, unknown, or of another shape or type. */
int model_open(struct model **ret, const char *dir, const struct model_config *c,
               const struct model_options *o, struct backend *backend, struct err *e);
void model_free(struct model *m);
/* One line of the log: which kernel serves the tensors of each stored format, and which
 * were decoded because none does. Nothing with dummy weights. */
void model_log_formats(const struct model *m);
/* Lines of the log of the first rank, where there is something to say of a model with
 * experts: that ranks hold whole ones by themselves, that slices are slow, or that a
 * slow kernel multiplies them. */
void model_log_experts(const struct model *m);
/* A hash of the configuration and of the tensors' names, types and shapes: equal on all
 * ranks of a model. */
uint64_t model_digest(const struct model *m);
static inline bool model_is_last(const struct model *m)
{
    return m->options.stage == m->options.n_stages - 1;
}
/* Whether row i of hidden belongs to logits row i, not to token i. */
bool model_gathers(const struct model *m, const struct batch *b);
/* ---- draft heads (heads/) ---- */

/* The configuration of the MTP head in a checkpoint whose model is `c`.
 * ERR_UNSUPPORTED: it has none, or one that is not known. */
int model_mtp_config(struct model_config *ret, const struct model_config *c, struct err *e);
/* Fit the configuration of an EAGLE-3 head to its target `c`. ERR_INVALID: they do not
 * belong together, and why. */
int model_eagle3_fit(struct model_config *head, const struct model_config *c, struct err *e);
/* What the target must keep for a head, and how many elements of a token that are. */
struct model_taps model_head_taps(const struct model_config *head);
int32_t model_taps_width(const struct model_taps *t, const struct model_config *c);
/* Let a head read the hidden states of `target`, and share its embedding and, if it has
 * none of its own, its output head. Both are on backends of one kind, and the target
 * has its cache. */
int model_head_bind(struct model *head, const struct model *target, struct err *e);

/* Compute one step, between the backend's step_begin and step_end: the forward pass,
 * then head and sampling in chunks of max_logits rows; of a pipeline, this stage's part
 * of it. */
void model_step(struct model *m, const struct batch *b);

#endif
