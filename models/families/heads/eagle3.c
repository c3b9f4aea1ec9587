/* EAGLE-3 (Li et al. 2025, section 3): a head that reads the residual stream of three
 * layers of its target, which one product combines, beside the embedding of the next
 * token. Its layer is LLaMA's, but q, k and v are made of both, each with a norm of its
 * own. It drafts from a part of the target's vocabulary. */
#include "models/families/layers.h"

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define ROW_QKV_JOINED(name, rows) ROW_MATRIX(name, rows, DIM_JOINED, SPLIT_OUT, qkv, WHEN_ALWAYS)

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROW("model.fc.weight", DIM_HIDDEN, DIM_TAPS, SPLIT_NONE, WEIGHT_LINEAR, IN_MODEL(draft.combine),
        WHEN_ALWAYS),
    ROW("model.norm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_MODEL(final_norm.weight), WHEN_ALWAYS),
    ROW("lm_head.weight", DIM_DRAFT_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_LINEAR, IN_MODEL(head),
        WHEN_ALWAYS),
    ROW_NORM(LAYER "input_layernorm", head.embed_norm),
    ROW_NORM(LAYER "hidden_norm", head.hidden_norm),
    ROW_QKV_JOINED(ATTN "q_proj", DIM_Q),
    ROW_QKV_JOINED(ATTN "k_proj", DIM_KV),
    ROW_QKV_JOINED(ATTN "v_proj", DIM_KV),
    ROWS_QKV_BIAS(ATTN),
    ROWS_QK_NORM(ATTN),
    ROW_O(ATTN "o_proj"),
    ROW(ATTN "o_proj.bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR, IN_LAYER(o_bias),
        WHEN_O_BIAS),
    ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),
    ROWS_GATED_MLP(LAYER "mlp."),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", "embed_tokens.weight", "d2t", "t2d",
                                      NULL};

static void eagle3_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    const struct layer *l = &t->layer[0];
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n);   /* [n_tokens, (n_heads + 2 n_kv_heads) * head_dim] */
    struct mat attn = mat_rows(t->attn, 0, n); /* [n_tokens, n_heads * head_dim] */

    head_input(m, x);
    ops->linear(be, qkv, mat_rows(t->draft.joined, 0, n), l->qkv,
                &(struct epilogue){.bias = l->qkv_bias});
    ops->rope_kv(be, qkv, &l->rope, &l->attention);
    ops->attention(be, attn, qkv, &l->attention);
    ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
    ops->add_norm(be, h, x, y, &l->mlp_norm, t->partial);
    transformer_mlp(m, l, y, h);
    transformer_end_layer(m, 0, h, x, y, t->partial);
}

const struct model_family eagle3_family = {
    .tensors = TENSORS, .ignored = IGNORED, .forward = eagle3_forward};

/* The layers that EAGLE-3 was made for: an early one, the middle one, a late one. */
static void set_usual_taps(struct head_config *h, const struct model_config *target)
{
    h->n_taps = 3;
    h->tap[0] = 2;
    h->tap[1] = target->n_layers / 2;
    h->tap[2] = target->n_layers - 3;
}

int model_eagle3_fit(struct model_config *head, const struct model_config *c, struct err *e)
{
    struct head_config *h = &head->head;

    if (h->n_taps < 0) {
        set_usual_taps(h, c);
    }
    if (head->n_layers != 1) {
        return err_set(e, ERR_UNSUPPORTED, "the EAGLE-3 head has %d layers; 1 is supported",
                       head->n_layers);
    }
    if (head->hidden != c->hidden || h->target_hidden != c->hidden) {
        return err_set(e, ERR_INVALID,
                       "the EAGLE-3 head is %d wide, for hidden states of %d; those of the model "
                       "have %d",
                       head->hidden, h->target_hidden, c->hidden);
    }
    if (c->embed_dim != c->hidden || !c->norm_before) {
        return err_set(e, ERR_UNSUPPORTED, "%s has no hidden states for an EAGLE-3 head",
                       c->architecture);
    }
    for (int32_t i = 0; i < h->n_taps; i++) {
        if (h->tap[i] < 0 || h->tap[i] > c->n_layers) {
            return err_set(e, ERR_INVALID,
                           "the EAGLE-3 head reads layer %d; the model has %d layers", h->tap[i],
                           c->n_layers);
        }
    }
    if (h->n_taps == 0 || (h->draft_vocab == 0 && head->vocab != c->vocab) ||
        h->draft_vocab > c->vocab) {
        return err_set(e, ERR_INVALID,
                       "the EAGLE-3 head has %d layers to read and %d ids to draft, the model %d",
                       h->n_taps, h->draft_vocab > 0 ? h->draft_vocab : head->vocab, c->vocab);
    }
    h->draft_vocab = h->draft_vocab == c->vocab ? 0 : h->draft_vocab;
    head->vocab = c->vocab;
    head->max_positions = c->max_positions;
    head->embed_scale = c->embed_scale;
    head->tied = false;
    return 0;
}
