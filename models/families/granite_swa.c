/* Granite with sliding windows: the layers of Granite, dense and with experts, with
 * sinks as in gpt-oss; a theta of each layer, 0 where it rotates nothing. */
#include "models/families/layers.h"

#define GRANITE(arch)                                                                          \
    .name = (arch), .norm = NORM_RMS, .norm_eps = 1e-5f, .act = ACT_SILU, .rope_theta = 10000, \
    .sliding_window = 128, .window_pattern = 4, .full_layers_first = true

static const struct architecture DENSE[] = {
    {GRANITE("GraniteSWAForCausalLM"), .models = "Granite with sliding windows", .tied = true},
    {0},
};
static const struct architecture EXPERTS[] = {
    {GRANITE("GraniteMoeSWAForCausalLM"), .models = "Granite with sliding windows and experts",
     .experts = true, .normalises_experts = true},
    {0},
};

#define ROWS_ATTENTION                                                                   \
    ROWS_LLAMA_ENDS, ROWS_LLAMA_ATTENTION,                                               \
        ROW(LLAMA_LAYER "self_attn.sinks", DIM_HEADS, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, \
            IN_LAYER(sinks), WHEN_ALWAYS)

static const struct tensor_spec DENSE_TENSORS[] = {
    ROWS_ATTENTION,
    ROWS_GATED_MLP(LLAMA_LAYER "mlp."),
    ROW_UP_BIAS(LLAMA_LAYER "mlp.gate_proj"),
    ROW_UP_BIAS(LLAMA_LAYER "mlp.up_proj"),
    ROW_DOWN_BIAS(LLAMA_LAYER "mlp.down_proj"),
    {0},
};
#define ROWS_BESIDE ROWS_ATTENTION, ROW_ROUTER(GRANITE_MOE "router"), ROWS_GRANITE_SHARED
static const struct tensor_spec EXPERTS_TENSORS[] = {ROWS_BESIDE, ROWS_EXPERTS(GRANITE_MOE), {0}};
/* As published: all experts of a layer in one tensor. */
static const struct tensor_spec STACKED_TENSORS[] = {
    ROWS_BESIDE, ROWS_STACKED_EXPERTS(GRANITE_MOE), {0}};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family granite_swa_family = {.architectures = DENSE,
                                                .tensors = DENSE_TENSORS,
                                                .ignored = IGNORED,
                                                .forward = llama_forward,
                                                .gathers = true};
static const struct model_family stacked = {.architectures = EXPERTS,
                                            .tensors = STACKED_TENSORS,
                                            .marker = "experts.gate_up_proj",
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};
const struct model_family granite_moe_swa_family = {.architectures = EXPERTS,
                                                    .tensors = EXPERTS_TENSORS,
                                                    .variant = &stacked,
                                                    .ignored = IGNORED,
                                                    .forward = llama_forward,
                                                    .gathers = true};
