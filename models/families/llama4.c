/* Llama 4: layers with chunks, whose heads are rotated and then normed without weights,
 * and every fourth one that sees all tokens and rotates nothing. One expert of a layer
 * reads its input times the router's sigmoid, beside a shared one; some layers may have
 * an MLP of another width. The forward pass is that of hybrids, which read a layer's
 * normed input more than once. */
#include "models/families/layers.h"

#define LLAMA4(arch)                                                                            \
    .name = (arch), .norm = NORM_RMS, .norm_eps = 1e-5f, .act = ACT_SILU, .rope_theta = 500000, \
    .rope_interleaved = true, .unrotated_pattern = 4, .norm_last = true, .experts = true,       \
    .llama4 = true

static const struct architecture ARCHITECTURES[] = {
    {LLAMA4("Llama4ForCausalLM"), .models = "Llama 4, text"},
    {LLAMA4("Llama4ForConditionalGeneration"), .models = "Llama 4: text", .wrapper = true},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define FF LAYER "feed_forward."

/* An MLP, or the shared expert in its place; and the router. */
#define ROWS_LAYER                                                                       \
    ROWS_LLAMA_ENDS, ROW_NORM(LAYER "input_layernorm", attn_norm), ROWS_QKV(ATTN),       \
        ROW_O(ATTN "o_proj"), ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),      \
        ROW_MATRIX(FF "gate_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),      \
        ROW_MATRIX(FF "up_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),        \
        ROW_MATRIX(FF "shared_expert.gate_proj", DIM_SHARED, DIM_HIDDEN, SPLIT_OUT, up,  \
                   WHEN_SHARED),                                                         \
        ROW_MATRIX(FF "shared_expert.up_proj", DIM_SHARED, DIM_HIDDEN, SPLIT_OUT, up,    \
                   WHEN_SHARED),                                                         \
        ROW_MATRIX(FF "down_proj", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down, WHEN_DENSE),     \
        ROW_MATRIX(FF "shared_expert.down_proj", DIM_HIDDEN, DIM_SHARED, SPLIT_IN, down, \
                   WHEN_SHARED),                                                         \
        ROW_ROUTER(FF "router")
#define ROW_STACKED(name, rows, cols, split, target)                     \
    {FF "experts." name,       rows,         cols, split, WEIGHT_LINEAR, \
     IN_LAYER(experts.target), WHEN_EXPERTS, true}

static const struct tensor_spec TENSORS[] = {ROWS_LAYER, ROWS_EXPERTS(FF), {0}};
/* As published: all experts of a layer in one tensor, each [in, out]. */
static const struct tensor_spec STACKED_TENSORS[] = {
    ROWS_LAYER,
    ROW_STACKED("gate_up_proj", DIM_STACKED_GATE_UP, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_STACKED("down_proj", DIM_STACKED_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

static const struct model_family stacked = {.architectures = ARCHITECTURES,
                                            .tensors = STACKED_TENSORS,
                                            .marker = "experts.gate_up_proj",
                                            .ignored = IGNORED,
                                            .forward = hybrid_forward};
const struct model_family llama4_family = {.architectures = ARCHITECTURES,
                                           .tensors = TENSORS,
                                           .variant = &stacked,
                                           .ignored = IGNORED,
                                           .forward = hybrid_forward};
