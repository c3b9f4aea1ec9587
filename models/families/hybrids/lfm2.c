/* LFM2: LLaMA's stack in which most layers have a short convolution, gated before and
 * behind, in place of attention (recurrent.c); and the same with experts, chosen by
 * sigmoid scores. */
#include "models/families/layers.h"

static const char *const IGNORED[] = {"rotary_emb.inv_freq", "pos_emb.inv_freq", NULL};

#define LFM2(arch)                                                                           \
    .name = (arch), .norm = NORM_RMS, .norm_eps = 1e-5f, .act = ACT_SILU, .rope_theta = 1e6, \
    .tied = true, .qk_norm = true, .conv = true

static const struct architecture DENSE[] = {
    {LFM2("Lfm2ForCausalLM"), .models = "LFM2"},
    {0},
};
static const struct architecture EXPERTS[] = {
    {LFM2("Lfm2MoeForCausalLM"), .models = "LFM2 with experts", .experts = true,
     .normalises_experts = true, .sigmoid_experts = true, .dense_layers = 2},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define MLP LAYER "feed_forward."
#define ROWS_LAYERS                                                                             \
    ROWS_ENDS("model.embed_tokens", "model.embedding_norm", "lm_head"),                         \
        ROW_NORM(LAYER "operator_norm", attn_norm), ROW_NORM(LAYER "ffn_norm", mlp_norm),       \
        ROW_MATRIX(ATTN "q_proj", DIM_Q, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION),           \
        ROW_MATRIX(ATTN "k_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION),          \
        ROW_MATRIX(ATTN "v_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION),          \
        ROW_LATENT_NORM(ATTN "q_layernorm", DIM_HEAD, rope.q_norm, WHEN_ATTENTION),             \
        ROW_LATENT_NORM(ATTN "k_layernorm", DIM_HEAD, rope.k_norm, WHEN_ATTENTION),             \
        ROW_MATRIX(ATTN "out_proj", DIM_HIDDEN, DIM_Q, SPLIT_IN, o, WHEN_ATTENTION),            \
        ROW_MATRIX(LAYER "conv.out_proj", DIM_HIDDEN, DIM_VALUES, SPLIT_IN, o, WHEN_RECURRENT), \
        ROW_MATRIX(LAYER "conv.in_proj", DIM_CONV_IN, DIM_HIDDEN, SPLIT_OUT, mixer,             \
                   WHEN_RECURRENT),                                                             \
        ROW(LAYER "conv.conv.weight", DIM_CONV, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR,              \
            IN_LAYER(recurrence.conv), WHEN_RECURRENT)
#define ROWS_MLP                                                              \
    ROW_MATRIX(MLP "w1", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),     \
        ROW_MATRIX(MLP "w3", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE), \
        ROW_MATRIX(MLP "w2", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down, WHEN_DENSE)
#define ROW_EXPERT(name, rows, cols, split, target) \
    ROW_MATRIX(MLP name, rows, cols, split, experts.target, WHEN_EXPERTS)

static const struct tensor_spec TENSORS[] = {ROWS_LAYERS, ROWS_MLP, {0}};
static const struct tensor_spec EXPERTS_TENSORS[] = {
    ROWS_LAYERS,
    ROWS_MLP,
    ROW_EXPERT("gate", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, router),
    ROW(MLP "expert_bias", DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_LAYER(experts.choice_bias), WHEN_CHOICE_BIAS),
    ROW_EXPERT("experts.%d.w1", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT("experts.%d.w3", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT("experts.%d.w2", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    {0},
};

const struct model_family lfm2_family = {
    .architectures = DENSE, .tensors = TENSORS, .ignored = IGNORED, .forward = hybrid_forward};
const struct model_family lfm2_moe_family = {.architectures = EXPERTS,
                                             .tensors = EXPERTS_TENSORS,
                                             .ignored = IGNORED,
                                             .forward = hybrid_forward};
