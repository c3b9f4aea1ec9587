/* From a table of tensors to weights on a backend: takes this rank's slice of each
 * tensor, stacks the tensors of a fused weight, and passes their pieces to the backend.
 *
 * A piece points into the mapped checkpoint; the backend reads it in place or copies
 * it. A tensor that its file holds encoded or unaligned is first copied to plain
 * memory, until the backend has made its own copy.
 */
#include "models/families/layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/quantised/quantised.h"

enum {
    TENSOR_PIECES = 3,         /* of one tensor, at most (axis_ranges) */
    HEAD_PIECES = LIMIT_HEADS, /* of one that is divided into heads */
    LATENT_ROWS = 1024         /* rows of the scratch of attention over latents, at most */
};

/* Where a piece of a weight comes from. */
struct source {
    const struct tensor *tensor; /* that the piece is a slice of; NULL: of a dummy */
    void *copy;                  /* owned; plain copy of an encoded or unaligned tensor, or NULL */
};

/* One weight and its pieces so far. */
struct assembly {
    struct model *m;
    struct weight_piece *piece; /* [cap] owned */
    struct source *source;      /* [cap] owned */
    int32_t n_pieces, cap;
    int32_t rows, cols; /* of the weight */
};

static int assembly_reserve(struct assembly *a, int32_t cap, struct err *e)
{
    a->piece = calloc((size_t)cap, sizeof(*a->piece));
    a->source = calloc((size_t)cap, sizeof(*a->source));
    a->cap = cap;
    return a->piece && a->source ? 0 : err_nomem(e, "the pieces of a weight");
}

static void assembly_release(struct assembly *a)
{
    for (int32_t i = 0; a->source && i < a->n_pieces; i++) {
        free(a->source[i].copy);
    }
    free(a->piece);
    free(a->source);
}

/* A range of an axis: [first, first + n). */
struct range {
    int32_t first, n;
};

/* This rank's range of `n` heads; with more ranks than heads several ranks hold the
 * same one. */
static struct range head_range(const struct model *m, int32_t n)
{
    int32_t n_ranks = m->options.n_ranks, rank = m->options.rank;

    if (n >= n_ranks) {
        return (struct range){rank * (n / n_ranks), n / n_ranks};
    }
    return (struct range){rank / (n_ranks / n), 1};
}

/* This rank's ids: equal ranges, of which the last may be shorter. */
static struct range vocab_range(const struct model *m)
{
    int32_t width = (int32_t)div_ceil(m->config.vocab, m->options.n_ranks),
            first = m->options.rank * width;

    return (struct range){first, MIN(width, m->config.vocab - first)};
}

int32_t model_n_kv_heads(const struct model_config *c, int32_t n_ranks)
{
    return MAX(c->n_kv_heads / n_ranks, 1);
}

static bool is_by_head(enum tensor_dim dim)
{
    return dim == DIM_K_UP || dim == DIM_V_UP;
}

/* The rows that make the keys of this rank's heads, or their values, a range a head. */
static int32_t head_ranges(const struct model *m, enum tensor_dim dim, struct range *ret)
{
    const struct latent_config *c = &m->config.latent;
    struct range heads = head_range(m, m->config.n_heads);

    for (int32_t i = 0; i < heads.n; i++) {
        int32_t first = (heads.first + i) * (c->nope_dim + c->v_dim);
        ret[i] = dim == DIM_K_UP ? (struct range){first, c->nope_dim}
                                 : (struct range){first + c->nope_dim, c->v_dim};
    }
    return heads.n;
}

/* The ranges of an axis that this rank holds, into ret[3], by head ret[HEAD_PIECES];
 * returns their number. */
static int32_t axis_ranges(const struct model *m, enum tensor_dim dim, bool split, int64_t size,
                           struct range *ret)
{
    const struct model_config *c = &m->config;
    int32_t d = c->head_dim;
    struct range q = head_range(m, c->n_heads), kv = head_range(m, c->n_kv_heads);

    if (is_by_head(dim)) {
        return head_ranges(m, dim, ret);
    }
    ret[0] = (struct range){0, (int32_t)size};
    if (dim == DIM_QKV) {
        if (!split || m->options.n_ranks == 1) {
            return 1;
        }
        ret[0] = (struct range){q.first * d, q.n * d};
        ret[1] = (struct range){(c->n_heads + kv.first) * d, kv.n * d};
        ret[2] = (struct range){(c->n_heads + c->n_kv_heads + kv.first) * d, kv.n * d};
        return 3;
    }
    if (dim == DIM_GATE_UP && split) {
        int32_t n = c->intermediate / m->options.n_ranks;
        ret[0] = (struct range){m->options.rank * n, n};
        ret[1] = (struct range){c->intermediate + m->options.rank * n, n};
        return 2;
    }
    if (!split) {
        return 1;
    }
    if (dim == DIM_HEADS) {
        ret[0] = q;
    } else if (dim == DIM_Q || dim == DIM_KV) {
        struct range heads = dim == DIM_Q ? q : kv;
        ret[0] = (struct range){heads.first * d, heads.n * d};
    } else if (dim == DIM_VOCAB) {
        ret[0] = vocab_range(m);
    } else {
        int32_t n = (int32_t)size / m->options.n_ranks;
        ret[0] = (struct range){m->options.rank * n, n};
    }
    return 1;
}

/* The tensor's values, decoded and aligned to their type; *ret_copy, where that takes a
 * copy, is the caller's. */
static const void *plain_data(const struct tensor *t, void **ret_copy)
{
    bool coded = t->encoded || t->quantised;

    if (!coded && (uintptr_t)t->data % (uintptr_t)dtype_bytes(t->dtype) == 0) {
        return t->data;
    }
    void *copy = malloc((size_t)t->n_bytes);
    *ret_copy = copy;
    if (copy && coded) {
        return tensor_decode(t, copy) == 0 ? copy : NULL;
    }
    return copy ? memcpy(copy, t->data, (size_t)t->n_bytes) : NULL;
}

/* ERR_UNSUPPORTED where this rank's range of an axis of `size` values ends inside a
 * group of `group` values, 0: all of them. */
static int check_cut(const struct model *m, const struct tensor *t, struct range r, int64_t size,
                     int32_t group, struct err *e)
{
    if (group == 0 || (r.first % group == 0 && (r.n % group == 0 || r.first + r.n == size))) {
        return 0;
    }
    return err_set_param(e, ERR_UNSUPPORTED, "tensor_parallel_size",
                         "tensor_parallel_size %d cuts the %s of %d values of %s (%s)",
                         m->options.n_ranks, t->quantised ? "groups" : "blocks", group, t->name,
                         t->format->name);
}

/* A slice of codes whose scales are apart, which is a weight with the scales of its
 * groups. */
static void slice_codes(struct weight_piece *p, const struct quant_tensor *q, struct range out,
                        struct range in, const uint8_t *codes)
{
    p->stride = q->stride;
    p->data = codes + weight_format_bytes(q->format, out.first * q->stride + in.first);
    p->scales = weight_scales_slice(&q->scales, out.first, in.first);
}

/* The values of one expert in a tensor of all, in the order of the spec: n of them,
 * every second one where gate and up are stored in turn. As plain_data otherwise. */
static const void *stacked_data(const struct tensor_spec *s, const struct tensor *t, int64_t n,
                                int32_t expert, void **ret_copy)
{
    size_t bytes = (size_t)dtype_bytes(t->dtype), step = (size_t)tensor_spec_step(s);
    const char *from = (const char *)t->data + (size_t)expert * (size_t)n * step * bytes;

    if (step == 1 && (uintptr_t)from % bytes == 0) {
        return from;
    }
    char *copy = malloc((size_t)n * bytes);
    *ret_copy = copy;
    from += s->rows == DIM_STACKED_UP ? bytes : 0;
    for (size_t i = 0; copy && i < (size_t)n; i++) {
        memcpy(copy + i * bytes, from + i * step * bytes, bytes);
    }
    return copy;
}

/* Whether the weights carry the factor of the logits: the head is linear, so it may be
 * on either side of it. */
static bool scales_logits(const struct model *m, const struct tensor_spec *s)
{
    return m->config.logit_scale != 1 && tensor_spec_indices(s) == 0 &&
           s->target == IN_MODEL(final_norm.weight);
}

static float value_at(const void *data, enum dtype t, int32_t i)
{
    uint32_t bits;
    float f;

    if (t == DTYPE_F16) {
        return weight_format_f16((const uint8_t *)data + (size_t)i * 2);
    }
    if (t == DTYPE_F32) {
        return ((const float *)data)[i];
    }
    bits = (uint32_t)((const uint16_t *)data)[i] << 16;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* The last piece, n values, times the factor of the logits, as float32. */
static int scale_piece(struct assembly *a, float factor, struct err *e)
{
    struct weight_piece *p = &a->piece[a->n_pieces - 1];
    struct source *from = &a->source[a->n_pieces - 1];
    float *scaled = malloc((size_t)p->cols * sizeof(*scaled));

    if (!scaled) {
        return err_nomem(e, from->tensor->name);
    }
    for (int32_t i = 0; i < p->cols; i++) {
        scaled[i] = factor * value_at(p->data, p->dtype, i);
    }
    free(from->copy);
    from->copy = scaled;
    p->data = scaled;
    p->dtype = DTYPE_F32;
    return 0;
}

/* Add this rank's blocks or codes of a tensor, which are stored as [out, in] whatever
 * the order of Hugging Face's tensor. */
static int add_blocks(struct assembly *a, const struct tensor_spec *s, const struct tensor *t,
                      struct err *e)
{
    const struct model *m = a->m;
    const struct quant_tensor *q = t->quantised;
    int64_t n_rows, n_cols;
    struct range out[TENSOR_PIECES], in[TENSOR_PIECES];

    tensor_spec_shape(s, &m->config, &n_rows, &n_cols);
    int64_t n_out = s->transposed ? n_cols : n_rows, n_in = s->transposed ? n_rows : n_cols;
    bool split_out = s->split == SPLIT_OUT || s->split == SPLIT_VOCAB;
    int32_t n_parts = axis_ranges(m, s->rows, split_out, n_out, out);
    axis_ranges(m, s->cols, s->split == SPLIT_IN, n_in, in);
    int rc = check_cut(
        m, t, in[0], n_in,
        q ? MAX(q->scales.group_cols, t->format->block_values) : t->format->block_values, e);
    void *copy = NULL;
    const uint8_t *codes = q && rc == 0 ? quant_tensor_codes(q, &copy) : t->blocks;
    a->source[a->n_pieces].copy = copy;
    if (rc == 0 && !codes) {
        return err_nomem(e, t->name);
    }
    for (int32_t i = 0; i < n_parts && rc == 0; i++) {
        int64_t first = (int64_t)out[i].first * n_in + in[0].first;
        struct weight_piece *p = &a->piece[a->n_pieces];
        a->source[a->n_pieces++].tensor = t;
        *p = (struct weight_piece){
            .dtype = t->dtype,
            .rows = out[i].n,
            .cols = in[0].n,
            .stride = n_in,
            .format = t->format,
            .head_rows = t->order == ORDER_ROTARY_PAIRS ? (int32_t)n_out / t->n_heads : 0};
        if (q) {
            rc = check_cut(m, t, out[i], n_out, q->scales.group_rows, e);
            slice_codes(p, q, out[i], in[0], codes);
        } else {
            p->data = t->blocks + weight_format_bytes(t->format, first);
        }
        a->rows += out[i].n;
    }
    a->cols = in[0].n;
    return rc;
}

/* Add this rank's rows and columns of a tensor, or of one expert in a tensor of all; t
 * NULL: a dummy, of which only the size counts. */
static int add_tensor(struct assembly *a, const struct tensor_spec *s, const struct tensor *t,
                      int32_t expert, struct err *e)
{
    const struct model *m = a->m;
    int64_t n_rows, n_cols;

    tensor_spec_shape(s, &m->config, &n_rows, &n_cols);
    bool vector = s->cols == DIM_ONE;
    int64_t n_out = s->transposed ? n_cols : n_rows, n_in = s->transposed ? n_rows : n_cols;
    struct range out[HEAD_PIECES], in[TENSOR_PIECES];
    bool split_out = s->split == SPLIT_OUT || s->split == SPLIT_VOCAB;
    int32_t n_parts = axis_ranges(m, s->rows, split_out, n_out, out);
    axis_ranges(m, s->cols, s->split == SPLIT_IN, n_in, in);
    void *copy = NULL;
    const void *data = !t                       ? NULL
                       : tensor_spec_stacked(s) ? stacked_data(s, t, n_rows * n_cols, expert, &copy)
                                                : plain_data(t, &copy);
    a->source[a->n_pieces].copy = copy;
    if (t && !data) {
        a->n_pieces++; /* so that the copy is freed */
        return err_nomem(e, t->name);
    }
    for (int32_t i = 0; i < n_parts; i++) {
        int64_t first = s->transposed ? (int64_t)in[0].first * n_cols + out[i].first
                                      : (int64_t)out[i].first * n_cols + in[0].first;
        struct weight_piece *p = &a->piece[a->n_pieces++];
        *p = (struct weight_piece){
            .rows = out[i].n, .cols = in[0].n, .stride = n_cols, .transposed = s->transposed};
        if (s->transposed) {
            *p = (struct weight_piece){
                .rows = in[0].n, .cols = out[i].n, .stride = n_cols, .transposed = true};
        } else if (vector) { /* stacked along its only axis */
            *p = (struct weight_piece){.rows = 1, .cols = out[i].n, .stride = out[i].n};
        } else if (s->rows == DIM_K_UP) {
            p->transposed = true;
        }
        if (t) {
            a->source[a->n_pieces - 1].tensor = t;
            p->data = (const char *)data + first * dtype_bytes(t->dtype);
            p->dtype = t->dtype;
        }
        if (vector) {
            a->cols += out[i].n;
        } else {
            a->rows += s->rows == DIM_K_UP ? in[0].n : out[i].n;
        }
    }
    if (vector) {
        a->rows = 1;
    } else {
        a->cols = s->rows == DIM_K_UP ? out[0].n : in[0].n;
    }
    return 0;
}

static int make_weight(struct assembly *a, const struct tensor_spec *s, int32_t layer,
                       struct mat *ret, struct err *e)
{
    struct model *m = a->m;
    char name[TENSOR_NAME_BYTES];

    tensor_spec_name(s, (struct tensor_index){layer, -1}, name);
    struct weight_desc d = {.name = name,
                            .kind = s->kind,
                            .dtype = m->options.dtype,
                            .rows = a->rows,
                            .cols = a->cols,
                            .piece = a->piece,
                            .n_pieces = m->checkpoint ? a->n_pieces : 0,
                            .mapped = m->checkpoint != NULL};
    if (s->target == IN_LAYER(experts.choice_bias) || s->target == IN_LAYER(sinks) ||
        scales_logits(m, s)) {
        d.dtype = DTYPE_F32;
    }
    d.tied_head = s->kind == WEIGHT_EMBEDDING && m->config.tied && model_is_last(m);
    for (int32_t i = 0; i < a->n_pieces; i++) {
        d.mapped &= !a->source[i].copy;
    }
    m->config.n_parameters += (int64_t)a->rows * a->cols;
    int rc = m->backend->ops->weight(m->backend, &d, ret, e);
    bool in_place = rc == 0 && d.mapped && ret->data == a->piece[0].data;
    for (int32_t i = 0; i < a->n_pieces && rc == 0; i++) {
        if (in_place || (d.mapped && a->piece[i].format)) {
            rc = checkpoint_keep(m->checkpoint, a->source[i].tensor, e);
        }
    }
    return rc;
}

/* Add the tensors of the n rows from s on, which have one target: of one expert, or of
 * none. */
static int add_rows(struct assembly *a, const struct tensor_spec *s, int32_t n,
                    struct tensor_index at, struct err *e)
{
    const struct model *m = a->m;
    int rc = 0;

    for (int32_t i = 0; i < n && rc == 0; i++, s++) {
        if (tensor_spec_wanted(s, &m->config, at.layer) &&
            (s->split != SPLIT_FIRST || m->options.rank == 0)) {
            const struct tensor *t = m->checkpoint ? tensor_spec_find(s, m->checkpoint, at) : NULL;
            bool blocks = tensor_stays_in_blocks(m, s, t);
            rc = blocks ? add_blocks(a, s, t, e) : add_tensor(a, s, t, at.expert, e);
            if (rc == 0 && t && scales_logits(m, s)) {
                rc = scale_piece(a, m->config.logit_scale, e);
            }
            if (t) {
                transformer_count_format(m->weights, t, blocks || !t->format);
            }
        }
    }
    return rc;
}

/* Load the weight whose tensors begin at row s of the table: for one layer, with `base`
 * its struct layer, or outside the layers, with `base` the struct transformer. */
static int load_target(struct model *m, const struct tensor_spec *s, int32_t layer, void *base,
                       struct err *e)
{
    struct assembly a = {.m = m};
    int32_t n_rows = 0, n_each = tensor_spec_count(s, &m->config);

    while (s[n_rows].name && s[n_rows].target == s->target) {
        n_rows++;
    }
    int32_t n_pieces = is_by_head(s->rows) ? HEAD_PIECES : TENSOR_PIECES;
    int rc = assembly_reserve(&a, n_rows * n_each * n_pieces, e);
    for (int32_t i = 0; i < n_each && rc == 0; i++) {
        rc = add_rows(&a, s, n_rows, (struct tensor_index){layer, i}, e);
    }
    if (rc == 0 && a.n_pieces > 0) {
        rc = make_weight(&a, s, layer, (struct mat *)((char *)base + s->target), e);
    }
    assembly_release(&a);
    return rc;
}

/* Whether this pipeline stage needs a weight outside the layers. */
static bool is_held(const struct model *m, size_t target)
{
    bool first = m->weights->first, last = model_is_last(m);

    if (target == IN_MODEL(embed)) {
        return first || (last && m->config.tied);
    }
    return target == IN_MODEL(positions) || target == IN_MODEL(project_in) ? first : last;
}

static int load_weights(struct model *m, struct err *e)
{
    struct transformer *t = m->weights;
    const struct tensor_spec *s = m->family->tensors;
    int rc = 0;

    while (s->name && rc == 0) {
        bool in_layer = tensor_spec_indices(s) > 0;
        int32_t n = in_layer ? t->n_layers : is_held(m, s->target) ? 1 : 0;
        for (int32_t i = 0; i < n && rc == 0; i++) {
            rc = load_target(m, s, t->first_layer + i, in_layer ? (void *)&t->layer[i] : (void *)t,
                             e);
        }
        size_t target = s->target;
        while (s->name && s->target == target && (tensor_spec_indices(s) > 0) == in_layer) {
            s++;
        }
    }
    return rc;
}

static int load_rope_table(struct model *m, const struct rope_config *r, float **host,
                           struct mat *ret, struct err *e)
{
    int32_t rows = m->options.max_len, cols = r->rot_dim;

    *host = malloc((size_t)rows * (size_t)cols * sizeof(float));
    if (!*host) {
        return err_nomem(e, "rope table");
    }
    rope_fill(*host, r, rows);
    struct weight_piece piece = {
        .data = *host, .dtype = DTYPE_F32, .rows = rows, .cols = cols, .stride = cols};
    struct weight_desc d = {.name = "rope table",
                            .kind = WEIGHT_TABLE,
                            .dtype = DTYPE_F32,
                            .rows = rows,
                            .cols = cols,
                            .piece = &piece,
                            .n_pieces = 1,
                            .mapped = true};
    return m->backend->ops->weight(m->backend, &d, ret, e);
}

/* The tables of rotation: of all layers, and of windowed ones if theirs differs. */
static int load_rope(struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    struct rope_config plain = {.kind = ROPE_DEFAULT,
                                .theta = c->window_theta,
                                .factor = 1,
                                .rot_dim = c->rope.rot_dim,
                                .original_positions = c->rope.original_positions};

    if (c->rope.rot_dim == 0) {
        return 0;
    }
    int rc = load_rope_table(m, &c->rope, &t->rope_host[0], &t->cos_sin, e);
    if (rc == 0 && c->window_theta > 0) {
        rc = load_rope_table(m, &plain, &t->rope_host[1], &t->window_cos_sin, e);
    }
    return rc;
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
        r->rot_dim = c->rope.rot_dim;
        r->interleaved = c->rope_interleaved;
    }
    set_norm(c, &r->q_norm);
    set_norm(c, &r->k_norm);
}

static void set_experts(const struct model *m, struct layer *l)
{
    const struct expert_config *x = &m->config.experts;

    l->experts.n = x->n;
    l->experts.top = x->top;
    l->experts.width = m->weights->expert_intermediate;
    l->experts.act = m->config.act;
    l->experts.normalised = x->normalised;
    l->experts.scores = x->scores;
    l->experts.groups_by_two = x->groups_by_two;
    l->experts.n_groups = x->n_groups;
    l->experts.top_groups = x->top_groups;
    l->experts.factor = x->factor;
    l->experts.swiglu_limit = x->swiglu_limit;
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

/* Parameters of the operations other than weights. */
static void set_parameters(struct model *m)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    struct model_kv_groups groups;

    model_kv_groups(&groups, c, &m->options);
    set_norm(c, &t->final_norm);
    for (int32_t i = 0; i < t->n_layers; i++) {
        struct layer *l = &t->layer[i];
        int32_t number = t->first_layer + i;
        set_norm(c, &l->attn_norm);
        set_norm(c, &l->mlp_norm);
        set_norm(c, &l->attn_post_norm);
        set_norm(c, &l->mlp_post_norm);
        set_norm(c, &l->q_norm);
        set_norm(c, &l->k_norm);
        if (c->experts.layer[number]) {
            set_experts(m, l);
        }
        set_rope(m, number, &l->rope);
        int32_t group, index;
        model_kv_place(&groups, c, t->first_layer, number, &group, &index);
        l->attention = (struct attention){.group = group,
                                          .layer = index,
                                          .n_heads = t->n_heads,
                                          .n_kv_heads = t->n_kv_heads,
                                          .head_dim = c->head_dim,
                                          .scale = (float)(1 / sqrt((double)c->query_scalar) /
                                                           (c->scale_by_layer ? number + 1 : 1)),
                                          .softcap = c->attn_softcap,
                                          .window = c->windowed[number] ? c->sliding_window : 0,
                                          .sinks = l->sinks};
        if (c->latent.rank > 0) {
            set_latent(m, l);
        }
    }
}

/* Memory that operations of a step share. */
struct want {
    struct mat *mat;
    int32_t rows, cols; /* 0: not wanted */
    enum dtype dtype;
};

static int make_mats(struct model *m, const struct want *want, size_t n, struct err *e)
{
    int rc = 0;

    for (size_t i = 0; i < n && rc == 0; i++) {
        if (want[i].rows > 0 && want[i].cols > 0) {
            rc = m->backend->ops->scratch(m->backend, want[i].rows, want[i].cols, want[i].dtype,
                                          want[i].mat, e);
        }
    }
    return rc;
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

static int make_expert_scratch(struct model *m, enum dtype act, struct err *e)
{
    const struct expert_config *x = &m->config.experts;
    struct transformer *t = m->weights;
    struct expert_scratch *s = &t->experts;
    int32_t n = m->options.max_tokens;
    bool pairs = m->backend->expert_pairs;
    int32_t each = pairs ? 0 : n, pair = pairs ? n * x->top : 0;
    int64_t words = experts_list_words(x->n, x->top, n);
    const struct want want[] = {
        {&s->scores, n, x->n, DTYPE_F32},
        {&s->y, n, m->config.hidden, act},
        {&s->row, 1, each, DTYPE_I32},
        {&s->x, each, m->config.hidden, act},
        {&s->up, each, 2 * t->expert_intermediate, act},
        {&s->act, each, t->expert_intermediate, act},
        {&s->pair_act, pair, t->expert_intermediate, act},
        {&s->pair_y, pair, m->config.hidden, act},
        {&s->lists, 1, pairs ? (int32_t)MIN(words, INT32_MAX) : 0, DTYPE_I32},
    };

    return x->n > 0 ? make_mats(m, want, ARRAY_LEN(want), e) : 0;
}

static int make_latent_scratch(struct model *m, enum dtype act, struct err *e)
{
    const struct latent_config *c = &m->config.latent;
    struct transformer *t = m->weights;
    int32_t n = m->options.max_tokens, rows = MIN(n, LATENT_ROWS);
    int32_t q = t->n_heads * m->config.head_dim, v = t->n_heads * c->v_dim;
    int32_t in = (c->q_rank > 0 ? c->q_rank : q) + c->rank + c->rot_dim;
    const struct want want[] = {
        {&t->qkv, n, MAX(in, v), act},
        {&t->attn, n, v, act},
        {&t->q, n, c->q_rank > 0 ? MAX(q, v) : 0, act},
        {&t->latent.q, rows, t->n_heads * (c->rank + c->rot_dim), act},
        {&t->latent.sum, rows, t->n_heads * c->rank, act},
    };

    return c->rank > 0 ? make_mats(m, want, ARRAY_LEN(want), e) : 0;
}

static int make_scratch(struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    struct transformer *t = m->weights;
    enum dtype act = backend_act_dtype(m->backend, m->options.dtype);
    int32_t n = m->options.max_tokens, q = t->n_heads * c->head_dim,
            kv = t->n_kv_heads * c->head_dim;
    int32_t n_logits = model_is_last(m) ? m->options.max_logits : 0;
    int32_t up = widest_up(t);
    bool narrow = c->embed_dim != c->hidden, heads = c->latent.rank == 0;
    const struct want want[] = {
        {&t->x, n, c->hidden, act},
        {&t->h, n, c->hidden, act},
        {&t->y, n, c->hidden, act},
        {&t->qkv, n, heads ? q + 2 * kv : 0, act},
        {&t->attn, n, heads ? q : 0, act},
        {&t->up, n, up, act},
        {&t->act, n, MAX(t->intermediate, t->shared_intermediate), act},
        {&t->narrow, n, narrow ? c->embed_dim : 0, act},
        {&m->gathered, n_logits, c->embed_dim, act},
        {&m->logits, n_logits, c->vocab, DTYPE_F32},
        {&m->local_logits, n_logits, t->partial ? t->n_vocab : 0, DTYPE_F32},
    };

    int rc = make_mats(m, want, ARRAY_LEN(want), e);
    m->head = c->tied ? t->embed : t->head;
    m->hidden = narrow ? t->narrow : c->final_norm ? t->h : t->x;
    rc = rc ? rc : make_latent_scratch(m, act, e);
    return rc ? rc : make_expert_scratch(m, act, e);
}

int model_check_ranks(const struct model_config *c, int32_t n, struct err *e)
{
    bool kv = c->n_kv_heads % n == 0 || n % c->n_kv_heads == 0;

    if (c->n_heads % n != 0 || c->intermediate % n != 0 || !kv) {
        return err_set_param(e, ERR_INVALID, "tensor_parallel_size",
                             "tensor_parallel_size %d does not divide the model: %d heads, %d "
                             "key/value heads, MLP width %d",
                             n, c->n_heads, c->n_kv_heads, c->intermediate);
    }
    if (c->wide_qk_norm && n > 1) {
        return err_set_param(e, ERR_UNSUPPORTED, "tensor_parallel_size",
                             "tensor_parallel_size %d: %s norms queries and keys over all heads, "
                             "which several ranks do not compute",
                             n, c->architecture);
    }
    if (c->experts.intermediate % n != 0 || c->experts.shared_intermediate % n != 0) {
        return err_set_param(e, ERR_INVALID, "tensor_parallel_size",
                             "tensor_parallel_size %d does not divide the model's experts: MLP "
                             "width %d, shared %d",
                             n, c->experts.intermediate, c->experts.shared_intermediate);
    }
    if (div_ceil(c->vocab, n) * (n - 1) >= c->vocab) {
        return err_set_param(
            e, ERR_INVALID, "tensor_parallel_size",
            "tensor_parallel_size %d leaves the last rank no part of a vocabulary of %d", n,
            c->vocab);
    }
    return 0;
}

int model_check_stages(const struct model_config *c, int32_t n, struct err *e)
{
    if (n > c->n_layers) {
        return err_set_param(e, ERR_INVALID, "pipeline_parallel_size",
                             "pipeline_parallel_size %d is more than the %d layers of the model", n,
                             c->n_layers);
    }
    return 0;
}

/* Refuse a model with layers that the backend does not compute. */
static int check_backend(const struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    const struct backend_ops *ops = m->backend->ops;
    const char *what = NULL;

    if (c->experts.n > 0 && !ops->experts) {
        what = "layers of experts";
    } else if (c->latent.rank > 0 && !ops->latent_attention) {
        what = "attention over latents";
    }
    return what ? err_set(e, ERR_UNSUPPORTED, "%s has %s, which the backend %s does not compute",
                          c->architecture, what, m->backend->name)
                : 0;
}

int transformer_load(struct model *m, struct err *e)
{
    const struct model_config *c = &m->config;
    int32_t stage = m->options.stage, n_stages = m->options.n_stages;
    int rc = model_check_ranks(c, m->options.n_ranks, e);

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
    t->first = stage == 0;
    t->first_layer = model_first_layer(c, stage, n_stages);
    t->n_layers = model_first_layer(c, stage + 1, n_stages) - t->first_layer;
    t->layer = calloc((size_t)t->n_layers, sizeof(*t->layer));
    if (!t->layer) {
        return err_nomem(e, "model");
    }
    t->n_heads = c->n_heads / m->options.n_ranks;
    t->n_kv_heads = model_n_kv_heads(c, m->options.n_ranks);
    t->intermediate = c->intermediate / m->options.n_ranks;
    t->expert_intermediate = c->experts.intermediate / m->options.n_ranks;
    t->shared_intermediate = c->experts.shared_intermediate / m->options.n_ranks;
    t->partial = m->options.n_ranks > 1;
    t->vocab_first = vocab_range(m).first;
    t->n_vocab = vocab_range(m).n;
    rc = load_weights(m, e);
    if (rc == 0) {
        rc = load_rope(m, e);
    }
    if (rc < 0) {
        return rc;
    }
    set_parameters(m);
    return make_scratch(m, e);
}

void transformer_mlp(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct experts *x = &l->experts;
    struct mat up = mat_rows(m->weights->up, 0, h.rows), act = mat_rows(m->weights->act, 0, h.rows);

    if (x->n > 0) {
        struct expert_scratch s = m->weights->experts;
        s.scores = mat_rows(s.scores, 0, h.rows);
        s.shared_up = mat_cols(up, 0, x->shared_up.rows);
        s.shared_act = mat_cols(act, 0, x->shared_up.rows / 2);
        ops->experts(m->backend, y, h, x, &s);
        return;
    }
    act = mat_cols(act, 0, l->down.cols);
    ops->linear_gated(m->backend, act, mat_cols(up, 0, l->up.rows), h, l->up, l->up_bias,
                      m->config.act);
    ops->linear(m->backend, y, act, l->down, &(struct epilogue){.bias = l->down_bias});
}

void transformer_end_layer(struct model *m, int32_t i, struct mat h, struct mat x, struct mat y,
                           bool partial)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    const struct norm *next = i + 1 < t->n_layers ? &t->layer[i + 1].attn_norm : &t->final_norm;

    if (next->weight.data) {
        ops->add_norm(m->backend, h, x, y, next, partial);
    } else {
        ops->add(m->backend, x, y, partial);
    }
}

void transformer_embed(struct model *m, struct mat out, float scale)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;

    if (t->partial) {
        ops->embed_shard(m->backend, out, t->embed, t->vocab_first, scale);
    } else {
        ops->embed(m->backend, out, t->embed, scale);
    }
}

void transformer_head(struct model *m, struct mat logits, struct mat x)
{
    const struct backend_ops *ops = m->backend->ops;
    bool partial = m->weights->partial;
    struct mat mine = partial ? mat_rows(m->local_logits, 0, x.rows) : logits;

    ops->linear(m->backend, mine, x, m->head, &(struct epilogue){0});
    if (m->config.final_softcap > 0) {
        ops->soft_cap(m->backend, mine, m->config.final_softcap);
    }
    if (partial) {
        ops->gather_logits(m->backend, logits, mine);
    }
}

void transformer_free(struct transformer *t)
{
    if (!t) {
        return;
    }
    free(t->layer);
    free(t->rope_host[0]);
    free(t->rope_host[1]);
    free(t);
}
