/* Nemotron-H: every layer is one of four, with one norm before it: a recurrence
 * (Mamba-2), attention, which rotates nothing, an MLP, or experts. No MLP has a gate:
 * the middle is relu(u) squared. What experts read and make may be narrower than hidden
 * (Nemotron 3 Super); their router and the shared expert read all of it. */
#include "models/families/layers.h"

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

static const struct architecture ARCHITECTURES[] = {
    {.name = "NemotronHForCausalLM",
     .models = "Nemotron-H, Nemotron Nano 2, Nemotron 3",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_RELU,
     .experts = true,
     .optional_experts = true,
     .sigmoid_experts = true,
     .normalises_experts = true,
     .ssd = true,
     .nemotron = true},
    {0},
};

#define MIXER "backbone.layers.%d.mixer."
#define ROW_VECTOR(when, name, rows, split, target) \
    ROW(MIXER name, rows, DIM_ONE, split, WEIGHT_VECTOR, IN_LAYER(target), when)
#define ROWS_OUTSIDE                                                \
    ROWS_ENDS("backbone.embeddings", "backbone.norm_f", "lm_head"), \
        ROW_NORM("backbone.layers.%d.norm", attn_norm)
#define ROWS_ATTENTION                                                                  \
    ROW_MATRIX(MIXER "q_proj", DIM_Q, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION),      \
        ROW_MATRIX(MIXER "k_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION), \
        ROW_MATRIX(MIXER "v_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_ATTENTION), \
        ROW_MATRIX(MIXER "o_proj", DIM_HIDDEN, DIM_Q, SPLIT_IN, o, WHEN_ATTENTION),     \
        ROW_MATRIX(MIXER "out_proj", DIM_HIDDEN, DIM_VALUES, SPLIT_IN, o, WHEN_RECURRENT)
#define ROWS_RECURRENCE                                                                           \
    ROW_MATRIX(MIXER "in_proj", DIM_SSD_IN, DIM_HIDDEN, SPLIT_OUT, mixer, WHEN_RECURRENT),        \
        ROW_VECTOR(WHEN_RECURRENT, "conv1d.weight", DIM_CONV, SPLIT_OUT, recurrence.conv),        \
        ROW_VECTOR(WHEN_CONV_BIAS, "conv1d.bias", DIM_CHANNELS, SPLIT_OUT, recurrence.conv_bias), \
        ROW_VECTOR(WHEN_RECURRENT, "A_log", DIM_STATE_HEADS, SPLIT_OUT, recurrence.a_log),        \
        ROW_VECTOR(WHEN_RECURRENT, "dt_bias", DIM_STATE_HEADS, SPLIT_OUT, recurrence.dt_bias),    \
        ROW_VECTOR(WHEN_RECURRENT, "D", DIM_STATE_HEADS, SPLIT_OUT, recurrence.d),                \
        ROW_VECTOR(WHEN_RECURRENT, "norm.weight", DIM_VALUES, SPLIT_OUT, mixer_norm.weight)
/* Of an MLP alone, or of the shared expert. */
#define ROWS_MLP                                                                             \
    ROW_MATRIX(MIXER "up_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_MLP_ALONE),         \
        ROW_MATRIX(MIXER "shared_experts.up_proj", DIM_SHARED, DIM_HIDDEN, SPLIT_OUT, up,    \
                   WHEN_SHARED),                                                             \
        ROW_MATRIX(MIXER "down_proj", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down, WHEN_MLP_ALONE),  \
        ROW_MATRIX(MIXER "shared_experts.down_proj", DIM_HIDDEN, DIM_SHARED, SPLIT_IN, down, \
                   WHEN_SHARED)
#define ROWS_ROUTER                                                                               \
    ROW_ROUTER(MIXER "gate"),                                                                     \
        ROW_VECTOR(WHEN_CHOICE_BIAS, "gate.e_score_correction_bias", DIM_EXPERTS, SPLIT_NONE,     \
                   experts.choice_bias),                                                          \
        ROW_MATRIX(MIXER "fc1_latent_proj", DIM_EXPERT_WIDTH, DIM_HIDDEN, SPLIT_NONE, expert_in,  \
                   WHEN_EXPERT_LATENT),                                                           \
        ROW_MATRIX(MIXER "fc2_latent_proj", DIM_HIDDEN, DIM_EXPERT_WIDTH, SPLIT_NONE, expert_out, \
                   WHEN_EXPERT_LATENT)

#define ROW_EXPERT_UP(when)                                                                     \
    ROW_MATRIX(MIXER "experts.%d.up_proj", DIM_EXPERT, DIM_EXPERT_WIDTH, SPLIT_OUT, experts.up, \
               when)
static const struct tensor_spec TENSORS[] = {
    ROWS_OUTSIDE,
    ROWS_ATTENTION,
    ROWS_RECURRENCE,
    ROWS_MLP,
    ROWS_ROUTER,
    ROW_EXPERT_UP(WHEN_GATE_COPIED),
    ROW_EXPERT_UP(WHEN_EXPERTS),
    ROW_MATRIX(MIXER "experts.%d.down_proj", DIM_EXPERT_WIDTH, DIM_EXPERT, SPLIT_IN, experts.down,
               WHEN_EXPERTS),
    {0},
};

static void run_experts(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    struct expert_scratch s = t->experts;
    bool latent = l->expert_in.data != NULL;
    struct mat x = latent ? mat_rows(t->expert_x, 0, h.rows) : h;
    struct mat out = latent ? mat_rows(t->expert_y, 0, h.rows) : y;

    s.scores = mat_rows(s.scores, 0, h.rows);
    if (latent) {
        s.router_x = h;
        ops->linear(m->backend, x, h, l->expert_in, NULL);
    }
    ops->experts(m->backend, out, x, &l->experts, &s);
    if (latent) {
        ops->linear(m->backend, y, out, l->expert_out, NULL);
    }
    if (l->up.data) {
        transformer_ungated_mlp(m, l, y, h, true);
    }
}

static void nemotron_forward(struct model *m, const struct batch *b)
{
    const struct transformer *t = m->weights;
    struct mat x = mat_rows(t->x, 0, b->n_tokens), h = mat_rows(t->h, 0, b->n_tokens),
               y = mat_rows(t->y, 0, b->n_tokens);

    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        y.transient = l->experts.n == 0; /* what is beside experts reads h and y once more */
        if (l->recurrence.n_heads > 0) {
            transformer_mix(m, l, y, h);
        } else if (l->qkv.data) {
            transformer_attend(m, l, y, h);
        } else if (l->experts.n > 0) {
            run_experts(m, l, y, h);
        } else {
            transformer_ungated_mlp(m, l, y, h, false);
        }
        h.transient = i + 1 < t->n_layers && l[1].experts.n == 0;
        transformer_end_layer(m, i, h, x, y, t->partial);
    }
}

const struct model_family nemotron_family = {.architectures = ARCHITECTURES,
                                             .tensors = TENSORS,
                                             .ignored = IGNORED,
                                             .forward = nemotron_forward};
