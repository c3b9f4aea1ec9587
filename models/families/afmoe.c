/* AFMoE (Arcee's Trinity): Qwen3's attention with gates, which rotates in windowed
 * layers alone, and GLM's experts; norms before attention and MLP and after them. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "AfmoeForCausalLM",
     .models = "Trinity (AFMoE)",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .gated_attention = true,
     .sliding_window = 1024,
     .window_pattern = 4,
     .windows_rotate = true,
     .experts = true,
     .normalises_experts = true,
     .sigmoid_experts = true,
     .dense_layers = 1,
     .n_shared = 2},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define MLP LAYER "mlp."

static const struct tensor_spec TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROWS_QKV(ATTN),
    ROW_QKV(ATTN "gate_proj", DIM_Q),
    ROWS_QK_NORM(ATTN),
    ROW_O(ATTN "o_proj"),
    ROW_NORM(LAYER "post_attention_layernorm", attn_post_norm),
    ROW_NORM(LAYER "pre_mlp_layernorm", mlp_norm),
    ROWS_DENSE_MLP(MLP),
    ROWS_EXPERTS(MLP),
    ROW_ROUTER(MLP "router.gate"),
    ROW(MLP "expert_bias", DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_LAYER(experts.choice_bias), WHEN_CHOICE_BIAS),
    ROWS_SHARED_EXPERT(MLP "shared_experts."),
    ROW_NORM(LAYER "post_mlp_layernorm", mlp_post_norm),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

static void forward(struct model *m, const struct batch *b)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    struct mat x = mat_rows(t->x, 0, b->n_tokens), h = mat_rows(t->h, 0, b->n_tokens),
               y = mat_rows(t->y, 0, b->n_tokens);

    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        transformer_attend(m, l, y, h);
        transformer_post_norm(m, y, y, &l->attn_post_norm);
        ops->add_norm(m->backend, h, x, y, &l->mlp_norm, false);
        transformer_mlp(m, l, y, h);
        transformer_post_norm(m, y, y, &l->mlp_post_norm);
        transformer_end_layer(m, i, h, x, y, false);
    }
}

const struct model_family afmoe_family = {
    .architectures = ARCHITECTURES, .tensors = TENSORS, .ignored = IGNORED, .forward = forward};
