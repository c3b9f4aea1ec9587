/* The tensors of a GGUF file as a checkpoint, with Hugging Face's names and order of
 * elements.
 *
 * llama.cpp rotates neighbouring pairs of a head's dimensions in its "llama"
 * architecture, so its converter reorders the rows of q and k; it transposes GPT-2's
 * Conv1D. Decoding a tensor reverses both, so the forward passes need not know. Tensors
 * that are neither encoded nor reordered are read in place, like those of safetensors.
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
    enum tensor_order order;
    enum gguf_shape shape;
};

/* Hugging Face's name, order and axes. A name that the family does not have is kept:
 * transformer_check reports it. */
static struct renamed rename_tensor(const struct gguf_family *f, const char *name)
{
    const char *end = strrchr(name, '.'), *stem = name;
    const char *layers = f->layers ? f->layers : "model.layers";
    struct renamed ret = {.order = ORDER_SAME};
    int layer = -1, used = 0;

    if (sscanf(name, "blk.%4d.%n", &layer, &used) == 1 && used > 0 && layer >= 0) {
        stem = name + used;
    } else {
        layer = -1;
    }
    bool ending = end && end >= stem && strcmp(end, ".scale") != 0; /* that of another kind */
    end = ending ? end : stem + strlen(stem);
    const struct gguf_rename *r = gguf_rename_find(f, layer >= 0, stem, (size_t)(end - stem));
    if (layer >= 0 && strncmp(stem, "nextn.", 6) == 0) { /* of a layer that drafts */
        snprintf(ret.name, sizeof(ret.name), "%s.%d.%s", layers, layer, stem);
        return ret;
    }
    if (!r) {
        snprintf(ret.name, sizeof(ret.name), "%s", name);
        return ret;
    }
    const char *suffix = r->whole ? "" : end;
    if (layer < 0) {
        snprintf(ret.name, sizeof(ret.name), "%s%s", r->to, suffix);
    } else {
        snprintf(ret.name, sizeof(ret.name), "%s.%d.%s%s", layers, layer, r->to, suffix);
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
static int add_tensor(struct checkpoint *c, const struct gguf_tensor *s, const struct renamed *to,
                      const struct model_config *config, enum dtype dtype, struct err *e)
{
    const char *renamed = to->name;
    struct tensor t = {.name = renamed,
                       .order = to->order,
                       .stored_type = gguf_encoding_name(s->encoding),
                       .usable = true,
                       .dtype = dtype};
    if (t.order == ORDER_TRANSPOSED && s->n_dims != 2) {
        t.order = ORDER_SAME;
    }
    t.n_heads = strstr(renamed, ".q_proj.") ? config->n_heads : config->n_kv_heads;
    int64_t rows = s->dim[s->n_dims - 1], n = 1;
    if (t.order == ORDER_ROTARY_PAIRS &&
        (rows % (2 * t.n_heads) != 0 || s->n_dims > 2)) { /* transformer_check refuses it */
        t.order = ORDER_SAME;
    }
    if (t.order == ORDER_ROTARY_PAIRS && s->n_dims == 1 && gguf_block_values(s->encoding) > 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: a quantised bias", renamed);
    }
    bool plain = gguf_encoding_dtype(s->encoding, &t.dtype);
    t.n_dims = s->n_dims;
    for (int32_t i = 0; i < s->n_dims; i++) {
        t.dim[i] = s->dim[t.order == ORDER_TRANSPOSED ? i : s->n_dims - 1 - i];
        n *= t.dim[i];
    }
    reshape(&t, to->shape);
    if (__builtin_mul_overflow(n, dtype_bytes(t.dtype), &t.n_bytes)) {
        return err_set(e, ERR_INVALID, "tensor %s has too many values", renamed);
    }
    if (plain && t.order == ORDER_SAME) {
        t.data = s->data;
    } else {
        t.encoded = s;
    }
    if (!plain) {
        t.format = gguf_encoding_format(s->encoding);
        t.blocks = s->data;
    }
    return checkpoint_add(c, &t, e);
}

/* Add each expert of a tensor, whose last axis in the file counts them, as a tensor of
 * its own; their views are g->slice[g->n_slices..]. `pattern` has a %d for the
 * expert. */
static int add_experts(struct checkpoint *c, struct gguf *g, const struct gguf_tensor *s,
                       const char *pattern, const struct model_config *config, enum dtype dtype,
                       struct err *e)
{
    struct renamed to = {.order = ORDER_SAME};
    const char *at = strstr(pattern, "%d");
    int32_t n_dims = s->n_dims - 1;
    int64_t n = s->dim[n_dims];
    int rc = 0;

    for (int64_t i = 0; i < n && rc == 0; i++) {
        struct gguf_tensor *one = &g->slice[g->n_slices++];
        *one = *s;
        one->n_dims = n_dims;
        one->n_bytes = s->n_bytes / n;
        one->data = s->data + i * one->n_bytes;
        snprintf(to.name, sizeof(to.name), "%.*s%lld%s", (int)(at - pattern), pattern, (long long)i,
                 at + 2);
        rc = add_tensor(c, one, &to, config, dtype, e);
    }
    return rc;
}

/* Whether the file's tensor holds one matrix, or one bias, for each expert. */
static bool is_experts(const struct gguf_tensor *t, const char *renamed)
{
    const char *end = strrchr(renamed, '.');

    return strstr(renamed, "%d") && t->n_dims == (end && strcmp(end, ".bias") == 0 ? 2 : 3);
}

/* Room for the views of all experts' matrices. */
static int count_slices(struct gguf *g, const struct gguf_family *f, struct err *e)
{
    char name[129];
    int64_t n = 0;

    for (int32_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensor[i];
        snprintf(name, sizeof(name), "%.*s", (int)t->name.len, t->name.at);
        struct renamed to = rename_tensor(f, name);
        if (is_experts(t, to.name)) {
            n += t->dim[t->n_dims - 1];
        }
        if (n > LIMIT_TENSORS) {
            return err_set(e, ERR_FULL, "more than %d tensors, an expert's each counted",
                           LIMIT_TENSORS);
        }
    }
    g->slice = n > 0 ? calloc((size_t)n, sizeof(*g->slice)) : NULL;
    return n > 0 && !g->slice ? err_nomem(e, "list of tensors") : 0;
}

static int add_all(struct checkpoint *c, struct gguf *g, const struct model_config *config,
                   enum dtype dtype, struct err *e)
{
    const struct gguf_family *f = NULL;
    char name[129];
    int rc = gguf_family(&f, g, e);

    if (rc < 0) {
        return rc;
    }
    rc = count_slices(g, f, e);
    for (int32_t i = 0; i < g->n_tensors && rc >= 0; i++) {
        const struct gguf_tensor *t = &g->tensor[i];
        snprintf(name, sizeof(name), "%.*s", (int)t->name.len, t->name.at);
        if (is_parameter(name)) {
            continue;
        }
        struct renamed to = rename_tensor(f, name);
        rc = is_experts(t, to.name) ? add_experts(c, g, t, to.name, config, dtype, e)
                                    : add_tensor(c, t, &to, config, dtype, e);
    }
    if (rc < 0) {
        err_prefix(e, "%s", g->file);
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
    rc = add_all(c, g, config, dtype, e);
    if (rc < 0) {
        checkpoint_free(c);
        return rc;
    }
    *ret = c;
    return 0;
}

/* Asked only of a file whose tensors are wanted: it takes a call for each sample. */
static bool is_cached(const char *path, size_t n_bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool cached = fd >= 0 && model_file_cached(fd, (int64_t)n_bytes);

    if (fd >= 0) {
        close(fd);
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
        (*ret)->uncached = !is_cached(path, (*ret)->gguf->n_bytes);
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
