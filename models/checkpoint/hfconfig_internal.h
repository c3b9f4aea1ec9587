/* Between the two passes of reading a configuration: hfconfig.c reads the files,
 * hfconfig_derive.c makes a model_config of their values. */
#ifndef QUIRE_MODELS_CHECKPOINT_HFCONFIG_INTERNAL_H
#define QUIRE_MODELS_CHECKPOINT_HFCONFIG_INTERNAL_H

#include "config/base/json.h"
#include "models/model.h"

/* What the configuration of an EAGLE-3 head has besides a model's. */
struct raw_eagle {
    bool is, speculators;               /* it is one; in the format of vLLM's speculators */
    int32_t draft_vocab, target_hidden; /* draft_vocab_size, target_hidden_size; 0: none */
    /* eagle_aux_hidden_state_layer_ids; n_taps -1: not given */
    int32_t n_taps, tap[LIMIT_TAPS];
    int8_t norm_before_residual; /* 0, 1, or -1: not given */
    bool parallel;               /* it drafts in one step (P-EAGLE) */
    int32_t mask_token;          /* pard_token, ptd_token_id or mask_token_id; -1: not given */
    const char *unknown;         /* a member that is set and changes what it computes; or NULL */
};

/* The model_type in what the GGUF reader writes as config.json. */
#define RAW_TYPE_GGUF "gguf"

/* The values of config.json under the keys in hfconfig.c's tables. A key that is absent
 * or null leaves -1 in a number or flag, NAN in a real and "" in a text. */
struct raw_config {
    /* Texts: architectures[0], hidden_act, dtype or torch_dtype, rope_type. */
    char architecture[64], act[32], dtype[16], rope_type[16];
    char scoring[16], choice[24]; /* scoring_func, topk_method: of experts */
    char both_ways[16];           /* use_bidirectional_attention */
    char mlp_act[32];             /* mlp_hidden_act */
    char state_act[32];           /* mamba_hidden_act */
    char type[32];                /* model_type */

    /* Sizes, as in struct model_config; window is sliding_window. */
    int32_t hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, vocab, embed_dim,
        max_positions, window;
    /* Of Gemma-4: global_head_dim and num_global_key_value_heads, of layers without a
     * window; num_kv_shared_layers; hidden_size_per_layer_input and
     * vocab_size_per_layer_input. */
    int32_t full_head_dim, full_kv_heads, sharing_layers, layer_input, layer_vocab;
    int32_t window_from_layer; /* max_window_layers: earlier layers have no window */
    /* Of Llama 4: attention_chunk_size, floor_scale, and intermediate_size_mlp, which
     * is of layers without experts. */
    int32_t chunk, unrotated_span, dense_intermediate;
    int32_t window_pattern;    /* sliding_window_pattern */
    int32_t unrotated_pattern; /* no_rope_layer_interval */
    int32_t bos;               /* bos_token_id */
    /* Of experts: num_experts or num_local_experts, num_experts_per_tok,
     * moe_intermediate_size, shared_expert_intermediate_size; decoder_sparse_step:
     * every so many layers have experts. */
    int32_t n_experts, top_experts, expert_intermediate, shared_intermediate, sparse_step;
    int32_t expert_latent; /* moe_latent_size */
    int32_t state_inner;   /* mamba_d_ssm: the values of all heads */
    /* Of recurrent layers: linear_num_value_heads or mamba_n_heads,
     * linear_num_key_heads or mamba_n_groups, linear_key_head_dim or mamba_d_state,
     * linear_value_head_dim or mamba_d_head, linear_conv_kernel_dim or mamba_d_conv,
     * mamba_expand; full_attention_interval: every so many layers one has attention. */
    int32_t state_heads, state_groups, state_key_dim, state_value_dim, state_kernel, state_expand,
        attention_every;
    /* Of Jamba: mamba_dt_rank; attn_layer_period and attn_layer_offset: every so many
     * layers one has attention; expert_layer_period and expert_layer_offset. */
    int32_t step_rank, attention_period, attention_offset, expert_period, expert_offset;
    /* n_shared_experts (each as wide as an expert), n_group, topk_group;
     * first_k_dense_replace and moe_layer_freq: which layers have experts. */
    int32_t n_shared, n_groups, top_groups, dense_layers, expert_interval;
    int32_t last_expert_layer; /* moe_layer_end_index: later ones are dense */
    int32_t rotary_dim;        /* of a head, in place of partial_rotary_factor */
    /* Of latents: kv_lora_rank, q_lora_rank, qk_rope_head_dim, qk_nope_head_dim,
     * v_head_dim. */
    int32_t latent_rank, q_rank, rot_dim, nope_dim, v_dim;
    int32_t n_draft_layers;          /* num_nextn_predict_layers */
    int32_t original_positions;      /* original_max_position_embeddings, at the top level */
    int32_t rope_original_positions; /* the same inside rope_parameters */

    /* theta and partial (partial_rotary_factor) at the top level and, as rope_…, inside
     * rope_parameters; query_scalar is query_pre_attn_scalar. */
    double unrotated_beta; /* attn_scale */
    double window_theta;   /* rope_local_base_freq, or rope_theta of sliding_attention */
    double expert_factor;  /* routed_scaling_factor */
    double norm_eps, theta, rope_theta, partial, rope_partial, query_scalar, attn_softcap,
        final_softcap;
    double swiglu_limit, swiglu_alpha, clip_qkv; /* under their own names */
    double mixer_jitter;                         /* router_jitter_noise */
    /* Of rope_parameters, under their own names. */
    double factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow, mscale, mscale_all_dim,
        attention_factor, alpha, short_mscale, long_mscale;

    /* Flags: 0, 1 or -1. use_window is use_sliding_window, affine
     * layer_norm_elementwise_affine, scale_attention scale_attn_weights, scale_by_layer
     * scale_attn_by_inverse_layer_idx; truncate is of rope_parameters. */
    int8_t tied, attention_bias, mlp_bias, enable_bias, use_window, norm_before, no_final_norm,
        affine, scale_by_layer;
    int8_t scale_attention, truncate;
    int8_t k_eq_v, enable_experts, double_wide; /* attention_k_eq_v, enable_moe_block,
                                                 * use_double_wide_mlp */
    int8_t normalise_experts;                   /* norm_topk_prob */
    int8_t use_qk_norm;                         /* q and k are normed */
    int8_t interleaved;                         /* rope_interleave */
    int8_t qkv_bias;                            /* Qwen2-MoE's; StableLM's use_qkv_bias */
    int8_t out_bias;                            /* attention_out_bias */
    int8_t conv_bias, proj_bias;                /* mamba_conv_bias, mamba_proj_bias */
    int8_t scales_embeddings;                   /* mup_enabled: by the root of hidden */
    int8_t expert_bias;                         /* use_expert_bias */
    int8_t shared_caches;                       /* use_cla */
    int8_t head_norms, parallel_residual;       /* qk_layernorm, use_parallel_residual */
    int8_t head_bias;                           /* lm_head_bias */
    /* Of Falcon: multi_query, new_decoder_architecture, alibi, parallel_attn. */
    int8_t multi_query, grouped, alibi, parallel_attention;

    /* logit_scale, logits_scaling, embedding_multiplier, attention_multiplier,
     * residual_multiplier; llama_4_scaling_beta of rope_parameters */
    double logit_scale, logits_scaling, embedding_factor, attention_factor_all, residual_factor,
        position_beta;
    /* Of Falcon-H1: key_multiplier, attention_in_multiplier, attention_out_multiplier,
     * ssm_in_multiplier, ssm_out_multiplier; ssm_multipliers (of z, x, B, C, dt) and
     * mlp_multipliers (of the gate and of what the MLP makes). */
    double key_factor, attention_in_factor, attention_out_factor, state_in_factor, state_out_factor;
    double state_factor[5], mlp_factor[2];
    int8_t state_norm, norm_before_gate; /* mamba_rms_norm, mamba_norm_before_gate */
    /* Of LFM2: whether intermediate_size is to be taken two thirds of, times
     * block_ffn_dim_multiplier, in multiples of block_multiple_of
     * (block_auto_adjust_ff_dim). */
    int8_t adjusts_width;
    int32_t width_multiple;
    double width_factor;
    struct raw_config *text; /* owned: text_config; NULL: there is none, or it was taken */
    bool text_found;         /* the values are those of text_config */
    bool wrapped;            /* and `architecture` is the one that raw_config_unwrap found */

    struct raw_eagle eagle;

    bool rope_given;     /* there is rope_parameters or rope_scaling */
    bool window_is_null; /* sliding_window is null: none, whatever the architecture's default */
    bool chunk_is_null;  /* likewise attention_chunk_size */
    bool untuned;        /* attn_temperature_tuning is false */

    int32_t n_eos, eos[LIMIT_EOS_IDS];  /* eos_token_id: none, one or several */
    int32_t n_layer_types;              /* entries of layer_types; -1: absent */
    bool layer_windowed[LIMIT_LAYERS];  /* [n_layer_types] the entry is sliding_attention, */
    bool layer_chunked[LIMIT_LAYERS];   /* [n_layer_types] or it is chunked_attention */
    bool experts_listed;                /* there is moe_layers */
    bool layer_moe[LIMIT_LAYERS];       /* and it names the layer */
    bool layer_recurrent[LIMIT_LAYERS]; /* [n_layer_types] it is linear_attention or mamba */
    bool layer_alone[LIMIT_LAYERS];     /* [n_layer_types] it is mlp or moe */
    bool layer_experts[LIMIT_LAYERS];   /* [n_layer_types] it is moe */
    bool attention_listed;              /* there is attn_layer_indices */
    bool layer_attends[LIMIT_LAYERS];   /* and it names the layer */
    bool rotates;                       /* position_embedding_type is rope */
    int8_t post_norm;                   /* use_post_norm */
    int32_t n_mlp_types;                /* entries of mlp_layer_types; -1: it is absent */
    double time_limit[2];               /* time_step_limit; NAN: none */
    int32_t n_rotated;                  /* entries of no_rope_layers; -1: absent */
    bool layer_rotated[LIMIT_LAYERS];   /* [n_rotated] the entry is not 0 */
    int32_t n_thetas;                   /* entries of layer_rope_theta; -1: it is absent */
    double layer_theta[LIMIT_LAYERS];   /* [n_thetas] 0: the layer rotates nothing */
    bool dense_layer[LIMIT_LAYERS];     /* mlp_only_layers: the layer has no experts */
    int32_t n_short, n_long;            /* numbers in the two lists */
    float short_factor[LIMIT_HEAD_DIM / 2], long_factor[LIMIT_HEAD_DIM / 2]; /* of longrope */
};

/* hfconfig_hybrid.c: read a member of the object if hybrids alone have it; *ret_known:
 * it is one. */
bool raw_hybrid_read(struct json *j, struct raw_config *raw, bool *ret_known);
/* Those members' values where they are absent. */
void raw_hybrid_init(struct raw_config *raw);
/* What the layers of Nemotron-H, or of Falcon-H1, have besides, once the rest was
 * derived. */
int raw_nemotron_derive(struct model_config *c, const struct raw_config *r, struct err *e);
int raw_falcon_derive(struct model_config *c, const struct raw_config *r, struct err *e);
/* The layers of Jamba, once the rest was derived. */
int raw_jamba_derive(struct model_config *c, const struct raw_config *r, struct err *e);
/* The recurrent layers of LFM2, and the width of its MLPs. */
int raw_lfm2_derive(struct model_config *c, const struct raw_config *r, struct err *e);

/* hfconfig_layers.c: read layer_rope_theta, the base of each layer's rotation. */
bool raw_thetas_read(struct json *j, struct raw_config *raw);
/* Which layers rotate by it, and the base of windowed ones; c->rope.theta, which is
 * set, becomes that of the others. */
int raw_thetas_derive(struct model_config *c, const struct raw_config *r, struct err *e);

/* hfconfig_llama4.c: what Llama 4 differs in, once the rest was derived. */
int raw_llama4_derive(struct model_config *c, const struct raw_config *r, struct err *e);

/* hfconfig_eagle.c: read a member of the object if it is one of an EAGLE-3 head;
 * *ret_known: it is. */
bool raw_eagle_read(struct json *j, struct raw_eagle *r, bool *ret_known);
/* Note what the name of the architecture tells; true: it is a head's. */
bool raw_eagle_named(struct raw_eagle *r, const char *architecture);
/* The part of *c that is a head's, once the rest was derived. */
int raw_eagle_derive(struct model_config *c, const struct raw_eagle *r, struct err *e);

/* hfconfig_wrapped.c: where config.json names a wrapper, put the architecture of its
 * text model and the sizes that text_config leaves out in their place. */
int raw_config_unwrap(struct raw_config *raw, struct err *e);

/* Whether the member at hand is a model's text part, under any of its names. */
bool raw_is_text_part(const struct json *j);

/* hfconfig_left_out.c: members of config.json that transformers has by default for
 * this model, as the text of an object; NULL: none but those that raw_config_derive
 * knows. */
const char *raw_left_out(const struct raw_config *raw);

/* ERR_UNSUPPORTED, with those that are known: no architecture, and no wrapper of one,
 * has this name. */
int raw_architecture_check(const char *name, struct err *e);
/* Fill and check all of *c except dtype, bos and eos: the file's values, else the
 * architecture's defaults, and what is computed from them. */
int raw_config_derive(struct model_config *c, const struct raw_config *r, struct err *e);

/* Both passes over the texts of config.json and generation_config.json (NULL: there is
 * none); for model_config_read, the GGUF reader and the fuzzer. *ret_dtype_given:
 * config.json names the type of the weights. */
int model_config_parse(struct model_config *ret, struct generation_defaults *ret_gen,
                       bool *ret_dtype_given, const char *config, size_t config_len,
                       const char *generation, size_t generation_len, struct err *e);

#endif
