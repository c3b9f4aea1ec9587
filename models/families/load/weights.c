/* From a table of tensors to weights on a backend: takes this rank's slice of each
 * tensor, stacks the tensors of a fused weight, and passes their pieces to the backend.
 *
 * A piece points into the mapped checkpoint; the backend reads it in place or copies
 * it. A tensor that its file holds encoded or unaligned is first copied to plain
 * memory, until the backend has made its own copy.
 */
#include "models/families/load/load.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/quantised/quantised.h"

enum {
    TENSOR_PIECES = 3, /* of one tensor, at most; more of one that is divided into heads */
    LATENT_ROWS = 1024 /* rows of the scratch of attention over latents, at most */
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

/* This rank's range of `n` heads; with more ranks than heads several ranks hold the
 * same one. */
static struct axis_range head_range(const struct model *m, int32_t n)
{
    int32_t n_ranks = m->options.n_ranks, rank = m->options.rank;

    if (n >= n_ranks) {
        return (struct axis_range){rank * (n / n_ranks), n / n_ranks};
    }
    return (struct axis_range){rank / (n_ranks / n), 1};
}

/* This rank's part of n ids: equal ranges, of which the last may be shorter. */
static struct axis_range part_of(const struct model *m, int32_t n)
{
    int32_t width = (int32_t)div_ceil(n, m->options.n_ranks), first = m->options.rank * width;

    return (struct axis_range){first, MIN(width, n - first)};
}

struct axis_range vocab_range(const struct model *m)
{
    return part_of(m, m->config.vocab);
}

struct axis_range logits_range(const struct model *m)
{
    int32_t n = m->config.head.draft_vocab;

    return n > 0 ? part_of(m, n) : vocab_range(m);
}

int32_t model_n_kv_heads(const struct model_config *c, int32_t n_ranks)
{
    return MAX(c->n_kv_heads / n_ranks, 1);
}

int32_t model_full_kv_heads(const struct model_config *c, int32_t n_ranks)
{
    return c->full_head_dim > 0 ? MAX(c->full_kv_heads / n_ranks, 1) : 0;
}

bool tensor_spec_by_expert(const struct tensor_spec *s)
{
    return tensor_spec_indices(s) == 2 || tensor_spec_stacked(s);
}

struct axis_range expert_range(const struct model *m)
{
    int32_t n = m->config.experts.n, n_ranks = m->options.expert_parallel ? m->options.n_ranks : 1;

    return (struct axis_range){m->options.rank % n_ranks * (n / n_ranks), n / n_ranks};
}

/* How a tensor is divided; one of experts that are divided among the ranks is whole. */
static enum tensor_split split_of(const struct model *m, const struct tensor_spec *s)
{
    return m->options.expert_parallel && tensor_spec_by_expert(s) ? SPLIT_NONE : s->split;
}

static bool is_grouped(enum tensor_dim dim)
{
    return dim == DIM_GROUPED_Q || dim == DIM_GROUPED_K || dim == DIM_GROUPED_V;
}

static bool is_by_head(enum tensor_dim dim)
{
    return dim == DIM_K_UP || dim == DIM_V_UP || is_grouped(dim);
}

/* The rows of this rank's heads in q, k and v by key/value head: its queries, its keys
 * or its values, a range a head. */
static int32_t grouped_ranges(const struct model *m, enum tensor_dim dim, struct axis_range *ret)
{
    const struct model_config *c = &m->config;
    int32_t queries = c->n_heads / c->n_kv_heads, d = c->head_dim;
    bool q = dim == DIM_GROUPED_Q;
    struct axis_range heads = head_range(m, q ? c->n_heads : c->n_kv_heads);

    for (int32_t i = 0; i < heads.n; i++) {
        int32_t head = heads.first + i, group = q ? head / queries : head;
        int32_t at = q ? head % queries : queries + (dim == DIM_GROUPED_V);
        ret[i] = (struct axis_range){(group * (queries + 2) + at) * d, d};
    }
    return heads.n;
}

/* The rows that make the keys of this rank's heads, or their values, a range a head. */
static int32_t head_ranges(const struct model *m, enum tensor_dim dim, struct axis_range *ret)
{
    const struct latent_config *c = &m->config.latent;
    struct axis_range heads = head_range(m, m->config.n_heads);

    for (int32_t i = 0; i < heads.n; i++) {
        int32_t first = (heads.first + i) * (c->nope_dim + c->v_dim);
        ret[i] = dim == DIM_K_UP ? (struct axis_range){first, c->nope_dim}
                                 : (struct axis_range){first + c->nope_dim, c->v_dim};
    }
    return heads.n;
}

/* The ranges of an axis that this rank holds, into ret[LIMIT_HEADS]; returns their
 * number. */
static int32_t axis_ranges(const struct model *m, enum tensor_dim dim, bool split, int64_t size,
                           struct axis_range *ret)
{
    const struct model_config *c = &m->config;
    int32_t d = c->head_dim;
    struct axis_range q = head_range(m, c->n_heads), kv = head_range(m, c->n_kv_heads);

    if (is_grouped(dim)) {
        return grouped_ranges(m, dim, ret);
    }
    if (is_by_head(dim)) {
        return head_ranges(m, dim, ret);
    }
    if (recurrent_dim_size(dim, c) >= 0) {
        return recurrent_ranges(m, dim, split, ret);
    }
    ret[0] = (struct axis_range){0, (int32_t)size};
    if (dim == DIM_QKV) {
        if (!split || m->options.n_ranks == 1) {
            return 1;
        }
        ret[0] = (struct axis_range){q.first * d, q.n * d};
        ret[1] = (struct axis_range){(c->n_heads + kv.first) * d, kv.n * d};
        ret[2] = (struct axis_range){(c->n_heads + c->n_kv_heads + kv.first) * d, kv.n * d};
        return 3;
    }
    bool both = dim == DIM_GATE_UP || dim == DIM_STACKED_GATE_UP || dim == DIM_SHARED_GATE_UP;
    if (both && split) {
        int32_t all = (int32_t)size / 2, n = all / m->options.n_ranks;
        ret[0] = (struct axis_range){m->options.rank * n, n};
        ret[1] = (struct axis_range){all + m->options.rank * n, n};
        return 2;
    }
    if (!split) {
        return 1;
    }
    if (dim == DIM_HEADS) {
        ret[0] = q;
    } else if (dim == DIM_Q || dim == DIM_KV) {
        struct axis_range heads = dim == DIM_Q ? q : kv;
        ret[0] = (struct axis_range){heads.first * d, heads.n * d};
    } else if (dim == DIM_FULL_Q || dim == DIM_FULL_KV) {
        struct axis_range heads = dim == DIM_FULL_Q ? q : head_range(m, c->full_kv_heads);
        ret[0] = (struct axis_range){heads.first * c->full_head_dim, heads.n * c->full_head_dim};
    } else if (dim == DIM_VOCAB) {
        ret[0] = vocab_range(m);
    } else if (dim == DIM_DRAFT_VOCAB) {
        ret[0] = logits_range(m);
    } else {
        int32_t n = (int32_t)size / m->options.n_ranks;
        ret[0] = (struct axis_range){m->options.rank * n, n};
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

void tensor_part_of(const struct model *m, const struct tensor_spec *s, struct tensor_part *ret)
{
    int64_t n_rows, n_cols;
    enum tensor_split split = split_of(m, s);
    bool split_out = split == SPLIT_OUT || split == SPLIT_VOCAB;

    tensor_spec_shape(s, &m->config, &n_rows, &n_cols);
    ret->n_out = s->transposed ? n_cols : n_rows;
    ret->n_in = s->transposed ? n_rows : n_cols;
    ret->n_parts = axis_ranges(m, s->rows, split_out, ret->n_out, ret->out);
    axis_ranges(m, s->cols, split == SPLIT_IN, ret->n_in, ret->in);
}

/* A slice of codes whose scales are apart, which is a weight with the scales of its
 * groups: every step-th row from `first` on. */
static void slice_codes(struct weight_piece *p, const struct quant_tensor *q, int64_t first,
                        int32_t step, struct axis_range in, const uint8_t *codes)
{
    p->stride = q->stride * step;
    p->data = codes + weight_format_bytes(q->format, first * q->stride + in.first);
    p->scales = weight_scales_slice(&q->scales, (int32_t)first, in.first);
    p->scales.stride *= step;
    p->scales.zero_stride *= step;
}

/* The row of a quantised tensor where row `row` of the spec is, of `expert` where they
 * are stacked. */
static int64_t code_row(const struct tensor_spec *s, const struct quant_tensor *q, int32_t expert,
                        int32_t row)
{
    int64_t stack = tensor_spec_stacked(s) ? q->rows / q->n_stacked * expert : 0;

    return stack + (int64_t)row * tensor_spec_step(s) + (s->rows == DIM_STACKED_UP);
}

/* The values of one expert in a tensor of all, n as it is stored, decoded where it is
 * quantised; *ret_copy, where that takes a copy, is the caller's. */
static const char *expert_data(const struct tensor *t, size_t n, int32_t expert, void **ret_copy)
{
    size_t bytes = (size_t)dtype_bytes(t->dtype);

    if (!t->quantised) {
        return (const char *)t->data + (size_t)expert * n * bytes;
    }
    *ret_copy = malloc(n * bytes);
    if (!*ret_copy || quant_tensor_decode_one(t->quantised, expert, t->dtype, *ret_copy) < 0) {
        return NULL;
    }
    return *ret_copy;
}

/* The same in the order of the spec: n values, every second one where gate and up are
 * stored in turn. As plain_data otherwise. */
static const void *stacked_data(const struct tensor_spec *s, const struct tensor *t, int64_t n,
                                int32_t expert, void **ret_copy)
{
    size_t bytes = (size_t)dtype_bytes(t->dtype), step = (size_t)tensor_spec_step(s);
    void *decoded = NULL;
    const char *from = expert_data(t, (size_t)n * step, expert, &decoded);

    if (!from || (step == 1 && (uintptr_t)from % bytes == 0)) {
        *ret_copy = decoded;
        return from;
    }
    char *copy = malloc((size_t)n * bytes);
    *ret_copy = copy;
    from += s->rows == DIM_STACKED_UP ? bytes : 0;
    for (size_t i = 0; copy && i < (size_t)n; i++) {
        memcpy(copy + i * bytes, from + i * step * bytes, bytes);
    }
    free(decoded);
    return copy;
}

/* A factor that the weights of a norm carry: that of the logits, since the head is
 * linear, or that of what a router reads. */
static float norm_factor(const struct model *m, const struct tensor_spec *s)
{
    if (tensor_spec_indices(s) == 0 && s->target == IN_MODEL(final_norm.weight)) {
        return m->config.logit_scale;
    }
    bool router = tensor_spec_indices(s) > 0 && s->target == IN_LAYER(router_norm.weight);
    return router ? 1 / sqrtf((float)m->config.hidden) : 1;
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

/* What a vector is multiplied by when it is loaded. A bias that is added once to a sum
 * over the ranks is zero on all but one: a backend chooses by what an operation is
 * given how ranks sum, and they must choose alike. */
static float vector_factor(const struct model *m, const struct tensor_spec *s)
{
    return split_of(m, s) == SPLIT_FIRST && m->options.rank > 0 ? 0 : norm_factor(m, s);
}

/* Whether this rank has nothing of the tensor: biases of experts are added by the
 * launch that has their weights. */
static bool is_elsewhere(const struct model *m, const struct tensor_spec *s)
{
    return split_of(m, s) == SPLIT_FIRST && m->options.rank > 0 &&
           (tensor_spec_by_expert(s) || tensor_spec_stacked(s));
}

/* The last piece, n values, times a factor, as float32. */
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

/* Add this rank's blocks or codes of a tensor, or of one expert in a tensor of all,
 * which are stored as [out, in] whatever the order of Hugging Face's tensor. */
static int add_blocks(struct assembly *a, const struct tensor_spec *s, const struct tensor *t,
                      int32_t expert, struct err *e)
{
    const struct quant_tensor *q = t->quantised;
    struct tensor_part part;
    void *copy = NULL;

    tensor_part_of(a->m, s, &part);
    const uint8_t *codes = q ? quant_tensor_codes(q, &copy) : t->blocks;
    a->source[a->n_pieces].copy = copy;
    if (!codes) {
        return err_nomem(e, t->name);
    }
    for (int32_t i = 0; i < part.n_parts; i++) {
        const struct axis_range *out = &part.out[i], *in = &part.in[0];
        struct weight_piece *p = &a->piece[a->n_pieces];
        a->source[a->n_pieces++].tensor = t;
        *p = (struct weight_piece){
            .dtype = t->dtype,
            .rows = out->n,
            .cols = in->n,
            .stride = part.n_in,
            .format = t->format,
            .head_rows = t->order == ORDER_ROTARY_PAIRS ? (int32_t)part.n_out / t->n_heads : 0};
        if (q) {
            slice_codes(p, q, code_row(s, q, expert, out->first), tensor_spec_step(s), *in, codes);
        } else {
            int64_t first = (int64_t)out->first * part.n_in + in->first;
            p->data = t->blocks + weight_format_bytes(t->format, first);
        }
        a->rows += out->n;
    }
    a->cols = part.in[0].n;
    return 0;
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
    struct tensor_part part;
    const struct axis_range *out = part.out, *in = part.in;

    tensor_part_of(m, s, &part);
    void *copy = NULL;
    const void *data = !t                       ? NULL
                       : tensor_spec_stacked(s) ? stacked_data(s, t, n_rows * n_cols, expert, &copy)
                                                : plain_data(t, &copy);
    a->source[a->n_pieces].copy = copy;
    if (t && !data) {
        a->n_pieces++; /* so that the copy is freed */
        return err_nomem(e, t->name);
    }
    for (int32_t i = 0; i < part.n_parts; i++) {
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

/* Whether a vector is small and its rounding would be felt: it is kept in float32. */
static bool keeps_float32(const struct model *m, const struct tensor_spec *s)
{
    const size_t target[] = {IN_LAYER(experts.choice_bias),
                             IN_LAYER(sinks),
                             IN_LAYER(xielu),
                             IN_LAYER(recurrence.conv),
                             IN_LAYER(recurrence.conv_bias),
                             IN_LAYER(recurrence.a_log),
                             IN_LAYER(recurrence.dt_bias),
                             IN_LAYER(recurrence.d),
                             IN_LAYER(experts.expert_scale)};
    bool is = norm_factor(m, s) != 1;

    for (size_t i = 0; i < ARRAY_LEN(target); i++) {
        is = is || (tensor_spec_indices(s) > 0 && s->target == target[i]);
    }
    return is;
}

/* The type of a weight that is no codes: the model's, but for one that was decoded to a
 * finer type as a whole (checkpoint_decode_finer). */
static enum dtype type_of(const struct assembly *a, const struct tensor_spec *s)
{
    bool finer = a->n_pieces > 0 && !tensor_spec_of_expert(s);

    if (keeps_float32(a->m, s)) {
        return DTYPE_F32;
    }
    for (int32_t i = 0; i < a->n_pieces; i++) {
        const struct tensor *t = a->source[i].tensor;
        finer = finer && t && t->quantised && a->piece[i].dtype == DTYPE_F16;
    }
    return finer ? DTYPE_F16 : a->m->options.dtype;
}

enum { FINE_FIRST = 1, FINE_LAST = 2 }; /* layers at the ends */

/* Whether the inputs of a weight's products weigh much: those of queries, keys and
 * values, which softmax makes exponents of, and all of the layers at the ends: the
 * first ones' errors go through all layers, and the last ones' meet no norm that makes
 * them small beside what other layers add. A draft is checked by its target. */
static bool keeps_inputs(const struct model *m, const struct tensor_spec *s, int32_t layer)
{
    const struct model_config *c = &m->config;

    return c->head.kind == HEAD_NONE && tensor_spec_indices(s) > 0 &&
           (s->target == IN_LAYER(qkv) || layer < FINE_FIRST || layer >= c->n_layers - FINE_LAST);
}

/* Notes how the tensors of a weight in blocks or codes are multiplied; those of `d`
 * that have no format in the file were quantised. */
static void note_uses(const struct assembly *a, const struct weight_desc *d, struct mat w)
{
    const struct tensor *last = NULL;

    for (int32_t i = 0, row = 0; i < a->n_pieces; row += a->piece[i++].rows) {
        const struct weight_format *f = a->piece[i].format;
        bool quantised = !f && d->piece != a->piece && d->piece[0].format;
        if ((f || quantised) && a->source[i].tensor != last) {
            model_note_use(a->m, f ? f : d->piece[0].format, quantised, w, row);
        }
        last = a->source[i].tensor;
    }
}

/* Whether all ranks multiply the weight and take the results as equal: a router's, or
 * what goes into the residual stream. Latents are read by a rank's own heads alone. */
static bool is_alike(const struct model *m, const struct tensor_spec *s)
{
    bool latents = tensor_spec_indices(s) > 0 && s->target == IN_LAYER(qkv);

    return m->options.n_ranks > 1 && s->kind == WEIGHT_LINEAR && s->split == SPLIT_NONE &&
           !tensor_spec_of_expert(s) && !latents;
}

/* Bytes that a dummy takes at least: an element's, or the fewest of a code. */
static int64_t least_bytes(const struct assembly *a, const struct tensor_spec *s)
{
    int64_t n = (int64_t)a->rows * a->cols;
    bool coded = model_quantises(a->m, s, a->cols) || tensor_spec_of_expert(s);

    return coded ? n / 2 : n * dtype_bytes(type_of(a, s));
}

static int make_weight(struct assembly *a, const struct tensor_spec *s, int32_t layer,
                       struct mat *ret, struct err *e)
{
    struct model *m = a->m;
    char name[TENSOR_NAME_BYTES];

    tensor_spec_name(s, (struct tensor_index){m->config.head.layer + layer, -1}, name);
    struct weight_desc d = {.name = name,
                            .kind = s->kind,
                            .dtype = type_of(a, s),
                            .rows = a->rows,
                            .cols = a->cols,
                            .piece = a->piece,
                            .n_pieces = m->checkpoint ? a->n_pieces : 0,
                            .mapped = m->checkpoint != NULL};
    d.experts = tensor_spec_of_expert(s);
    if (d.n_pieces == 0 && d.experts &&
        model_keeps_dummy_format(m, m->weights->expert_intermediate)) {
        d.dummy_format = m->expert_format;
    }
    d.tied_head = s->kind == WEIGHT_EMBEDDING && s->target == IN_MODEL(embed) && m->config.tied &&
                  model_is_last(m);
    d.logits = d.tied_head || s->target == IN_MODEL(head);
    d.fine_inputs = keeps_inputs(m, s, layer);
    for (int32_t i = 0; i < a->n_pieces; i++) {
        d.mapped &= !a->source[i].copy;
    }
    m->config.n_parameters += (int64_t)a->rows * a->cols;
    struct quantised q = {0};
    int rc = model_quantises(m, s, a->cols) ? quantised_init(&q, m, &d, e) : 0;
    rc = rc < 0 ? rc : m->backend->ops->weight(m->backend, &d, ret, e);
    if (rc == 0) {
        ret->alike = is_alike(m, s);
    }
    if (rc == 0 && m->checkpoint) {
        note_uses(a, &d, *ret);
    }
    quantised_release(&q);
    bool in_place = rc == 0 && d.mapped && ret->data == a->piece[0].data;
    for (int32_t i = 0; i < a->n_pieces && rc == 0; i++) {
        if (in_place || (d.mapped && a->piece[i].format)) {
            rc = checkpoint_keep(m->checkpoint, a->source[i].tensor, e);
        }
    }
    return rc;
}

/* Check the codes or blocks of a tensor: where it is added as stored those of its
 * pieces from `first` on, which are this rank's, else all. */
static int check_codes(const struct assembly *a, const struct tensor *t, int32_t first, bool stored,
                       struct err *e)
{
    int rc = 0;

    checkpoint_ask(a->m->checkpoint, t);
    if (!stored) {
        return tensor_check_all(t, e);
    }
    for (int32_t i = first; i < a->n_pieces && rc == 0; i++) {
        const struct weight_piece *p = &a->piece[i];
        rc = tensor_check(t, p->data, p->rows, p->cols, p->stride, e);
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
        if (tensor_spec_wanted(s, &m->config, at.layer) && !is_elsewhere(m, s)) {
            struct tensor_index named = {m->config.head.layer + at.layer, at.expert};
            const struct tensor *t =
                m->checkpoint ? tensor_spec_find(s, m->checkpoint, named) : NULL;
            bool blocks = tensor_stays_in_blocks(m, s, t);
            int32_t first = a->n_pieces;
            rc = tensor_part_check(m, s, t, named, e);
            rc = rc < 0   ? rc
                 : blocks ? add_blocks(a, s, t, at.expert, e)
                          : add_tensor(a, s, t, at.expert, e);
            bool coded = t && (t->quantised || t->blocks);
            rc = rc == 0 && coded ? check_codes(a, t, first, blocks, e) : rc;
            if (rc == 0 && t && vector_factor(m, s) != 1) {
                rc = scale_piece(a, vector_factor(m, s), e);
            }
            if (t && !t->format && model_quantises(m, s, a->cols)) {
                m->weights->n_quantised++;
            } else if (t) {
                model_count_format(m, s, t, blocks || !t->format);
            }
        }
    }
    return rc;
}

/* Load the weight whose tensors begin at row s of the table: for one layer, with `base`
 * its struct layer, or outside the layers, with `base` the struct transformer. `bytes`
 * not NULL: add its size there instead. */
static int load_target(struct model *m, const struct tensor_spec *s, int32_t layer, void *base,
                       int64_t *bytes, struct err *e)
{
    struct assembly a = {.m = m};
    struct axis_range each = tensor_spec_by_expert(s) ? expert_range(m) : (struct axis_range){0, 1};
    int32_t n_rows = 0;

    while (s[n_rows].name && s[n_rows].target == s->target) {
        n_rows++;
    }
    int32_t n_pieces =
        is_by_head(s->rows) ? LIMIT_HEADS : MAX(TENSOR_PIECES, recurrent_most_ranges(&m->config));
    int rc = assembly_reserve(&a, n_rows * each.n * n_pieces, e);
    for (int32_t i = 0; i < each.n && rc == 0; i++) {
        rc = add_rows(&a, s, n_rows, (struct tensor_index){layer, each.first + i}, e);
    }
    if (rc == 0 && a.n_pieces > 0 && bytes) {
        *bytes += least_bytes(&a, s);
    } else if (rc == 0 && a.n_pieces > 0) {
        rc = make_weight(&a, s, layer, (struct mat *)((char *)base + s->target), e);
    }
    assembly_release(&a);
    return rc;
}

/* Whether this pipeline stage needs a weight outside the layers. */
static bool is_held(const struct model *m, size_t target)
{
    static const size_t FIRST[] = {IN_MODEL(positions), IN_MODEL(project_in),
                                   IN_MODEL(inputs_table), IN_MODEL(inputs_project),
                                   IN_MODEL(inputs_norm.weight)};
    bool first = m->weights->first, last = model_is_last(m);

    if (target == IN_MODEL(embed)) {
        return first || (last && m->config.tied);
    }
    for (size_t i = 0; i < ARRAY_LEN(FIRST); i++) {
        if (target == FIRST[i]) {
            return first;
        }
    }
    return last;
}

/* Load all weights. `bytes` not NULL: add their sizes there instead. */
static int load_each(struct model *m, int64_t *bytes, struct err *e)
{
    struct transformer *t = m->weights;
    const struct tensor_spec *s = m->family->tensors;
    int rc = 0;

    while (s->name && rc == 0) {
        bool in_layer = tensor_spec_indices(s) > 0;
        int32_t n = in_layer ? t->n_layers : is_held(m, s->target) ? 1 : 0;
        for (int32_t i = 0; i < n && rc == 0; i++) {
            rc = load_target(m, s, t->first_layer + i, in_layer ? (void *)&t->layer[i] : (void *)t,
                             bytes, e);
        }
        size_t target = s->target;
        while (s->name && s->target == target && (tensor_spec_indices(s) > 0) == in_layer) {
            s++;
        }
    }
    return rc;
}

/* Dummies have no file whose size would tell how much memory they need: whether the
 * device has it is asked before it is filled. */
static int check_dummies(struct model *m, struct err *e)
{
    struct backend_memory memory;
    int64_t bytes = 0;
    int rc = load_each(m, &bytes, e);

    m->weights->n_quantised = 0; /* counted as they were measured */
    rc = rc < 0 ? rc : m->backend->ops->memory(m->backend, &memory, e);
    if (rc == 0 && bytes > memory.free_bytes) {
        rc = err_set(e, ERR_NOMEM,
                     "the weights take at least %lld MiB, but of %lld MiB only %lld are free",
                     (long long)(bytes >> 20), (long long)(memory.total_bytes >> 20),
                     (long long)(memory.free_bytes >> 20));
    }
    return rc;
}

int load_weights(struct model *m, struct err *e)
{
    int rc = m->checkpoint ? 0 : check_dummies(m, e);

    return rc < 0 ? rc : load_each(m, NULL, e);
}
