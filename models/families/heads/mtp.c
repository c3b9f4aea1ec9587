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
    ROWS_LATENT_DOWN(LAYER),
    ROWS_LATENT_UP(LAYER),
    ROW_MATRIX(ATTN "o_proj", DIM_HIDDEN, DIM_V, SPLIT_IN, o, WHEN_ALWAYS),
    ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),
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

/* Targets whose heads are known. */
static const struct {
    const char *architecture;
    bool named; /* as in struct head_config */
} TARGETS[] = {
    {"DeepseekV3ForCausalLM", false},  {"Glm4MoeForCausalLM", false},
    {"Glm4MoeLiteForCausalLM", false}, {"Qwen3NextForCausalLM", true},
    {"Qwen3_5ForCausalLM", true},      {"Qwen3_5ForConditionalGeneration", true},
    {"Qwen3_5MoeForCausalLM", true},   {"Qwen3_5MoeForConditionalGeneration", true},
};

int model_mtp_config(struct model_config *ret, const struct model_config *c, struct err *e)
{
    size_t i = 0;

    while (i < ARRAY_LEN(TARGETS) && strcmp(TARGETS[i].architecture, c->architecture) != 0) {
        i++;
    }
    if (i == ARRAY_LEN(TARGETS)) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s has no MTP head that is known; DeepSeek-V3, GLM-4.5 and Qwen3-Next "
                       "have one",
                       c->architecture);
    }
    bool named = TARGETS[i].named;
    if (c->n_draft_layers == 0 && !named) {
        return err_set(e, ERR_UNSUPPORTED,
                       "the checkpoint has no MTP head: num_nextn_predict_layers is 0");
    }
    *ret = *c;
    ret->n_layers = 1;
    ret->n_draft_layers = 0;
    ret->experts.layer[0] = c->experts.n > 0; /* the layer has attention and, if any do, experts */
    ret->recurrent = (struct recurrent_config){0};
    ret->windowed[0] = ret->unrotated[0] = false;
    ret->tied = false;
    ret->head = (struct head_config){
        .kind = HEAD_MTP, .layer = named ? 0 : c->n_layers, .named = named, .normed = named};
    return 0;
}
