/* Phi-3 and Phi-4-mini: LLaMA's computation with q, k, v and gate, up stored as one
 * tensor each. */
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
