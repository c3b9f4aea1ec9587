/* Command R: attention and MLP read the same layer norm and are both added to the
 * residual stream; neighbouring dims rotate, logits have a factor. Command R7B and A
 * have a sliding window in three of four layers, and those alone rotate.
 */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "CohereForCausalLM",
     .models = "Command R",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .tied = true,
     .rope_interleaved = true,
     .logit_scale = 0.0625f},
    {.name = "Cohere2ForCausalLM",
     .models = "Command R7B, A",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .tied = true,
     .sliding_window = 4096,
     .window_pattern = 4,
     .rope_interleaved = true,
     .windows_rotate = true,
     .logit_scale = 0.0625f},
    {0},
};

#define LAYER LLAMA_LAYER

static const struct tensor_spec TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROWS_QKV(LAYER "self_attn."),
    ROWS_QKV_BIAS(LAYER "self_attn."),
    ROW_O(LAYER "self_attn.o_proj"),
    ROW_O_BIAS(LAYER "self_attn.o_proj"),
    ROWS_GATED_MLP(LAYER "mlp."),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

static void cohere_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n);   /* [n_tokens, (n_heads + 2 n_kv_heads) * head_dim] */
    struct mat attn = mat_rows(t->attn, 0, n); /* [n_tokens, n_heads * head_dim] */

    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, h, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
        ops->add(be, x, y, t->partial);
        transformer_mlp(m, l, y, h);
        transformer_end_layer(m, i, h, x, y, t->partial);
    }
}

const struct model_family cohere_family = {.architectures = ARCHITECTURES,
                                           .tensors = TENSORS,
                                           .ignored = IGNORED,
                                           .forward = cohere_forward};
