/* LLaMA's computation under other names: Phi-3 and Phi-4 store q, k, v and gate, up as
 * one tensor each; EXAONE 3 has GPT-2's names; InternLM2 stores q, k and v by key/value
 * head. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "Phi3ForCausalLM",
     .models = "Phi-3, Phi-4",
     .windows = true,
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {0},
};

#define LAYER LLAMA_LAYER

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROWS_LLAMA_JOINED,
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family phi3_family = {.architectures = ARCHITECTURES,
                                         .tensors = TENSORS,
                                         .ignored = IGNORED,
                                         .forward = llama_forward,
                                         .gathers = true};

/* ---- EXAONE 3 ---- */

static const struct architecture EXAONE[] = {
    {.name = "ExaoneForCausalLM",
     .models = "EXAONE 3.0, 3.5, Deep",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {0},
};

#define BLOCK "transformer.h.%d."

static const struct tensor_spec EXAONE_TENSORS[] = {
    ROWS_ENDS("transformer.wte", "transformer.ln_f", "lm_head"),
    ROW_NORM(BLOCK "ln_1", attn_norm),
    ROWS_QKV(BLOCK "attn.attention."),
    ROW_O(BLOCK "attn.attention.out_proj"),
    ROW_NORM(BLOCK "ln_2", mlp_norm),
    ROW_UP(BLOCK "mlp.c_fc_0", DIM_MLP),
    ROW_UP(BLOCK "mlp.c_fc_1", DIM_MLP),
    ROW_DOWN(BLOCK "mlp.c_proj"),
    {0},
};

const struct model_family exaone_family = {.architectures = EXAONE,
                                           .tensors = EXAONE_TENSORS,
                                           .ignored = IGNORED,
                                           .forward = llama_forward,
                                           .gathers = true};

/* ---- InternLM2 ---- */

static const struct architecture INTERNLM2[] = {
    {.name = "InternLM2ForCausalLM",
     .models = "InternLM2, InternLM2.5",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {0},
};

#define ROWS_INTERNLM2                                                                  \
    ROWS_ENDS("model.tok_embeddings", "model.norm", "output"),                          \
        ROW_NORM(LAYER "attention_norm", attn_norm), ROW_O(LAYER "attention.wo"),       \
        ROW_NORM(LAYER "ffn_norm", mlp_norm), ROW_UP(LAYER "feed_forward.w1", DIM_MLP), \
        ROW_UP(LAYER "feed_forward.w3", DIM_MLP), ROW_DOWN(LAYER "feed_forward.w2")

static const struct tensor_spec INTERNLM2_TENSORS[] = {
    ROWS_INTERNLM2, ROWS_GROUPED_QKV(LAYER "attention.wqkv"), {0}};
/* As in a GGUF file. */
static const struct tensor_spec INTERNLM2_APART_TENSORS[] = {
    ROWS_INTERNLM2, ROWS_QKV(LAYER "attention."), {0}};

static const struct model_family internlm2_apart = {.architectures = INTERNLM2,
                                                    .tensors = INTERNLM2_APART_TENSORS,
                                                    .marker = "attention.q_proj.weight",
                                                    .ignored = IGNORED,
                                                    .forward = llama_forward,
                                                    .gathers = true};
const struct model_family internlm2_family = {.architectures = INTERNLM2,
                                              .tensors = INTERNLM2_TENSORS,
                                              .variant = &internlm2_apart,
                                              .ignored = IGNORED,
                                              .forward = llama_forward,
                                              .gathers = true};
