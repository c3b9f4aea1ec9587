/* Multi-token prediction of Qwen3-Next and Qwen3.5, whose tensors have names of
 * their own ("mtp."): one layer of the target's kind with full attention, behind a
 * join as in mtp.c. Further drafts are made of what its last norm gives. */
#include "models/families/layers.h"

#define LAYER "mtp.layers.%d."
#define ATTN LAYER "self_attn."
#define MLP LAYER "mlp."
#define ROW_END_NORM(name, norm)                                               \
    ROW("mtp." name ".weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, \
        IN_MODEL(norm.weight), WHEN_ALWAYS)
#define ROW_ATTN(name, rows) ROW_MATRIX(ATTN name, rows, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ALWAYS)

#define ROWS_JOIN                                                                                \
    ROW_END_NORM("pre_fc_norm_embedding", draft.embed_norm),                                     \
        ROW_END_NORM("pre_fc_norm_hidden", draft.hidden_norm), ROW_END_NORM("norm", final_norm), \
        ROW("mtp.fc.weight", DIM_HIDDEN, DIM_JOINED, SPLIT_NONE, WEIGHT_LINEAR,                  \
            IN_MODEL(draft.join), WHEN_ALWAYS)
#define ROWS_ATTENTION                                                                             \
    ROW_ATTN("q_proj", DIM_GATED_Q_QUERY), ROW_ATTN("k_proj", DIM_KV), ROW_ATTN("v_proj", DIM_KV), \
        ROW_ATTN("q_proj", DIM_GATED_Q_GATE), ROWS_QK_NORM(ATTN), ROW_O(ATTN "o_proj"),            \
        ROW_NORM(LAYER "input_layernorm", attn_norm),                                              \
        ROW_NORM(LAYER "post_attention_layernorm", mlp_norm)
#define ROWS_SHARED                                                                                \
    ROWS_SHARED_EXPERT(MLP "shared_expert."),                                                      \
        ROW_MATRIX(MLP "shared_expert_gate", DIM_ONE, DIM_HIDDEN, SPLIT_NONE, experts.shared_gate, \
                   WHEN_SHARED)

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROWS_JOIN, ROWS_ATTENTION, ROWS_MLP_OR_EXPERTS(MLP), ROWS_SHARED, {0},
};

/* All experts of the layer in one tensor. */
static const struct tensor_spec STACKED_TENSORS[] = {
    ROWS_JOIN, ROWS_ATTENTION, ROW_ROUTER(MLP "gate"), ROWS_STACKED_EXPERTS(MLP), ROWS_SHARED, {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", "embed_tokens.weight",
                                      "lm_head.weight", NULL};

static const struct model_family stacked = {.tensors = STACKED_TENSORS,
                                            .marker = "experts.gate_up_proj",
                                            .ignored = IGNORED,
                                            .forward = hybrid_forward};
const struct model_family qwen_mtp_family = {
    .tensors = TENSORS, .variant = &stacked, .ignored = IGNORED, .forward = hybrid_forward};
