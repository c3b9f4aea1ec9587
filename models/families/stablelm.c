/* StableLM: LLaMA's forward pass with layer norms, and a quarter of a head rotated. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "StableLmForCausalLM",
     .models = "StableLM 1.6B, 3B",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .rope_partial = 0.25},
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
    ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),
    ROW_NORM_BIAS(LAYER "post_attention_layernorm", mlp_norm),
    ROWS_GATED_MLP(LAYER "mlp."),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family stablelm_family = {.architectures = ARCHITECTURES,
                                             .tensors = TENSORS,
                                             .ignored = IGNORED,
                                             .forward = llama_forward,
                                             .gathers = true};
