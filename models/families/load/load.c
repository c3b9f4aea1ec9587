/* A model's parts on a backend: weights, tables of rotation, and the parameters of each
 * layer's operations; and what is refused before. */
#include "models/families/load/load.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

/* The rows of a table of rotation. Most positions of a long context are never reached,
 * so a backend that reads tables in place has them written as steps get there. */
static int load_rope_table(struct model *m, const struct rope_config *r, struct rope_table *t,
                           struct mat *ret, struct err *e)
{
    int32_t rows = m->options.max_len, cols = rope_table_cols(r);
    size_t n_bytes = (size_t)rows * (size_t)cols * sizeof(float);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *out = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);

    if (out == MAP_FAILED) {
        return err_nomem(e, "rope table");
    }
    rope_table_init(t, out, r, rows);
    if (!m->backend->late_rows) {
        rope_table_reach(t, rows);
    }
    struct weight_piece piece = {
        .data = out, .dtype = DTYPE_F32, .rows = rows, .cols = cols, .stride = cols};
    struct weight_desc d = {.name = "rope table",
                            .kind = WEIGHT_TABLE,
                            .dtype = DTYPE_F32,
                            .rows = rows,
                            .cols = cols,
                            .piece = &piece,
                            .n_pieces = 1,
                            .late = {rope_table_reach, t},
                            .mapped = true};
    if (!m->backend->late_rows) {
        d.late = (struct table_rows){0};
    }
    return m->backend->ops->weight(m->backend, &d, ret, e);
}

/* The tables of rotation: of all layers, of windowed ones if theirs differs, and of
 * those that rotate nothing if their queries have factors. */
static int load_rope(struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    struct rope_config plain = {.kind = ROPE_DEFAULT,
                                .theta = c->window_theta,
                                .factor = 1,
                                .rot_dim = c->full_head_dim > 0 ? c->head_dim : c->rope.rot_dim,
                                .original_positions = c->rope.original_positions};

    if (c->rope.rot_dim == 0) {
        return 0;
    }
    int rc = load_rope_table(m, &c->rope, &t->rope[0], &t->cos_sin, e);
    if (rc == 0 && c->window_theta > 0) {
        rc = load_rope_table(m, &plain, &t->rope[1], &t->window_cos_sin, e);
    }
    if (rc == 0 && c->unrotated_beta > 0) {
        const struct rope_config still = {.kind = ROPE_PROPORTIONAL, /* of no pair */
                                          .theta = c->rope.theta,
                                          .factor = 1,
                                          .rot_dim = c->rope.rot_dim,
                                          .query_beta = c->unrotated_beta,
                                          .query_offset = 1,
                                          .original_positions = c->unrotated_span};
        rc = load_rope_table(m, &still, &t->rope[1], &t->still_cos_sin, e);
    }
    return rc;
}

static int load_factors(struct model *m, struct err *e)
{
    struct weight_piece piece = {.data = m->config.factor,
                                 .dtype = DTYPE_F32,
                                 .rows = 1,
                                 .cols = LAYER_FACTORS,
                                 .stride = LAYER_FACTORS};
    struct weight_desc d = {.name = "factors",
                            .kind = WEIGHT_TABLE,
                            .dtype = DTYPE_F32,
                            .rows = 1,
                            .cols = LAYER_FACTORS,
                            .piece = &piece,
                            .n_pieces = 1,
                            .mapped = true};

    return m->config.recurrent.beside
               ? m->backend->ops->weight(m->backend, &d, &m->weights->factors, e)
               : 0;
}

/* The weights of norms that have none. */
static int load_ones(struct model *m, struct err *e)
{
    struct transformer *t = m->weights;
    int32_t n = m->config.head_dim;
    struct weight_piece piece = {
        .data = t->one, .dtype = DTYPE_F32, .rows = 1, .cols = n, .stride = n};
    struct weight_desc d = {.name = "ones",
                            .kind = WEIGHT_VECTOR,
                            .dtype = m->options.dtype,
                            .rows = 1,
                            .cols = n,
                            .piece = &piece,
                            .n_pieces = 1,
                            .mapped = true};

    for (int32_t i = 0; i < n; i++) {
        t->one[i] = 1;
    }
    return m->config.plain_qk_norm ? m->backend->ops->weight(m->backend, &d, &t->ones, e) : 0;
}

static void set_norm(const struct model_config *c, struct norm *n)
{
    n->kind = c->norm;
    n->eps = c->norm_eps;
    n->weight_offset = c->norm_offset;
}

static void set_rope(const struct model *m, int32_t layer, struct rope *r)
{
    const struct model_config *c = &m->config;
    const struct transformer *t = m->weights;
    bool own = c->windowed[layer] && t->window_cos_sin.data;

    if (!c->unrotated[layer]) {
        r->cos_sin = own ? t->window_cos_sin : t->cos_sin;
        r->rot_dim = own ? t->rope[1].rot_dim : t->rope[0].rot_dim;
        r->query_factors = r->cos_sin.cols > r->rot_dim;
        r->interleaved = c->rope_interleaved;
        if (c->plain_qk_norm) {
            r->q_norm.weight = r->k_norm.weight = t->ones;
        }
    } else if (t->still_cos_sin.data) {
        r->cos_sin = t->still_cos_sin;
        r->rot_dim = t->rope[1].rot_dim;
        r->query_factors = true;
    }
    r->norm_last = c->norm_last;
    set_norm(c, &r->q_norm);
    set_norm(c, &r->k_norm);
}

static void set_experts(const struct model *m, struct layer *l)
{
    const struct expert_config *x = &m->config.experts;

    l->experts.n = x->n;
    if (m->options.expert_parallel) {
        struct axis_range mine = expert_range(m);
        l->experts.first = mine.first;
        l->experts.held = mine.n;
    }
    l->experts.top = x->top;
    l->experts.width = m->weights->expert_intermediate;
    l->experts.act = m->config.act;
    l->experts.normalised = x->normalised;
    l->experts.scores = x->scores;
    l->experts.mixer_jitter = x->mixer_jitter;
    l->experts.groups_by_two = x->groups_by_two;
    l->experts.n_groups = x->n_groups;
    l->experts.top_groups = x->top_groups;
    l->experts.factor = x->factor;
    l->experts.swiglu_limit = x->swiglu_limit;
    l->experts.self_gated = x->self_gated && !x->gate_copied;
}

static void set_latent(const struct model *m, struct layer *l)
{
    const struct model_config *c = &m->config;
    struct latent_attention *a = &l->latent;

    a->group = l->attention.group;
    a->layer = l->attention.layer;
    a->n_heads = m->weights->n_heads;
    a->latent = c->latent.rank;
    a->rot_dim = c->latent.rot_dim;
    a->nope_dim = c->latent.nope_dim;
    a->v_dim = c->latent.v_dim;
    a->scale = l->attention.scale;
    a->cos_sin = m->weights->cos_sin;
    a->interleaved = c->rope_interleaved;
    set_norm(c, &a->norm);
    a->norm.eps = l->q_norm.eps = 1e-6f; /* whatever the model's other norms have */
}

/* Of what Gemma-4's layers have besides. The factors of the layers' inputs are folded
 * into the eps of norms: see gemma4.c. */
static void set_gemma4_norms(const struct model_config *c, struct layer *l)
{
    set_norm(c, &l->router_norm);
    set_norm(c, &l->experts_norm);
    set_norm(c, &l->experts_post_norm);
    set_norm(c, &l->mlp_own_norm);
    set_norm(c, &l->input_norm);
    l->input_norm.eps *= 2;
    l->rope.v_eps = c->full_head_dim > 0 ? c->norm_eps : 0;
}

/* Parameters of the operations other than weights. */
static void set_parameters(struct model *m)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    struct model_kv_groups groups;
    bool chunks = c->chunked && m->options.max_len > c->sliding_window; /* else there is one */

    model_kv_groups(&groups, c, &m->options);
    set_norm(c, &t->final_norm);
    set_norm(c, &t->inputs_norm);
    t->inputs_norm.eps *= (float)c->hidden;
    for (int32_t i = 0; i < t->n_layers; i++) {
        struct layer *l = &t->layer[i];
        int32_t number = t->first_layer + i;
        set_norm(c, &l->attn_norm);
        set_norm(c, &l->mlp_norm);
        set_norm(c, &l->attn_post_norm);
        set_norm(c, &l->mlp_post_norm);
        set_norm(c, &l->q_norm);
        set_norm(c, &l->k_norm);
        set_gemma4_norms(c, l);
        if (c->experts.layer[number]) {
            set_experts(m, l);
        }
        set_rope(m, number, &l->rope);
        int32_t group, index;
        if (c->recurrent.layer[number]) {
            model_kv_place(&groups, c, t->first_layer, number, true, &group, &index);
            transformer_set_recurrence(m, l, group, index);
        }
        if (!model_attends(c, number)) {
            continue;
        }
        model_kv_place(&groups, c, t->first_layer, number, false, &group, &index);
        l->attention = (struct attention){
            .group = group,
            .layer = index,
            .n_heads = t->n_heads,
            .n_kv_heads = model_is_full(c, number) ? t->full_kv_heads : t->n_kv_heads,
            .head_dim = model_head_dim(c, number),
            .scale =
                (float)(1 / sqrt((double)c->query_scalar) / (c->scale_by_layer ? number + 1 : 1)),
            .softcap = c->attn_softcap,
            .window = c->windowed[number] && !c->chunked ? c->sliding_window : 0,
            .chunk = c->windowed[number] && chunks ? c->sliding_window : 0,
            .sinks = l->sinks};
        if (c->latent.rank > 0) {
            set_latent(m, l);
        }
    }
}

int model_check_ranks(const struct model_config *c, int32_t n, bool by_expert, struct err *e)
{
    int32_t full = MAX(c->full_kv_heads, 1);
    int32_t ids = c->head.draft_vocab > 0 ? c->head.draft_vocab : c->vocab;
    bool kv = (c->n_kv_heads % n == 0 || n % c->n_kv_heads == 0) &&
              (c->full_head_dim == 0 || full % n == 0 || n % full == 0);

    if (by_expert && c->experts.n == 0) {
        return err_set_param(e, ERR_INVALID, "expert_parallel",
                             "expert_parallel: %s has no experts", c->architecture);
    }
    if (by_expert && c->experts.n % n != 0) {
        return err_set_param(e, ERR_INVALID, "expert_parallel",
                             "expert_parallel: tensor_parallel_size %d does not divide the %d "
                             "experts of a layer",
                             n, c->experts.n);
    }
    if (c->n_heads % n != 0 || c->intermediate % n != 0 || !kv) {
        return err_set_param(e, ERR_INVALID, "tensor_parallel_size",
                             "tensor_parallel_size %d does not divide the model: %d heads, %d "
                             "key/value heads, MLP width %d",
                             n, c->n_heads, c->n_kv_heads, c->intermediate);
    }
    if ((!by_expert && c->experts.intermediate % n != 0) ||
        c->experts.shared_intermediate % n != 0) {
        return err_set_param(e, ERR_INVALID, "tensor_parallel_size",
                             "tensor_parallel_size %d does not divide the model's experts: MLP "
                             "width %d, shared %d",
                             n, c->experts.intermediate, c->experts.shared_intermediate);
    }
    int rc = model_check_recurrence(&c->recurrent, n, e);
    if (rc < 0) {
        return rc;
    }
    if (div_ceil(ids, n) * (n - 1) >= ids) {
        return err_set_param(
            e, ERR_INVALID, "tensor_parallel_size",
            "tensor_parallel_size %d leaves the last rank no part of a vocabulary of %d", n, ids);
    }
    return 0;
}

bool model_norms_over_ranks(const struct model_config *c, int32_t n)
{
    return n > 1 && (c->wide_qk_norm || model_shares_mixer_norm(&c->recurrent, n));
}

/* Refuse a model with layers that the backend does not compute. */
static int check_backend(const struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    const struct backend_ops *ops = m->backend->ops;
    const char *what = NULL;
    bool convolves = c->recurrent.n_heads > 0 && c->recurrent.kind == RECURRENCE_CONV;

    if (c->experts.n > 0 && !ops->experts) {
        what = "layers of experts";
    } else if (c->latent.rank > 0 && !ops->latent_attention) {
        what = "attention over latents";
    } else if (c->recurrent.n_heads > 0 && !ops->recurrence) {
        what = "layers with recurrent states";
    } else if (convolves && !m->backend->convolutions) {
        what = "layers that are convolutions";
    } else if (c->recurrent.n_heads > 0 && c->recurrent.kind == RECURRENCE_SCAN &&
               !m->backend->scans) {
        what = "selective scans (Mamba-1)";
    } else if (c->experts.n > 0 && c->experts.scores == SCORES_MIXER &&
               !m->backend->mixer_experts) {
        what = "experts that a sparse mixer chooses";
    } else if (c->experts.scaled_inputs && !ops->scale_by_score) {
        what = "experts of scaled inputs";
    } else if (c->xielu && !ops->xielu) {
        what = "the activation xIELU";
    } else if (c->norm_last && !m->backend->late_head_norms) {
        what = "norms of rotated heads";
    } else if (c->full_head_dim > 0 && !ops->multiply) {
        what = "heads of two sizes";
    } else if (model_norms_over_ranks(c, m->options.n_ranks) && !ops->square_sums) {
        return err_set_param(e, ERR_UNSUPPORTED, "tensor_parallel_size",
                             "tensor_parallel_size %d: %s has norms over the heads of all ranks, "
                             "which the backend %s does not compute",
                             m->options.n_ranks, c->architecture, m->backend->name);
    }
    return what ? err_set(e, ERR_UNSUPPORTED, "%s has %s, which the backend %s does not compute",
                          c->architecture, what, m->backend->name)
                : 0;
}

int transformer_load(struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    int32_t stage = m->options.stage, n_stages = m->options.n_stages;
    int rc = model_check_ranks(c, m->options.n_ranks, m->options.expert_parallel, e);

    if (rc == 0) {
        rc = check_backend(m, e);
    }
    if (rc == 0) {
        rc = model_check_stages(c, n_stages, e);
    }
    if (rc < 0) {
        return rc;
    }
    struct transformer *t = calloc(1, sizeof(*t));
    if (!t) {
        return err_nomem(e, "model");
    }
    m->weights = t;
    expert_division_choose(m);
    t->first = stage == 0;
    t->first_layer = model_first_layer(c, stage, n_stages);
    t->n_layers = model_first_layer(c, stage + 1, n_stages) - t->first_layer;
    t->layer = calloc((size_t)t->n_layers, sizeof(*t->layer));
    if (!t->layer) {
        return err_nomem(e, "model");
    }
    t->n_heads = c->n_heads / m->options.n_ranks;
    t->n_kv_heads = model_n_kv_heads(c, m->options.n_ranks);
    t->full_kv_heads = model_full_kv_heads(c, m->options.n_ranks);
    t->intermediate = c->intermediate / m->options.n_ranks;
    t->expert_intermediate =
        c->experts.intermediate / (m->options.expert_parallel ? 1 : m->options.n_ranks);
    t->shared_intermediate = c->experts.shared_intermediate / m->options.n_ranks;
    t->partial = m->options.n_ranks > 1;
    t->vocab_first = vocab_range(m).first;
    t->n_vocab = vocab_range(m).n;
    rc = load_weights(m, e);
    if (rc == 0) {
        rc = load_rope(m, e);
    }
    rc = rc < 0 ? rc : load_factors(m, e);
    rc = rc < 0 ? rc : load_ones(m, e);
    if (rc < 0) {
        return rc;
    }
    set_parameters(m);
    rc = load_cache_scales(m, e);
    rc = rc < 0 ? rc : transformer_make_scratch(m, e);
    return rc < 0 || c->head.kind == HEAD_NONE ? rc : head_load(m, e);
}
