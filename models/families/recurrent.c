/* Layers with recurrent states: which rows of their tensors go where, and the mixer
 * that stands in place of attention (struct recurrence of backend.h).
 *
 * Some checkpoints interleave what a product gives: for each head q and its gates, for
 * each group its q, k, v and z. The rows of each are gathered here, so that the
 * products give matrices whose columns are q, k, v, ... one after another. */
#include "models/families/layers.h"

/* Whether neighbouring heads have neighbouring groups, as in llama.cpp's files. */
static bool heads_take_turns(const struct recurrent_config *c)
{
    return c->tiled && c->n_heads != c->n_groups;
}

/* Groups of this rank. Where the ranks cannot have groups of their own, as of Mamba-2
 * with one group, several have the same one; where neighbouring heads have neighbouring
 * groups, a rank's heads read all of them. */
static int32_t groups_of_rank(const struct recurrent_config *c, int32_t n_ranks)
{
    if (n_ranks == 1 || heads_take_turns(c)) {
        return c->n_groups;
    }
    return c->kind == RECURRENCE_SSD && c->n_groups < n_ranks ? 1 : c->n_groups / n_ranks;
}

int model_check_recurrence(const struct recurrent_config *c, int32_t n, struct err *e)
{
    bool tiled = heads_take_turns(c);
    bool shares = c->kind == RECURRENCE_SSD && n % MAX(c->n_groups, 1) == 0;

    if (n > 1 && tiled && c->n_heads / c->n_groups % n != 0) {
        return err_set_param(e, ERR_INVALID, "tensor_parallel_size",
                             "tensor_parallel_size %d does not divide the model's recurrent "
                             "layers: %d heads in llama.cpp's order, %d of each group",
                             n, c->n_heads, c->n_heads / c->n_groups);
    }
    if (c->n_heads % n != 0 || (!tiled && !shares && c->n_groups % n != 0)) {
        return err_set_param(e, ERR_INVALID, "tensor_parallel_size",
                             "tensor_parallel_size %d does not divide the model's recurrent "
                             "layers: %d heads in %d groups",
                             n, c->n_heads, c->n_groups);
    }
    if (model_shares_mixer_norm(c, n) && c->n_groups > 1) {
        return err_set_param(e, ERR_UNSUPPORTED, "tensor_parallel_size",
                             "tensor_parallel_size %d: the norms of the %d groups of the "
                             "recurrent layers would each run over some of the ranks",
                             n, c->n_groups);
    }
    return 0;
}

bool model_shares_mixer_norm(const struct recurrent_config *c, int32_t n_ranks)
{
    return c->n_heads > 0 && c->kind == RECURRENCE_SSD && c->normed && c->n_groups % n_ranks != 0;
}

struct recurrence model_recurrence(const struct recurrent_config *c, int32_t n_ranks)
{
    return (struct recurrence){.kind = c->kind,
                               .n_heads = c->n_heads / n_ranks,
                               .n_groups = groups_of_rank(c, n_ranks),
                               .key_dim = c->key_dim,
                               .value_dim = c->value_dim,
                               .kernel = c->kernel,
                               .tiled = c->tiled,
                               .dt_min = c->dt_min,
                               .dt_max = c->dt_max};
}

/* Of n units of `size` elements each the elements [first, first + count). */
struct interleaved {
    int32_t n, size, first, count;
};

/* The dims that name a part of interleaved rows; n 0: another dim. */
static struct interleaved interleaved_of(enum tensor_dim dim, const struct model_config *c)
{
    const struct recurrent_config *r = &c->recurrent;
    int32_t groups = MAX(r->n_groups, 1), heads = r->n_heads / groups, k = r->key_dim;
    int32_t v = heads * r->value_dim, qkvz = 2 * k + 2 * v, d = c->head_dim;

    switch (dim) {
    case DIM_GATED_Q_QUERY:
        return (struct interleaved){c->n_heads, 2 * d, 0, d};
    case DIM_GATED_Q_GATE:
        return (struct interleaved){c->n_heads, 2 * d, d, d};
    case DIM_QKVZ_Q:
        return (struct interleaved){groups, qkvz, 0, k};
    case DIM_QKVZ_K:
        return (struct interleaved){groups, qkvz, k, k};
    case DIM_QKVZ_V:
        return (struct interleaved){groups, qkvz, 2 * k, v};
    case DIM_QKVZ_Z:
        return (struct interleaved){groups, qkvz, 2 * k + v, v};
    case DIM_BA_B:
        return (struct interleaved){groups, 2 * heads, 0, heads};
    case DIM_BA_A:
        return (struct interleaved){groups, 2 * heads, heads, heads};
    default:
        return (struct interleaved){0};
    }
}

int64_t recurrent_dim_size(enum tensor_dim dim, const struct model_config *c)
{
    struct interleaved x = interleaved_of(dim, c);
    struct recurrence r = model_recurrence(&c->recurrent, 1);
    int64_t channels = recurrence_channels(&r), values = (int64_t)r.n_heads * r.value_dim;

    if (x.n > 0) {
        return (int64_t)x.n * x.size;
    }
    switch (dim) {
    case DIM_CHANNELS:
        return channels;
    case DIM_CONV:
        return channels * r.kernel;
    case DIM_VALUES:
        return values;
    case DIM_VALUE:
        return r.value_dim;
    case DIM_STATE_HEADS:
        return r.n_heads;
    case DIM_SSD_IN:
        return values + channels + r.n_heads;
    case DIM_CONV_IN:
        return 3 * channels;
    case DIM_SCAN_IN:
        return 2 * values;
    case DIM_SCAN_GATES:
        return c->recurrent.step_rank + 2 * (int64_t)r.key_dim;
    case DIM_STEP_RANK:
        return c->recurrent.step_rank;
    case DIM_STATE_KEY:
        return r.key_dim;
    default:
        return -1;
    }
}

int32_t recurrent_most_ranges(const struct model_config *c)
{
    enum { SSD_IN = 5 };

    return c->recurrent.n_heads > 0 ? MAX(MAX(c->n_heads, c->recurrent.n_groups), SSD_IN) : 0;
}

/* This rank's parts of the channels from `at` on, times `scale`. */
static int32_t channel_ranges(const struct model *m, int32_t at, int32_t scale,
                              struct axis_range *ret)
{
    const struct recurrent_config *c = &m->config.recurrent;
    struct recurrence r = model_recurrence(c, m->options.n_ranks);
    int32_t n = m->options.n_ranks, rank = m->options.rank;
    /* the ranks of a group, 1 where a rank has several, or where each has all */
    int32_t sharing = c->n_groups < n ? n / c->n_groups : 1;
    int32_t group = r.n_groups == c->n_groups ? 0 : rank / sharing * r.n_groups;
    int32_t value = r.n_heads * r.value_dim;
    const struct axis_range keys = {group * r.key_dim, r.n_groups * r.key_dim},
                            values = {rank * value, value};
    int32_t all_keys = c->n_groups * r.key_dim, all_values = n * value;
    bool delta = r.kind == RECURRENCE_DELTA;

    for (int32_t i = 0; i < 3; i++) {
        bool is_keys = delta ? i < 2 : i > 0;
        struct axis_range part = is_keys ? keys : values;
        ret[i] = (struct axis_range){(at + part.first) * scale, part.n * scale};
        at += is_keys ? all_keys : all_values;
    }
    return 3;
}

static int32_t interleaved_ranges(const struct model *m, struct interleaved x, bool split,
                                  struct axis_range *ret)
{
    int32_t n = split ? x.n / m->options.n_ranks : x.n;
    int32_t first = split ? m->options.rank * n : 0;

    for (int32_t i = 0; i < n; i++) {
        ret[i] = (struct axis_range){(first + i) * x.size + x.first, x.count};
    }
    return n;
}

int32_t recurrent_ranges(const struct model *m, enum tensor_dim dim, bool split,
                         struct axis_range *ret)
{
    struct interleaved x = interleaved_of(dim, &m->config);
    int32_t size = (int32_t)recurrent_dim_size(dim, &m->config), n = m->options.n_ranks;
    struct recurrence r = model_recurrence(&m->config.recurrent, n);
    int32_t values = r.n_heads * r.value_dim, rank = m->options.rank;

    if (x.n > 0) {
        return interleaved_ranges(m, x, split, ret);
    }
    if (!split || n == 1) {
        ret[0] = (struct axis_range){0, size};
        return 1;
    }
    bool mixed =
        r.n_groups > 0 && r.kind != RECURRENCE_CONV; /* keys and values are among the channels */
    if ((dim == DIM_CHANNELS || dim == DIM_CONV) && mixed) {
        return channel_ranges(m, 0, dim == DIM_CONV ? r.kernel : 1, ret);
    }
    if (dim == DIM_SSD_IN) {
        ret[0] = (struct axis_range){rank * values, values};
        channel_ranges(m, n * values, 1, ret + 1);
        ret[4] = (struct axis_range){size - (n - rank) * r.n_heads, r.n_heads};
        return 5;
    }
    int32_t parts = dim == DIM_CONV_IN ? 3 : dim == DIM_SCAN_IN ? 2 : 1, each = size / parts;
    for (int32_t i = 0; i < parts; i++) {
        ret[i] = (struct axis_range){i * each + rank * (each / n), each / n};
    }
    return parts;
}

void transformer_set_recurrence(const struct model *m, struct layer *l, int32_t group,
                                int32_t index)
{
    struct recurrence r = model_recurrence(&m->config.recurrent, m->options.n_ranks);

    r.group = group;
    r.layer = index;
    r.conv = l->recurrence.conv;
    r.conv_bias = l->recurrence.conv_bias;
    r.a_log = l->recurrence.a_log;
    r.dt_bias = l->recurrence.dt_bias;
    r.d = l->recurrence.d;
    l->recurrence = r;
    l->mixer_norm.eps = m->config.recurrent.norm_eps;
    l->mixer_norm.gate_first = m->config.recurrent.gate_first;
    l->mixer_norm.width =
        r.kind == RECURRENCE_DELTA ? r.value_dim : r.n_heads / MAX(r.n_groups, 1) * r.value_dim;
    l->mixer_norm_shared = model_shares_mixer_norm(&m->config.recurrent, m->options.n_ranks);
    struct norm *norms[] = {&l->scan.step_norm, &l->scan.k_norm, &l->scan.q_norm};
    for (size_t i = 0; i < ARRAY_LEN(norms); i++) {
        norms[i]->kind = m->config.norm;
        norms[i]->eps = m->config.norm_eps;
    }
}

/* Mamba-1: what the convolution makes of the channels gives each token's key, query
 * and, through a narrow product, the step of each channel. */
static void scan(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct recurrence *r = &l->recurrence;
    int32_t values = r->n_heads * r->value_dim, rank = l->scan.step.cols, keys = r->key_dim;
    struct mat all = mat_cols(mat_rows(m->weights->mixer, 0, h.rows), 0, l->mixer.rows);
    struct mat out = mat_cols(mat_rows(m->weights->attn, 0, h.rows), 0, values);
    struct mat x = mat_cols(all, 0, values), z = mat_cols(all, values, values);
    struct mat gates = mat_rows(m->weights->scan, 0, h.rows); /* steps, their input, k, q */
    struct mat in = mat_cols(gates, values, rank + 2 * keys), step = mat_cols(in, 0, rank);
    struct mat k = mat_cols(in, rank, keys), q = mat_cols(in, rank + keys, keys);

    ops->linear(m->backend, all, h, l->mixer, NULL);
    ops->recurrence(m->backend, out, x, (struct mat){0}, r, NULL);
    ops->linear(m->backend, in, x, l->scan.in, NULL);
    if (m->weights->partial) {
        ops->all_reduce(m->backend, in);
    }
    ops->norm(m->backend, step, step, &l->scan.step_norm);
    ops->norm(m->backend, k, k, &l->scan.k_norm);
    ops->norm(m->backend, q, q, &l->scan.q_norm);
    ops->linear(m->backend, mat_cols(gates, 0, values), step, l->scan.step, NULL);
    ops->recurrence(m->backend, out, x, gates, r, NULL);
    ops->multiply(m->backend, out, z, ACT_SILU);
    ops->linear(m->backend, y, out, l->o, NULL);
}

/* The product gives gates of the channels, gates of the result, and the channels. */
static void convolve(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    int32_t n = recurrence_channels(&l->recurrence);
    struct mat all = mat_cols(mat_rows(m->weights->mixer, 0, h.rows), 0, l->mixer.rows);
    struct mat out = mat_cols(mat_rows(m->weights->attn, 0, h.rows), 0, n);
    struct mat x = mat_cols(all, 2 * n, n);

    ops->linear(m->backend, all, h, l->mixer, NULL);
    ops->multiply(m->backend, x, mat_cols(all, 0, n), ACT_NONE);
    ops->recurrence(m->backend, out, x, (struct mat){0}, &l->recurrence, NULL);
    ops->multiply(m->backend, out, mat_cols(all, n, n), ACT_NONE);
    ops->linear(m->backend, y, out, l->o, NULL);
}

/* The gated norm of x, whose groups several ranks share. */
static void norm_shared(struct model *m, const struct gated_norm *g, struct mat x, struct mat gate)
{
    const struct backend_ops *ops = m->backend->ops;
    struct norm n = {.kind = NORM_RMS, .weight = g->weight, .eps = g->eps};
    struct norm_part part = {x, &n};

    if (g->gate_first) {
        ops->multiply(m->backend, x, gate, ACT_SILU);
    }
    transformer_norm_parts(m, &part, 1);
    if (!g->gate_first) {
        ops->multiply(m->backend, x, gate, ACT_SILU);
    }
}

void transformer_recur(struct model *m, const struct layer *l, struct mat out, struct mat x,
                       struct mat gates, struct mat z)
{
    const struct output_norm after = {&l->mixer_norm, z};
    bool shared = l->mixer_norm_shared;

    m->backend->ops->recurrence(m->backend, out, x, gates, &l->recurrence, shared ? NULL : &after);
    if (shared) {
        norm_shared(m, &l->mixer_norm, out, z);
    }
}

void transformer_mix(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct recurrence *r = &l->recurrence;
    bool delta = r->kind == RECURRENCE_DELTA;
    int32_t values = r->n_heads * r->value_dim, channels = recurrence_channels(r);
    int32_t n_gates = delta ? 2 * r->n_heads : r->n_heads;
    struct mat all = mat_cols(mat_rows(m->weights->mixer, 0, h.rows), 0, l->mixer.rows);
    struct mat out = mat_cols(mat_rows(m->weights->attn, 0, h.rows), 0, values);
    struct mat x = mat_cols(all, delta ? 0 : values, channels);
    struct mat z = mat_cols(all, delta ? channels : 0, values);

    if (r->kind == RECURRENCE_CONV || r->kind == RECURRENCE_SCAN) {
        (r->kind == RECURRENCE_CONV ? convolve : scan)(m, l, y, h);
        return;
    }
    ops->linear(m->backend, all, h, l->mixer, NULL);
    transformer_recur(m, l, out, x, mat_cols(all, channels + values, n_gates), z);
    ops->linear(m->backend, y, out, l->o, NULL);
}
