/* StarCoder2: GPT-2's computation (layer norms, biases, a plain MLP) with LLaMA's
 * rotary positions and grouped queries. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "Starcoder2ForCausalLM",
     .models = "StarCoder2",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .tied = true,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true},
    {0},
};

#define LAYER LLAMA_LAYER

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROWS_LLAMA_ENDS,
    ROW("model.norm.bias", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_MODEL(final_norm.bias), WHEN_ALWAYS),
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROW_NORM_BIAS(LAYER "input_layernorm", attn_norm),
    ROWS_QKV(LAYER "self_attn."),
    ROWS_QKV_BIAS(LAYER "self_attn."),
    ROW_O(LAYER "self_attn.o_proj"),
    ROW(LAYER "self_attn.o_proj.bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR,
        IN_LAYER(o_bias), WHEN_O_BIAS),
    ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),
    ROW_NORM_BIAS(LAYER "post_attention_layernorm", mlp_norm),
    ROW_UP(LAYER "mlp.c_fc", DIM_MLP),
    ROW(LAYER "mlp.c_fc.bias", DIM_MLP, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(up_bias),
        WHEN_MLP_BIAS),
    ROW_DOWN(LAYER "mlp.c_proj"),
    ROW(LAYER "mlp.c_proj.bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR,
        IN_LAYER(down_bias), WHEN_MLP_BIAS),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family starcoder2_family = {.architectures = ARCHITECTURES,
                                               .tensors = TENSORS,
                                               .ignored = IGNORED,
                                               .forward = gpt2_forward};
