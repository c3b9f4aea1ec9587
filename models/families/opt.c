/* OPT: learned positions with an offset of 2, layer norm, biases, ReLU. The 350m
 * variant has its norms after attention and MLP, and a projection of its embedding. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "OPTForCausalLM",
     .models = "OPT",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_RELU,
     .tied = true,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true},
    {0},
};

enum { POSITION_OFFSET = 2 };

#define TOP "model.decoder."
#define LAYER "model.decoder.layers.%d."

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    {TOP "embed_tokens.weight", DIM_VOCAB, DIM_EMBED, SPLIT_VOCAB, WEIGHT_EMBEDDING,
     IN_MODEL(embed), WHEN_ALWAYS, false},
    {TOP "embed_positions.weight", DIM_POSITIONS_2, DIM_HIDDEN, SPLIT_NONE, WEIGHT_TABLE,
     IN_MODEL(positions), WHEN_ALWAYS, false},
    {TOP "project_in.weight", DIM_HIDDEN, DIM_EMBED, SPLIT_NONE, WEIGHT_LINEAR,
     IN_MODEL(project_in), WHEN_PROJECTED, false},
    {TOP "project_out.weight", DIM_EMBED, DIM_HIDDEN, SPLIT_NONE, WEIGHT_LINEAR,
     IN_MODEL(project_out), WHEN_PROJECTED, false},
    {TOP "final_layer_norm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
     IN_MODEL(final_norm.weight), WHEN_FINAL_NORM, false},
    {TOP "final_layer_norm.bias", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
     IN_MODEL(final_norm.bias), WHEN_FINAL_NORM, false},
    {"lm_head.weight", DIM_VOCAB, DIM_EMBED, SPLIT_VOCAB, WEIGHT_LINEAR, IN_MODEL(head),
     WHEN_UNTIED, false},
    ROW_NORM(LAYER "self_attn_layer_norm", attn_norm),
    ROW_NORM_BIAS(LAYER "self_attn_layer_norm", attn_norm),
    ROWS_QKV(LAYER "self_attn."),
    ROWS_QKV_BIAS(LAYER "self_attn."),
    ROW_O(LAYER "self_attn.out_proj"),
    ROW_O_BIAS(LAYER "self_attn.out_proj"),
    ROW_NORM(LAYER "final_layer_norm", mlp_norm),
    ROW_NORM_BIAS(LAYER "final_layer_norm", mlp_norm),
    ROW_UP(LAYER "fc1", DIM_MLP),
    ROW_UP_BIAS(LAYER "fc1"),
    ROW_DOWN(LAYER "fc2"),
    ROW_DOWN_BIAS(LAYER "fc2"),
    {0},
};

static const char *const IGNORED[] = {NULL};

static void forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    const struct epilogue plain = {0};
    bool before = m->config.norm_before, projected = m->config.embed_dim != m->config.hidden;
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n), attn = mat_rows(t->attn, 0, n),
               up = mat_rows(t->up, 0, n);
    struct mat narrow = mat_rows(t->narrow, 0, n); /* [n_tokens, embed_dim] */

    if (t->first) {
        transformer_embed(m, projected ? narrow : x, 1);
        if (projected) {
            ops->linear(be, x, narrow, t->project_in, &plain);
        }
        ops->embed_position(be, x, t->positions, POSITION_OFFSET);
    }
    if (before) {
        ops->norm(be, h, x, &t->layer[0].attn_norm);
    }
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, before ? h : x, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
        ops->add_norm(be, h, x, y, before ? &l->mlp_norm : &l->attn_norm, t->partial);
        ops->linear(be, up, h, l->up, &(struct epilogue){.bias = l->up_bias, .act = m->config.act});
        ops->linear(be, y, up, l->down, &(struct epilogue){.bias = l->down_bias});
        if (!before) { /* the normed h is the residual stream */
            ops->add_norm(be, x, h, y, &l->mlp_norm, t->partial);
        } else {
            transformer_end_layer(m, i, h, x, y, t->partial);
        }
    }
    if (projected && model_is_last(m)) {
        ops->linear(be, narrow, m->config.final_norm ? h : x, t->project_out, &plain);
    }
}

const struct model_family opt_family = {
    .architectures = ARCHITECTURES, .tensors = TENSORS, .ignored = IGNORED, .forward = forward};
