/* Phi-3 and Phi-4-mini: LLaMA's computation with q, k, v and gate, up stored as one tensor each. */
#include "models/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "Phi3ForCausalLM", .norm = NORM_RMS, .norm_eps = 1e-5f, .act = ACT_SILU, .rope_theta = 10000},
    {0},
};

#define LAYER "model.layers.%d."

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    {"model.embed_tokens.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_EMBEDDING, IN_MODEL(embed), WHEN_ALWAYS,
     false},
    {"model.norm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_MODEL(final_norm.weight), WHEN_ALWAYS,
     false},
    {"lm_head.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_LINEAR, IN_MODEL(head), WHEN_UNTIED, false},
    {LAYER "input_layernorm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(attn_norm.weight),
     WHEN_ALWAYS, false},
    {LAYER "self_attn.qkv_proj.weight", DIM_QKV, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(qkv), WHEN_ALWAYS,
     false},
    {LAYER "self_attn.o_proj.weight", DIM_HIDDEN, DIM_Q, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(o), WHEN_ALWAYS, false},
    {LAYER "post_attention_layernorm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(mlp_norm.weight),
     WHEN_ALWAYS, false},
    {LAYER "mlp.gate_up_proj.weight", DIM_GATE_UP, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(up), WHEN_ALWAYS,
     false},
    {LAYER "mlp.down_proj.weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(down), WHEN_ALWAYS, false},
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family phi3_family = {
    .architectures = ARCHITECTURES, .tensors = TENSORS, .ignored = IGNORED, .forward = llama_forward};
