/* Jamba: LLaMA's stack without a rotation, in which most layers have Mamba-1
 * (recurrent.c) in place of attention, and every second one experts in place of its
 * MLP. */
#include "models/families/layers.h"

static const char *const IGNORED[] = {NULL};

static const struct architecture ARCHITECTURES[] = {
    {.name = "JambaForCausalLM",
     .models = "Jamba, Jamba 1.5 to 1.7, Jamba Reasoning",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .experts = true,
     .optional_experts = true,
     .scan = true},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define MAMBA LAYER "mamba."
#define MLP LAYER "feed_forward."
#define ROW_STATE(name, rows, cols, split, kind, target) \
    ROW(MAMBA name, rows, cols, split, kind, IN_LAYER(target), WHEN_RECURRENT)
#define ROW_EXPERT(name, rows, cols, split, target) \
    ROW_MATRIX(MLP name, rows, cols, split, experts.target, WHEN_EXPERTS)

static const struct tensor_spec TENSORS[] = {
    ROWS_ENDS("model.embed_tokens", "model.final_layernorm", "lm_head"),
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROW_NORM(LAYER "pre_ff_layernorm", mlp_norm),
    ROW_MATRIX(ATTN "q_proj", DIM_Q, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION),
    ROW_MATRIX(ATTN "k_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION),
    ROW_MATRIX(ATTN "v_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION),
    ROW_MATRIX(ATTN "o_proj", DIM_HIDDEN, DIM_Q, SPLIT_IN, o, WHEN_ATTENTION),
    ROW_MATRIX(MAMBA "out_proj", DIM_HIDDEN, DIM_VALUES, SPLIT_IN, o, WHEN_RECURRENT),
    ROW_MATRIX(MAMBA "in_proj", DIM_SCAN_IN, DIM_HIDDEN, SPLIT_OUT, mixer, WHEN_RECURRENT),
    ROW_MATRIX(MAMBA "x_proj", DIM_SCAN_GATES, DIM_VALUES, SPLIT_IN, scan.in, WHEN_RECURRENT),
    ROW_MATRIX(MAMBA "dt_proj", DIM_VALUES, DIM_STEP_RANK, SPLIT_OUT, scan.step, WHEN_RECURRENT),
    ROW_STATE("conv1d.weight", DIM_CONV, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, recurrence.conv),
    ROW(MAMBA "conv1d.bias", DIM_CHANNELS, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR,
        IN_LAYER(recurrence.conv_bias), WHEN_CONV_BIAS),
    ROW_STATE("A_log", DIM_VALUES, DIM_STATE_KEY, SPLIT_OUT, WEIGHT_TABLE, recurrence.a_log),
    ROW_STATE("dt_proj.bias", DIM_VALUES, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, recurrence.dt_bias),
    ROW_STATE("D", DIM_VALUES, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, recurrence.d),
    ROW_STATE("dt_layernorm.weight", DIM_STEP_RANK, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
              scan.step_norm.weight),
    ROW_STATE("b_layernorm.weight", DIM_STATE_KEY, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
              scan.k_norm.weight),
    ROW_STATE("c_layernorm.weight", DIM_STATE_KEY, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
              scan.q_norm.weight),
    ROW_MATRIX(MLP "gate_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),
    ROW_MATRIX(MLP "up_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),
    ROW_MATRIX(MLP "down_proj", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down, WHEN_DENSE),
    ROW_EXPERT("router", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, router),
    ROW_EXPERT("experts.%d.gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT("experts.%d.up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT("experts.%d.down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    {0},
};

const struct model_family jamba_family = {.architectures = ARCHITECTURES,
                                          .tensors = TENSORS,
                                          .ignored = IGNORED,
                                          .forward = hybrid_forward};
