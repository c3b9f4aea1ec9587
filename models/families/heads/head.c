/* Draft heads: what a target keeps of its hidden states, what a head makes of them, and
 * how the two meet.
 *
 * A head's entry at position p belongs to token p + 1 of the sequence: it reads that
 * token's embedding and the target's hidden state of token p, and its logits are of
 * token p + 2. So a step's token is at its entry's position and slot, and the hidden
 * state is found in the target's cache at the same slot. Behind the tokens that are
 * known there are no hidden states yet: a drafted token's entry reads what the head
 * left of the entry before it, in `own`. */
#include <stdlib.h>
#include <string.h>

#include "models/families/layers.h"

/* ---- the target ---- */

bool transformer_taps(const struct model *m, int32_t i)
{
    const struct model_taps *t = &m->options.taps;
    int32_t at = m->weights->first_layer + i;
    bool is = t->final && at == m->config.n_layers;

    for (int32_t k = 0; k < t->n; k++) {
        is = is || t->tap[k] == at;
    }
    return is;
}

void transformer_tap(struct model *m, int32_t i, struct mat x, struct mat h)
{
    const struct model_taps *t = &m->options.taps;
    int32_t at = m->weights->first_layer + i;

    if (t->final && at == m->config.n_layers) {
        m->backend->ops->hidden_store(m->backend, h, 0);
    }
    for (int32_t k = 0; k < t->n; k++) {
        if (t->tap[k] == at) {
            m->backend->ops->hidden_store(m->backend, x, k * m->config.hidden);
        }
    }
}

int32_t model_taps_width(const struct model_taps *t, const struct model_config *c)
{
    return (t->final ? 1 : t->n) * c->hidden;
}

struct model_taps model_head_taps(const struct model_config *head)
{
    struct model_taps t = {.final = head->head.kind == HEAD_MTP};

    if (head->head.kind == HEAD_EAGLE3) {
        t.n = head->head.n_taps;
        memcpy(t.tap, head->head.tap, sizeof(t.tap));
    }
    return t;
}

/* ---- the head ---- */

const struct model_family *head_family(const struct model_config *c)
{
    return c->head.kind == HEAD_EAGLE3 ? &eagle3_family
           : c->head.named             ? &qwen_mtp_family
           : c->latent.rank > 0        ? &latent_mtp_family
                                       : &mtp_family;
}

void head_begin(struct model *m, const struct batch *b)
{
    m->weights->draft.feeds = b->n_tokens > 0 && b->token_src && b->token_src[0] >= 0;
}

/* The hidden states that the step's entries read, into out [n_tokens, hidden]. */
static void read_hidden(struct model *m, struct mat out)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct head_parts *h = &m->weights->draft;

    if (h->feeds) {
        ops->hidden_own(m->backend, out, h->own);
    } else if (h->combine.data) {
        struct mat taps = mat_rows(h->taps, 0, out.rows);
        ops->hidden_load(m->backend, taps, &h->pool);
        ops->linear(m->backend, out, taps, h->combine, &(struct epilogue){0});
    } else {
        ops->hidden_load(m->backend, out, &h->pool);
    }
}

void head_input(struct model *m, struct mat out)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    const struct head_parts *h = &t->draft;
    int32_t width = m->config.hidden;
    struct mat embedded = mat_rows(h->embedded, 0, out.rows),
               joined = mat_rows(h->joined, 0, out.rows);

    if (t->partial) {
        ops->embed_shard(m->backend, embedded, t->embed, t->vocab_first, m->config.embed_scale);
    } else {
        ops->embed(m->backend, embedded, t->embed, m->config.embed_scale);
    }
    ops->norm(m->backend, mat_cols(joined, 0, width), embedded, &h->embed_norm);
    read_hidden(m, out);
    ops->norm(m->backend, mat_cols(joined, width, width), out, &h->hidden_norm);
    if (h->join.data) {
        ops->linear(m->backend, out, joined, h->join, &(struct epilogue){0});
    } else if (m->config.head.norm_before_residual) {
        ops->norm(m->backend, out, out, &h->hidden_norm);
    }
}

/* The residual stream behind the layer is what the next entry reads, or its norm. */
void head_end(struct model *m, const struct batch *b)
{
    const struct transformer *t = m->weights;
    struct mat x = m->config.head.normed ? m->hidden : t->x;

    if (m->config.head.kind != HEAD_NONE && b->n_logits > 0) {
        m->backend->ops->gather(m->backend, mat_rows(t->draft.own, 0, b->n_logits),
                                mat_rows(x, 0, b->n_tokens), 0);
    }
}

/* ---- loading ---- */

static int64_t whole_at(const struct tensor *t, int32_t i)
{
    int32_t narrow;
    int64_t wide;

    if (strcmp(t->stored_type, "I32") == 0) {
        memcpy(&narrow, (const char *)t->data + (size_t)i * sizeof(narrow), sizeof(narrow));
        return narrow;
    }
    memcpy(&wide, (const char *)t->data + (size_t)i * sizeof(wide), sizeof(wide));
    return wide;
}

/* ids[draft_vocab] by the checkpoint's d2t: how far behind its own a drafted id is. */
static int read_ids(const struct model *m, const struct tensor *t, float *ids, struct err *e)
{
    int32_t n = m->config.head.draft_vocab, before = -1;
    bool whole = t && t->data && t->n_dims == 1 && t->dim[0] == n &&
                 (strcmp(t->stored_type, "I64") == 0 || strcmp(t->stored_type, "I32") == 0);

    if (!whole) {
        return err_set(e, ERR_INVALID, "%s: d2t must be there, with %d whole numbers",
                       m->config.architecture, n);
    }
    for (int32_t i = 0; i < n; i++) {
        int64_t offset = whole_at(t, i), id = i + MAX(MIN(offset, LIMIT_VOCAB), -LIMIT_VOCAB);
        if (id <= before || id >= m->config.vocab) {
            return err_set(e, ERR_INVALID,
                           "%s: d2t makes id %lld of the drafted id %d; ids must ascend below %d",
                           m->config.architecture, (long long)id, i, m->config.vocab);
        }
        before = (int32_t)id;
        ids[i] = (float)id;
    }
    return 0;
}

static int load_ids(struct model *m, struct err *e)
{
    struct head_parts *h = &m->weights->draft;
    int32_t n = m->config.head.draft_vocab;

    if (n == 0) {
        return 0;
    }
    h->id_host = malloc((size_t)n * sizeof(*h->id_host));
    if (!h->id_host) {
        return err_nomem(e, "ids of a draft head");
    }
    for (int32_t i = 0; i < n && !m->checkpoint; i++) { /* a dummy's, spread out */
        h->id_host[i] = (float)((int64_t)i * m->config.vocab / n);
    }
    int rc = m->checkpoint ? read_ids(m, checkpoint_find(m->checkpoint, "d2t"), h->id_host, e) : 0;
    struct weight_piece piece = {
        .data = h->id_host, .dtype = DTYPE_F32, .rows = 1, .cols = n, .stride = n};
    struct weight_desc d = {.name = "ids of a draft head",
                            .kind = WEIGHT_TABLE,
                            .dtype = DTYPE_F32,
                            .rows = 1,
                            .cols = n,
                            .piece = &piece,
                            .n_pieces = 1,
                            .mapped = true};
    return rc < 0 ? rc : m->backend->ops->weight(m->backend, &d, &h->id, e);
}

static void set_parts(struct model *m)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    const struct head_layer *l = &t->layer[0].head;
    struct head_parts *h = &t->draft;

    if (l->embed_norm.weight.data) {
        h->embed_norm.weight = l->embed_norm.weight;
        h->hidden_norm.weight = l->hidden_norm.weight;
    }
    if (l->join.data) {
        h->join = l->join;
        t->final_norm.weight = l->final_norm.weight;
    }
    h->embed_norm.kind = h->hidden_norm.kind = c->norm;
    h->embed_norm.eps = h->hidden_norm.eps = c->norm_eps;
    h->embed_norm.weight_offset = h->hidden_norm.weight_offset = c->norm_offset;
}

int head_load(struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    const struct backend_ops *ops = m->backend->ops;
    struct transformer *t = m->weights;
    struct head_parts *h = &t->draft;
    enum dtype act = backend_act_dtype(m->backend, m->options.dtype);
    int32_t n = m->options.max_tokens, n_ids = c->head.draft_vocab;

    if (!ops->hidden_load) {
        return err_set(e, ERR_UNSUPPORTED, "the backend %s runs no draft heads", m->backend->name);
    }
    set_parts(m);
    int rc = ops->scratch(m->backend, n, c->hidden, act, &h->embedded, e);
    rc = rc ? rc : ops->scratch(m->backend, n, 2 * c->hidden, act, &h->joined, e);
    rc = rc ? rc : ops->scratch(m->backend, n, c->hidden, act, &h->own, e);
    if (rc == 0 && h->combine.data) {
        rc = ops->scratch(m->backend, n, h->combine.cols, act, &h->taps, e);
    }
    if (rc == 0 && n_ids > 0) {
        rc = ops->scratch(m->backend, m->options.max_logits, n_ids, DTYPE_F32, &h->logits, e);
    }
    return rc < 0 ? rc : load_ids(m, e);
}

void head_release(struct transformer *t)
{
    free(t->draft.id_host);
}

int model_head_bind(struct model *head, const struct model *target, struct err *e)
{
    struct transformer *t = head->weights;
    struct head_parts *h = &t->draft;
    int32_t width = model_taps_width(&target->options.taps, &target->config);

    if (strcmp(head->backend->name, target->backend->name) != 0) {
        return err_set(e, ERR_UNSUPPORTED, "the draft head is on %s, the model on %s",
                       head->backend->name, target->backend->name);
    }
    h->pool = target->backend->ops->hidden_pool(target->backend);
    if (!h->pool.data || h->pool.width != width ||
        h->pool.dtype != backend_act_dtype(head->backend, head->options.dtype)) {
        return err_set(e, ERR_UNSUPPORTED,
                       "the draft head and the model compute in different types");
    }
    if (!t->head.data && target->head.priv && head->backend->async) {
        return err_set(e, ERR_UNSUPPORTED,
                       "a draft head cannot share the model's quantised output head");
    }
    t->embed = target->weights->embed;
    head->head = t->head.data ? t->head : target->head;
    return 0;
}
