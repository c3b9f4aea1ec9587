/* The list of families, and what is the same for all of them: opening a model and
 * running a step. */
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/quantised/quantised.h"
#include "models/families/layers.h"

const struct model_family *const model_families[] = {&llama_family,
                                                     &arcee_family,
                                                     &qwen_moe_family,
                                                     &mixtral_family,
                                                     &olmoe_family,
                                                     &granite_moe_family,
                                                     &apertus_family,
                                                     &llama4_family,
                                                     &granite_swa_family,
                                                     &granite_moe_swa_family,
                                                     &minimax_family,
                                                     &ernie_moe_family,
                                                     &hunyuan_family,
                                                     &hunyuan_moe_family,
                                                     &exaone_family,
                                                     &internlm2_family,
                                                     &phi_moe_family,
                                                     &glm_moe_family,
                                                     &ling_family,
                                                     &exaone_moe_family,
                                                     &hy3_family,
                                                     &afmoe_family,
                                                     &gpt_oss_family,
                                                     &deepseek_family,
                                                     &olmo2_family,
                                                     &flex_olmo_family,
                                                     &exaone4_family,
                                                     &cohere_family,
                                                     &phi3_family,
                                                     &glm_family,
                                                     &glm4_family,
                                                     &gemma2_family,
                                                     &vault_gemma_family,
                                                     &clova_family,
                                                     &gemma4_family,
                                                     &stablelm_family,
                                                     &nemotron_dense_family,
                                                     &starcoder2_family,
                                                     &opt_family,
                                                     &gpt2_family,
                                                     &big_code_family,
                                                     &neox_family,
                                                     &gptj_family,
                                                     &phi_family,
                                                     &falcon_parallel_family,
                                                     &qwen_next_family,
                                                     &qwen35_family,
                                                     &qwen35_moe_family,
                                                     &bamba_family,
                                                     &granite_hybrid_family,
                                                     &nemotron_family,
                                                     &falcon_family,
                                                     &jamba_family,
                                                     &lfm2_family,
                                                     &lfm2_moe_family,
                                                     NULL};

const struct model_family *model_family_find(const char *name, const struct architecture **ret)
{
    for (int i = 0; model_families[i]; i++) {
        for (const struct architecture *a = model_families[i]->architectures; a->name; a++) {
            if (strcmp(a->name, name) == 0) {
                *ret = a;
                return model_families[i];
            }
        }
    }
    return NULL;
}

const struct model_family *model_family_stored(const struct model_family *f,
                                               const struct checkpoint *c,
                                               const struct model_config *config)
{
    for (const struct model_family *v = f->variant; v; v = v->variant) {
        size_t end = strlen(v->marker);
        for (int32_t i = 0; i < checkpoint_count(c); i++) {
            const char *name = checkpoint_at(c, i)->name;
            size_t len = strlen(name);
            if (len >= end && strcmp(name + len - end, v->marker) == 0 &&
                tensor_is_read(name, config)) {
                return v;
            }
        }
    }
    return f;
}

/* Load the weights onto the backend; model_free frees what an error leaves behind. */
static int load(struct model *m, const char *dir, struct err *e)
{
    const struct architecture *a;

    m->family = m->config.head.kind != HEAD_NONE ? head_family(&m->config)
                                                 : model_family_find(m->config.architecture, &a);
    if (!m->family) {
        return err_set(e, ERR_UNSUPPORTED, "architecture %s is not known", m->config.architecture);
    }
    int rc = m->options.dummy && !gguf_is_file(dir)
                 ? checkpoint_expert_format(&m->expert_format, dir, e)
                 : 0;
    if (!m->options.dummy) {
        rc = gguf_is_file(dir)
                 ? gguf_checkpoint_open(&m->checkpoint, dir, &m->config, m->options.dtype, e)
                 : checkpoint_open(&m->checkpoint, dir, e);
        if (rc == 0 && !gguf_is_file(dir)) {
            rc = checkpoint_read_quantised(m->checkpoint, dir, m->options.dtype, e);
            /* products of float32 activations take weights of either type */
            if (rc == 0 && backend_act_dtype(m->backend, DTYPE_F16) == DTYPE_F32) {
                checkpoint_decode_finer(m->checkpoint);
            }
        }
        if (rc == 0) {
            m->family = model_family_stored(m->family, m->checkpoint, &m->config);
            m->config.tied = m->config.tied && transformer_is_tied(m->family, m->checkpoint);
            rc = transformer_check(m->family, &m->config, m->checkpoint, e);
        }
    }
    if (rc == 0) {
        rc = transformer_load(m, e);
    }
    if (rc == 0 && m->checkpoint) {
        rc = checkpoint_fetch(m->checkpoint, e);
    }
    if (m->backend->ops->ready) { /* after an error too: uploads in progress read the files */
        struct err late;
        int ready = m->backend->ops->ready(m->backend, rc == 0 ? e : &late);
        rc = rc == 0 ? ready : rc;
    }
    if (rc == 0 && m->checkpoint) {
        /* where the backend made copies, the file's pages are not needed */
        checkpoint_drop_pages(m->checkpoint);
    }
    return rc;
}

int model_open(struct model **ret, const char *dir, const struct model_config *c,
               const struct model_options *o, struct backend *backend, struct err *e)
{
    struct model *m = calloc(1, sizeof(*m));

    if (!m) {
        return err_nomem(e, "model");
    }
    m->config = *c;
    m->options = *o;
    m->options.n_ranks = MAX(o->n_ranks, 1);
    m->options.n_stages = MAX(o->n_stages, 1);
    m->config.n_parameters = 0;
    m->backend = backend;
    m->config.experts.gate_copied = c->experts.self_gated && !backend->self_gated_experts;
    int rc = load(m, dir, e);
    if (rc < 0) {
        model_free(m);
        return rc;
    }
    *ret = m;
    return 0;
}

void model_free(struct model *m)
{
    if (!m) {
        return;
    }
    transformer_free(m->weights);
    checkpoint_free(m->checkpoint);
    free(m);
}

bool model_gathers(const struct model *m, const struct batch *b)
{
    bool all = m->config.head.kind != HEAD_NONE || transformer_taps(m, m->weights->n_layers);

    return m->family->gathers && b->n_logits < b->n_tokens && model_is_last(m) && !all;
}

/* The logits of a chunk, whose first row is the batch's `first`. */
static struct mat head_chunk(struct model *m, const struct batch *b, int32_t first)
{
    bool gathered = model_gathers(m, b); /* hidden has the rows of logits alone */
    int32_t n = MIN(b->n_logits - first, m->options.max_logits);
    struct mat logits = mat_rows(m->logits, 0, n);
    struct mat rows = mat_rows(gathered ? m->hidden : m->gathered, gathered ? first : 0, n);

    if (!gathered) {
        m->backend->ops->gather(m->backend, rows, mat_rows(m->hidden, 0, b->n_tokens), first);
    }
    transformer_head(m, logits, rows);
    return logits;
}

static void head_and_sample(struct model *m, const struct batch *b)
{
    int32_t most = m->options.max_logits;

    /* From the first sampling on a device waits for late masks, and can load no kernel
     * meanwhile. So what later chunks launch is launched once in front of it. */
    for (int32_t first = most; m->backend->async && b->n_late_mask > 0 && first < b->n_logits;
         first += most) {
        head_chunk(m, b, first);
    }
    for (int32_t first = 0; first < b->n_logits; first += most) {
        m->backend->ops->sample(m->backend, head_chunk(m, b, first), first);
    }
}

/* What stages hand on: the residual stream, and what layers get of their own. Call
 * `to`, the backend's stage_receive or stage_send, for each. */
static void pass(struct model *m, const struct batch *b, void (*to)(struct backend *, struct mat))
{
    to(m->backend, mat_rows(m->weights->x, 0, b->n_tokens));
    if (m->config.layer_input > 0) {
        to(m->backend, mat_rows(m->weights->inputs, 0, b->n_tokens));
    }
}

void model_step(struct model *m, const struct batch *b)
{
    const struct backend_ops *ops = m->backend->ops;

    if (b->n_tokens == 0) {
        return;
    }
    if (!m->weights->first) {
        pass(m, b, ops->stage_receive);
    }
    head_begin(m, b);
    if (!ops->replay || !ops->replay(m->backend, b)) {
        m->family->forward(m, b);
        head_end(m, b);
        if (model_is_last(m)) {
            head_and_sample(m, b);
        }
    }
    if (!model_is_last(m)) {
        pass(m, b, ops->stage_send);
    }
}
