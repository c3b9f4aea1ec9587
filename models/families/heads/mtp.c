/* Multi-token prediction: the layer behind the last of a checkpoint, which drafts
 * (DeepSeek-V3, section 2.2; GLM-4.5 has the same). It joins the normed embedding of
 * a token with the normed hidden state of the token before, which is the output of
 * the target's final norm, and is one layer of the target's kind. Embedding and
 * output head are the target's. Drafts further ahead are made by the same layer, of
 * its own residual stream. */
#include <string.h>

#include "models/families/layers.h"

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define MLP LAYER "mlp."

#define ROWS_JOIN                                                                                \
    ROW_NORM(LAYER "enorm", head.embed_norm), ROW_NORM(LAYER "hnorm", head.hidden_norm),         \
        ROW_MATRIX(LAYER "eh_proj", DIM_HIDDEN, DIM_JOINED, SPLIT_NONE, head.join, WHEN_ALWAYS), \
        ROW_NORM(LAYER "shared_head.norm", head.final_norm)

/* Attention over latents with DeepSeek's names, and the norms before it and the MLP. */
#define ROW_LATENT_NORM(name, dim, target, when) \
    ROW(name ".weight", dim, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(target.weight), when)
#define ROWS_LATENT_ATTENTION                                                                    \
    ROW_NORM(LAYER "input_layernorm", attn_norm),                                                \
        ROW_MATRIX(ATTN "q_proj", DIM_Q, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_NO_Q_RANK),            \
        ROW_MATRIX(ATTN "q_a_proj", DIM_Q_RANK, DIM_HIDDEN, SPLIT_NONE, qkv, WHEN_Q_RANK),       \
        ROW_MATRIX(ATTN "kv_a_proj_with_mqa", DIM_LATENT_KEY, DIM_HIDDEN, SPLIT_NONE, qkv,       \
                   WHEN_ALWAYS),                                                                 \
        ROW_LATENT_NORM(ATTN "q_a_layernorm", DIM_Q_RANK, q_norm, WHEN_Q_RANK),                  \
        ROW_MATRIX(ATTN "q_b_proj", DIM_Q, DIM_Q_RANK, SPLIT_OUT, q_up, WHEN_Q_RANK),            \
        ROW_LATENT_NORM(ATTN "kv_a_layernorm", DIM_LATENT, latent.norm, WHEN_ALWAYS),            \
        ROW_MATRIX(ATTN "kv_b_proj", DIM_K_UP, DIM_LATENT, SPLIT_OUT, latent.k_up, WHEN_ALWAYS), \
        ROW_MATRIX(ATTN "kv_b_proj", DIM_V_UP, DIM_LATENT, SPLIT_OUT, latent.v_up, WHEN_ALWAYS), \
        ROW_MATRIX(ATTN "o_proj", DIM_HIDDEN, DIM_V, SPLIT_IN, o, WHEN_ALWAYS),                  \
        ROW_NORM(LAYER "post_attention_layernorm", mlp_norm)

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, goes to, when */
    ROWS_JOIN,
    ROWS_LLAMA_ATTENTION,
    ROWS_MLP_OR_EXPERTS(MLP),
    ROW_CHOICE_BIAS(MLP),
    ROWS_SHARED_EXPERT(MLP "shared_experts."),
    {0},
};

static const struct tensor_spec LATENT_TENSORS[] = {
    ROWS_JOIN,
    ROWS_LATENT_ATTENTION,
    ROWS_MLP_OR_EXPERTS(MLP),
    ROW_CHOICE_BIAS(MLP),
    ROWS_SHARED_EXPERT(MLP "shared_experts."),
    {0},
};

/* The checkpoint repeats what the target has. */
static const char *const IGNORED[] = {"rotary_emb.inv_freq", "embed_tokens.weight",
                                      "shared_head.head.weight", NULL};

const struct model_family mtp_family = {
    .tensors = TENSORS, .ignored = IGNORED, .forward = llama_forward};
const struct model_family latent_mtp_family = {
    .tensors = LATENT_TENSORS, .ignored = IGNORED, .forward = deepseek_forward};

/* The targets whose heads are known; that of a dense layer has no experts. */
static bool is_known(const struct model_config *c)
{
    static const char *const NAMES[] = {"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM",
                                        "Glm4MoeLiteForCausalLM"};
    bool is = false;

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        is = is || strcmp(c->architecture, NAMES[i]) == 0;
    }
    return is;
}

int model_mtp_config(struct model_config *ret, const struct model_config *c, struct err *e)
{
    if (!is_known(c)) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s has no MTP head that is known; DeepSeek-V3 and GLM-4.5 have one",
                       c->architecture);
    }
    if (c->n_draft_layers == 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "the checkpoint has no MTP head: num_nextn_predict_layers is 0");
    }
    *ret = *c;
    ret->n_layers = 1;
    ret->n_draft_layers = 0;
    ret->experts.layer[0] = c->experts.n > 0;
    ret->windowed[0] = ret->unrotated[0] = false;
    ret->tied = false;
    ret->head = (struct head_config){.kind = HEAD_MTP, .layer = c->n_layers};
    return 0;
}
