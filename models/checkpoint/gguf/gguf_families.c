/* The architectures that GGUF files name: which of config.json's they are, what their
 * files call tensors and settings, and what the files leave unsaid because llama.cpp's
 * code for the architecture knows it.
 *
 * A family's tensors are looked up in its own list first, then in the one that all
 * share.
 */
#include "models/checkpoint/gguf/gguf_families.h"

#include <stdio.h>
#include <string.h>

#include "config/base/buf.h"

/* ---- tensors ---- */

#define NAME(a, b) {.from = (a), .to = (b)}
#define TURNED(a, b) {.from = (a), .to = (b), .order = ORDER_TRANSPOSED}

static const struct gguf_rename OUTER[] = {NAME("token_embd", "model.embed_tokens"),
                                           NAME("output_norm", "model.norm"),
                                           NAME("output", "lm_head"),
                                           {0}};
static const struct gguf_rename LAYER[] = {
    NAME("attn_norm", "input_layernorm"),
    NAME("attn_q", "self_attn.q_proj"),
    NAME("attn_k", "self_attn.k_proj"),
    NAME("attn_v", "self_attn.v_proj"),
    NAME("attn_qkv", "self_attn.qkv_proj"),
    NAME("attn_q_norm", "self_attn.q_norm"),
    NAME("attn_k_norm", "self_attn.k_norm"),
    NAME("attn_output", "self_attn.o_proj"),
    NAME("ffn_norm", "post_attention_layernorm"),
    NAME("ffn_gate", "mlp.gate_proj"),
    NAME("ffn_up", "mlp.up_proj"),
    NAME("ffn_down", "mlp.down_proj"),
    NAME("ffn_gate_inp", "mlp.gate"),
    NAME("ffn_gate_exps", "mlp.experts.%d.gate_proj"),
    NAME("ffn_up_exps", "mlp.experts.%d.up_proj"),
    NAME("ffn_down_exps", "mlp.experts.%d.down_proj"),
    {0},
};

#define PAIRS(a, b) {.from = (a), .to = (b), .order = ORDER_ROTARY_PAIRS}
#define ROTARY_PAIRS PAIRS("attn_q", "self_attn.q_proj"), PAIRS("attn_k", "self_attn.k_proj")
#define CHOICE_BIAS {.from = "exp_probs_b", .to = "mlp.gate.e_score_correction_bias", .whole = true}
#define SHARED_EXPERTS                                      \
    NAME("ffn_gate_shexp", "mlp.shared_experts.gate_proj"), \
        NAME("ffn_up_shexp", "mlp.shared_experts.up_proj"), \
        NAME("ffn_down_shexp", "mlp.shared_experts.down_proj")
/* Of a recurrent layer, under the mixer's name. */
#define STATES(mixer)                                                         \
    {.from = "ssm_conv1d", .to = mixer ".conv1d", .shape = GGUF_CONVOLUTION}, \
        {.from = "ssm_dt", .to = mixer ".dt_bias", .whole = true},            \
        {.from = "ssm_a",                                                     \
         .to = mixer ".A_log",                                                \
         .whole = true,                                                       \
         .order = ORDER_DECAYS,                                               \
         .shape = GGUF_ONE_AXIS},                                             \
        {.from = "ssm_norm", .to = mixer ".norm", .shape = GGUF_ONE_AXIS},    \
        NAME("ssm_out", mixer ".out_proj")
#define SSM_D(mixer) {.from = "ssm_d", .to = mixer ".D", .whole = true, .shape = GGUF_ONE_AXIS}
static const struct gguf_rename LLAMA_LAYER[] = {ROTARY_PAIRS, {0}};
static const struct gguf_rename APERTUS_LAYER[] = {
    NAME("attn_norm", "attention_layernorm"), NAME("ffn_norm", "feedforward_layernorm"), {0}};
static const struct gguf_rename MIXTRAL_LAYER[] = {
    ROTARY_PAIRS,
    NAME("ffn_gate_inp", "block_sparse_moe.gate"),
    NAME("ffn_gate_exps", "block_sparse_moe.experts.%d.w1"),
    NAME("ffn_up_exps", "block_sparse_moe.experts.%d.w3"),
    NAME("ffn_down_exps", "block_sparse_moe.experts.%d.w2"),
    {0}};
static const struct gguf_rename QWEN2_MOE_LAYER[] = {
    NAME("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    NAME("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    NAME("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    NAME("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    {0}};
static const struct gguf_rename GLM4_MOE_LAYER[] = {
    NAME("post_attention_norm", "post_attention_layernorm"), CHOICE_BIAS, SHARED_EXPERTS, {0}};
static const struct gguf_rename DOTS1_LAYER[] = {CHOICE_BIAS, SHARED_EXPERTS, {0}};
static const struct gguf_rename EXAONE_MOE_LAYER[] = {
    {.from = "exp_probs_b", .to = "mlp.e_score_correction_bias", .whole = true},
    SHARED_EXPERTS,
    {0}};
static const struct gguf_rename HY3_LAYER[] = {
    {.from = "exp_probs_b", .to = "mlp.expert_bias", .whole = true},
    NAME("ffn_gate_inp", "mlp.router.gate"),
    NAME("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
    NAME("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
    NAME("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
    {0}};
static const struct gguf_rename LLAMA4_LAYER[] = {
    NAME("ffn_gate", "feed_forward.gate_proj"),
    NAME("ffn_up", "feed_forward.up_proj"),
    NAME("ffn_down", "feed_forward.down_proj"),
    NAME("ffn_gate_inp", "feed_forward.router"),
    NAME("ffn_gate_exps", "feed_forward.experts.%d.gate_proj"),
    NAME("ffn_up_exps", "feed_forward.experts.%d.up_proj"),
    NAME("ffn_down_exps", "feed_forward.experts.%d.down_proj"),
    NAME("ffn_gate_shexp", "feed_forward.shared_expert.gate_proj"),
    NAME("ffn_up_shexp", "feed_forward.shared_expert.up_proj"),
    NAME("ffn_down_shexp", "feed_forward.shared_expert.down_proj"),
    {0}};
static const struct gguf_rename AFMOE_LAYER[] = {
    NAME("attn_gate", "self_attn.gate_proj"),
    NAME("post_attention_norm", "post_attention_layernorm"),
    NAME("ffn_norm", "pre_mlp_layernorm"),
    NAME("post_ffw_norm", "post_mlp_layernorm"),
    {.from = "exp_probs_b", .to = "mlp.expert_bias", .whole = true},
    NAME("ffn_gate_inp", "mlp.router.gate"),
    SHARED_EXPERTS,
    {0}};
static const struct gguf_rename ERNIE_MOE_LAYER[] = {
    {.from = "exp_probs_b", .to = "mlp.moe_statics.e_score_correction_bias", .whole = true},
    SHARED_EXPERTS,
    {0}};
static const struct gguf_rename DEEPSEEK2_LAYER[] = {
    NAME("attn_q_a", "self_attn.q_a_proj"),
    NAME("attn_q_b", "self_attn.q_b_proj"),
    NAME("attn_q_a_norm", "self_attn.q_a_layernorm"),
    NAME("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    NAME("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    NAME("attn_kv_b", "self_attn.kv_b_proj"), /* of early files */
    {.from = "attn_k_b", .to = "self_attn.k_b_proj", .shape = GGUF_TWO_AXES},
    {.from = "attn_v_b", .to = "self_attn.v_b_proj", .shape = GGUF_TWO_AXES},
    CHOICE_BIAS,
    SHARED_EXPERTS,
    {0}};
static const struct gguf_rename MINIMAX_LAYER[] = {
    NAME("ffn_gate_inp", "block_sparse_moe.gate"),
    NAME("ffn_gate_exps", "block_sparse_moe.experts.%d.w1"),
    NAME("ffn_up_exps", "block_sparse_moe.experts.%d.w3"),
    NAME("ffn_down_exps", "block_sparse_moe.experts.%d.w2"),
    {.from = "exp_probs_b", .to = "block_sparse_moe.e_score_correction_bias", .whole = true},
    {0}};
#define SINKS {.from = "attn_sinks", .to = "self_attn.sinks", .whole = true}
static const struct gguf_rename GPT_OSS_LAYER[] = {
    SINKS,
    NAME("post_attention_norm", "post_attention_layernorm"),
    NAME("ffn_gate_inp", "mlp.router"),
    {0}};
#define GRANITE_ROUTED                                              \
    NAME("ffn_gate_exps", "block_sparse_moe.experts.%d.gate_proj"), \
        NAME("ffn_up_exps", "block_sparse_moe.experts.%d.up_proj"), \
        NAME("ffn_down_exps", "block_sparse_moe.experts.%d.down_proj")
#define GRANITE_EXPERTS                                                    \
    NAME("ffn_gate_inp", "block_sparse_moe.router.layer"), GRANITE_ROUTED, \
        NAME("ffn_gate_shexp", "shared_mlp.gate_proj"),                    \
        NAME("ffn_up_shexp", "shared_mlp.up_proj"), NAME("ffn_down_shexp", "shared_mlp.down_proj")
static const struct gguf_rename GRANITE_SWA_LAYER[] = {ROTARY_PAIRS, SINKS, {0}};
/* The gate and the up of the shared expert are one tensor. */
static const struct gguf_rename GRANITE_MOE_SWA_LAYER[] = {
    ROTARY_PAIRS,
    SINKS,
    NAME("ffn_gate_inp", "block_sparse_moe.router"),
    GRANITE_ROUTED,
    NAME("ffn_up_shexp", "shared_mlp.input_linear"),
    NAME("ffn_down_shexp", "shared_mlp.output_linear"),
    {0}};
static const struct gguf_rename GRANITE_MOE_LAYER[] = {ROTARY_PAIRS, GRANITE_EXPERTS, {0}};
static const struct gguf_rename GRANITE_HYBRID_LAYER[] = {ROTARY_PAIRS,
                                                          GRANITE_EXPERTS,
                                                          NAME("ffn_gate", "shared_mlp.gate_proj"),
                                                          NAME("ffn_up", "shared_mlp.up_proj"),
                                                          NAME("ffn_down", "shared_mlp.down_proj"),
                                                          STATES("mamba"),
                                                          NAME("ssm_in", "mamba.in_proj"),
                                                          SSM_D("mamba"),
                                                          {0}};
static const struct gguf_rename QWEN_HYBRID_LAYER[] = {
    NAME("attn_qkv", "linear_attn.in_proj_qkv"),
    NAME("attn_gate", "linear_attn.in_proj_z"),
    NAME("ssm_ba", "linear_attn.in_proj_ba"),
    NAME("ssm_beta", "linear_attn.in_proj_b"),
    NAME("ssm_alpha", "linear_attn.in_proj_a"),
    STATES("linear_attn"),
    NAME("post_attention_norm", "post_attention_layernorm"),
    NAME("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    NAME("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    NAME("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    NAME("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    {0}};
static const struct gguf_rename NEMOTRON_OUTER[] = {
    NAME("token_embd", "backbone.embeddings"), NAME("output_norm", "backbone.norm_f"), {0}};
/* Queries and keys are in pairs; without a rotation the order of a head's values is the
 * same to both. */
static const struct gguf_rename NEMOTRON_LAYER[] = {
    NAME("attn_norm", "norm"),
    NAME("attn_q", "mixer.q_proj"),
    NAME("attn_k", "mixer.k_proj"),
    NAME("attn_v", "mixer.v_proj"),
    NAME("attn_output", "mixer.o_proj"),
    STATES("mixer"),
    NAME("ssm_in", "mixer.in_proj"),
    SSM_D("mixer"),
    NAME("ffn_up", "mixer.up_proj"),
    NAME("ffn_down", "mixer.down_proj"),
    NAME("ffn_gate_inp", "mixer.gate"),
    {.from = "exp_probs_b", .to = "mixer.gate.e_score_correction_bias", .whole = true},
    NAME("ffn_up_exps", "mixer.experts.%d.up_proj"),
    NAME("ffn_down_exps", "mixer.experts.%d.down_proj"),
    NAME("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    NAME("ffn_down_shexp", "mixer.shared_experts.down_proj"),
    NAME("ffn_latent_down", "mixer.fc1_latent_proj"),
    NAME("ffn_latent_up", "mixer.fc2_latent_proj"),
    {0}};
static const struct gguf_rename FALCON_H1_OUTER[] = {NAME("output_norm", "model.final_layernorm"),
                                                     {0}};
static const struct gguf_rename FALCON_H1_LAYER[] = {
    {.from = "ffn_norm", .to = "pre_ff_layernorm.weight", .whole = true},
    NAME("ffn_gate", "feed_forward.gate_proj"),
    NAME("ffn_up", "feed_forward.up_proj"),
    NAME("ffn_down", "feed_forward.down_proj"),
    STATES("mamba"),
    NAME("ssm_in", "mamba.in_proj"),
    SSM_D("mamba"),
    {0}};
static const struct gguf_rename JAMBA_LAYER[] = {
    NAME("ffn_norm", "pre_ff_layernorm"),
    NAME("ffn_gate", "feed_forward.gate_proj"),
    NAME("ffn_up", "feed_forward.up_proj"),
    NAME("ffn_down", "feed_forward.down_proj"),
    NAME("ffn_gate_inp", "feed_forward.router"),
    NAME("ffn_gate_exps", "feed_forward.experts.%d.gate_proj"),
    NAME("ffn_up_exps", "feed_forward.experts.%d.up_proj"),
    NAME("ffn_down_exps", "feed_forward.experts.%d.down_proj"),
    NAME("ssm_in", "mamba.in_proj"),
    {.from = "ssm_conv1d", .to = "mamba.conv1d", .shape = GGUF_CONVOLUTION},
    NAME("ssm_x", "mamba.x_proj"),
    NAME("ssm_dt", "mamba.dt_proj"),
    NAME("ssm_dt_norm", "mamba.dt_layernorm"),
    NAME("ssm_b_norm", "mamba.b_layernorm"),
    NAME("ssm_c_norm", "mamba.c_layernorm"),
    {.from = "ssm_a", .to = "mamba.A_log", .whole = true, .order = ORDER_DECAYS},
    {.from = "ssm_d", .to = "mamba.D", .whole = true},
    NAME("ssm_out", "mamba.out_proj"),
    {0}};
static const struct gguf_rename HUNYUAN_LAYER[] = {
    NAME("attn_q_norm", "self_attn.query_layernorm"),
    NAME("attn_k_norm", "self_attn.key_layernorm"),
    NAME("ffn_gate_inp", "mlp.gate.wg"),
    NAME("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
    NAME("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
    NAME("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
    {0}};
static const struct gguf_rename LING_OUTER[] = {NAME("token_embd", "model.word_embeddings"), {0}};
static const struct gguf_rename LING_LAYER[] = {
    NAME("attn_qkv", "attention.query_key_value"),
    NAME("attn_q_norm", "attention.query_layernorm"),
    NAME("attn_k_norm", "attention.key_layernorm"),
    NAME("attn_output", "attention.dense"),
    {.from = "exp_probs_b", .to = "mlp.gate.expert_bias", .whole = true},
    SHARED_EXPERTS,
    {0}};
static const struct gguf_rename LFM2_OUTER[] = {NAME("token_embd_norm", "model.embedding_norm"),
                                                {0}};
static const struct gguf_rename LFM2_LAYER[] = {
    NAME("attn_norm", "operator_norm"),
    NAME("ffn_norm", "ffn_norm"),
    NAME("attn_q_norm", "self_attn.q_layernorm"),
    NAME("attn_k_norm", "self_attn.k_layernorm"),
    NAME("attn_output", "self_attn.out_proj"),
    {.from = "shortconv.conv", .to = "conv.conv", .shape = GGUF_CONVOLUTION},
    NAME("shortconv.in_proj", "conv.in_proj"),
    NAME("shortconv.out_proj", "conv.out_proj"),
    NAME("ffn_gate", "feed_forward.w1"),
    NAME("ffn_up", "feed_forward.w3"),
    NAME("ffn_down", "feed_forward.w2"),
    NAME("ffn_gate_inp", "feed_forward.gate"),
    {.from = "exp_probs_b", .to = "feed_forward.expert_bias", .whole = true},
    NAME("ffn_gate_exps", "feed_forward.experts.%d.w1"),
    NAME("ffn_up_exps", "feed_forward.experts.%d.w3"),
    NAME("ffn_down_exps", "feed_forward.experts.%d.w2"),
    {0}};
static const struct gguf_rename PHI3_LAYER[] = {NAME("ffn_up", "mlp.gate_up_proj"), {0}};
/* norms after attention and MLP beside those before them */
static const struct gguf_rename GEMMA2_LAYER[] = {
    NAME("post_attention_norm", "post_attention_layernorm"),
    NAME("ffn_norm", "pre_feedforward_layernorm"),
    NAME("post_ffw_norm", "post_feedforward_layernorm"),
    {0}};
static const struct gguf_rename GEMMA4_OUTER[] = {
    NAME("per_layer_token_embd", "model.embed_tokens_per_layer"),
    NAME("per_layer_model_proj", "model.per_layer_model_projection"),
    NAME("per_layer_proj_norm", "model.per_layer_projection_norm"),
    {0}};
static const struct gguf_rename GEMMA4_LAYER[] = {
    NAME("post_attention_norm", "post_attention_layernorm"),
    NAME("ffn_norm", "pre_feedforward_layernorm"),
    NAME("post_ffw_norm", "post_feedforward_layernorm"),
    NAME("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    NAME("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    NAME("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    NAME("ffn_gate_inp", "router.proj"),
    {.from = "ffn_gate_inp.scale", .to = "router.scale", .whole = true},
    NAME("ffn_gate_exps", "experts.%d.gate_proj"),
    NAME("ffn_up_exps", "experts.%d.up_proj"),
    NAME("ffn_down_exps", "experts.%d.down_proj"),
    {.from = "ffn_down_exps.scale", .to = "router.per_expert_scale", .whole = true},
    {.from = "layer_output_scale", .to = "layer_scalar", .whole = true},
    NAME("inp_gate", "per_layer_input_gate"),
    NAME("proj", "per_layer_projection"),
    NAME("post_norm", "post_per_layer_input_norm"),
    {0}};
static const struct gguf_rename GLM4_LAYER[] = {
    NAME("post_attention_norm", "post_self_attn_layernorm"),
    NAME("post_ffw_norm", "post_mlp_layernorm"),
    NAME("ffn_up", "mlp.gate_up_proj"),
    {0}};
/* norms after attention and MLP alone */
static const struct gguf_rename OLMO2_LAYER[] = {
    NAME("post_attention_norm", "post_attention_layernorm"),
    NAME("post_ffw_norm", "post_feedforward_layernorm"),
    {0}};
static const struct gguf_rename STARCODER2_LAYER[] = {
    NAME("ffn_up", "mlp.c_fc"), NAME("ffn_down", "mlp.c_proj"), {0}};
static const struct gguf_rename EXAONE_OUTER[] = {
    NAME("token_embd", "transformer.wte"), NAME("output_norm", "transformer.ln_f"), {0}};
static const struct gguf_rename EXAONE_LAYER[] = {NAME("attn_norm", "ln_1"),
                                                  NAME("attn_q", "attn.attention.q_proj"),
                                                  NAME("attn_k", "attn.attention.k_proj"),
                                                  NAME("attn_v", "attn.attention.v_proj"),
                                                  NAME("attn_output", "attn.attention.out_proj"),
                                                  NAME("ffn_norm", "ln_2"),
                                                  NAME("ffn_gate", "mlp.c_fc_0"),
                                                  NAME("ffn_up", "mlp.c_fc_1"),
                                                  NAME("ffn_down", "mlp.c_proj"),
                                                  {0}};
static const struct gguf_rename INTERNLM2_OUTER[] = {
    NAME("token_embd", "model.tok_embeddings"), NAME("output", "output"), {0}};
static const struct gguf_rename INTERNLM2_LAYER[] = {
    NAME("attn_norm", "attention_norm"), PAIRS("attn_q", "attention.q_proj"),
    PAIRS("attn_k", "attention.k_proj"), NAME("attn_v", "attention.v_proj"),
    NAME("attn_output", "attention.wo"), NAME("ffn_norm", "ffn_norm"),
    NAME("ffn_gate", "feed_forward.w1"), NAME("ffn_up", "feed_forward.w3"),
    NAME("ffn_down", "feed_forward.w2"), {0}};
static const struct gguf_rename NEOX_OUTER[] = {NAME("token_embd", "gpt_neox.embed_in"),
                                                NAME("output_norm", "gpt_neox.final_layer_norm"),
                                                NAME("output", "embed_out"),
                                                {0}};
static const struct gguf_rename NEOX_LAYER[] = {NAME("attn_norm", "input_layernorm"),
                                                NAME("attn_qkv", "attention.qkv_proj"),
                                                NAME("attn_output", "attention.dense"),
                                                NAME("ffn_norm", "post_attention_layernorm"),
                                                NAME("ffn_up", "mlp.dense_h_to_4h"),
                                                NAME("ffn_down", "mlp.dense_4h_to_h"),
                                                {0}};
static const struct gguf_rename PHI2_OUTER[] = {NAME("output_norm", "model.final_layernorm"), {0}};
static const struct gguf_rename PHI2_LAYER[] = {NAME("attn_output", "self_attn.dense"),
                                                NAME("ffn_up", "mlp.fc1"),
                                                NAME("ffn_down", "mlp.fc2"),
                                                {0}};
static const struct gguf_rename FALCON_OUTER[] = {NAME("token_embd", "transformer.word_embeddings"),
                                                  NAME("output_norm", "transformer.ln_f"),
                                                  {0}};
/* attn_norm is of the MLP where there are two */
static const struct gguf_rename FALCON_LAYER[] = {NAME("attn_norm", "input_layernorm"),
                                                  NAME("attn_norm_2", "attn_layernorm"),
                                                  NAME("attn_qkv", "self_attention.qkv_proj"),
                                                  NAME("attn_output", "self_attention.dense"),
                                                  NAME("ffn_up", "mlp.dense_h_to_4h"),
                                                  NAME("ffn_down", "mlp.dense_4h_to_h"),
                                                  {0}};
static const struct gguf_rename STARCODER_LAYER[] = {NAME("attn_norm", "ln_1"),
                                                     NAME("attn_qkv", "attn.c_attn"),
                                                     NAME("attn_output", "attn.c_proj"),
                                                     NAME("ffn_norm", "ln_2"),
                                                     NAME("ffn_up", "mlp.c_fc"),
                                                     NAME("ffn_down", "mlp.c_proj"),
                                                     {0}};
static const struct gguf_rename GPT2_OUTER[] = {NAME("token_embd", "transformer.wte"),
                                                NAME("position_embd", "transformer.wpe"),
                                                NAME("output_norm", "transformer.ln_f"),
                                                {0}};
static const struct gguf_rename GPT2_LAYER[] = {NAME("attn_norm", "ln_1"),
                                                TURNED("attn_qkv", "attn.c_attn"),
                                                TURNED("attn_output", "attn.c_proj"),
                                                NAME("ffn_norm", "ln_2"),
                                                TURNED("ffn_up", "mlp.c_fc"),
                                                TURNED("ffn_down", "mlp.c_proj"),
                                                {0}};

/* Of xIELU (Huang and Schlag 2024), whose constants are those of its authors. */
static const struct gguf_values XIELU[] = {{.key = "xielu.alpha_p", .to = "mlp.act_fn.alpha_p"},
                                           {.key = "xielu.alpha_n", .to = "mlp.act_fn.alpha_n"},
                                           {.key = "xielu.beta", .is = 0.5f},
                                           {.key = "xielu.eps", .is = -1e-6f},
                                           {0}};

/* ---- settings ---- */

static const struct gguf_key EXPERTS[] = {
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {0}};
/* Without a shared expert: files of some converters name its size all the same. */
static const struct gguf_key ROUTED[] = {{"expert_count", "num_experts"},
                                         {"expert_used_count", "num_experts_per_tok"},
                                         {"expert_feed_forward_length", "moe_intermediate_size"},
                                         {0}};
static const struct gguf_key LLAMA4_KEYS[] = {
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"interleave_moe_layer_step", "interleave_moe_layer_step"},
    {0}};
static const struct gguf_key GROUPED_EXPERTS[] = {
    {"expert_count", "n_routed_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_count", "n_shared_experts"},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"expert_weights_scale", "routed_scaling_factor"},
    {"expert_weights_norm", "norm_topk_prob"},
    {0}};
static const struct gguf_key ERNIE_EXPERTS[] = {
    {"expert_count", "moe_num_experts"},
    {"expert_used_count", "moe_k"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_count", "moe_num_shared_experts"},
    {"interleave_moe_layer_step", "moe_layer_interval"},
    {"leading_dense_block_count", "moe_layer_start_index"},
    {0}};
static const struct gguf_key GRANITE_FACTORS[] = {{"attention.scale", "attention_multiplier"},
                                                  {"embedding_scale", "embedding_multiplier"},
                                                  {"residual_scale", "residual_multiplier"},
                                                  {"logit_scale", "logits_scaling"},
                                                  {0}};
static const struct gguf_key HY3_KEYS[] = {
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"expert_weights_scale", "router_scaling_factor"},
    {0}};
static const struct gguf_key MELLUM_KEYS[] = {
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"rope.freq_base_swa", "rope_local_base_freq"},
    {0}};
static const struct gguf_key GRANITE_MOE_KEYS[] = {
    {"attention.scale", "attention_multiplier"},
    {"embedding_scale", "embedding_multiplier"},
    {"residual_scale", "residual_multiplier"},
    {"logit_scale", "logits_scaling"},
    {"expert_count", "num_local_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_feed_forward_length", "shared_intermediate_size"},
    {0}};
static const struct gguf_key NEMOTRON_EXPERTS[] = {
    {"expert_count", "n_routed_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"expert_weights_scale", "routed_scaling_factor"},
    {"expert_weights_norm", "norm_topk_prob"},
    {"moe_latent_size", "moe_latent_size"},
    {0}};
static const struct gguf_key QWEN_HYBRID_KEYS[] = {
    {"full_attention_interval", "full_attention_interval"}, {0}};
static const struct gguf_key QWEN_HYBRID_EXPERTS[] = {
    {"full_attention_interval", "full_attention_interval"},
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {0}};
static const struct gguf_key HUNYUAN_EXPERTS[] = {
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_count", "num_shared_expert"},
    {0}};
static const struct gguf_key LFM2_KEYS[] = {{"shortconv.l_cache", "conv_L_cache"}, {0}};
static const struct gguf_key LFM2_EXPERTS[] = {
    {"shortconv.l_cache", "conv_L_cache"},
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"leading_dense_block_count", "num_dense_layers"},
    {0}};
static const struct gguf_key COHERE_KEYS[] = {{"logit_scale", "logit_scale"}, {0}};
static const struct gguf_key WINDOW_KEYS[] = {{"rope.freq_base_swa", "rope_local_base_freq"}, {0}};
static const struct gguf_key GEMMA4_KEYS[] = {
    {"rope.freq_base_swa", "rope_local_base_freq"},
    {"attention.shared_kv_layers", "num_kv_shared_layers"},
    {"embedding_length_per_layer_input", "hidden_size_per_layer_input"},
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {0}};
static const struct gguf_key STABLELM_KEYS[] = {{"use_parallel_residual", "use_parallel_residual"},
                                                {0}};

/* Of several rows of one name the first whose `when` is met counts. */
static const struct gguf_family FAMILIES[] = {
    {.gguf = "llama",
     .name = "MixtralForCausalLM",
     .when = "expert_count",
     .layer = MIXTRAL_LAYER,
     .keys = ROUTED},
    {.gguf = "llama",
     .name = "LlamaForCausalLM",
     .layer = LLAMA_LAYER,
     .qkv_bias = "attention_bias",
     .mlp_bias = "mlp_bias"},
    {.gguf = "arcee",
     .name = "ArceeForCausalLM",
     .layer = LLAMA_LAYER,
     .qkv_bias = "attention_bias",
     .mlp_bias = "mlp_bias"},
    {.gguf = "mistral3", .name = "Ministral3ForCausalLM", .layer = LLAMA_LAYER},
    {.gguf = "smollm3",
     .name = "SmolLM3ForCausalLM",
     .layer = LLAMA_LAYER,
     .qkv_bias = "attention_bias"},
    {.gguf = "granite",
     .name = "GraniteForCausalLM",
     .layer = LLAMA_LAYER,
     .keys = GRANITE_FACTORS,
     .qkv_bias = "attention_bias",
     .mlp_bias = "mlp_bias"},
    {.gguf = "granite_swa",
     .name = "GraniteMoeSWAForCausalLM",
     .when = "expert_count",
     .layer = GRANITE_MOE_SWA_LAYER,
     .keys = GRANITE_MOE_KEYS,
     .qkv_bias = "attention_bias"},
    {.gguf = "granite_swa",
     .name = "GraniteSWAForCausalLM",
     .layer = GRANITE_SWA_LAYER,
     .keys = GRANITE_FACTORS,
     .qkv_bias = "attention_bias",
     .mlp_bias = "mlp_bias"},
    {.gguf = "apertus",
     .name = "ApertusForCausalLM",
     .layer = APERTUS_LAYER,
     .values = XIELU,
     .qkv_bias = "attention_bias"},
    {.gguf = "qwen2", .name = "Qwen2ForCausalLM"},
    /* Text of models that see has the same position on each axis of the rotation. */
    {.gguf = "qwen2vl", .name = "Qwen2ForCausalLM"},
    {.gguf = "qwen2moe",
     .name = "Qwen2MoeForCausalLM",
     .layer = QWEN2_MOE_LAYER,
     .keys = EXPERTS,
     .json = ",\"norm_topk_prob\":false"},
    {.gguf = "qwen3", .name = "Qwen3ForCausalLM", .qkv_bias = "attention_bias"},
    {.gguf = "qwen3vl", .name = "Qwen3ForCausalLM", .qkv_bias = "attention_bias"},
    {.gguf = "qwen3moe",
     .name = "Qwen3MoeForCausalLM",
     .keys = ROUTED,
     .qkv_bias = "attention_bias",
     .json = ",\"norm_topk_prob\":true"},
    {.gguf = "qwen3vlmoe",
     .name = "Qwen3MoeForCausalLM",
     .keys = ROUTED,
     .qkv_bias = "attention_bias",
     .json = ",\"norm_topk_prob\":true"},
    {.gguf = "olmoe",
     .name = "OlmoeForCausalLM",
     .keys = ROUTED,
     .json = ",\"norm_topk_prob\":false"},
    {.gguf = "glm4moe",
     .name = "Glm4MoeForCausalLM",
     .layer = GLM4_MOE_LAYER,
     .keys = GROUPED_EXPERTS,
     .json = ",\"first_k_dense_replace\":0",
     .qkv_bias = "attention_bias",
     .head_norms = "use_qk_norm"},
    {.gguf = "exaone-moe",
     .name = "ExaoneMoeForCausalLM",
     .layer = EXAONE_MOE_LAYER,
     .keys = GROUPED_EXPERTS},
    {.gguf = "hy_v3", .name = "HYV3ForCausalLM", .layer = HY3_LAYER, .keys = HY3_KEYS},
    /* llama.cpp tells the model without norms of heads by its experts. */
    {.gguf = "llama4",
     .name = "Llama4ForCausalLM",
     .when = "expert_count",
     .is = 128,
     .layer = LLAMA4_LAYER,
     .keys = LLAMA4_KEYS,
     .json = ",\"use_qk_norm\":false"},
    {.gguf = "llama4", .name = "Llama4ForCausalLM", .layer = LLAMA4_LAYER, .keys = LLAMA4_KEYS},
    {.gguf = "afmoe",
     .name = "AfmoeForCausalLM",
     .layer = AFMOE_LAYER,
     .keys = GROUPED_EXPERTS,
     .json = ",\"mup_enabled\":true"},
    {.gguf = "mellum",
     .name = "MellumForCausalLM",
     .keys = MELLUM_KEYS,
     .json = ",\"norm_topk_prob\":true"},
    {.gguf = "dots1", .name = "Dots1ForCausalLM", .layer = DOTS1_LAYER, .keys = GROUPED_EXPERTS},
    {.gguf = "ernie4_5-moe",
     .name = "Ernie4_5_MoeForCausalLM",
     .layer = ERNIE_MOE_LAYER,
     .keys = ERNIE_EXPERTS,
     .qkv_bias = "use_bias"},
    {.gguf = "hunyuan-dense",
     .name = "HunYuanDenseV1ForCausalLM",
     .layer = HUNYUAN_LAYER,
     .qkv_bias = "attention_bias",
     .head_norms = "use_qk_norm"},
    {.gguf = "hunyuan-moe",
     .name = "HunYuanMoEV1ForCausalLM",
     .layer = HUNYUAN_LAYER,
     .keys = HUNYUAN_EXPERTS,
     .qkv_bias = "attention_bias",
     .head_norms = "use_qk_norm"},
    {.gguf = "bailingmoe2",
     .name = "BailingMoeV2ForCausalLM",
     .outer = LING_OUTER,
     .layer = LING_LAYER,
     .keys = GROUPED_EXPERTS,
     .head_norms = "use_qk_norm"},
    {.gguf = "minimax-m2", .name = "MiniMaxM2ForCausalLM", .layer = MINIMAX_LAYER, .keys = ROUTED},
    {.gguf = "gpt-oss",
     .name = "GptOssForCausalLM",
     .layer = GPT_OSS_LAYER,
     .keys = ROUTED,
     .rope_json = ",\"truncate\":false"},
    {.gguf = "deepseek2",
     .name = "YoutuForCausalLM",
     .without = "expert_count",
     .layer = DEEPSEEK2_LAYER,
     .latent = true},
    {.gguf = "deepseek2",
     .name = "DeepseekV3ForCausalLM",
     .when = "expert_gating_func",
     .is = 2, /* sigmoid */
     .layer = DEEPSEEK2_LAYER,
     .keys = GROUPED_EXPERTS,
     .latent = true},
    {.gguf = "deepseek2",
     .name = "DeepseekV2ForCausalLM",
     .layer = DEEPSEEK2_LAYER,
     .keys = GROUPED_EXPERTS,
     .json = ",\"topk_method\":\"group_limited_greedy\"",
     .latent = true},
    /* Files do not say how queries grow with their position, which all models have. */
    {.gguf = "mistral4",
     .name = "Mistral4ForCausalLM",
     .layer = DEEPSEEK2_LAYER,
     .keys = GROUPED_EXPERTS,
     .rope_json = ",\"llama_4_scaling_beta\":0.1",
     .latent = true},
    {.gguf = "granitemoe",
     .name = "GraniteMoeSharedForCausalLM",
     .layer = GRANITE_MOE_LAYER,
     .keys = GRANITE_MOE_KEYS},
    {.gguf = "granitehybrid",
     .name = "GraniteMoeHybridForCausalLM",
     .layer = GRANITE_HYBRID_LAYER,
     .keys = GRANITE_MOE_KEYS},
    {.gguf = "qwen3next",
     .name = "Qwen3NextForCausalLM",
     .layer = QWEN_HYBRID_LAYER,
     .keys = QWEN_HYBRID_EXPERTS},
    {.gguf = "qwen35",
     .name = "Qwen3_5ForCausalLM",
     .layer = QWEN_HYBRID_LAYER,
     .keys = QWEN_HYBRID_KEYS,
     .tiled = true},
    {.gguf = "qwen35moe",
     .name = "Qwen3_5MoeForCausalLM",
     .layer = QWEN_HYBRID_LAYER,
     .keys = QWEN_HYBRID_EXPERTS,
     .tiled = true},
    {.gguf = "nemotron_h",
     .name = "NemotronHForCausalLM",
     .outer = NEMOTRON_OUTER,
     .layer = NEMOTRON_LAYER,
     .layers = "backbone.layers",
     .apart = true,
     .parts = "mlp"},
    {.gguf = "nemotron_h_moe",
     .name = "NemotronHForCausalLM",
     .outer = NEMOTRON_OUTER,
     .layer = NEMOTRON_LAYER,
     .layers = "backbone.layers",
     .apart = true,
     .parts = "moe",
     .keys = NEMOTRON_EXPERTS},
    /* llama.cpp's weights carry the factors, and its norm comes behind the gate. */
    {.gguf = "falcon-h1",
     .name = "FalconH1ForCausalLM",
     .outer = FALCON_H1_OUTER,
     .layer = FALCON_H1_LAYER,
     .json = ",\"mamba_norm_before_gate\":false",
     .state_norm = "mamba_rms_norm"},
    {.gguf = "jamba",
     .name = "JambaForCausalLM",
     .outer = FALCON_H1_OUTER,
     .layer = JAMBA_LAYER,
     .keys = ROUTED,
     .scan = true},
    {.gguf = "lfm2",
     .name = "Lfm2ForCausalLM",
     .outer = LFM2_OUTER,
     .layer = LFM2_LAYER,
     .keys = LFM2_KEYS,
     .json = ",\"block_auto_adjust_ff_dim\":false"},
    {.gguf = "lfm2moe",
     .name = "Lfm2MoeForCausalLM",
     .outer = LFM2_OUTER,
     .layer = LFM2_LAYER,
     .keys = LFM2_EXPERTS},
    {.gguf = "exaone",
     .name = "ExaoneForCausalLM",
     .outer = EXAONE_OUTER,
     .layer = EXAONE_LAYER,
     .layers = "transformer.h",
     .apart = true},
    {.gguf = "internlm2",
     .name = "InternLM2ForCausalLM",
     .outer = INTERNLM2_OUTER,
     .layer = INTERNLM2_LAYER,
     .apart = true},
    {.gguf = "phimoe",
     .name = "PhiMoEForCausalLM",
     .layer = MINIMAX_LAYER,
     .keys = ROUTED,
     .qkv_bias = "attention_bias",
     .head_bias = "lm_head_bias"},
    {.gguf = "phi3", .name = "Phi3ForCausalLM", .layer = PHI3_LAYER},
    {.gguf = "gemma", .name = "GemmaForCausalLM"},
    {.gguf = "gemma2", .name = "Gemma2ForCausalLM", .layer = GEMMA2_LAYER},
    {.gguf = "gemma3", .name = "Gemma3ForCausalLM", .layer = GEMMA2_LAYER, .keys = WINDOW_KEYS},
    {.gguf = "gemma4",
     .name = "Gemma4ForCausalLM",
     .outer = GEMMA4_OUTER,
     .layer = GEMMA4_LAYER,
     .keys = GEMMA4_KEYS,
     .two_heads = true},
    {.gguf = "chatglm", .name = "GlmForCausalLM", .layer = PHI3_LAYER},
    /* The text part of a model that sees. */
    {.gguf = "glm4",
     .name = "Glm4ForCausalLM",
     .when = "rope.dimension_sections",
     .halved = true,
     .layer = GLM4_LAYER,
     .qkv_bias = "attention_bias"},
    {.gguf = "glm4", .name = "Glm4ForCausalLM", .layer = GLM4_LAYER, .qkv_bias = "attention_bias"},
    {.gguf = "olmo2",
     .name = "Olmo3ForCausalLM",
     .when = "attention.sliding_window",
     .layer = OLMO2_LAYER,
     .keys = WINDOW_KEYS},
    {.gguf = "olmo2", .name = "Olmo2ForCausalLM", .layer = OLMO2_LAYER},
    {.gguf = "exaone4", .name = "Exaone4ForCausalLM", .layer = OLMO2_LAYER},
    {.gguf = "seed_oss",
     .name = "SeedOssForCausalLM",
     .layer = GLM4_MOE_LAYER,
     .qkv_bias = "attention_bias",
     .o_bias = "attention_out_bias",
     .mlp_bias = "mlp_bias"},
    {.gguf = "ernie4_5", .name = "Ernie4_5ForCausalLM", .qkv_bias = "use_bias"},
    {.gguf = "command-r",
     .name = "CohereForCausalLM",
     .keys = COHERE_KEYS,
     .head_norms = "use_qk_norm"},
    {.gguf = "cohere2", .name = "Cohere2ForCausalLM", .keys = COHERE_KEYS},
    {.gguf = "stablelm",
     .name = "StableLmForCausalLM",
     .keys = STABLELM_KEYS,
     .qkv_bias = "use_qkv_bias",
     .head_norms = "qk_layernorm"},
    {.gguf = "nemotron",
     .name = "NemotronForCausalLM",
     .qkv_bias = "attention_bias",
     .mlp_bias = "mlp_bias"},
    {.gguf = "jais2", .name = "Jais2ForCausalLM"},
    {.gguf = "gptneox",
     .name = "GPTNeoXForCausalLM",
     .outer = NEOX_OUTER,
     .layer = NEOX_LAYER,
     .layers = "gpt_neox.layers",
     .keys = STABLELM_KEYS,
     .apart = true},
    {.gguf = "phi2", .name = "PhiForCausalLM", .outer = PHI2_OUTER, .layer = PHI2_LAYER},
    {.gguf = "falcon",
     .name = "FalconForCausalLM",
     .outer = FALCON_OUTER,
     .layer = FALCON_LAYER,
     .layers = "transformer.h",
     .json = ",\"new_decoder_architecture\":true",
     .apart = true},
    {.gguf = "starcoder",
     .name = "GPTBigCodeForCausalLM",
     .outer = GPT2_OUTER,
     .layer = STARCODER_LAYER,
     .layers = "transformer.h",
     .apart = true},
    {.gguf = "starcoder2", .name = "Starcoder2ForCausalLM", .layer = STARCODER2_LAYER},
    {.gguf = "gpt2",
     .name = "GPT2LMHeadModel",
     .outer = GPT2_OUTER,
     .layer = GPT2_LAYER,
     .layers = "transformer.h",
     .apart = true},
};

/* ---- looking up ---- */

/* The number `name` of the architecture, 1 of an array that has elements, 0 if it is
 * absent. */
static int64_t number_of(const struct gguf *g, const struct gguf_family *f, const char *name)
{
    char key[128];
    int64_t value = 0;
    struct err e;

    snprintf(key, sizeof(key), "%s.%s", f->gguf, name);
    const struct gguf_pair *p = gguf_find(g, key);
    if (p && p->type == GGUF_ARRAY) {
        return p->n > 0;
    }
    return gguf_int(g, key, &value, &e) > 0 ? value : 0;
}

static bool is_met(const struct gguf *g, const struct gguf_family *f)
{
    int64_t value = f->when ? number_of(g, f, f->when) : 1;

    return (f->is ? value == f->is : value != 0) &&
           (!f->without || number_of(g, f, f->without) == 0);
}

/* As many names as an error has room for, and how many more there are. */
static void list_names(struct buf *b)
{
    enum { ROOM = 280 };
    int more = 0;

    for (size_t i = 0; i < ARRAY_LEN(FAMILIES); i++) {
        bool again = i > 0 && strcmp(FAMILIES[i].gguf, FAMILIES[i - 1].gguf) == 0;
        if (!again && b->len < ROOM) {
            buf_printf(b, "%s%s", i ? ", " : "", FAMILIES[i].gguf);
        } else {
            more += !again;
        }
    }
    buf_printf(b, " and %d more (docs/models.md)", more);
    buf_putc(b, '\0');
}

int gguf_family(const struct gguf_family **ret, const struct gguf *g, struct err *e)
{
    struct gguf_text name = {0};
    int rc = gguf_string(g, "general.architecture", &name, e);
    struct buf known;

    if (rc < 0) {
        return rc;
    }
    for (size_t i = 0; i < ARRAY_LEN(FAMILIES) && rc > 0; i++) {
        if (gguf_text_is(name, FAMILIES[i].gguf) && is_met(g, &FAMILIES[i])) {
            *ret = &FAMILIES[i];
            return 0;
        }
    }
    buf_init(&known, 4096);
    list_names(&known);
    const char *list = known.failed ? "" : known.data;
    if (rc == 0) {
        rc = err_set(e, ERR_INVALID, "%s: general.architecture is missing; known are %s", g->file,
                     list);
    } else {
        rc = err_set(e, ERR_UNSUPPORTED, "%s: architecture '%.*s' is not known; known are %s",
                     g->file, (int)MIN(name.len, (size_t)40), name.at, list);
    }
    buf_release(&known);
    return rc;
}

const char *gguf_name_of(const char *name, int i)
{
    for (size_t k = 0; k < ARRAY_LEN(FAMILIES); k++) {
        if (strcmp(FAMILIES[k].name, name) == 0 && i-- == 0) {
            return FAMILIES[k].gguf;
        }
    }
    return NULL;
}

static const struct gguf_rename *find(const struct gguf_rename *table, const char *stem, size_t len)
{
    for (; table && table->from; table++) {
        if (strlen(table->from) == len && memcmp(table->from, stem, len) == 0) {
            return table;
        }
    }
    return NULL;
}

const struct gguf_rename *gguf_rename_find(const struct gguf_family *f, bool of_layer,
                                           const char *stem, size_t len)
{
    const struct gguf_rename *own = find(of_layer ? f->layer : f->outer, stem, len);

    if (own || (of_layer && f->apart)) {
        return own;
    }
    return find(of_layer ? LAYER : OUTER, stem, len);
}
