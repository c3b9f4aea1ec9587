/* Falcon-H1: every layer has attention and a recurrence (Mamba-2) side by side, which
 * read the same and whose outputs are added, then an MLP. Factors of its parts are
 * numbers of the configuration; those that are 1 cost nothing. */
#include "models/families/layers.h"

static const char *const IGNORED[] = {"rotary_emb.inv_freq", "mup_vector", NULL};

static const struct architecture ARCHITECTURES[] = {
    {.name = "FalconH1ForCausalLM",
     .models = "Falcon-H1",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 100000,
     .ssd = true,
     .falcon = true},
    {0},
};

#define LAYER LLAMA_LAYER
#define MAMBA LAYER "mamba."
#define ROW_VECTOR(when, name, rows, split, target) \
    ROW(MAMBA name, rows, DIM_ONE, split, WEIGHT_VECTOR, IN_LAYER(target), when)

static const struct tensor_spec TENSORS[] = {
    ROWS_ENDS("model.embed_tokens", "model.final_layernorm", "lm_head"),
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROW_NORM(LAYER "pre_ff_layernorm", mlp_norm),
    ROWS_QKV(LAYER "self_attn."),
    ROW_O(LAYER "self_attn.o_proj"),
    ROW_MATRIX(MAMBA "in_proj", DIM_SSD_IN, DIM_HIDDEN, SPLIT_OUT, mixer, WHEN_ALWAYS),
    ROW_VECTOR(WHEN_ALWAYS, "conv1d.weight", DIM_CONV, SPLIT_OUT, recurrence.conv),
    ROW_VECTOR(WHEN_CONV_BIAS, "conv1d.bias", DIM_CHANNELS, SPLIT_OUT, recurrence.conv_bias),
    ROW_VECTOR(WHEN_ALWAYS, "A_log", DIM_STATE_HEADS, SPLIT_OUT, recurrence.a_log),
    ROW_VECTOR(WHEN_ALWAYS, "dt_bias", DIM_STATE_HEADS, SPLIT_OUT, recurrence.dt_bias),
    ROW_VECTOR(WHEN_ALWAYS, "D", DIM_STATE_HEADS, SPLIT_OUT, recurrence.d),
    ROW_VECTOR(WHEN_MIXER_NORM, "norm.weight", DIM_VALUES, SPLIT_OUT, mixer_norm.weight),
    ROW_MATRIX(MAMBA "out_proj", DIM_HIDDEN, DIM_VALUES, SPLIT_IN, mixer_out, WHEN_ALWAYS),
    ROWS_GATED_MLP(LAYER "feed_forward."),
    {0},
};

static void scale(struct model *m, struct mat x, enum layer_factor f)
{
    if (m->config.factor[f] != 1) {
        m->backend->ops->multiply(m->backend, x, mat_cols(m->weights->factors, f, 1), ACT_NONE);
    }
}

/* y = what the recurrence makes of h. */
static void mix(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct recurrence *r = &l->recurrence;
    int32_t values = r->n_heads * r->value_dim, keys = r->n_groups * r->key_dim;
    struct mat all = mat_cols(mat_rows(m->weights->mixer, 0, h.rows), 0, l->mixer.rows);
    struct mat out = mat_cols(mat_rows(m->weights->attn, 0, h.rows), 0, values);
    struct mat z = mat_cols(all, 0, values);
    const int32_t width[] = {values, values, keys, keys, r->n_heads};

    ops->linear(m->backend, all, h, l->mixer, NULL);
    for (int32_t i = 0, at = 0; i < (int32_t)ARRAY_LEN(width); at += width[i++]) {
        scale(m, mat_cols(all, at, width[i]), (enum layer_factor)(FACTOR_Z + i));
    }
    struct mat x = mat_cols(all, values, values + 2 * keys);
    struct mat steps = mat_cols(all, 2 * (values + keys), r->n_heads);
    if (m->config.recurrent.normed) {
        transformer_recur(m, l, out, x, steps, z);
    } else {
        ops->recurrence(m->backend, out, x, steps, r, NULL);
        ops->multiply(m->backend, out, z, ACT_SILU);
    }
    scale(m, out, FACTOR_STATES);
    ops->linear(m->backend, y, out, l->mixer_out, NULL);
}

/* y += attention of h. */
static void attend(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct attention *a = &l->attention;
    struct mat qkv = mat_cols(mat_rows(m->weights->qkv, 0, h.rows), 0, l->qkv.rows);
    struct mat out = mat_cols(mat_rows(m->weights->attn, 0, h.rows), 0, a->n_heads * a->head_dim);

    ops->linear(m->backend, qkv, h, l->qkv, NULL);
    ops->rope_kv(m->backend, qkv, &l->rope, a);
    ops->attention(m->backend, out, qkv, a);
    scale(m, out, FACTOR_ATTENTION);
    ops->linear(m->backend, y, out, l->o, &(struct epilogue){.residual = y});
}

static void feed_forward(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    struct mat both = mat_cols(mat_rows(m->weights->up, 0, h.rows), 0, l->up.rows);
    struct mat gate = mat_cols(both, 0, l->down.cols),
               up = mat_cols(both, l->down.cols, l->down.cols);

    ops->linear(m->backend, both, h, l->up, NULL);
    scale(m, gate, FACTOR_GATE);
    ops->multiply(m->backend, up, gate, m->config.act);
    scale(m, up, FACTOR_DOWN);
    ops->linear(m->backend, y, up, l->down, NULL);
}

static void falcon_forward(struct model *m, const struct batch *b)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    struct mat x = mat_rows(t->x, 0, b->n_tokens), h = mat_rows(t->h, 0, b->n_tokens),
               y = mat_rows(t->y, 0, b->n_tokens);

    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        mix(m, l, y, h);
        attend(m, l, y, h);
        ops->add_norm(m->backend, h, x, y, &l->mlp_norm, t->partial);
        feed_forward(m, l, y, h);
        transformer_end_layer(m, i, h, x, y, t->partial);
    }
}

const struct model_family falcon_family = {.architectures = ARCHITECTURES,
                                           .tensors = TENSORS,
                                           .ignored = IGNORED,
                                           .forward = falcon_forward};
