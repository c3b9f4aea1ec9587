/* Mixtures of experts of LLaMA's shape: the MLP of a layer is replaced by experts, each
 * a gated MLP (backend.h's struct experts). Qwen2-MoE adds a shared expert, Qwen3-MoE
 * normalises the weights and norms q and k per head; a model may keep the plain MLP in
 * some layers. The forward pass is LLaMA's.
 */
#include "models/families/layers.h"

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

#define LAYER LLAMA_LAYER
#define ROW_EXPERT(name, rows, cols, split, target) \
    ROW(name ".weight", rows, cols, split, WEIGHT_LINEAR, IN_LAYER(experts.target), WHEN_EXPERTS)

/* ---- Qwen ---- */

static const struct architecture QWEN[] = {
    {.name = "Qwen3MoeForCausalLM",
     .models = "Qwen3-MoE",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .sliding_window = 4096,
     .window_switch = true,
     .experts = true},
    {.name = "Qwen2MoeForCausalLM",
     .models = "Qwen2-MoE",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qkv_bias = true,
     .sliding_window = 4096,
     .window_switch = true,
     .experts = true},
    {0},
};

static const struct tensor_spec QWEN_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_MLP_OR_EXPERTS(LAYER "mlp."),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_expert."),
    ROW_MATRIX(LAYER "mlp.shared_expert_gate", DIM_ONE, DIM_HIDDEN, SPLIT_NONE, experts.shared_gate,
               WHEN_SHARED),
    {0},
};

/* ---- OLMoE: q and k are normed over all heads together ---- */

static const struct architecture OLMOE[] = {
    {.name = "OlmoeForCausalLM",
     .models = "OLMoE",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .wide_qk_norm = true,
     .experts = true},
    {0},
};

static const struct tensor_spec OLMOE_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_WIDE_NORMS(LAYER "self_attn."),
    ROW_EXPERT(LAYER "mlp.gate", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, router),
    ROW_EXPERT(LAYER "mlp.experts.%d.gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(LAYER "mlp.experts.%d.up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(LAYER "mlp.experts.%d.down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    {0},
};

const struct model_family olmoe_family = {.architectures = OLMOE,
                                          .tensors = OLMOE_TENSORS,
                                          .ignored = IGNORED,
                                          .forward = llama_forward,
                                          .gathers = true};

const struct model_family qwen_moe_family = {.architectures = QWEN,
                                             .tensors = QWEN_TENSORS,
                                             .ignored = IGNORED,
                                             .forward = llama_forward,
                                             .gathers = true};

/* ---- Mixtral ---- */

static const struct architecture MIXTRAL[] = {
    {.name = "MixtralForCausalLM",
     .models = "Mixtral",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6,
     .experts = true,
     .normalises_experts = true},
    {0},
};

#define MOE LAYER "block_sparse_moe."
static const struct tensor_spec MIXTRAL_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROW_EXPERT(MOE "gate", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, router),
    ROW_EXPERT(MOE "experts.%d.w1", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(MOE "experts.%d.w3", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(MOE "experts.%d.w2", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    {0},
};

const struct model_family mixtral_family = {.architectures = MIXTRAL,
                                            .tensors = MIXTRAL_TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};
