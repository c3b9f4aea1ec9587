/* DeepSeek-V2 and V3, and what has their shape (Kimi-K2, GLM-4.7-Flash, Mistral
 * Small 4): multi-head latent attention, whose cache holds one latent a token for all
 * heads (backend.h, struct latent_attention), and experts behind a few plain layers.
 * Youtu-LLM has plain layers alone.
 *
 * One product makes the queries, or a latent of theirs, and the latent of keys and
 * values. V2 routes by softmax, V3 by sigmoid scores with a bias for the choice, both
 * among groups of experts. With ranks the heads are divided and each rank has the whole
 * latent, which it computes itself.
 */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "DeepseekV2ForCausalLM",
     .models = "DeepSeek-V2, V2-Lite",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .rope_interleaved = true,
     .experts = true,
     .latent = true},
    {.name = "DeepseekV3ForCausalLM",
     .models = "DeepSeek-V3, R1, Kimi-K2",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .rope_interleaved = true,
     .experts = true,
     .normalises_experts = true,
     .latent = true,
     .sigmoid_experts = true,
     .dense_layers = 3},
    {.name = "Glm4MoeLiteForCausalLM",
     .models = "GLM-4.7-Flash",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .rope_interleaved = true,
     .experts = true,
     .normalises_experts = true,
     .latent = true,
     .sigmoid_experts = true,
     .dense_layers = 1},
    {.name = "Mistral4ForCausalLM",
     .models = "Mistral Small 4",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .rope_interleaved = true,
     .experts = true,
     .normalises_experts = true,
     .latent = true,
     .n_shared = 1},
    {.name = "YoutuForCausalLM",
     .models = "Youtu-LLM",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .tied = true,
     .rope_interleaved = true,
     .latent = true},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define MLP LAYER "mlp."
#define ROWS_OUT                                                            \
    ROW_MATRIX(ATTN "o_proj", DIM_HIDDEN, DIM_V, SPLIT_IN, o, WHEN_ALWAYS), \
        ROW_NORM(LAYER "post_attention_layernorm", mlp_norm)
#define ROWS_BESIDE ROW_CHOICE_BIAS(MLP), ROWS_SHARED_EXPERT(MLP "shared_experts.")
#define ROWS_BEHIND ROWS_OUT, ROWS_MLP_OR_EXPERTS(MLP), ROWS_BESIDE

/* As published: keys and values of a head are made by one tensor. */
static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, goes to, when */
    ROWS_LLAMA_ENDS, ROWS_LATENT_DOWN(LAYER), ROWS_LATENT_UP(LAYER), ROWS_BEHIND, {0},
};

/* As in a GGUF file: by two, that of the keys transposed head by head. */
static const struct tensor_spec APART_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LATENT_DOWN(LAYER),
    ROW_MATRIX(ATTN "k_b_proj", DIM_HEAD_LATENTS, DIM_NOPE, SPLIT_OUT, latent.k_up, WHEN_ALWAYS),
    ROW_MATRIX(ATTN "v_b_proj", DIM_V, DIM_LATENT, SPLIT_OUT, latent.v_up, WHEN_ALWAYS),
    ROWS_BEHIND,
    {0},
};

/* As Mistral publishes it: all experts of a layer in one tensor. */
static const struct tensor_spec STACKED_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LATENT_DOWN(LAYER),
    ROWS_LATENT_UP(LAYER),
    ROWS_OUT,
    ROWS_DENSE_MLP(MLP),
    ROW_ROUTER(MLP "gate"),
    ROWS_STACKED_EXPERTS(MLP),
    ROWS_BESIDE,
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

/* attn [n_tokens, n_heads * v_dim] = the layer's attention of h [n_tokens, hidden].
 * Returns the queries' memory, which is free again. */
static struct mat attend(struct model *m, const struct layer *l, struct mat attn, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    const struct latent_attention *a = &l->latent;
    struct mat in = mat_rows(t->qkv, 0, h.rows), q = l->q_up.data ? mat_rows(t->q, 0, h.rows) : in;
    int32_t q_cols = a->n_heads * (a->nope_dim + a->rot_dim);
    int32_t first = l->q_up.data ? l->q_up.cols : q_cols, width = a->latent + a->rot_dim;
    struct mat heads = mat_cols(q, 0, q_cols);

    ops->linear(m->backend, mat_cols(in, 0, first + width), h, l->qkv, &(struct epilogue){0});
    if (l->q_up.data) {
        struct mat latent = mat_cols(in, 0, first);
        ops->norm(m->backend, latent, latent, &l->q_norm);
        ops->linear(m->backend, heads, latent, l->q_up, &(struct epilogue){0});
    }
    ops->latent_kv(m->backend, heads, mat_cols(in, first, width), a);
    ops->latent_attention(m->backend, attn, heads, a, &t->latent);
    return q;
}

void deepseek_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat attn = mat_rows(t->attn, 0, n); /* [n_tokens, n_heads * v_dim] */

    h.transient = true;
    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        struct mat free = attend(m, l, attn, h);
        if (i + 1 == t->n_layers && model_gathers(m, b)) {
            n = b->n_logits;
            if (n == 0) {
                return; /* the cache is written */
            }
            transformer_gather_rows(m, n, &x, &y, &attn, free);
            h = mat_rows(h, 0, n);
        }
        y.transient = true;
        ops->linear(be, y, attn, l->o, &(struct epilogue){0});
        ops->add_norm(be, h, x, y, &l->mlp_norm, t->partial);
        transformer_mlp(m, l, y, h);
        h.transient = i + 1 < t->n_layers; /* the last is what the head reads */
        transformer_end_layer(m, i, h, x, y, t->partial);
        h.transient = true;
    }
}

static const struct model_family deepseek_stacked = {.architectures = ARCHITECTURES,
                                                     .tensors = STACKED_TENSORS,
                                                     .marker = "experts.gate_up_proj",
                                                     .ignored = IGNORED,
                                                     .forward = deepseek_forward,
                                                     .gathers = true};

static const struct model_family deepseek_apart = {.architectures = ARCHITECTURES,
                                                   .tensors = APART_TENSORS,
                                                   .variant = &deepseek_stacked,
                                                   .marker = "self_attn.k_b_proj.weight",
                                                   .ignored = IGNORED,
                                                   .forward = deepseek_forward,
                                                   .gathers = true};

const struct model_family deepseek_family = {.architectures = ARCHITECTURES,
                                             .tensors = TENSORS,
                                             .variant = &deepseek_apart,
                                             .ignored = IGNORED,
                                             .forward = deepseek_forward,
                                             .gathers = true};
