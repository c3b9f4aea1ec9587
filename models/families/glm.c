/* GLM-4: LLaMA's computation with biases of q, k and v, half of a head rotated in
 * neighbouring pairs, and gate and up stored as one tensor. The models of 2025
 * (Glm4ForCausalLM) have norms after attention and MLP as well, as Gemma-2 has. GGUF
 * files made of what was published first (ChatGLM3, GLM-4 9B) have q, k and v as one
 * tensor. */
#include "models/families/layers.h"

#define GLM                                                                         \
    .norm = NORM_RMS, .norm_eps = 1.5625e-7f, .act = ACT_SILU, .rope_theta = 10000, \
    .rope_partial = 0.5, .rope_interleaved = true, .qkv_bias = true, .bias_apart = true

static const struct architecture GLM_ARCHITECTURES[] = {
    {.name = "GlmForCausalLM", .models = "GLM-4 of 2024", GLM}, {0}};
static const struct architecture GLM4_ARCHITECTURES[] = {
    {.name = "Glm4ForCausalLM", .models = "GLM-4 of 2025", GLM}, {0}};

#define LAYER LLAMA_LAYER
#define ROWS_GLM                                                                          \
    ROWS_LLAMA_ENDS, ROWS_LLAMA_ATTENTION, ROW_UP(LAYER "mlp.gate_up_proj", DIM_GATE_UP), \
        ROW_DOWN(LAYER "mlp.down_proj")

static const struct tensor_spec GLM_TENSORS[] = {ROWS_GLM, {0}};
static const struct tensor_spec GLM4_TENSORS[] = {
    ROWS_GLM,
    ROW_NORM(LAYER "post_self_attn_layernorm", attn_post_norm),
    ROW_NORM(LAYER "post_mlp_layernorm", mlp_post_norm),
    {0},
};

static const struct tensor_spec CHATGLM_TENSORS[] = {ROWS_LLAMA_JOINED, {0}};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

static const struct model_family chatglm = {.architectures = GLM_ARCHITECTURES,
                                            .tensors = CHATGLM_TENSORS,
                                            .marker = "self_attn.qkv_proj.weight",
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};

const struct model_family glm_family = {.architectures = GLM_ARCHITECTURES,
                                        .tensors = GLM_TENSORS,
                                        .variant = &chatglm,
                                        .ignored = IGNORED,
                                        .forward = llama_forward,
                                        .gathers = true};
const struct model_family glm4_family = {.architectures = GLM4_ARCHITECTURES,
                                         .tensors = GLM4_TENSORS,
                                         .ignored = IGNORED,
                                         .forward = gemma2_forward};
