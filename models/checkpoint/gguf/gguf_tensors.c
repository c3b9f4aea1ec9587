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

#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/weights_internal.h"

struct rename {
    /* without .weight or .bias, and without "blk.N." or the family's prefix of a
     * layer */
    const char *from, *to;
    enum tensor_order order; /* of the weight; of the bias too when it is ORDER_ROTARY_PAIRS */
};

static const struct rename WHOLE[] = {{"token_embd", "model.embed_tokens", 0},
                                      {"output_norm", "model.norm", 0},
                                      {"output", "lm_head", 0},
                                      {0}};
static const struct rename LAYER[] = {
    {"attn_norm", "input_layernorm", 0},
    {"attn_q", "self_attn.q_proj", 0},
    {"attn_k", "self_attn.k_proj", 0},
    {"attn_v", "self_attn.v_proj", 0},
    {"attn_qkv", "self_attn.qkv_proj", 0},
    {"attn_q_norm", "self_attn.q_norm", 0},
    {"attn_k_norm", "self_attn.k_norm", 0},
    {"attn_output", "self_attn.o_proj", 0},
    {"ffn_norm", "post_attention_layernorm", 0},
    {"ffn_gate", "mlp.gate_proj", 0},
    {"ffn_up", "mlp.up_proj", 0},
    {"ffn_down", "mlp.down_proj", 0},
    {0},
};

/* Looked up before LAYER. */
static const struct rename LLAMA_LAYER[] = {{"attn_q", "self_attn.q_proj", ORDER_ROTARY_PAIRS},
                                            {"attn_k", "self_attn.k_proj", ORDER_ROTARY_PAIRS},
                                            {0}};
static const struct rename PHI3_LAYER[] = {{"ffn_up", "mlp.gate_up_proj", 0}, {0}};
static const struct rename GEMMA2_LAYER[] = {{"post_attention_norm", "post_attention_layernorm", 0},
                                             {"ffn_norm", "pre_feedforward_layernorm", 0},
                                             {"post_ffw_norm", "post_feedforward_layernorm", 0},
                                             {0}};
static const struct rename STARCODER2_LAYER[] = {
    {"ffn_up", "mlp.c_fc", 0}, {"ffn_down", "mlp.c_proj", 0}, {0}};
static const struct {
    const char *arch;
    const struct rename *layer;
} OF_ARCHITECTURE[] = {{"llama", LLAMA_LAYER},
                       {"phi3", PHI3_LAYER},
                       {"gemma2", GEMMA2_LAYER},
                       {"starcoder2", STARCODER2_LAYER}};

static const struct rename GPT2_WHOLE[] = {{"token_embd", "transformer.wte", 0},
                                           {"position_embd", "transformer.wpe", 0},
                                           {"output_norm", "transformer.ln_f", 0},
                                           {0}};
static const struct rename GPT2_LAYER[] = {{"attn_norm", "ln_1", 0},
                                           {"attn_qkv", "attn.c_attn", ORDER_TRANSPOSED},
                                           {"attn_output", "attn.c_proj", ORDER_TRANSPOSED},
                                           {"ffn_norm", "ln_2", 0},
                                           {"ffn_up", "mlp.c_fc", ORDER_TRANSPOSED},
                                           {"ffn_down", "mlp.c_proj", ORDER_TRANSPOSED},
                                           {0}};

static const struct rename *find(const struct rename *table, const char *stem, size_t len)
{
    for (; table && table->from; table++) {
        if (strlen(table->from) == len && memcmp(table->from, stem, len) == 0) {
            return table;
        }
    }
    return NULL;
}

/* The entry for a tensor of architecture `arch`; *ret_layer is -1 outside the layers.
 * NULL: unknown. */
static const struct rename *look_up(const char *arch, const char *name, size_t stem_len,
                                    int *ret_layer)
{
    bool gpt2 = strcmp(arch, "gpt2") == 0;
    int used = 0;

    *ret_layer = -1;
    if (sscanf(name, "blk.%4d.%n", ret_layer, &used) != 1 || used == 0 || *ret_layer < 0) {
        *ret_layer = -1;
        const struct rename *r = gpt2 ? find(GPT2_WHOLE, name, stem_len) : NULL;
        return r ? r : find(WHOLE, name, stem_len);
    }
    const char *stem = name + used;
    size_t len = stem_len > (size_t)used ? stem_len - (size_t)used : 0;
    if (gpt2) {
        return find(GPT2_LAYER, stem, len);
    }
    const struct rename *r = NULL;
    for (size_t i = 0; i < ARRAY_LEN(OF_ARCHITECTURE) && !r; i++) {
        r = strcmp(arch, OF_ARCHITECTURE[i].arch) == 0 ? find(OF_ARCHITECTURE[i].layer, stem, len)
                                                       : NULL;
    }
    return r ? r : find(LAYER, stem, len);
}

/* Write the Hugging Face name into ret[256]; returns the order of the elements. An
 * unknown name is kept: transformer_check reports it. */
static enum tensor_order rename_tensor(const char *arch, const char *name, char *ret)
{
    const char *end = strrchr(name, '.');
    size_t stem_len = end ? (size_t)(end - name) : strlen(name);
    int layer;
    const struct rename *r = look_up(arch, name, stem_len, &layer);

    if (!r || !end) {
        snprintf(ret, 256, "%s", name);
        return ORDER_SAME;
    }
    if (layer < 0) {
        snprintf(ret, 256, "%s%s", r->to, end);
    } else {
        snprintf(ret, 256, "%s.%d.%s%s",
                 strcmp(arch, "gpt2") == 0 ? "transformer.h" : "model.layers", layer, r->to, end);
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

static int add_tensor(struct checkpoint *c, const struct gguf_tensor *s, const char *arch,
                      const struct model_config *config, enum dtype dtype, struct err *e)
{
    char name[129], renamed[256];

    snprintf(name, sizeof(name), "%.*s", (int)s->name.len, s->name.at);
    if (is_parameter(name)) {
        return 0;
    }
    struct tensor t = {.name = renamed,
                       .stored_type = gguf_encoding_name(s->encoding),
                       .usable = true,
                       .dtype = dtype};
    t.order = rename_tensor(arch, name, renamed);
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
        return err_set(e, ERR_UNSUPPORTED, "%s: a quantised bias", name);
    }
    bool plain = gguf_encoding_dtype(s->encoding, &t.dtype);
    t.n_dims = s->n_dims;
    for (int32_t i = 0; i < s->n_dims; i++) {
        t.dim[i] = s->dim[t.order == ORDER_TRANSPOSED ? i : s->n_dims - 1 - i];
        n *= t.dim[i];
    }
    if (__builtin_mul_overflow(n, dtype_bytes(t.dtype), &t.n_bytes)) {
        return err_set(e, ERR_INVALID, "tensor %s has too many values", name);
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

int gguf_checkpoint(struct checkpoint **ret, struct gguf *g, const struct model_config *config,
                    enum dtype dtype, struct err *e)
{
    struct checkpoint *c = NULL;
    struct gguf_text text = {0};
    char arch[64];
    int rc = checkpoint_new(&c, e);

    if (rc < 0) {
        gguf_free(g);
        return rc;
    }
    c->gguf = g;
    c->uncached = !g->cached;
    rc = gguf_string(g, "general.architecture", &text, e);
    snprintf(arch, sizeof(arch), "%.*s", (int)MIN(text.len, sizeof(arch) - 1),
             text.at ? text.at : "");
    for (int32_t i = 0; i < g->n_tensors && rc >= 0; i++) {
        rc = add_tensor(c, &g->tensor[i], arch, config, dtype, e);
        if (rc < 0) {
            err_prefix(e, "%s", g->file);
        }
    }
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
