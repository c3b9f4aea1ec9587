/* GPT-2: learned positions, layer norm before attention and MLP, biases, GELU. Weights
 * are stored [in, out] (Conv1D), with q, k and v as one tensor. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "GPT2LMHeadModel",
     .models = "GPT-2",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_TANH,
     .tied = true,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true},
    {0},
};

#define LAYER "transformer.h.%d."

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns of the result, split over ranks, kind, goes to, when,
     * stored transposed */
    {"transformer.wte.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_EMBEDDING,
     IN_MODEL(embed), WHEN_ALWAYS, false},
    {"transformer.wpe.weight", DIM_POSITIONS, DIM_HIDDEN, SPLIT_NONE, WEIGHT_TABLE,
     IN_MODEL(positions), WHEN_ALWAYS, false},
    {"transformer.ln_f.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
     IN_MODEL(final_norm.weight), WHEN_ALWAYS, false},
    {"transformer.ln_f.bias", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
     IN_MODEL(final_norm.bias), WHEN_ALWAYS, false},
    {"lm_head.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_LINEAR, IN_MODEL(head),
     WHEN_UNTIED, false},
    {LAYER "ln_1.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
     IN_LAYER(attn_norm.weight), WHEN_ALWAYS, false},
    {LAYER "ln_1.bias", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(attn_norm.bias),
     WHEN_ALWAYS, false},
    {LAYER "attn.c_attn.weight", DIM_QKV, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(qkv),
     WHEN_ALWAYS, true},
    {LAYER "attn.c_attn.bias", DIM_QKV, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(qkv_bias),
     WHEN_ALWAYS, false},
    {LAYER "attn.c_proj.weight", DIM_HIDDEN, DIM_Q, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(o),
     WHEN_ALWAYS, true},
    {LAYER "attn.c_proj.bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR, IN_LAYER(o_bias),
     WHEN_ALWAYS, false},
    {LAYER "ln_2.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(mlp_norm.weight),
     WHEN_ALWAYS, false},
    {LAYER "ln_2.bias", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(mlp_norm.bias),
     WHEN_ALWAYS, false},
    {LAYER "mlp.c_fc.weight", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(up),
     WHEN_ALWAYS, true},
    {LAYER "mlp.c_fc.bias", DIM_MLP, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(up_bias),
     WHEN_ALWAYS, false},
    {LAYER "mlp.c_proj.weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(down),
     WHEN_ALWAYS, true},
    {LAYER "mlp.c_proj.bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR, IN_LAYER(down_bias),
     WHEN_ALWAYS, false},
    {0},
};

/* The causal mask, which old checkpoints contain. */
static const char *const IGNORED[] = {".attn.bias", ".attn.masked_bias", NULL};

void gpt2_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n), attn = mat_rows(t->attn, 0, n),
               up = mat_rows(t->up, 0, n);

    if (t->first) {
        transformer_embed(m, x, 1);
    }
    if (t->first && t->positions.data) { /* StarCoder2's positions are rotary */
        ops->embed_position(be, x, t->positions, 0);
    }
    ops->norm(be, h, x, &t->layer[0].attn_norm);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, h, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
        ops->add_norm(be, h, x, y, &l->mlp_norm, t->partial);
        ops->linear(be, up, h, l->up, &(struct epilogue){.bias = l->up_bias, .act = m->config.act});
        ops->linear(be, y, up, l->down, &(struct epilogue){.bias = l->down_bias});
        transformer_end_layer(m, i, h, x, y, t->partial);
    }
}

const struct model_family gpt2_family = {.architectures = ARCHITECTURES,
                                         .tensors = TENSORS,
                                         .ignored = IGNORED,
                                         .forward = gpt2_forward};
