/* Gemma-2: LLaMA's forward pass with norms after attention and MLP as well, soft-capped
 * scores and logits, and a sliding window in every other layer. As in Gemma, norm
 * weights are 1 + w and embeddings are scaled by sqrt(hidden). Gemma-3 norms q and k
 * per head in place of the caps, and its windowed layers, five of six, rotate by a
 * theta of their own. VaultGemma has no norms after; HyperCLOVA X has them around the
 * layers of Granite. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "Gemma2ForCausalLM",
     .models = "Gemma-2",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .tied = true,
     .sliding_window = 4096,
     .window_pattern = 2,
     .gemma = true},
    {.name = "Gemma3ForCausalLM",
     .models = "Gemma-3, text",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_GELU_TANH,
     .rope_theta = 1e6,
     .tied = true,
     .qk_norm = true,
     .sliding_window = 4096,
     .window_pattern = 6,
     .window_theta = 10000,
     .gemma = true},
    {.name = "Gemma3ForConditionalGeneration",
     .models = "Gemma-3 with vision: text",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_GELU_TANH,
     .rope_theta = 1e6,
     .tied = true,
     .qk_norm = true,
     .sliding_window = 4096,
     .window_pattern = 6,
     .window_theta = 10000,
     .gemma = true,
     .wrapper = true},
    {0},
};

#define LAYER LLAMA_LAYER

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROWS_LLAMA_ENDS,
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROWS_QKV(LAYER "self_attn."),
    ROWS_QK_NORM(LAYER "self_attn."),
    ROW_O(LAYER "self_attn.o_proj"),
    ROW_NORM(LAYER "post_attention_layernorm", attn_post_norm),
    ROW_NORM(LAYER "pre_feedforward_layernorm", mlp_norm),
    ROWS_GATED_MLP(LAYER "mlp."),
    ROW_NORM(LAYER "post_feedforward_layernorm", mlp_post_norm),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

void transformer_post_norm(struct model *m, struct mat out, struct mat y, const struct norm *n)
{
    if (m->weights->partial) {
        m->backend->ops->all_reduce(m->backend, y);
    }
    m->backend->ops->norm(m->backend, out, y, n);
}

void gemma2_forward(struct model *m, const struct batch *b)
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
    struct mat up = mat_rows(t->up, 0, n);     /* [n_tokens, 2 * intermediate] */
    struct mat act = mat_rows(t->act, 0, n);   /* [n_tokens, intermediate] */

    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, h, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, h, attn, l->o, &plain);
        transformer_post_norm(m, y, h, &l->attn_post_norm);
        ops->add_norm(be, h, x, y, &l->mlp_norm, false);
        ops->linear_gated(be, act, up, h, l->up, plain.bias, m->config.act);
        ops->linear(be, h, act, l->down, &plain);
        transformer_post_norm(m, y, h, &l->mlp_post_norm);
        transformer_end_layer(m, i, h, x, y, false);
    }
}

const struct model_family gemma2_family = {.architectures = ARCHITECTURES,
                                           .tensors = TENSORS,
                                           .ignored = IGNORED,
                                           .forward = gemma2_forward};

/* ---- VaultGemma: Gemma-2 without the norms after attention and MLP ---- */

static const struct architecture VAULT[] = {
    {.name = "VaultGemmaForCausalLM",
     .models = "VaultGemma",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .tied = true,
     .sliding_window = 4096,
     .window_pattern = 2,
     .gemma = true},
    {0},
};

static const struct tensor_spec VAULT_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROWS_QKV(LAYER "self_attn."),
    ROW_O(LAYER "self_attn.o_proj"),
    ROW_NORM(LAYER "pre_feedforward_layernorm", mlp_norm),
    ROWS_GATED_MLP(LAYER "mlp."),
    {0},
};

const struct model_family vault_gemma_family = {.architectures = VAULT,
                                                .tensors = VAULT_TENSORS,
                                                .ignored = IGNORED,
                                                .forward = llama_forward,
                                                .gathers = true};

/* ---- HyperCLOVA X Think: Granite's factors, and norms after attention and MLP ---- */

static const struct architecture CLOVA[] = {
    {.name = "HyperCLOVAXForCausalLM",
     .models = "HyperCLOVA X SEED Think",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .clova = true},
    {0},
};

static const struct tensor_spec CLOVA_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROWS_QKV(LAYER "self_attn."),
    ROWS_QKV_BIAS(LAYER "self_attn."),
    ROW_O(LAYER "self_attn.o_proj"),
    ROW_NORM(LAYER "post_norm1", attn_post_norm),
    ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),
    ROWS_GATED_MLP(LAYER "mlp."),
    ROW_NORM(LAYER "post_norm2", mlp_post_norm),
    {0},
};

const struct model_family clova_family = {.architectures = CLOVA,
                                          .tensors = CLOVA_TENSORS,
                                          .ignored = IGNORED,
                                          .forward = gemma2_forward};
