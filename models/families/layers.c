/* Parts of a forward pass that the families share. */
#include "models/families/layers.h"

#include <stdlib.h>
#include <sys/mman.h>

void transformer_ungated_mlp(struct model *m, const struct layer *l, struct mat y, struct mat h,
                             bool add)
{
    const struct backend_ops *ops = m->backend->ops;
    struct mat up = mat_cols(mat_rows(m->weights->up, 0, h.rows), 0, l->up.rows);
    struct epilogue down = {.bias = l->down_bias};

    if (add) {
        down.residual = y;
    }
    ops->linear(m->backend, up, h, l->up, &(struct epilogue){.bias = l->up_bias});
    if (l->xielu.data) {
        ops->xielu(m->backend, up, l->xielu);
    } else {
        ops->multiply(m->backend, up, up, m->config.act);
    }
    ops->linear(m->backend, y, up, l->down, &down);
}

/* The one expert of a token gets its input times the router's sigmoid of it, and the
 * shared one, which is the layer's MLP, as it is. */
static void scaled_experts(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    struct mat up = mat_cols(mat_rows(m->weights->up, 0, h.rows), 0, l->up.rows);
    struct mat act = mat_cols(mat_rows(m->weights->act, 0, h.rows), 0, l->down.cols);
    struct mat x = mat_rows(m->weights->router_x, 0, h.rows), sum = y;
    struct expert_scratch s = m->weights->experts;

    sum.transient = false; /* read behind the next operation */
    s.scores = mat_rows(s.scores, 0, h.rows);
    s.router_x = h;
    ops->linear(m->backend, s.scores, h, l->experts.router, NULL);
    ops->scale_by_score(m->backend, x, h, s.scores);
    ops->experts(m->backend, sum, x, &l->experts, &s);
    ops->linear_gated(m->backend, act, up, h, l->up, (struct mat){0}, m->config.act);
    ops->linear(m->backend, y, act, l->down, &(struct epilogue){.residual = sum});
}

void transformer_mlp(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct experts *x = &l->experts;
    struct mat up = mat_rows(m->weights->up, 0, h.rows), act = mat_rows(m->weights->act, 0, h.rows);

    if (x->n > 0 && m->config.experts.scaled_inputs) {
        scaled_experts(m, l, y, h);
        return;
    }
    if (x->n > 0) {
        struct expert_scratch s = m->weights->experts;
        s.scores = mat_rows(s.scores, 0, h.rows);
        s.shared_up = mat_cols(up, 0, x->shared_up.rows);
        s.shared_act = mat_cols(act, 0, x->shared_up.rows / 2);
        ops->experts(m->backend, y, h, x, &s);
        return;
    }
    if (m->config.ungated_mlp) {
        transformer_ungated_mlp(m, l, y, h, false);
        return;
    }
    act = mat_cols(act, 0, l->down.cols);
    act.transient = true;
    ops->linear_gated(m->backend, act, mat_cols(up, 0, l->up.rows), h, l->up, l->up_bias,
                      m->config.act);
    ops->linear(m->backend, y, act, l->down, &(struct epilogue){.bias = l->down_bias});
}

void transformer_norm_heads(struct model *m, const struct layer *l, struct mat qkv)
{
    int32_t d = m->config.head_dim, q = m->weights->n_heads * d, k = m->weights->n_kv_heads * d;
    struct mat of_q = mat_cols(qkv, 0, q), of_k = mat_cols(qkv, q, k);

    const struct norm_part part[] = {{of_q, &l->q_norm}, {of_k, &l->k_norm}};

    if (!l->q_norm.weight.data) {
        return;
    }
    if (m->weights->partial) {
        transformer_norm_parts(m, part, ARRAY_LEN(part));
        return;
    }
    m->backend->ops->norm(m->backend, of_q, of_q, &l->q_norm);
    m->backend->ops->norm(m->backend, of_k, of_k, &l->k_norm);
}

void transformer_norm_parts(struct model *m, const struct norm_part *part, int32_t n)
{
    const struct backend_ops *ops = m->backend->ops;
    struct mat sums = mat_rows(m->weights->sums, 0, part[0].x.rows);

    for (int32_t i = 0; i < n; i++) {
        ops->square_sums(m->backend, mat_cols(sums, i, 1), part[i].x);
    }
    ops->all_reduce(m->backend, sums);
    for (int32_t i = 0; i < n; i++) {
        /* heads that several ranks hold alike are counted as often, and so are their
         * columns */
        int32_t width = part[i].x.cols * m->options.n_ranks;
        ops->norm_by_sums(m->backend, part[i].x, mat_cols(sums, i, 1), width, part[i].norm);
    }
}

void transformer_begin(struct model *m, struct mat x, struct mat h)
{
    const struct transformer *t = m->weights;

    if (t->first) {
        transformer_embed(m, x, m->config.embed_scale);
    }
    m->backend->ops->norm(m->backend, h, x, &t->layer[0].attn_norm);
}

void transformer_end_layer(struct model *m, int32_t i, struct mat h, struct mat x, struct mat y,
                           bool partial)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    const struct norm *next = i + 1 < t->n_layers ? &t->layer[i + 1].attn_norm : &t->final_norm;

    h.transient = h.transient && !transformer_taps(m, i + 1);
    if (next->weight.data) {
        ops->add_norm(m->backend, h, x, y, next, partial);
    } else {
        ops->add(m->backend, x, y, partial);
    }
    transformer_tap(m, i + 1, x, h);
}

void transformer_embed(struct model *m, struct mat out, float scale)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;

    if (m->config.head.kind != HEAD_NONE) {
        head_input(m, out);
        return;
    }
    if (t->partial) {
        ops->embed_shard(m->backend, out, t->embed, t->vocab_first, scale);
    } else {
        ops->embed(m->backend, out, t->embed, scale);
    }
    transformer_tap(m, 0, out, (struct mat){0});
}

void transformer_head(struct model *m, struct mat logits, struct mat x)
{
    const struct backend_ops *ops = m->backend->ops;
    bool partial = m->weights->partial;
    const struct head_parts *head = &m->weights->draft;
    struct mat whole = head->id.data ? mat_rows(head->logits, 0, x.rows) : logits;
    struct mat mine = partial ? mat_rows(m->local_logits, 0, x.rows) : whole;

    ops->linear(m->backend, mine, x, m->head, &(struct epilogue){.bias = m->weights->head_bias});
    if (m->config.final_softcap > 0) {
        ops->soft_cap(m->backend, mine, m->config.final_softcap);
    }
    if (partial) {
        ops->gather_logits(m->backend, whole, mine);
    }
    if (head->id.data) {
        ops->spread(m->backend, logits, whole, head->id);
    }
}

void transformer_free(struct transformer *t)
{
    if (!t) {
        return;
    }
    free(t->layer);
    for (size_t i = 0; i < ARRAY_LEN(t->rope); i++) {
        if (t->rope[i].out) {
            munmap(t->rope[i].out, rope_table_bytes(&t->rope[i]));
        }
    }
    head_release(t);
    free(t);
}
