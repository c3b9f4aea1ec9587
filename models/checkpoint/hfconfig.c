/* Reads config.json and generation_config.json of a Hugging Face directory into a
 * checked `struct model_config`.
 *
 * There are two passes. The first, here, reads values without knowing the architecture:
 * FIELDS says for each key where its value goes and which range is allowed. The second,
 * hfconfig_derive.c, fills in the architecture's defaults and checks fields against
 * each other. Keys that are not in the tables are skipped.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/hfconfig_internal.h"
#include "models/checkpoint/weights.h"

static const char CONFIG[] = "config.json", GENERATION[] = "generation_config.json";

enum field_kind { FIELD_INT, FIELD_REAL, FIELD_BOOL };

struct field {
    const char *key;
    enum field_kind kind;
    size_t offset;
    double min, max; /* INT and REAL, both allowed */
};

#define AT(member) offsetof(struct raw_config, member)

/* Several keys for one value are the names that different families use. */
static const struct field FIELDS[] = {
    {"hidden_size", FIELD_INT, AT(hidden), 1, LIMIT_HIDDEN},
    {"n_embd", FIELD_INT, AT(hidden), 1, LIMIT_HIDDEN},
    {"num_hidden_layers", FIELD_INT, AT(n_layers), 1, LIMIT_LAYERS},
    {"num_layers", FIELD_INT, AT(n_layers), 1, LIMIT_LAYERS},
    {"n_layer", FIELD_INT, AT(n_layers), 1, LIMIT_LAYERS},
    {"num_attention_heads", FIELD_INT, AT(n_heads), 1, LIMIT_HEADS},
    {"n_head", FIELD_INT, AT(n_heads), 1, LIMIT_HEADS},
    {"num_key_value_heads", FIELD_INT, AT(n_kv_heads), 1, LIMIT_HEADS},
    {"num_kv_heads", FIELD_INT, AT(n_kv_heads), 1, LIMIT_HEADS},
    {"head_dim", FIELD_INT, AT(head_dim), 1, LIMIT_HEAD_DIM},
    {"attention_head_dim", FIELD_INT, AT(head_dim), 1, LIMIT_HEAD_DIM},
    {"global_head_dim", FIELD_INT, AT(full_head_dim), 1, LIMIT_HEAD_DIM},
    {"num_global_key_value_heads", FIELD_INT, AT(full_kv_heads), 1, LIMIT_HEADS},
    {"num_kv_shared_layers", FIELD_INT, AT(sharing_layers), 0, LIMIT_LAYERS},
    {"hidden_size_per_layer_input", FIELD_INT, AT(layer_input), 0, LIMIT_HIDDEN},
    {"vocab_size_per_layer_input", FIELD_INT, AT(layer_vocab), 0, LIMIT_VOCAB},
    {"intermediate_size", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"ffn_dim", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"n_inner", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"ffn_hidden_size", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"block_ff_dim", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"block_multiple_of", FIELD_INT, AT(width_multiple), 1, LIMIT_HIDDEN},
    {"block_ffn_dim_multiplier", FIELD_REAL, AT(width_factor), 1e-3, 1e3},
    {"block_auto_adjust_ff_dim", FIELD_BOOL, AT(adjusts_width), 0, 0},
    {"vocab_size", FIELD_INT, AT(vocab), 1, LIMIT_VOCAB},
    {"word_embed_proj_dim", FIELD_INT, AT(embed_dim), 1, LIMIT_HIDDEN},
    {"max_position_embeddings", FIELD_INT, AT(max_positions), 1, 1 << 30},
    {"n_positions", FIELD_INT, AT(max_positions), 1, 1 << 30},
    {"sliding_window", FIELD_INT, AT(window), 0, 1 << 30},
    {"attention_chunk_size", FIELD_INT, AT(chunk), 1, 1 << 30},
    {"floor_scale", FIELD_INT, AT(unrotated_span), 1, 1 << 30},
    {"attn_scale", FIELD_REAL, AT(unrotated_beta), 0, 1e3},
    {"intermediate_size_mlp", FIELD_INT, AT(dense_intermediate), 1, LIMIT_HIDDEN * 8},
    {"max_window_layers", FIELD_INT, AT(window_from_layer), 0, 1 << 30},
    {"original_max_position_embeddings", FIELD_INT, AT(original_positions), 1, 1 << 30},
    {"sliding_window_pattern", FIELD_INT, AT(window_pattern), 1, LIMIT_LAYERS},
    {"_sliding_window_pattern", FIELD_INT, AT(window_pattern), 1, LIMIT_LAYERS},
    {"global_attn_every_n_layers", FIELD_INT, AT(window_pattern), 1, LIMIT_LAYERS},
    {"no_rope_layer_interval", FIELD_INT, AT(unrotated_pattern), 1, LIMIT_LAYERS},
    {"bos_token_id", FIELD_INT, AT(bos), -1, LIMIT_VOCAB},
    {"num_experts", FIELD_INT, AT(n_experts), 0, LIMIT_EXPERTS},
    {"num_local_experts", FIELD_INT, AT(n_experts), 0, LIMIT_EXPERTS},
    {"moe_num_experts", FIELD_INT, AT(n_experts), 0, LIMIT_EXPERTS},
    {"num_experts_per_tok", FIELD_INT, AT(top_experts), 1, LIMIT_EXPERTS},
    {"top_k_experts", FIELD_INT, AT(top_experts), 1, LIMIT_EXPERTS},
    {"moe_k", FIELD_INT, AT(top_experts), 1, LIMIT_EXPERTS},
    {"moe_topk", FIELD_INT, AT(top_experts), 1, LIMIT_EXPERTS},
    {"moe_intermediate_size", FIELD_INT, AT(expert_intermediate), 1, LIMIT_HIDDEN * 8},
    {"shared_expert_intermediate_size", FIELD_INT, AT(shared_intermediate), 0, LIMIT_HIDDEN * 8},
    {"moe_shared_expert_intermediate_size", FIELD_INT, AT(shared_intermediate), 0,
     LIMIT_HIDDEN * 8},
    {"moe_latent_size", FIELD_INT, AT(expert_latent), 1, LIMIT_HIDDEN},
    {"decoder_sparse_step", FIELD_INT, AT(sparse_step), 1, LIMIT_LAYERS},
    {"moe_layer_interval", FIELD_INT, AT(sparse_step), 1, LIMIT_LAYERS},
    {"interleave_moe_layer_step", FIELD_INT, AT(sparse_step), 1, LIMIT_LAYERS},
    {"linear_num_value_heads", FIELD_INT, AT(state_heads), 1, LIMIT_HEADS},
    {"mamba_n_heads", FIELD_INT, AT(state_heads), 1, LIMIT_HEADS},
    {"linear_num_key_heads", FIELD_INT, AT(state_groups), 1, LIMIT_HEADS},
    {"mamba_n_groups", FIELD_INT, AT(state_groups), 1, LIMIT_HEADS},
    {"linear_key_head_dim", FIELD_INT, AT(state_key_dim), 1, LIMIT_HEAD_DIM},
    {"mamba_d_state", FIELD_INT, AT(state_key_dim), 1, LIMIT_HEAD_DIM},
    {"linear_value_head_dim", FIELD_INT, AT(state_value_dim), 1, LIMIT_HEAD_DIM},
    {"mamba_d_head", FIELD_INT, AT(state_value_dim), 1, LIMIT_HEAD_DIM},
    {"linear_conv_kernel_dim", FIELD_INT, AT(state_kernel), 2, LIMIT_CONV_KERNEL},
    {"mamba_d_conv", FIELD_INT, AT(state_kernel), 2, LIMIT_CONV_KERNEL},
    {"conv_L_cache", FIELD_INT, AT(state_kernel), 2, LIMIT_CONV_KERNEL},
    {"mamba_expand", FIELD_INT, AT(state_expand), 1, 64},
    {"mamba_dt_rank", FIELD_INT, AT(step_rank), 1, LIMIT_HIDDEN},
    {"attn_layer_period", FIELD_INT, AT(attention_period), 1, LIMIT_LAYERS},
    {"attn_layer_offset", FIELD_INT, AT(attention_offset), 0, LIMIT_LAYERS},
    {"expert_layer_period", FIELD_INT, AT(expert_period), 1, LIMIT_LAYERS},
    {"expert_layer_offset", FIELD_INT, AT(expert_offset), 0, LIMIT_LAYERS},
    {"mamba_d_ssm", FIELD_INT, AT(state_inner), 1, LIMIT_HIDDEN * 8},
    {"mamba_num_heads", FIELD_INT, AT(state_heads), 1, LIMIT_HEADS},
    {"n_groups", FIELD_INT, AT(state_groups), 1, LIMIT_HEADS},
    {"ssm_state_size", FIELD_INT, AT(state_key_dim), 1, LIMIT_HEAD_DIM},
    {"mamba_head_dim", FIELD_INT, AT(state_value_dim), 1, LIMIT_HEAD_DIM},
    {"conv_kernel", FIELD_INT, AT(state_kernel), 2, LIMIT_CONV_KERNEL},
    {"expand", FIELD_INT, AT(state_expand), 1, 64},
    {"full_attention_interval", FIELD_INT, AT(attention_every), 1, LIMIT_LAYERS},
    {"shared_intermediate_size", FIELD_INT, AT(shared_intermediate), 0, LIMIT_HIDDEN * 8},
    {"mamba_conv_bias", FIELD_BOOL, AT(conv_bias), 0, 0},
    {"mamba_proj_bias", FIELD_BOOL, AT(proj_bias), 0, 0},
    {"projectors_bias", FIELD_BOOL, AT(proj_bias), 0, 0},
    {"mamba_rms_norm", FIELD_BOOL, AT(state_norm), 0, 0},
    {"mamba_norm_before_gate", FIELD_BOOL, AT(norm_before_gate), 0, 0},
    {"use_conv_bias", FIELD_BOOL, AT(conv_bias), 0, 0},
    {"conv_bias", FIELD_BOOL, AT(conv_bias), 0, 0},
    {"use_expert_bias", FIELD_BOOL, AT(expert_bias), 0, 0},
    {"moe_router_enable_expert_bias", FIELD_BOOL, AT(expert_bias), 0, 0},
    {"use_cla", FIELD_BOOL, AT(shared_caches), 0, 0},
    {"n_routed_experts", FIELD_INT, AT(n_experts), 0, LIMIT_EXPERTS},
    {"n_shared_experts", FIELD_INT, AT(n_shared), 0, LIMIT_EXPERTS},
    {"moe_num_shared_experts", FIELD_INT, AT(n_shared), 0, LIMIT_EXPERTS},
    {"num_shared_experts", FIELD_INT, AT(n_shared), 0, LIMIT_EXPERTS},
    {"num_shared_expert", FIELD_INT, AT(n_shared), 0, LIMIT_EXPERTS},
    {"n_group", FIELD_INT, AT(n_groups), 1, LIMIT_EXPERTS},
    {"topk_group", FIELD_INT, AT(top_groups), 1, LIMIT_EXPERTS},
    {"first_k_dense_replace", FIELD_INT, AT(dense_layers), 0, LIMIT_LAYERS},
    {"num_dense_layers", FIELD_INT, AT(dense_layers), 0, LIMIT_LAYERS},
    {"moe_layer_start_index", FIELD_INT, AT(dense_layers), 0, LIMIT_LAYERS},
    {"moe_layer_end_index", FIELD_INT, AT(last_expert_layer), -1, LIMIT_LAYERS},
    {"moe_layer_freq", FIELD_INT, AT(expert_interval), 1, LIMIT_LAYERS},
    {"routed_scaling_factor", FIELD_REAL, AT(expert_factor), 1e-6, 1e6},
    {"route_scale", FIELD_REAL, AT(expert_factor), 1e-6, 1e6},
    {"router_scaling_factor", FIELD_REAL, AT(expert_factor), 1e-6, 1e6},
    {"clip_qkv", FIELD_REAL, AT(clip_qkv), 0, 1e6},
    {"swiglu_limit", FIELD_REAL, AT(swiglu_limit), 1e-6, 1e6},
    {"swiglu_alpha", FIELD_REAL, AT(swiglu_alpha), 1e-6, 1e6},
    {"use_qk_norm", FIELD_BOOL, AT(use_qk_norm), 0, 0},
    {"norm_topk_prob", FIELD_BOOL, AT(normalise_experts), 0, 0},
    {"route_norm", FIELD_BOOL, AT(normalise_experts), 0, 0},
    {"mup_enabled", FIELD_BOOL, AT(scales_embeddings), 0, 0},
    {"kv_lora_rank", FIELD_INT, AT(latent_rank), 1, LIMIT_LATENT_DIM},
    {"q_lora_rank", FIELD_INT, AT(q_rank), 1, LIMIT_HIDDEN},
    {"qk_rope_head_dim", FIELD_INT, AT(rot_dim), 2, LIMIT_HEAD_DIM},
    {"qk_nope_head_dim", FIELD_INT, AT(nope_dim), 1, LIMIT_HEAD_DIM},
    {"v_head_dim", FIELD_INT, AT(v_dim), 1, LIMIT_HEAD_DIM},
    {"rope_interleave", FIELD_BOOL, AT(interleaved), 0, 0},
    {"num_nextn_predict_layers", FIELD_INT, AT(n_draft_layers), 0, LIMIT_LAYERS},
    {"rms_norm_eps", FIELD_REAL, AT(norm_eps), 0, 1},
    {"norm_eps", FIELD_REAL, AT(norm_eps), 0, 1},
    {"layer_norm_eps", FIELD_REAL, AT(norm_eps), 0, 1},
    {"layer_norm_epsilon", FIELD_REAL, AT(norm_eps), 0, 1},
    {"norm_epsilon", FIELD_REAL, AT(norm_eps), 0, 1},
    {"rope_theta", FIELD_REAL, AT(theta), 1, 1e12},
    {"rotary_emb_base", FIELD_REAL, AT(theta), 1, 1e12},
    {"rope_local_base_freq", FIELD_REAL, AT(window_theta), 1, 1e12},
    {"partial_rotary_factor", FIELD_REAL, AT(partial), 0, 1},
    {"rotary_pct", FIELD_REAL, AT(partial), 0, 1},
    {"rotary_dim", FIELD_INT, AT(rotary_dim), 2, LIMIT_HEAD_DIM},
    {"query_pre_attn_scalar", FIELD_REAL, AT(query_scalar), 1e-6, 1e6},
    {"attn_logit_softcapping", FIELD_REAL, AT(attn_softcap), 1e-6, 1e6},
    {"final_logit_softcapping", FIELD_REAL, AT(final_softcap), 1e-6, 1e6},
    {"logit_scale", FIELD_REAL, AT(logit_scale), 1e-6, 1e6},
    {"logits_scaling", FIELD_REAL, AT(logits_scaling), 1e-6, 1e6},
    {"embedding_multiplier", FIELD_REAL, AT(embedding_factor), 1e-6, 1e6},
    {"attention_multiplier", FIELD_REAL, AT(attention_factor_all), 1e-6, 1e6},
    {"lm_head_multiplier", FIELD_REAL, AT(logit_scale), 1e-6, 1e6},
    {"key_multiplier", FIELD_REAL, AT(key_factor), 1e-6, 1e6},
    {"attention_in_multiplier", FIELD_REAL, AT(attention_in_factor), 1e-6, 1e6},
    {"attention_out_multiplier", FIELD_REAL, AT(attention_out_factor), 1e-6, 1e6},
    {"ssm_in_multiplier", FIELD_REAL, AT(state_in_factor), 1e-6, 1e6},
    {"ssm_out_multiplier", FIELD_REAL, AT(state_out_factor), 1e-6, 1e6},
    {"residual_multiplier", FIELD_REAL, AT(residual_factor), 1e-6, 1e6},
    {"tie_word_embeddings", FIELD_BOOL, AT(tied), 0, 0},
    {"tie_embedding", FIELD_BOOL, AT(tied), 0, 0},
    {"attention_bias", FIELD_BOOL, AT(attention_bias), 0, 0},
    {"mlp_bias", FIELD_BOOL, AT(mlp_bias), 0, 0},
    {"attention_k_eq_v", FIELD_BOOL, AT(k_eq_v), 0, 0},
    {"enable_moe_block", FIELD_BOOL, AT(enable_experts), 0, 0},
    {"use_double_wide_mlp", FIELD_BOOL, AT(double_wide), 0, 0},
    {"qkv_bias", FIELD_BOOL, AT(qkv_bias), 0, 0},
    {"use_qkv_bias", FIELD_BOOL, AT(qkv_bias), 0, 0},
    {"attention_out_bias", FIELD_BOOL, AT(out_bias), 0, 0},
    {"qk_layernorm", FIELD_BOOL, AT(head_norms), 0, 0},
    {"use_parallel_residual", FIELD_BOOL, AT(parallel_residual), 0, 0},
    {"lm_head_bias", FIELD_BOOL, AT(head_bias), 0, 0},
    {"multi_query", FIELD_BOOL, AT(multi_query), 0, 0},
    {"new_decoder_architecture", FIELD_BOOL, AT(grouped), 0, 0},
    {"alibi", FIELD_BOOL, AT(alibi), 0, 0},
    {"use_post_norm", FIELD_BOOL, AT(post_norm), 0, 0},
    {"parallel_attn", FIELD_BOOL, AT(parallel_attention), 0, 0},
    {"router_jitter_noise", FIELD_REAL, AT(mixer_jitter), 0, 1},
    {"enable_bias", FIELD_BOOL, AT(enable_bias), 0, 0},
    {"use_bias", FIELD_BOOL, AT(enable_bias), 0, 0},
    {"use_sliding_window", FIELD_BOOL, AT(use_window), 0, 0},
    {"do_layer_norm_before", FIELD_BOOL, AT(norm_before), 0, 0},
    {"_remove_final_layer_norm", FIELD_BOOL, AT(no_final_norm), 0, 0},
    {"layer_norm_elementwise_affine", FIELD_BOOL, AT(affine), 0, 0},
    {"scale_attn_weights", FIELD_BOOL, AT(scale_attention), 0, 0},
    {"scale_attn_by_inverse_layer_idx", FIELD_BOOL, AT(scale_by_layer), 0, 0},
    {NULL, 0, 0, 0, 0},
};

/* Inside rope_scaling and rope_parameters. */
static const struct field ROPE_FIELDS[] = {
    {"rope_theta", FIELD_REAL, AT(rope_theta), 1, 1e12},
    {"partial_rotary_factor", FIELD_REAL, AT(rope_partial), 0, 1},
    {"factor", FIELD_REAL, AT(factor), 1, 1e6},
    {"low_freq_factor", FIELD_REAL, AT(low_freq_factor), 1e-6, 1e6},
    {"high_freq_factor", FIELD_REAL, AT(high_freq_factor), 1e-6, 1e6},
    {"beta_fast", FIELD_REAL, AT(beta_fast), 0, 1e6},
    {"beta_slow", FIELD_REAL, AT(beta_slow), 0, 1e6},
    {"mscale", FIELD_REAL, AT(mscale), 0, 1e3},
    {"mscale_all_dim", FIELD_REAL, AT(mscale_all_dim), 0, 1e3},
    {"attention_factor", FIELD_REAL, AT(attention_factor), 1e-6, 1e3},
    {"short_mscale", FIELD_REAL, AT(short_mscale), 1e-6, 1e3},
    {"long_mscale", FIELD_REAL, AT(long_mscale), 1e-6, 1e3},
    {"llama_4_scaling_beta", FIELD_REAL, AT(position_beta), 0, 1e3},
    {"alpha", FIELD_REAL, AT(alpha), 1e-6, 1e9},
    {"truncate", FIELD_BOOL, AT(truncate), 0, 0},
    {"original_max_position_embeddings", FIELD_INT, AT(rope_original_positions), 1, 1 << 30},
    {NULL, 0, 0, 0, 0},
};

#undef AT

/* ---- reading ---- */

static bool wrong_type(struct json *j, const char *key, const char *want)
{
    return json_fail(j, "%s must be %s, not %s", key, want, json_type_name(json_peek(j)));
}

static bool read_int(struct json *j, const char *key, double min, double max, int32_t *ret)
{
    int64_t value;

    if (json_peek(j) != JSON_NUMBER) {
        return wrong_type(j, key, "a whole number");
    }
    if (!json_read_int(j, &value)) {
        return false;
    }
    if ((double)value < min || (double)value > max) {
        return json_fail(j, "%s is %lld, allowed are %.0f to %.0f", key, (long long)value, min,
                         max);
    }
    *ret = (int32_t)value;
    return true;
}

static bool read_real(struct json *j, const char *key, double min, double max, double *ret)
{
    double value;

    if (json_peek(j) != JSON_NUMBER) {
        return wrong_type(j, key, "a number");
    }
    if (!json_read_double(j, &value)) {
        return false;
    }
    if (!(value >= min && value <= max)) {
        return json_fail(j, "%s is %g, allowed are %g to %g", key, value, min, max);
    }
    *ret = value;
    return true;
}

static bool read_text(struct json *j, const char *key, char *ret, size_t cap)
{
    if (json_peek(j) != JSON_STRING) {
        return wrong_type(j, key, "a string");
    }
    return json_read_string(j, ret, cap, NULL);
}

/* A row of the table for `key`, or NULL. */
static const struct field *find_field(const struct field *fields, const char *key)
{
    for (; fields->key; fields++) {
        if (strcmp(fields->key, key) == 0) {
            return fields;
        }
    }
    return NULL;
}

static bool read_field(struct json *j, const struct field *f, struct raw_config *raw)
{
    void *at = (char *)raw + f->offset;
    bool value = false;

    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    switch (f->kind) {
    case FIELD_INT:
        return read_int(j, f->key, f->min, f->max, at);
    case FIELD_REAL:
        return read_real(j, f->key, f->min, f->max, at);
    case FIELD_BOOL:
        break;
    }
    if (json_peek(j) != JSON_BOOL) {
        return wrong_type(j, f->key, "true or false");
    }
    json_read_bool(j, &value);
    *(int8_t *)at = value;
    return true;
}

/* eos_token_id: null, one id or a list. */
static bool read_eos(struct json *j, int32_t *eos, int32_t *n_eos)
{
    *n_eos = 0;
    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_ARRAY) {
        *n_eos = 1;
        return read_int(j, "eos_token_id", 0, LIMIT_VOCAB - 1, eos);
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (*n_eos == LIMIT_EOS_IDS) {
            return json_fail(j, "eos_token_id has more than %d ids", LIMIT_EOS_IDS);
        }
        if (!read_int(j, "eos_token_id", 0, LIMIT_VOCAB - 1, &eos[(*n_eos)++])) {
            return false;
        }
    }
    return !j->failed;
}

/* short_factor, long_factor: one number a frequency. */
static bool read_factors(struct json *j, const char *key, float *ret, int32_t *ret_n)
{
    if (json_peek(j) != JSON_ARRAY) {
        return wrong_type(j, key, "a list of numbers");
    }
    *ret_n = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        double value;
        if (*ret_n == LIMIT_HEAD_DIM / 2) {
            return json_fail(j, "%s has more than %d numbers", key, LIMIT_HEAD_DIM / 2);
        }
        if (!read_real(j, key, 1e-6, 1e6, &value)) {
            return false;
        }
        ret[(*ret_n)++] = (float)value;
    }
    return !j->failed;
}

/* rope_parameters of windowed layers: a theta, without scaling. */
static bool read_window_rope(struct json *j, struct raw_config *raw)
{
    char kind[32] = "";

    if (json_peek(j) != JSON_OBJECT) {
        return wrong_type(j, "rope_parameters: sliding_attention", "an object");
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "rope_theta")) {
            read_real(j, "rope_theta", 1, 1e12, &raw->window_theta);
        } else if (json_key_is(j, "rope_type")) {
            read_text(j, "rope_type", kind, sizeof(kind));
        } else {
            json_skip(j);
        }
    }
    if (*kind && strcmp(kind, "default") != 0) {
        return json_fail(
            j, "rope_parameters: sliding_attention: rope_type '%.30s' is not supported", kind);
    }
    return !j->failed;
}

static bool read_rope(struct json *j, const char *key, struct raw_config *raw)
{
    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_OBJECT) {
        return wrong_type(j, key, "an object");
    }
    raw->rope_given = true;
    json_enter_object(j);
    while (json_next_member(j)) {
        const struct field *f = find_field(ROPE_FIELDS, j->key);
        if (f) {
            read_field(j, f, raw);
        } else if (json_key_is(j, "rope_type") || json_key_is(j, "type")) {
            read_text(j, "rope_type", raw->rope_type, sizeof(raw->rope_type));
        } else if (json_key_is(j, "short_factor")) {
            read_factors(j, "short_factor", raw->short_factor, &raw->n_short);
        } else if (json_key_is(j, "long_factor")) {
            read_factors(j, "long_factor", raw->long_factor, &raw->n_long);
        } else if (json_key_is(j, "full_attention") && strcmp(key, j->key) != 0) {
            read_rope(j, "full_attention", raw);
        } else if (json_key_is(j, "sliding_attention")) {
            read_window_rope(j, raw);
        } else if (json_peek(j) == JSON_OBJECT) {
            return json_fail(j, "%s: parameters by layer type ('%.40s') are not supported", key,
                             j->key);
        } else {
            json_skip(j);
        }
    }
    return !j->failed;
}

static bool read_architectures(struct json *j, struct raw_config *raw)
{
    char other[64];

    if (json_peek(j) != JSON_ARRAY) {
        return wrong_type(j, "architectures", "a list of strings");
    }
    json_enter_array(j);
    for (int i = 0; json_next_element(j); i++) {
        read_text(j, "architectures", i == 0 ? raw->architecture : other, sizeof(other));
    }
    return !j->failed;
}

/* layer_types, or layers_block_type: null or the kind of each layer. */
static bool read_layer_types(struct json *j, struct raw_config *raw)
{
    const char *key = json_key_is(j, "layer_types") ? "layer_types" : "layers_block_type";
    char text[32];

    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_ARRAY) {
        return wrong_type(j, key, "a list of strings");
    }
    raw->n_layer_types = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        if (raw->n_layer_types == LIMIT_LAYERS) {
            return json_fail(j, "%s has more than %d entries", key, LIMIT_LAYERS);
        }
        if (!read_text(j, key, text, sizeof(text))) {
            return false;
        }
        bool mlp = strcmp(text, "mlp") == 0, experts = strcmp(text, "moe") == 0;
        bool chunked = strcmp(text, "chunked_attention") == 0;
        bool windowed = chunked || strcmp(text, "sliding_attention") == 0;
        bool recurrent = strcmp(text, "linear_attention") == 0 || strcmp(text, "mamba") == 0 ||
                         strcmp(text, "conv") == 0;
        if (!windowed && !recurrent && !mlp && !experts && strcmp(text, "full_attention") != 0 &&
            strcmp(text, "attention") != 0) {
            return json_fail(j,
                             "%s: '%s' is none of full_attention, sliding_attention, "
                             "linear_attention",
                             key, text);
        }
        raw->layer_alone[raw->n_layer_types] = mlp || experts;
        raw->layer_experts[raw->n_layer_types] = experts;
        raw->layer_recurrent[raw->n_layer_types] = recurrent;
        raw->layer_chunked[raw->n_layer_types] = chunked;
        raw->layer_windowed[raw->n_layer_types++] = windowed;
    }
    return !j->failed;
}

/* no_rope_layers: null or a number a layer, 0 where it rotates nothing. */
static bool read_rotated_layers(struct json *j, struct raw_config *raw)
{
    int32_t rotated;

    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_ARRAY) {
        return wrong_type(j, "no_rope_layers", "a list of whole numbers");
    }
    raw->n_rotated = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        if (raw->n_rotated == LIMIT_LAYERS) {
            return json_fail(j, "no_rope_layers has more than %d entries", LIMIT_LAYERS);
        }
        if (!read_int(j, "no_rope_layers", 0, 1, &rotated)) {
            return false;
        }
        raw->layer_rotated[raw->n_rotated++] = rotated != 0;
    }
    return !j->failed;
}

/* mlp_layer_types: null or "dense" or "sparse" for each layer. */
static bool read_mlp_types(struct json *j, struct raw_config *raw)
{
    char text[16];
    int32_t n = 0;

    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_ARRAY) {
        return wrong_type(j, "mlp_layer_types", "a list of strings");
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (n == LIMIT_LAYERS) {
            return json_fail(j, "mlp_layer_types has more than %d entries", LIMIT_LAYERS);
        }
        if (!read_text(j, "mlp_layer_types", text, sizeof(text))) {
            return false;
        }
        raw->dense_layer[n] = strcmp(text, "dense") == 0;
        if (!raw->dense_layer[n++] && strcmp(text, "sparse") != 0) {
            return json_fail(j, "mlp_layer_types: '%s' is neither dense nor sparse", text);
        }
    }
    raw->dense_layers = 0; /* each layer is named */
    raw->n_mlp_types = n;
    return !j->failed;
}

/* In place of a whole number a list that has the same one for each layer (HunYuan). */
static bool read_alike(struct json *j, const struct field *f, int32_t *ret)
{
    int32_t value;

    *ret = -1;
    json_enter_array(j);
    while (json_next_element(j)) {
        if (!read_int(j, f->key, f->min, f->max, &value)) {
            return false;
        }
        if (*ret >= 0 && value != *ret) {
            return json_fail(j, "%s differs between layers, which is not supported", f->key);
        }
        *ret = value;
    }
    return !j->failed;
}

/* Null or a list of layers, which are marked. */
static bool read_layer_list(struct json *j, const char *key, bool *layers)
{
    int32_t layer;

    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_ARRAY) {
        return wrong_type(j, key, "a list of whole numbers");
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (!read_int(j, key, 0, LIMIT_LAYERS - 1, &layer)) {
            return false;
        }
        layers[layer] = true;
    }
    return !j->failed;
}

/* time_step_limit: null or two numbers; infinity is an object or a text. */
static bool read_time_limit(struct json *j, struct raw_config *raw)
{
    if (json_peek(j) != JSON_ARRAY) {
        return json_peek(j) == JSON_NULL ? json_skip(j)
                                         : wrong_type(j, "time_step_limit", "a list");
    }
    json_enter_array(j);
    for (int i = 0; json_next_element(j); i++) {
        if (i < 2 && json_peek(j) == JSON_NUMBER) {
            read_real(j, "time_step_limit", 0, INFINITY, &raw->time_limit[i]);
        } else {
            json_skip(j);
        }
    }
    return !j->failed;
}

/* per_layer_config: what transformers writes in place of global_head_dim and
 * num_global_key_value_heads, by layer. */
static bool read_layers(struct json *j, struct raw_config *raw)
{
    if (json_peek(j) != JSON_OBJECT) {
        return json_peek(j) == JSON_NULL ? json_skip(j)
                                         : wrong_type(j, "per_layer_config", "an object");
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_peek(j) != JSON_OBJECT) {
            return wrong_type(j, "per_layer_config", "an object of objects");
        }
        json_enter_object(j);
        while (json_next_member(j)) {
            if (json_key_is(j, "head_dim")) {
                read_int(j, "head_dim", 1, LIMIT_HEAD_DIM, &raw->full_head_dim);
            } else if (json_key_is(j, "num_key_value_heads")) {
                read_int(j, "num_key_value_heads", 1, LIMIT_HEADS, &raw->full_kv_heads);
            } else {
                return json_fail(j, "per_layer_config: '%.40s' is not supported", j->key);
            }
        }
    }
    return !j->failed;
}

static bool read_text_config(struct json *j, struct raw_config *raw);

/* Whether a text says that positions rotate. */
static bool read_position_kind(struct json *j, struct raw_config *raw)
{
    char text[32];
    bool read = read_text(j, "position_embedding_type", text, sizeof(text));

    raw->rotates = read && strcmp(text, "rope") == 0;
    return read;
}

static bool read_rope_member(struct json *j, struct raw_config *raw)
{
    return read_rope(j, "rope_parameters", raw);
}

static bool read_eos_member(struct json *j, struct raw_config *raw)
{
    return read_eos(j, raw->eos, &raw->n_eos);
}

static bool read_dense_layers(struct json *j, struct raw_config *raw)
{
    return read_layer_list(j, "mlp_only_layers", raw->dense_layer);
}

static bool read_expert_layers(struct json *j, struct raw_config *raw)
{
    raw->experts_listed = true;
    return read_layer_list(j, j->key, raw->layer_moe);
}

/* attn_temperature_tuning: true or false, or a number, which is true but for 0. */
static bool read_tuning(struct json *j, struct raw_config *raw)
{
    int64_t number = 0;
    bool value = false;

    if (json_peek(j) == JSON_NUMBER) {
        json_read_int(j, &number);
    } else if (json_peek(j) == JSON_BOOL) {
        json_read_bool(j, &value);
    } else {
        return wrong_type(j, j->key, "true or false");
    }
    raw->untuned = !value && number == 0;
    return !j->failed;
}

/* use_bidirectional_attention: a text, or true, which is as "all". */
static bool read_both_ways(struct json *j, struct raw_config *raw)
{
    bool all = false;

    if (json_peek(j) == JSON_STRING) {
        return read_text(j, j->key, raw->both_ways, sizeof(raw->both_ways));
    }
    if (json_peek(j) != JSON_BOOL) {
        return json_skip(j);
    }
    json_read_bool(j, &all);
    snprintf(raw->both_ways, sizeof(raw->both_ways), "%s", all ? "all" : "");
    return true;
}

static bool read_attending_layers(struct json *j, struct raw_config *raw)
{
    raw->attention_listed = json_peek(j) != JSON_NULL;
    return read_layer_list(j, j->key, raw->layer_attends);
}

/* Members that are no plain field: what reads each. */
static const struct member {
    const char *key;
    bool (*read)(struct json *j, struct raw_config *raw);
    bool null_skips; /* null is as good as absent */
} MEMBERS[] = {
    {"architectures", read_architectures, false},
    {"text_config", read_text_config, false},
    {"llm_config", read_text_config, false},
    {"transformer_layer_config", read_text_config, false},
    {"rope_scaling", read_rope_member, false},
    {"rope_parameters", read_rope_member, false},
    {"eos_token_id", read_eos_member, false},
    {"layer_types", read_layer_types, false},
    {"layers_block_type", read_layer_types, false},
    {"per_layer_config", read_layers, false},
    {"no_rope_layers", read_rotated_layers, false},
    {"moe_layers", read_expert_layers, true},
    {"attn_temperature_tuning", read_tuning, true},
    {"layer_rope_theta", raw_thetas_read, true},
    {"mlp_layer_types", read_mlp_types, false},
    {"mlp_only_layers", read_dense_layers, false},
    {"attn_layer_indices", read_attending_layers, false},
    {"full_attn_idxs", read_attending_layers, false},
    {"time_step_limit", read_time_limit, false},
    {"use_bidirectional_attention", read_both_ways, true},
    {"position_embedding_type", read_position_kind, true},
};

/* Members that are kept as texts. */
static const struct text_member {
    const char *key, *called; /* and what messages call it */
    size_t offset, cap;
    bool other_types; /* values of other types mean something else and are passed over */
} TEXTS[] = {
#define TEXT(key, called, member, other_types)                                                   \
    {key, called, offsetof(struct raw_config, member), sizeof(((struct raw_config *)0)->member), \
     other_types}
    TEXT("mlp_hidden_act", "mlp_hidden_act", mlp_act, false),
    TEXT("mamba_hidden_act", "mamba_hidden_act", state_act, false),
    TEXT("model_type", "model_type", type, true),
    TEXT("scoring_func", "scoring_func", scoring, false),
    TEXT("score_func", "score_func", scoring, false),
    TEXT("topk_method", "topk_method", choice, false),
    TEXT("hidden_act", "hidden_act", act, false),
    TEXT("activation_function", "hidden_act", act, false),
    TEXT("hidden_activation", "hidden_act", act, false),
    TEXT("activation", "activation", act, true), /* Falcon's */
    TEXT("dtype", "dtype", dtype, false),
    TEXT("torch_dtype", "dtype", dtype, false),
#undef TEXT
};

/* sliding_window_pattern as a text, as in EXAONE: LLLG, a G for a layer without a
 * window. */
static bool read_window_letters(struct json *j, const char *key, int32_t *ret)
{
    char text[LIMIT_LAYERS + 1];

    if (!read_text(j, key, text, sizeof(text))) {
        return false;
    }
    size_t len = strlen(text);
    if (len == 0 || strspn(text, "L") != len - 1 || text[len - 1] != 'G') {
        return json_fail(j, "%s: '%.40s' is not letters L with a G behind them", key, text);
    }
    *ret = (int32_t)len;
    return true;
}

/* A plain field, or what some families write in its place. */
static bool read_plain(struct json *j, const struct field *f, struct raw_config *raw)
{
    bool automatic = strcmp(f->key, "mamba_d_head") == 0 || strcmp(f->key, "mamba_dt_rank") == 0;
    bool by_layer = f->offset == offsetof(struct raw_config, top_experts) ||
                    f->offset == offsetof(struct raw_config, n_shared) ||
                    f->offset == offsetof(struct raw_config, expert_intermediate);

    if (automatic && json_peek(j) == JSON_STRING) {
        return json_skip(j); /* "auto" */
    }
    if (f->offset == offsetof(struct raw_config, window_pattern) && json_peek(j) == JSON_STRING) {
        return read_window_letters(j, f->key, &raw->window_pattern);
    }
    if (by_layer && f->kind == FIELD_INT && json_peek(j) == JSON_ARRAY) {
        return read_alike(j, f, (int32_t *)((char *)raw + f->offset));
    }
    raw->window_is_null |= json_peek(j) == JSON_NULL && strcmp(f->key, "sliding_window") == 0;
    raw->chunk_is_null |= json_peek(j) == JSON_NULL && strcmp(f->key, "attention_chunk_size") == 0;
    if (json_peek(j) == JSON_NULL && (f->offset == offsetof(struct raw_config, attn_softcap) ||
                                      f->offset == offsetof(struct raw_config, final_softcap))) {
        *(double *)((char *)raw + f->offset) = 0; /* none, whatever the default is */
    }
    return read_field(j, f, raw);
}

static bool read_text_member(struct json *j, const struct text_member *t, struct raw_config *raw)
{
    enum json_type type = json_peek(j);

    return type == JSON_NULL || (t->other_types && type != JSON_STRING)
               ? json_skip(j)
               : read_text(j, t->called, (char *)raw + t->offset, t->cap);
}

static bool read_member(struct json *j, struct raw_config *raw)
{
    const struct field *f = find_field(FIELDS, j->key);
    bool known;

    if (f) {
        return read_plain(j, f, raw);
    }
    for (size_t i = 0; i < ARRAY_LEN(MEMBERS); i++) {
        if (json_key_is(j, MEMBERS[i].key)) {
            return MEMBERS[i].null_skips && json_peek(j) == JSON_NULL ? json_skip(j)
                                                                      : MEMBERS[i].read(j, raw);
        }
    }
    for (size_t i = 0; i < ARRAY_LEN(TEXTS); i++) {
        if (json_key_is(j, TEXTS[i].key)) {
            return read_text_member(j, &TEXTS[i], raw);
        }
    }
    if (!raw_eagle_read(j, &raw->eagle, &known) || known || !raw_hybrid_read(j, raw, &known) ||
        known) {
        return !j->failed;
    }
    return json_skip(j);
}

static void raw_init(struct raw_config *raw)
{
    memset(raw, 0, sizeof(*raw));
    for (const struct field *table = FIELDS; table; table = table == FIELDS ? ROPE_FIELDS : NULL) {
        for (const struct field *f = table; f->key; f++) {
            if (f->kind == FIELD_INT) {
                *(int32_t *)((char *)raw + f->offset) = -1;
            } else if (f->kind == FIELD_REAL) {
                *(double *)((char *)raw + f->offset) = NAN;
            } else {
                *(int8_t *)((char *)raw + f->offset) = -1;
            }
        }
    }
    raw->n_layer_types = -1;
    raw_hybrid_init(raw);
    raw->eagle.n_taps = raw->eagle.norm_before_residual = raw->eagle.mask_token = -1;
    raw->n_rotated = raw->n_mlp_types = raw->n_thetas = -1;
    raw->window_theta = NAN;
    raw->time_limit[0] = raw->time_limit[1] = NAN;
}

bool raw_is_text_part(const struct json *j)
{
    for (size_t i = 0; i < ARRAY_LEN(MEMBERS); i++) {
        if (MEMBERS[i].read == read_text_config && json_key_is(j, MEMBERS[i].key)) {
            return true;
        }
    }
    return false;
}

/* The configuration of a vision model's text part, in an object of its own. */
static bool read_text_config(struct json *j, struct raw_config *raw)
{
    if (json_peek(j) != JSON_OBJECT || raw->text) {
        return json_peek(j) == JSON_NULL ? json_skip(j) : wrong_type(j, "text_config", "an object");
    }
    raw->text = malloc(sizeof(*raw->text));
    if (!raw->text) {
        return json_fail(j, "out of memory");
    }
    raw_init(raw->text);
    json_enter_object(j);
    while (json_next_member(j)) {
        if (raw_is_text_part(j)) { /* not deeper */
            json_skip(j);
        } else {
            read_member(j, raw->text);
        }
    }
    return !j->failed;
}

/* The text part in place of the whole, with what only the whole has. */
static void take_text_config(struct raw_config *raw)
{
    struct raw_config *text = raw->text;

    if (!text) {
        return;
    }
    memcpy(text->architecture, raw->architecture, sizeof(text->architecture));
    text->eagle = raw->eagle;
    if (!*text->dtype) {
        memcpy(text->dtype, raw->dtype, sizeof(text->dtype));
    }
    text->bos = text->bos >= 0 ? text->bos : raw->bos;
    text->tied = text->tied >= 0 ? text->tied : raw->tied;
    if (text->n_eos == 0) {
        text->n_eos = raw->n_eos;
        memcpy(text->eos, raw->eos, sizeof(text->eos));
    }
    *raw = *text;
    raw->text = NULL;
    raw->text_found = true;
    free(text);
}

/* Take what *from has for the fields of a table that are absent in *raw. */
static void fill_absent(struct raw_config *raw, const struct raw_config *from,
                        const struct field *table)
{
    for (const struct field *f = table; f->key; f++) {
        void *to = (char *)raw + f->offset;
        const void *at = (const char *)from + f->offset;
        if (f->kind == FIELD_INT && *(int32_t *)to < 0) {
            *(int32_t *)to = *(const int32_t *)at;
        } else if (f->kind == FIELD_REAL && isnan(*(double *)to)) {
            *(double *)to = *(const double *)at;
        } else if (f->kind == FIELD_BOOL && *(int8_t *)to < 0) {
            *(int8_t *)to = *(const int8_t *)at;
        }
    }
}

/* Fill what raw_left_out says; the rotation as a whole, or not. */
static int fill_left_out(struct raw_config *raw, struct err *e)
{
    const char *members = raw_left_out(raw);
    struct raw_config *from;
    struct json j;

    if (!members) {
        return 0;
    }
    from = malloc(sizeof(*from));
    if (!from) {
        return err_nomem(e, CONFIG);
    }
    raw_init(from);
    json_init(&j, members, strlen(members), CONFIG, e);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        read_member(&j, from);
    }
    fill_absent(raw, from, FIELDS);
    if (!raw->rope_given) {
        double theta = raw->theta;
        fill_absent(raw, from, ROPE_FIELDS);
        memcpy(raw->rope_type, from->rope_type, sizeof(raw->rope_type));
        raw->window_theta = isnan(raw->window_theta) ? from->window_theta : raw->window_theta;
        raw->rope_theta = isnan(theta) ? raw->rope_theta : theta;
    }
    free(from);
    return json_finish(&j) ? 0 : ERR_INVALID;
}

static int set_dtype(struct model_config *c, const char *name, struct err *e)
{
    static const char *const NAMES[] = {
        [DTYPE_F32] = "float32", [DTYPE_F16] = "float16", [DTYPE_BF16] = "bfloat16"};

    if (strncmp(name, "torch.", 6) == 0) {
        name += 6;
    }
    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        if (strcmp(name, NAMES[i]) == 0) {
            c->dtype = (enum dtype)i;
            return 0;
        }
    }
    if (*name) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: dtype is '%s', allowed are bfloat16, float16, float32", CONFIG, name);
    }
    return 0;
}

/* The type of the checkpoint's first tensor, for a config.json without a dtype. */
static enum dtype checkpoint_dtype(const char *dir)
{
    struct checkpoint *c;

    if (checkpoint_open(&c, dir, NULL) < 0) {
        return DTYPE_F32; /* model_open will say why, unless the weights are dummies */
    }
    const struct tensor *t = checkpoint_count(c) > 0 ? checkpoint_at(c, 0) : NULL;
    enum dtype dtype = t && t->usable && t->dtype != DTYPE_I32 ? t->dtype : DTYPE_F32;
    checkpoint_free(c);
    return dtype;
}

/* ---- generation_config.json ---- */

static bool read_default(struct json *j, const char *key, double min, double max, float *ret)
{
    double value;

    if (!read_real(j, key, min, max, &value)) {
        return false;
    }
    *ret = (float)value;
    return true;
}

static bool read_generation_member(struct json *j, struct generation_defaults *g,
                                   struct model_config *c)
{
    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_key_is(j, "temperature")) {
        return read_default(j, j->key, 0, 100, &g->temperature);
    }
    if (json_key_is(j, "top_p")) {
        return read_default(j, j->key, 1e-6, 1, &g->top_p);
    }
    if (json_key_is(j, "min_p")) {
        return read_default(j, j->key, 0, 1, &g->min_p);
    }
    if (json_key_is(j, "repetition_penalty")) {
        return read_default(j, j->key, 1e-3, 1e3, &g->repetition_penalty);
    }
    if (json_key_is(j, "top_k")) {
        return read_int(j, j->key, -1, LIMIT_VOCAB, &g->top_k);
    }
    if (json_key_is(j, "bos_token_id")) {
        return read_int(j, j->key, 0, LIMIT_VOCAB - 1, &c->bos);
    }
    if (json_key_is(j, "eos_token_id")) {
        return read_eos(j, c->eos, &c->n_eos);
    }
    return json_skip(j);
}

static int read_generation(struct generation_defaults *g, struct model_config *c, const char *text,
                           size_t len, struct err *e)
{
    struct json j;

    json_init(&j, text, len, GENERATION, e);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        read_generation_member(&j, g, c);
    }
    return json_finish(&j) ? 0 : ERR_INVALID;
}

/* ---- together ---- */

/* Ids outside the vocabulary can never be sampled. */
static int check_ids(const struct model_config *c, struct err *e)
{
    if (c->bos >= c->vocab) {
        return err_set(e, ERR_INVALID, "bos_token_id is %d, vocab_size is %d", c->bos, c->vocab);
    }
    for (int32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] >= c->vocab) {
            return err_set(e, ERR_INVALID, "eos_token_id is %d, vocab_size is %d", c->eos[i],
                           c->vocab);
        }
    }
    return 0;
}

/* The error of a config.json with a member that cannot be read: that of its
 * architecture, if this is not known, as it may give members another meaning. */
static int unreadable(struct raw_config *raw, const char *text, size_t len, struct err *e)
{
    struct json j;

    raw_init(raw);
    json_init(&j, text, len, CONFIG, NULL);
    json_enter_object(&j);
    while (json_next_member(&j) && !raw->architecture[0]) {
        if (json_key_is(&j, "architectures")) {
            read_architectures(&j, raw);
        } else {
            json_skip(&j);
        }
    }
    bool named = raw->architecture[0] && !raw_eagle_named(&raw->eagle, raw->architecture);
    int rc = named ? raw_architecture_check(raw->architecture, e) : 0;
    return rc < 0 ? rc : ERR_INVALID;
}

/* Read config.json into *raw, and derive *c from it. */
static int parse_config(struct model_config *c, struct raw_config *raw, const char *text,
                        size_t len, struct err *e)
{
    struct json j;

    raw_init(raw);
    json_init(&j, text, len, CONFIG, e);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        read_member(&j, raw);
    }
    if (!json_finish(&j)) {
        free(raw->text);
        return unreadable(raw, text, len, e);
    }
    take_text_config(raw);
    c->bos = raw->bos;
    c->n_eos = raw->n_eos;
    memcpy(c->eos, raw->eos, sizeof(c->eos));
    if (raw_eagle_named(&raw->eagle, raw->architecture)) {
        snprintf(raw->architecture, sizeof(raw->architecture), "LlamaForCausalLM");
    }
    int rc = raw_config_unwrap(raw, e);
    rc = rc ? rc : fill_left_out(raw, e);
    rc = rc ? rc : raw_config_derive(c, raw, e);
    rc = rc ? rc : raw_eagle_derive(c, &raw->eagle, e);
    if (rc == 0 && c->head.kind != HEAD_NONE) {
        /* The model begins and ends texts; published heads have ids of other models. */
        c->bos = -1;
        c->n_eos = 0;
    }
    return rc == 0 ? set_dtype(c, raw->dtype, e) : rc;
}

int model_config_parse(struct model_config *ret, struct generation_defaults *ret_gen,
                       bool *ret_dtype_given, const char *config, size_t config_len,
                       const char *generation, size_t generation_len, struct err *e)
{
    struct generation_defaults gen = {
        .temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition_penalty = NAN, .top_k = -1};
    struct raw_config *raw = malloc(sizeof(*raw));
    struct model_config *c = calloc(1, sizeof(*c));
    int rc = raw && c ? parse_config(c, raw, config, config_len, e) : err_nomem(e, CONFIG);

    if (rc == 0 && generation) {
        rc = read_generation(&gen, c, generation, generation_len, e);
    }
    if (rc == 0) {
        rc = check_ids(c, e);
    }
    if (rc == 0) {
        *ret = *c;
        *ret_gen = gen;
        *ret_dtype_given = raw->dtype[0] != 0;
    }
    free(raw);
    free(c);
    return rc;
}

int model_config_read(struct model_config *ret, struct generation_defaults *ret_gen,
                      const char *dir, struct err *e)
{
    char *config = NULL, *generation = NULL;
    size_t config_len = 0, generation_len = 0;
    bool dtype_given;

    if (gguf_is_file(dir)) {
        return gguf_config_read(ret, ret_gen, dir, e);
    }
    int rc = model_file_read(dir, CONFIG, LIMIT_CONFIG_JSON_BYTES, &config, &config_len, e);
    if (rc == 0 && model_file_exists(dir, GENERATION)) {
        rc = model_file_read(dir, GENERATION, LIMIT_CONFIG_JSON_BYTES, &generation, &generation_len,
                             e);
    }
    if (rc == 0) {
        rc = model_config_parse(ret, ret_gen, &dtype_given, config, config_len, generation,
                                generation_len, e);
    }
    if (rc == 0 && !dtype_given) {
        ret->dtype = checkpoint_dtype(dir);
    }
    free(config);
    free(generation);
    return rc;
}
