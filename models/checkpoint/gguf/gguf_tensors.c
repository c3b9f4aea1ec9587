/* The tensors of a GGUF file as a checkpoint, with Hugging Face's names and order of
 * elements.
 *
 * llama.cpp rotates neighbouring pairs of a head's dimensions in its "llama"
 * architecture, so its converter reorders the rows of q and k; it transposes GPT-2's
 * Conv1D. Decoding a tensor reverses both, so the forward passes need not know. Tensors
 * that are neither encoded nor reordered are read in place, like those of safetensors.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/gguf/gguf_families.h"
#include "models/checkpoint/weights_internal.h"

/* Write the Hugging Face name into ret[256]; with %d in it where the tensor has an
 * expert along its first axis. Returns the order of the elements. A name that the
 * family does not have is kept: transformer_check reports it. */
static enum tensor_order rename_tensor(const struct gguf_family *f, const char *name, char *ret)
{
    const char *end = strrchr(name, '.'), *stem = name;
    const char *layers = strcmp(f->gguf, "gpt2") == 0 ? "transformer.h" : "model.layers";
    int layer = -1, used = 0;

    if (sscanf(name, "blk.%4d.%n", &layer, &used) == 1 && used > 0 && layer >= 0) {
        stem = name + used;
    } else {
        layer = -1;
    }
    const struct gguf_rename *r =
        end && end >= stem ? gguf_rename_find(f, layer >= 0, stem, (size_t)(end - stem)) : NULL;
    if (layer >= 0 && strncmp(stem, "nextn.", 6) == 0) { /* of a layer that drafts */
        snprintf(ret, 256, "%s.%d.%s", layers, layer, stem);
        return ORDER_SAME;
    }
    if (!r) {
        snprintf(ret, 256, "%s", name);
        return ORDER_SAME;
    }
    const char *suffix = r->whole ? "" : end;
    if (layer < 0) {
        snprintf(ret, 256, "%s%s", r->to, suffix);
    } else {
        snprintf(ret, 256, "%s.%d.%s%s", layers, layer, r->to, suffix);
    }
    return strcmp(end, ".weight") == 0 || r->order == ORDER_ROTARY_PAIRS ? r->order : ORDER_SAME;
}

/* Tensors that hold parameters of RoPE; gguf_config.c reads them. */
static bool is_parameter(const char *name)
{
    return strcmp(name, "rope_freqs.weight") == 0 ||
           strcmp(name, "rope_factors_long.weight") == 0 ||
           strcmp(name, "rope_factors_short.weight") == 0;
}

/* Add a tensor under the name `renamed`. */
static int add_tensor(struct checkpoint *c, const struct gguf_tensor *s, const char *renamed,
                      enum tensor_order order, const struct model_config *config, enum dtype dtype,
                      struct err *e)
{
    struct tensor t = {.name = renamed,
                       .order = order,
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
    const char *at = strstr(pattern, "%d");
    int32_t n_dims = s->n_dims - 1;
    int64_t n = s->dim[n_dims];
    int rc = 0;

    for (int64_t i = 0; i < n && rc == 0; i++) {
        struct gguf_tensor *one = &g->slice[g->n_slices++];
        char name[300];
        *one = *s;
        one->n_dims = n_dims;
        one->n_bytes = s->n_bytes / n;
        one->data = s->data + i * one->n_bytes;
        snprintf(name, sizeof(name), "%.*s%lld%s", (int)(at - pattern), pattern, (long long)i,
                 at + 2);
        rc = add_tensor(c, one, name, ORDER_SAME, config, dtype, e);
    }
    return rc;
}

/* Whether the file's tensor holds one matrix for each expert. */
static bool is_experts(const struct gguf_tensor *t, const char *renamed)
{
    return strstr(renamed, "%d") && t->n_dims == 3;
}

/* Room for the views of all experts' matrices. */
static int count_slices(struct gguf *g, const struct gguf_family *f, struct err *e)
{
    char name[129], renamed[256];
    int64_t n = 0;

    for (int32_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensor[i];
        snprintf(name, sizeof(name), "%.*s", (int)t->name.len, t->name.at);
        rename_tensor(f, name, renamed);
        if (is_experts(t, renamed)) {
            n += t->dim[2];
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
    char name[129], renamed[256];
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
        enum tensor_order order = rename_tensor(f, name, renamed);
        rc = is_experts(t, renamed) ? add_experts(c, g, t, renamed, config, dtype, e)
                                    : add_tensor(c, t, renamed, order, config, dtype, e);
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
    c->uncached = !g->cached;
    rc = add_all(c, g, config, dtype, e);
    if (rc < 0) {
        checkpoint_free(c);
        return rc;
    }
    *ret = c;
    return 0;
}

int gguf_checkpoint_open(struct checkpoint **ret, const char *path, const struct model_config *c,
                         enum dtype dtype, struct err *e)
{
    struct gguf *g = NULL;
    int rc = gguf_open(&g, path, e);

    return rc == 0 ? gguf_checkpoint(ret, g, c, dtype, e) : rc;
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
