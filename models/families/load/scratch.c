/* The memory that operations of a step share.
 *
 * A layer's attention or recurrence, its MLP, and the head come one after another, and
 * what passes from one to the next is in matrices that are always kept. So those of
 * each lie over those of the others, where the backend can do that. */
#include "models/families/load/load.h"

enum { LATENT_ROWS = 1024 }; /* rows of the scratch of attention over latents, at most */

enum life { KEPT = -1, MIXING, FEEDING, LOGITS };

struct want {
    struct mat *mat;
    int32_t rows, cols; /* 0: not wanted */
    enum dtype dtype;
    enum life life;
};

enum { WANTS_MAX = 48 };
struct wants {
    struct want want[WANTS_MAX];
    int32_t n;
};

static void add_wants(struct wants *to, const struct want *want, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (want[i].rows > 0 && want[i].cols > 0) {
            to->want[to->n++] = want[i];
        }
    }
}

static int make_mats(struct model *m, const struct wants *w, struct err *e)
{
    const struct backend_ops *ops = m->backend->ops;
    struct turn_scratch turn[WANTS_MAX];
    int32_t n = 0;
    int rc = 0;

    for (int32_t i = 0; i < w->n && rc == 0; i++) {
        const struct want *a = &w->want[i];
        if (a->life != KEPT && ops->scratch_in_turns) {
            turn[n++] = (struct turn_scratch){a->mat, a->rows, a->cols, a->dtype, (int32_t)a->life};
        } else {
            rc = ops->scratch(m->backend, a->rows, a->cols, a->dtype, a->mat, e);
        }
    }
    return rc == 0 && n > 0 ? ops->scratch_in_turns(m->backend, turn, n, e) : rc;
}

/* Rows of the widest up of a layer, which may have none. */
static int32_t widest_up(const struct transformer *t)
{
    int32_t n = 0;

    for (int32_t i = 0; i < t->n_layers; i++) {
        n = MAX(n, MAX(t->layer[i].up.rows, t->layer[i].experts.shared_up.rows));
    }
    return n;
}

/* Rows of the widest product in front of a recurrence; 0: no layer has one. */
static int32_t widest_mixer(const struct transformer *t)
{
    int32_t n = 0;

    for (int32_t i = 0; i < t->n_layers; i++) {
        n = MAX(n, t->layer[i].mixer.rows);
    }
    return n;
}

static void want_experts(struct model *m, enum dtype act, struct wants *ret)
{
    const struct expert_config *x = &m->config.experts;
    struct transformer *t = m->weights;
    struct expert_scratch *s = &t->experts;
    int32_t n = m->options.max_tokens, width = model_expert_width(&m->config);
    bool pairs = m->backend->expert_pairs;
    int32_t parts = experts_parts(t->shared_intermediate, t->expert_intermediate);
    int32_t each = pairs ? 0 : n;
    int32_t pair = pairs ? (int32_t)experts_most_pairs(x->top, parts, n) : 0;
    int64_t words = experts_list_words(x->n + parts, x->top + parts, n);
    const struct want want[] = {
        {&s->scores, n, x->n, DTYPE_F32, FEEDING},
        {&s->y, n, width, act, FEEDING},
        {&s->row, 1, each, DTYPE_I32, FEEDING},
        {&s->x, each, width, act, FEEDING},
        {&s->act, each, t->expert_intermediate, act, FEEDING},
        {&s->up, each, 2 * t->expert_intermediate, act, FEEDING},
        {&s->pair_act, pair, t->expert_intermediate, act, FEEDING},
        {&s->pair_y, pair, width, act, FEEDING},
        {&s->lists, 1, pairs ? (int32_t)MIN(words, INT32_MAX) : 0, DTYPE_I32, FEEDING},
        {&t->expert_x, n, m->config.experts.latent, act, FEEDING},
        {&t->expert_y, n, m->config.experts.latent, act, FEEDING},
    };

    add_wants(ret, want, x->n > 0 ? (int32_t)ARRAY_LEN(want) : 0);
}

static void want_latents(struct model *m, enum dtype act, struct wants *ret)
{
    const struct latent_config *c = &m->config.latent;
    struct transformer *t = m->weights;
    int32_t n = m->options.max_tokens, rows = MIN(n, LATENT_ROWS);
    int32_t q = t->n_heads * m->config.head_dim, v = t->n_heads * c->v_dim;
    int32_t in = (c->q_rank > 0 ? c->q_rank : q) + c->rank + c->rot_dim;
    const struct want want[] = {
        {&t->qkv, n, MAX(in, v), act, MIXING},
        {&t->attn, n, v, act, MIXING},
        {&t->q, n, c->q_rank > 0 ? MAX(q, v) : 0, act, MIXING},
        {&t->latent.q, rows, t->n_heads * (c->rank + c->rot_dim), act, MIXING},
        {&t->latent.sum, rows, t->n_heads * c->rank, act, MIXING},
    };

    add_wants(ret, want, c->rank > 0 ? (int32_t)ARRAY_LEN(want) : 0);
}

static void want_inputs(struct model *m, enum dtype act, struct wants *ret)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    int32_t n = m->options.max_tokens, inputs = c->layer_input * c->n_layers;
    bool beside = c->full_head_dim > 0 && c->experts.n > 0;
    const struct want want[] = {
        {&t->inputs, n, inputs, act, KEPT},
        {&t->inputs_embed, n, t->first ? inputs : 0, act, KEPT},
        {&t->input, n, c->layer_input, act, KEPT},
        {&t->beside, n, beside ? c->hidden : 0, act, FEEDING},
        {&t->router_x, n, beside || c->experts.scaled_inputs ? c->hidden : 0, act, FEEDING},
    };

    add_wants(ret, want, (int32_t)ARRAY_LEN(want));
}

/* What attention over keys and values and recurrences use. */
static void want_mixers(struct model *m, enum dtype act, struct wants *ret)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    int32_t n = m->options.max_tokens, q = t->n_heads * c->head_dim,
            kv = t->n_kv_heads * c->head_dim;
    int32_t full_q = t->n_heads * c->full_head_dim;
    int32_t full_qkv = full_q + 2 * t->full_kv_heads * c->full_head_dim;
    struct recurrence r = model_recurrence(&c->recurrent, m->options.n_ranks);
    int32_t scan = r.kind == RECURRENCE_SCAN && r.n_heads > 0
                       ? r.n_heads * r.value_dim + c->recurrent.step_rank + 2 * r.key_dim
                       : 0;
    int32_t gates = c->gated_attention ? q : 0;
    bool heads = c->latent.rank == 0;
    const struct want want[] = {
        {&t->qkv, n, heads ? MAX(q + 2 * kv + gates, full_qkv) : 0, act, MIXING},
        {&t->attn, n, heads ? MAX(MAX(q, full_q), r.n_heads * r.value_dim) : 0, act, MIXING},
        {&t->mixer, n, widest_mixer(t), act, MIXING},
        {&t->scan, n, scan, act, MIXING},
    };

    add_wants(ret, want, (int32_t)ARRAY_LEN(want));
}

int transformer_make_scratch(struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    enum dtype act = backend_act_dtype(m->backend, m->options.dtype);
    int32_t n = m->options.max_tokens, n_logits = model_is_last(m) ? m->options.max_logits : 0;
    bool narrow = c->embed_dim != c->hidden;
    struct wants w = {.n = 0};
    const struct want want[] = {
        {&t->x, n, c->hidden, act, KEPT},
        {&t->h, n, c->hidden, act, KEPT},
        {&t->y, n, c->hidden, act, KEPT},
        /* in front of `up`, of whose end a backend may use little */
        {&t->act, n, MAX(t->intermediate * (c->wide_mlp ? 2 : 1), t->shared_intermediate), act,
         FEEDING},
        {&t->up, n, widest_up(t), act, FEEDING},
        {&t->narrow, n, narrow ? c->embed_dim : 0, act, KEPT},
        {&t->sums, n, model_norms_over_ranks(c, m->options.n_ranks) ? SUM_COLUMNS : 0, DTYPE_F32,
         KEPT},
        {&m->gathered, n_logits, c->embed_dim, act, LOGITS},
        {&m->logits, n_logits, c->vocab, DTYPE_F32, LOGITS},
        {&m->local_logits, n_logits, t->partial ? logits_range(m).n : 0, DTYPE_F32, LOGITS},
    };

    add_wants(&w, want, (int32_t)ARRAY_LEN(want));
    want_mixers(m, act, &w);
    want_latents(m, act, &w);
    want_inputs(m, act, &w);
    want_experts(m, act, &w);
    m->head = c->tied ? t->embed : t->head;
    int rc = make_mats(m, &w, e);
    m->hidden = narrow ? t->narrow : c->final_norm ? t->h : t->x;
    return rc;
}
