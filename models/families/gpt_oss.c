/* gpt-oss: LLaMA's attention with biases, sinks and a window in every other layer; the
 * experts of a layer are, as published, stacked in tensors of their own, stored [in,
 * out], with gate and up in turn, and have biases and a clamped SwiGLU (backend.h's
 * struct experts). The softmax over the chosen experts alone is that over all,
 * normalised. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "GptOssForCausalLM",
     .models = "gpt-oss",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 150000,
     .qkv_bias = true,
     .o_bias = true,
     .sliding_window = 128,
     .window_pattern = 2,
     .experts = true,
     .normalises_experts = true,
     .swiglu_limit = 7},
    {0},
};

#define MLP LLAMA_LAYER "mlp."
#define ROW_STACKED(name, rows, cols, split, target)                     \
    {MLP "experts." name,      rows,         cols, split, WEIGHT_LINEAR, \
     IN_LAYER(experts.target), WHEN_EXPERTS, true}
#define ROW_BIAS(name, rows, split, target)                                             \
    ROW(MLP name "bias", rows, DIM_ONE, split, WEIGHT_VECTOR, IN_LAYER(experts.target), \
        WHEN_EXPERTS)

#define ROW_EXPERT(name, rows, cols, split, target) \
    ROW_MATRIX(MLP "experts.%d." name, rows, cols, split, experts.target, WHEN_EXPERTS)
#define ROW_EXPERT_BIAS(name, rows, split, target) \
    ROW_BIAS("experts.%d." name ".", rows, split, target)
#define ROWS_ROUTED                                                                      \
    ROWS_LLAMA_ENDS, ROWS_LLAMA_ATTENTION,                                               \
        ROW(LLAMA_LAYER "self_attn.sinks", DIM_HEADS, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, \
            IN_LAYER(sinks), WHEN_ALWAYS),                                               \
        ROW(MLP "router.weight", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, WEIGHT_LINEAR,     \
            IN_LAYER(experts.router), WHEN_EXPERTS),                                     \
        ROW_BIAS("router.", DIM_EXPERTS, SPLIT_NONE, router_bias)

/* As in a GGUF file. */
static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, goes to, when */
    ROWS_ROUTED,
    ROW_EXPERT("gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT("up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT_BIAS("gate_proj", DIM_EXPERT, SPLIT_OUT, up_bias),
    ROW_EXPERT_BIAS("up_proj", DIM_EXPERT, SPLIT_OUT, up_bias),
    ROW_EXPERT("down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    ROW_EXPERT_BIAS("down_proj", DIM_HIDDEN, SPLIT_FIRST, down_bias),
    {0},
};

static const struct tensor_spec STACKED_TENSORS[] = {
    ROWS_ROUTED,
    ROW_STACKED("gate_up_proj", DIM_STACKED_GATE, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_STACKED("gate_up_proj", DIM_STACKED_UP, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_BIAS("experts.gate_up_proj_", DIM_STACKED_GATE, SPLIT_OUT, up_bias),
    ROW_BIAS("experts.gate_up_proj_", DIM_STACKED_UP, SPLIT_OUT, up_bias),
    ROW_STACKED("down_proj", DIM_STACKED_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    ROW_BIAS("experts.down_proj_", DIM_STACKED_HIDDEN, SPLIT_FIRST, down_bias),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

static const struct model_family gpt_oss_stacked = {.architectures = ARCHITECTURES,
                                                    .tensors = STACKED_TENSORS,
                                                    .marker = "experts.gate_up_proj_bias",
                                                    .ignored = IGNORED,
                                                    .forward = llama_forward,
                                                    .gathers = true};

const struct model_family gpt_oss_family = {.architectures = ARCHITECTURES,
                                            .tensors = TENSORS,
                                            .variant = &gpt_oss_stacked,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};
