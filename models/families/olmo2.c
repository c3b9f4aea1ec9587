/* OLMo-2, OLMo-3, FlexOlmo, EXAONE 4: LLaMA's layers with norms after attention and MLP
 * instead of before them. OLMo norms q and k over all heads together, EXAONE each
 * head's; layers with a sliding window rotate without scaling (OLMo-3), or they alone
 * rotate (EXAONE). */
#include "models/families/layers.h"

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
/* Of a layer, all but the norms of q and k; and of these, what attention has. */
#define ROWS_ATTENTION \
    ROWS_QKV(ATTN), ROW_O(ATTN "o_proj"), ROW_NORM(LAYER "post_attention_layernorm", attn_post_norm)
#define ROWS_LAYER                                \
    ROWS_ATTENTION, ROWS_GATED_MLP(LAYER "mlp."), \
        ROW_NORM(LAYER "post_feedforward_layernorm", mlp_post_norm)

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

static void olmo2_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    const struct epilogue plain = {0};
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n);   /* [n_tokens, (n_heads + 2 n_kv_heads) * head_dim] */
    struct mat attn = mat_rows(t->attn, 0, n); /* [n_tokens, n_heads * head_dim] */

    if (t->first) {
        transformer_embed(m, x, m->config.embed_scale);
    }
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, x, l->qkv, &plain);
        transformer_norm_heads(m, l, qkv);
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, h, attn, l->o, &plain);
        transformer_post_norm(m, y, h, &l->attn_post_norm);
        ops->add(be, x, y, false);
        transformer_mlp(m, l, h, x);
        transformer_post_norm(m, y, h, &l->mlp_post_norm);
        transformer_end_layer(m, i, h, x, y, false);
    }
}

/* ---- OLMo ---- */

static const struct architecture OLMO2[] = {
    {.name = "Olmo2ForCausalLM",
     .models = "OLMo-2",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .wide_qk_norm = true},
    {.name = "Olmo3ForCausalLM",
     .models = "OLMo-3",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 500000,
     .sliding_window = 4096,
     .window_pattern = 4,
     .window_theta = 500000,
     .wide_qk_norm = true},
    {0},
};

static const struct tensor_spec OLMO2_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LAYER,
    ROWS_WIDE_NORMS(ATTN),
    {0},
};

const struct model_family olmo2_family = {
    .architectures = OLMO2, .tensors = OLMO2_TENSORS, .ignored = IGNORED, .forward = olmo2_forward};

/* ---- FlexOlmo: OLMo-2 with OLMoE's experts ---- */

static const struct architecture FLEX_OLMO[] = {
    {.name = "FlexOlmoForCausalLM",
     .models = "FlexOlmo",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 500000,
     .wide_qk_norm = true,
     .experts = true},
    {0},
};

static const struct tensor_spec FLEX_OLMO_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_ATTENTION,
    ROWS_WIDE_NORMS(ATTN),
    ROW_ROUTER(LAYER "mlp.gate"),
    ROWS_EXPERTS(LAYER "mlp."),
    ROW_NORM(LAYER "post_feedforward_layernorm", mlp_post_norm),
    {0},
};

const struct model_family flex_olmo_family = {.architectures = FLEX_OLMO,
                                              .tensors = FLEX_OLMO_TENSORS,
                                              .ignored = IGNORED,
                                              .forward = olmo2_forward};

/* ---- EXAONE ---- */

static const struct architecture EXAONE4[] = {
    {.name = "Exaone4ForCausalLM",
     .models = "EXAONE 4",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .sliding_window = 4096,
     .window_pattern = 4,
     .windows_rotate = true},
    {0},
};

static const struct tensor_spec EXAONE4_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LAYER,
    ROWS_QK_NORM(ATTN),
    {0},
};

const struct model_family exaone4_family = {.architectures = EXAONE4,
                                            .tensors = EXAONE4_TENSORS,
                                            .ignored = IGNORED,
                                            .forward = olmo2_forward};
