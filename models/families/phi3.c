/* LLaMA's computation under other names: Phi-3 and Phi-4 store q, k, v and gate, up as
 * one tensor each; EXAONE 3 has GPT-2's names. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "Phi3ForCausalLM",
     .models = "Phi-3, Phi-4",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {0},
};

#define LAYER LLAMA_LAYER

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROWS_LLAMA_ENDS,
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROW_QKV(LAYER "self_attn.qkv_proj", DIM_QKV),
    ROW_O(LAYER "self_attn.o_proj"),
    ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),
    ROW_UP(LAYER "mlp.gate_up_proj", DIM_GATE_UP),
    ROW_DOWN(LAYER "mlp.down_proj"),
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
    ROW("transformer.wte.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_EMBEDDING,
        IN_MODEL(embed), WHEN_ALWAYS),
    ROW("transformer.ln_f.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_MODEL(final_norm.weight), WHEN_ALWAYS),
    ROW("lm_head.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_LINEAR, IN_MODEL(head),
        WHEN_UNTIED),
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
