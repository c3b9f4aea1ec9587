/* The tensors of a GGUF file as a checkpoint, with Hugging Face's names and order of
 * elements.
 *
 * llama.cpp rotates neighbouring pairs of a head's dimensions in its "llama"
 * architecture, so its converter reorders the rows of q and k; it transposes GPT-2's
 * Conv1D. Decoding a tensor reverses both, so the forward passes need not know. Tensors
 * that are neither encoded nor reordered are read in place, like those of safetensors.
 * What directories have as tensors of one value may be numbers of the metadata here,
 * which lie at any address and are decoded.
 */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf_families.h"
#include "models/checkpoint/weights_internal.h"

/* What becomes of a tensor. */
struct renamed {
    char name[256]; /* with %d where the tensor has an expert along its first axis */
    char then[256]; /* likewise, of the second half of an expert's rows; "": all are `name` */
    enum tensor_order order;
    enum gguf_shape shape;
};

/* What the names of a layer's tensors begin with. */
static const char *layers_prefix(const struct gguf_family *f)
{
    return f->layers ? f->layers : "model.layers";
}

/* What is read, and into what. */
struct reading {
    struct checkpoint *c;
    struct gguf *g;
    const struct gguf_family *f;
    const struct model_config *config;
    enum dtype dtype; /* of what is decoded */
    struct err *e;
};

/* Gates and ups of experts; a file may have both in one tensor, an expert's gate before
 * its up. */
static const char GATES[] = "ffn_gate_exps", UPS[] = "ffn_up_exps";

/* Hugging Face's name, order and axes. A name that the family does not have is kept:
 * transformer_check reports it. */
static struct renamed rename_tensor(const struct gguf_family *f, const char *name)
{
    const char *end = strrchr(name, '.'), *stem = name;
    const char *layers = layers_prefix(f);
    struct renamed ret = {.order = ORDER_SAME};
    int layer = -1, used = 0;

    if (sscanf(name, "blk.%4d.%n", &layer, &used) == 1 && used > 0 && layer >= 0) {
        stem = name + used;
    } else {
        layer = -1;
    }
    bool ending = end && end >= stem && strcmp(end, ".scale") != 0; /* that of another kind */
    end = ending ? end : stem + strlen(stem);
    bool both = layer >= 0 && strcmp(stem, "ffn_gate_up_exps.weight") == 0;
    const struct gguf_rename *r = both
                                      ? gguf_rename_find(f, true, GATES, strlen(GATES))
                                      : gguf_rename_find(f, layer >= 0, stem, (size_t)(end - stem));
    const struct gguf_rename *up = both ? gguf_rename_find(f, true, UPS, strlen(UPS)) : NULL;
    if (layer >= 0 && strncmp(stem, "nextn.", 6) == 0) { /* of a layer that drafts */
        snprintf(ret.name, sizeof(ret.name), "%s.%d.%s", layers, layer, stem);
        return ret;
    }
    if (!r || both != (up != NULL)) {
        snprintf(ret.name, sizeof(ret.name), "%s", name);
        return ret;
    }
    const char *suffix = r->whole ? "" : end;
    if (layer < 0) {
        snprintf(ret.name, sizeof(ret.name), "%s%s", r->to, suffix);
    } else {
        snprintf(ret.name, sizeof(ret.name), "%s.%d.%s%s", layers, layer, r->to, suffix);
    }
    if (up) {
        snprintf(ret.then, sizeof(ret.then), "%s.%d.%s%s", layers, layer, up->to, suffix);
    }
    bool bias = strcmp(end, ".bias") == 0;
    ret.order = bias && r->order != ORDER_ROTARY_PAIRS ? ORDER_SAME : r->order;
    ret.shape = bias && !r->whole ? GGUF_AS_IS : r->shape;
    return ret;
}

/* Tensors that hold parameters of RoPE; gguf_config.c reads them. */
static bool is_parameter(const char *name)
{
    return strcmp(name, "rope_freqs.weight") == 0 ||
           strcmp(name, "rope_factors_long.weight") == 0 ||
           strcmp(name, "rope_factors_short.weight") == 0;
}

/* Give a tensor other axes, where it has those that they are made of. */
static void reshape(struct tensor *t, enum gguf_shape shape)
{
    if (shape == GGUF_ONE_AXIS) {
        for (; t->n_dims > 1; t->n_dims--) {
            t->dim[t->n_dims - 2] *= t->dim[t->n_dims - 1];
        }
    } else if (shape == GGUF_TWO_AXES && t->n_dims == 3) {
        t->dim[0] *= t->dim[1];
        t->dim[1] = t->dim[2];
        t->n_dims = 2;
    } else if (shape == GGUF_CONVOLUTION && t->n_dims == 2) {
        t->dim[2] = t->dim[1];
        t->dim[1] = 1;
        t->n_dims = 3;
    }
}

/* Add a tensor as `to` says. */
static int add_tensor(const struct reading *r, const struct gguf_tensor *s,
                      const struct renamed *to)
{
    const char *renamed = to->name;
    struct tensor t = {.name = renamed,
                       .order = to->order,
                       .stored_type = gguf_encoding_name(s->encoding),
                       .usable = true,
                       .dtype = r->dtype};
    if (t.order == ORDER_TRANSPOSED && s->n_dims != 2) {
        t.order = ORDER_SAME;
    }
    t.n_heads = strstr(renamed, ".q_proj.") ? r->config->n_heads : r->config->n_kv_heads;
    int64_t rows = s->dim[s->n_dims - 1], n = 1;
    if (t.order == ORDER_ROTARY_PAIRS &&
        (rows % (2 * t.n_heads) != 0 || s->n_dims > 2)) { /* transformer_check refuses it */
        t.order = ORDER_SAME;
    }
    if (t.order == ORDER_ROTARY_PAIRS && s->n_dims == 1 && gguf_block_values(s->encoding) > 1) {
        return err_set(r->e, ERR_UNSUPPORTED, "%s: a quantised bias", renamed);
    }
    bool plain = gguf_encoding_dtype(s->encoding, &t.dtype);
    t.n_dims = s->n_dims;
    for (int32_t i = 0; i < s->n_dims; i++) {
        t.dim[i] = s->dim[t.order == ORDER_TRANSPOSED ? i : s->n_dims - 1 - i];
        n *= t.dim[i];
    }
    reshape(&t, to->shape);
    if (__builtin_mul_overflow(n, dtype_bytes(t.dtype), &t.n_bytes)) {
        return err_set(r->e, ERR_INVALID, "tensor %s has too many values", renamed);
    }
    bool aligned = (uintptr_t)s->data % (uintptr_t)dtype_bytes(t.dtype) == 0;
    if (plain && aligned && t.order == ORDER_SAME) {
        t.data = s->data;
    } else {
        t.encoded = s;
    }
    if (!plain) {
        t.format = gguf_encoding_format(s->encoding);
        t.blocks = s->data;
    }
    return checkpoint_add(r->c, &t, r->e);
}

/* A view into the file, in the memory that make_views made. */
static struct gguf_tensor *new_view(const struct reading *r)
{
    return &r->g->slice[r->g->n_slices++];
}

/* Add each expert of a tensor, whose last axis in the file counts them, as a tensor of
 * its own, or part `part` of `parts` of its rows. `pattern` has a %d for the expert. */
static int add_parts(const struct reading *r, const struct gguf_tensor *s, const char *pattern,
                     int part, int parts)
{
    struct renamed to = {.order = ORDER_SAME};
    const char *at = strstr(pattern, "%d");
    int32_t n_dims = s->n_dims - 1;
    int64_t n = s->dim[n_dims];
    int rc = 0;

    for (int64_t i = 0; i < n && rc == 0; i++) {
        struct gguf_tensor *one = new_view(r);
        *one = *s;
        one->n_dims = n_dims;
        one->dim[n_dims - 1] /= parts;
        one->n_bytes = s->n_bytes / n / parts;
        one->data = s->data + (i * parts + part) * one->n_bytes;
        snprintf(to.name, sizeof(to.name), "%.*s%lld%s", (int)(at - pattern), pattern, (long long)i,
                 at + 2);
        rc = add_tensor(r, one, &to);
    }
    return rc;
}

static int add_experts(const struct reading *r, const struct gguf_tensor *s,
                       const struct renamed *to)
{
    if (to->then[0] == '\0') {
        return add_parts(r, s, to->name, 0, 1);
    }
    if (s->dim[1] % 2 != 0) {
        return err_set(r->e, ERR_INVALID,
                       "tensor %.*s has %lld rows an expert, which are not two halves",
                       (int)s->name.len, s->name.at, (long long)s->dim[1]);
    }
    int rc = add_parts(r, s, to->name, 0, 2);
    return rc == 0 ? add_parts(r, s, to->then, 1, 2) : rc;
}

/* Whether the file's tensor holds one matrix, or one bias, for each expert. */
static bool is_experts(const struct gguf_tensor *t, const char *renamed)
{
    const char *end = strrchr(renamed, '.');

    return strstr(renamed, "%d") && t->n_dims == (end && strcmp(end, ".bias") == 0 ? 2 : 3);
}

/* ---- tensors of the metadata ---- */

/* Check the values that the file has; p NULL: none. */
static int check_array(const struct gguf *g, const struct gguf_values *v, const struct gguf_pair *p,
                       int64_t layers, struct err *e)
{
    if (!p) {
        return v->to ? err_set(e, ERR_INVALID, "%s: %s is missing", g->file, v->key) : 0;
    }
    if (layers < 0 || p->n != (uint64_t)layers) {
        return err_set(e, ERR_INVALID, "%s: %s has %llu values for %lld layers", g->file, v->key,
                       (unsigned long long)p->n, (long long)layers);
    }
    for (uint64_t i = 0; i < p->n; i++) {
        float x = gguf_item_f32(p, i);
        if (!isfinite(x)) {
            return err_set(e, ERR_INVALID, "%s: %s has a value that is not finite", g->file,
                           v->key);
        }
        if (!v->to && fabsf(x - v->is) > fabsf(v->is) / 256) {
            return err_set(e, ERR_UNSUPPORTED, "%s: %s has %g, and only %g is supported", g->file,
                           v->key, (double)x, (double)v->is);
        }
    }
    return 0;
}

/* Whether the metadata's arrays are as the family has them. Errors name the file. */
static int check_values(const struct gguf *g, const struct gguf_family *f, struct err *e)
{
    char key[128];
    int64_t layers = 0;
    int rc = 0;

    snprintf(key, sizeof(key), "%s.block_count", f->gguf);
    for (const struct gguf_values *v = f->values; v && v->key && rc >= 0; v++) {
        const struct gguf_pair *p = NULL;
        rc = gguf_int(g, key, &layers, e);
        rc = rc < 0 ? rc : gguf_array(g, v->key, GGUF_F32, &p, e);
        rc = rc < 0 ? rc : check_array(g, v, p, layers, e);
    }
    return rc < 0 ? rc : 0;
}

/* The array that becomes tensors; NULL: v is none. It was checked. */
static const struct gguf_pair *find_values(const struct gguf *g, const struct gguf_values *v)
{
    return v->to ? gguf_find(g, v->key) : NULL;
}

static int add_values(const struct reading *r)
{
    int rc = 0;

    for (const struct gguf_values *v = r->f->values; v && v->key; v++) {
        const struct gguf_pair *p = find_values(r->g, v);
        for (uint64_t i = 0; p && i < p->n && rc == 0; i++) {
            struct renamed to = {.order = ORDER_SAME};
            struct gguf_tensor *one = new_view(r);
            *one = (struct gguf_tensor){.name = p->key,
                                        .encoding = GGUF_ENCODING_F32,
                                        .n_dims = 1,
                                        .dim = {1},
                                        .data = p->at + i * sizeof(float),
                                        .n_bytes = sizeof(float)};
            snprintf(to.name, sizeof(to.name), "%s.%llu.%s", layers_prefix(r->f),
                     (unsigned long long)i, v->to);
            rc = add_tensor(r, one, &to);
        }
    }
    return rc;
}

/* ---- all ---- */

/* Tensors that one of the file becomes: it has an expert along its last axis, or is
 * one. */
static int64_t count_views(const struct gguf_family *f, const struct gguf_tensor *t)
{
    char name[129];

    snprintf(name, sizeof(name), "%.*s", (int)t->name.len, t->name.at);
    struct renamed to = rename_tensor(f, name);
    int64_t experts = is_experts(t, to.name) ? t->dim[t->n_dims - 1] : 0;
    return MIN(experts, LIMIT_TENSORS) * (to.then[0] ? 2 : 1);
}

/* Memory for the views of all experts' matrices and of the metadata's values. */
static int make_views(const struct reading *r)
{
    int64_t n = 0;

    for (const struct gguf_values *v = r->f->values; v && v->key; v++) {
        const struct gguf_pair *p = find_values(r->g, v);
        n += p ? (int64_t)MIN(p->n, (uint64_t)LIMIT_TENSORS) : 0;
    }
    for (int32_t i = 0; i < r->g->n_tensors && n <= LIMIT_TENSORS; i++) {
        n += count_views(r->f, &r->g->tensor[i]);
    }
    if (n > LIMIT_TENSORS) {
        return err_set(r->e, ERR_FULL, "more than %d tensors, an expert's each counted",
                       LIMIT_TENSORS);
    }
    r->g->slice = n > 0 ? calloc((size_t)n, sizeof(*r->g->slice)) : NULL;
    return n > 0 && !r->g->slice ? err_nomem(r->e, "list of tensors") : 0;
}

static int add_all(const struct reading *r)
{
    char name[129];
    int rc = make_views(r);

    for (int32_t i = 0; i < r->g->n_tensors && rc >= 0; i++) {
        const struct gguf_tensor *t = &r->g->tensor[i];
        snprintf(name, sizeof(name), "%.*s", (int)t->name.len, t->name.at);
        if (is_parameter(name)) {
            continue;
        }
        struct renamed to = rename_tensor(r->f, name);
        rc = is_experts(t, to.name) ? add_experts(r, t, &to) : add_tensor(r, t, &to);
    }
    rc = rc < 0 ? rc : add_values(r);
    if (rc < 0) {
        err_prefix(r->e, "%s", r->g->file);
    }
    return rc;
}

int gguf_checkpoint(struct checkpoint **ret, struct gguf *g, const struct model_config *config,
                    enum dtype dtype, struct err *e)
{
    struct checkpoint *c = NULL;
    int rc = checkpoint_new(&c, e);

    if (rc < 0) {
        gguf_free(g);
        return rc;
    }
    c->gguf = g;
    c->uncached = true;
    struct reading r = {.c = c, .g = g, .config = config, .dtype = dtype, .e = e};
    rc = gguf_family(&r.f, g, e);
    rc = rc < 0 ? rc : check_values(g, r.f, e);
    rc = rc < 0 ? rc : add_all(&r);
    if (rc < 0) {
        checkpoint_free(c);
        return rc;
    }
    *ret = c;
    return 0;
}

/* Asked only of files whose tensors are wanted: it takes a call for each sample. */
static bool is_cached(const char *path, const struct gguf *g)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool cached = fd >= 0 && model_file_cached(fd, (int64_t)g->n_bytes);

    if (fd >= 0) {
        close(fd);
    }
    for (int32_t i = 0; i < g->n_parts && cached; i++) {
        cached = is_cached(g->part[i]->path, g->part[i]);
    }
    return cached;
}

int gguf_checkpoint_open(struct checkpoint **ret, const char *path, const struct model_config *c,
                         enum dtype dtype, struct err *e)
{
    struct gguf *g = NULL;
    int rc = gguf_open(&g, path, e);

    if (rc == 0) {
        rc = gguf_checkpoint(ret, g, c, dtype, e);
    }
    if (rc == 0) {
        (*ret)->uncached = !is_cached(path, (*ret)->gguf);
    }
    return rc;
}

/* ---- values ---- */

/* The row in the order [heads][2][half] of row r in the file's order
 * [heads][half][2]. */
static int64_t from_pairs(int64_t r, int64_t head_rows)
{
    int64_t head = r / head_rows, i = r % head_rows;

    return head * head_rows + i % 2 * (head_rows / 2) + i / 2;
}

int gguf_tensor_decode(const struct tensor *t, void *ret)
{
    const struct gguf_tensor *s = t->encoded;
    /* a bias: its values are the rows */
    bool vector = s->n_dims == 1 && t->order == ORDER_ROTARY_PAIRS;
    int64_t cols = vector ? 1 : s->dim[0], rows = vector ? s->dim[0] : 1;

    for (int32_t i = 1; i < s->n_dims; i++) {
        rows *= s->dim[i];
    }
    int64_t row_bytes = cols / gguf_block_values(s->encoding) * gguf_block_bytes(s->encoding);
    float *row = malloc((size_t)cols * sizeof(*row));
    if (!row) {
        return ERR_NOMEM;
    }
    for (int64_t r = 0; r < rows; r++) {
        gguf_decode(s->encoding, s->data + r * row_bytes, cols, row);
        for (int64_t i = 0; i < cols && t->order == ORDER_DECAYS; i++) {
            row[i] = logf(-row[i]);
        }
        if (t->order == ORDER_TRANSPOSED) {
            tensor_store(ret, t->dtype, r, rows, row, cols);
        } else {
            tensor_store(ret, t->dtype,
                         (t->order == ORDER_ROTARY_PAIRS ? from_pairs(r, rows / t->n_heads) : r) *
                             cols,
                         1, row, cols);
        }
    }
    free(row);
    return 0;
}
