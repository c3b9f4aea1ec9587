/* Apertus: LLaMA's layers with norms of each head's q and k, and an MLP without a gate,
 * whose activation has two factors of each layer. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "ApertusForCausalLM",
     .models = "Apertus",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_NONE,
     .rope_theta = 12e6,
     .qk_norm = true,
     .ungated_mlp = true,
     .xielu = true},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define ROW_FACTOR(name)                                                                        \
    ROW(LAYER "mlp.act_fn." name, DIM_ONE, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(xielu), \
        WHEN_ALWAYS)

static const struct tensor_spec TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROW_NORM(LAYER "attention_layernorm", attn_norm),
    ROWS_QKV(ATTN),
    ROWS_QKV_BIAS(ATTN),
    ROWS_QK_NORM(ATTN),
    ROW_O(ATTN "o_proj"),
    ROW_O_BIAS(ATTN "o_proj"),
    ROW_NORM(LAYER "feedforward_layernorm", mlp_norm),
    ROW_UP(LAYER "mlp.up_proj", DIM_MLP),
    ROW_DOWN(LAYER "mlp.down_proj"),
    ROW_FACTOR("alpha_p"),
    ROW_FACTOR("alpha_n"),
    {0},
};

/* The constants of the activation are the same in all models. */
static const char *const IGNORED[] = {"rotary_emb.inv_freq", "act_fn.beta", "act_fn.eps", NULL};

const struct model_family apertus_family = {.architectures = ARCHITECTURES,
                                            .tensors = TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};
