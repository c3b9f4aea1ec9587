/* LLaMA's forward pass with layer norms: StableLM, of which a quarter of a head
 * rotates, and Nemotron and Jais 2, whose MLPs have no gate. Norm weights of Nemotron
 * are stored minus 1. */
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
    ROW_FINAL_NORM_BIAS("model.norm"),
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

/* ---- Nemotron ---- */

static const struct architecture NEMOTRON[] = {
    {.name = "NemotronForCausalLM",
     .models = "Minitron, Nemotron-4",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_RELU,
     .rope_theta = 10000,
     .rope_partial = 0.5,
     .norm_from_one = true,
     .ungated_mlp = true},
    {.name = "Jais2ForCausalLM",
     .models = "Jais 2",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_RELU,
     .rope_theta = 10000,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true,
     .ungated_mlp = true},
    {0},
};

static const struct tensor_spec NEMOTRON_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROW_FINAL_NORM_BIAS("model.norm"),
    ROWS_LLAMA_ATTENTION,
    ROW_NORM_BIAS(LAYER "input_layernorm", attn_norm),
    ROW_NORM_BIAS(LAYER "post_attention_layernorm", mlp_norm),
    ROW_UP(LAYER "mlp.up_proj", DIM_MLP),
    ROW_UP_BIAS(LAYER "mlp.up_proj"),
    ROW_DOWN(LAYER "mlp.down_proj"),
    ROW_DOWN_BIAS(LAYER "mlp.down_proj"),
    {0},
};

const struct model_family nemotron_dense_family = {.architectures = NEMOTRON,
                                                   .tensors = NEMOTRON_TENSORS,
                                                   .ignored = IGNORED,
                                                   .forward = llama_forward,
                                                   .gathers = true};
