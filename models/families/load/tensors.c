/* Checks a checkpoint against a family's table of tensors and reports all tensors that
 * are missing, unknown, or of another shape or type.
 *
 * The same problem in several layers is reported once:
 * "missing model.layers.*.mlp.up_proj.weight (30 times)".
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/buf.h"
#include "models/families/layers.h"

enum { NAME_BYTES = TENSOR_NAME_BYTES, TEXT_BYTES = 400 };

struct problems {
    struct buf text;       /* the reports that fit */
    int32_t n, n_left_out; /* reports in all, and those that did not fit */
    bool *used;            /* [tensors of the checkpoint] known, or reported */
};

/* The sizes of experts; -1: it is none of theirs. */
static int64_t expert_dim_size(enum tensor_dim d, const struct model_config *c)
{
    switch (d) {
    case DIM_EXPERTS:
        return c->experts.n;
    case DIM_EXPERT:
    case DIM_STACKED_EXPERT:
    case DIM_STACKED_GATE:
    case DIM_STACKED_UP:
        return c->experts.intermediate;
    case DIM_EXPERT_WIDTH:
    case DIM_STACKED_WIDTH:
        return model_expert_width(c);
    case DIM_STACKED_HIDDEN:
        return c->hidden;
    case DIM_STACKED_GATE_UP:
        return 2 * (int64_t)c->experts.intermediate;
    case DIM_SHARED:
        return c->experts.shared_intermediate;
    case DIM_SHARED_GATE_UP:
        return 2 * (int64_t)c->experts.shared_intermediate;
    default:
        return -1;
    }
}

/* Those of attention, latents included. */
static int64_t attention_dim_size(enum tensor_dim d, const struct model_config *c)
{
    switch (d) {
    case DIM_Q:
        return (int64_t)c->n_heads * c->head_dim;
    case DIM_KV:
        return (int64_t)c->n_kv_heads * c->head_dim;
    case DIM_QKV:
    case DIM_GROUPED_Q:
    case DIM_GROUPED_K:
    case DIM_GROUPED_V:
        return ((int64_t)c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
    case DIM_HEAD:
        return c->head_dim;
    case DIM_HEADS:
        return c->n_heads;
    case DIM_FULL_Q:
        return (int64_t)c->n_heads * c->full_head_dim;
    case DIM_FULL_KV:
        return (int64_t)c->full_kv_heads * c->full_head_dim;
    case DIM_FULL_HEAD:
        return c->full_head_dim;
    case DIM_V:
        return (int64_t)c->n_heads * c->latent.v_dim;
    case DIM_Q_RANK:
        return c->latent.q_rank;
    case DIM_LATENT:
        return c->latent.rank;
    case DIM_HEAD_LATENTS:
        return (int64_t)c->n_heads * c->latent.rank;
    case DIM_NOPE:
        return c->latent.nope_dim;
    case DIM_LATENT_KEY:
        return (int64_t)c->latent.rank + c->latent.rot_dim;
    case DIM_K_UP:
    case DIM_V_UP:
        return (int64_t)c->n_heads * (c->latent.nope_dim + c->latent.v_dim);
    default:
        return -1;
    }
}

/* Those of a draft model's head, which reads its target's layers. */
static int64_t head_dim_size(enum tensor_dim d, const struct model_config *c)
{
    switch (d) {
    case DIM_JOINED:
        return 2 * (int64_t)c->hidden;
    case DIM_TAPS:
        return (int64_t)c->head.n_taps * c->head.target_hidden;
    case DIM_DRAFT_VOCAB:
        return c->head.draft_vocab > 0 ? c->head.draft_vocab : c->vocab;
    default:
        return -1;
    }
}

static int64_t plain_dim_size(enum tensor_dim d, const struct model_config *c)
{
    switch (d) {
    case DIM_ONE:
        return 1;
    case DIM_HIDDEN:
        return c->hidden;
    case DIM_EMBED:
        return c->embed_dim;
    case DIM_MLP:
        return c->intermediate;
    case DIM_GATE_UP:
    case DIM_WIDE_MLP:
        return 2 * (int64_t)c->intermediate;
    case DIM_LAYER_INPUT:
        return c->layer_input;
    case DIM_LAYER_INPUTS:
        return (int64_t)c->layer_input * c->n_layers;
    case DIM_VOCAB:
        return c->vocab;
    case DIM_POSITIONS:
        return c->max_positions;
    case DIM_POSITIONS_2:
        return (int64_t)c->max_positions + 2;
    default:
        return -1;
    }
}

static int64_t dim_size(enum tensor_dim d, const struct model_config *c)
{
    typedef int64_t size_fn(enum tensor_dim, const struct model_config *);
    static size_fn *const parts[] = {plain_dim_size, attention_dim_size, expert_dim_size,
                                     head_dim_size};
    int64_t size = -1;

    for (size_t i = 0; i < ARRAY_LEN(parts) && size < 0; i++) {
        size = parts[i](d, c);
    }
    return size >= 0 ? size : recurrent_dim_size(d, c);
}

void tensor_spec_shape(const struct tensor_spec *s, const struct model_config *c, int64_t *ret_rows,
                       int64_t *ret_cols)
{
    *ret_rows = dim_size(s->transposed ? s->cols : s->rows, c);
    *ret_cols = dim_size(s->transposed ? s->rows : s->cols, c);
}

bool tensor_spec_wanted(const struct tensor_spec *s, const struct model_config *c, int32_t layer)
{
    switch (s->when) {
    case WHEN_ALWAYS:
        return true;
    case WHEN_UNTIED:
        return !c->tied;
    case WHEN_QKV_BIAS:
        return c->qkv_bias;
    case WHEN_O_BIAS:
        return c->o_bias;
    case WHEN_MLP_BIAS:
        return c->mlp_bias;
    case WHEN_HEAD_BIAS:
        return c->head_bias;
    case WHEN_QK_NORM:
        return c->qk_norm;
    case WHEN_FINAL_NORM:
        return c->final_norm;
    case WHEN_PROJECTED:
        return c->embed_dim != c->hidden;
    case WHEN_DENSE:
        return !c->experts.layer[layer];
    case WHEN_EXPERTS:
        return c->experts.layer[layer];
    case WHEN_SHARED:
        return c->experts.layer[layer] && c->experts.shared_intermediate > 0;
    case WHEN_CHOICE_BIAS:
        return c->experts.layer[layer] && c->experts.choice_bias;
    case WHEN_EXPERT_LATENT:
        return c->experts.layer[layer] && c->experts.latent > 0;
    case WHEN_GATE_COPIED:
        return c->experts.layer[layer] && c->experts.gate_copied;
    case WHEN_Q_RANK:
        return c->latent.q_rank > 0;
    case WHEN_NO_Q_RANK:
        return c->latent.q_rank == 0;
    case WHEN_WINDOWED:
        return !model_is_full(c, layer);
    case WHEN_FULL:
        return model_is_full(c, layer);
    case WHEN_WINDOWED_KV:
        return !model_is_full(c, layer) && layer < c->sharing_from;
    case WHEN_FULL_KV:
        return model_is_full(c, layer) && layer < c->sharing_from;
    case WHEN_FULL_V:
        return model_is_full(c, layer) && layer < c->sharing_from && !c->keys_are_values;
    case WHEN_FULL_KEY_IS_V:
        return model_is_full(c, layer) && layer < c->sharing_from && c->keys_are_values;
    case WHEN_PLAIN_MLP:
        return !c->wide_mlp || layer < c->sharing_from;
    case WHEN_WIDE_MLP:
        return c->wide_mlp && layer >= c->sharing_from;
    case WHEN_LAYER_INPUT:
        return c->layer_input > 0;
    case WHEN_ATTENTION:
        return model_attends(c, layer);
    case WHEN_RECURRENT:
        return c->recurrent.layer[layer];
    case WHEN_CONV_BIAS:
        return c->recurrent.layer[layer] && c->recurrent.conv_bias;
    case WHEN_FIRST_LAYER:
        return layer == 0;
    case WHEN_LATER_LAYER:
        return layer > 0;
    case WHEN_MIXER_NORM:
        return c->recurrent.layer[layer] && c->recurrent.normed;
    case WHEN_MLP_ALONE:
        return c->mlp_alone[layer] && !c->experts.layer[layer];
    }
    return false;
}

int32_t tensor_spec_indices(const struct tensor_spec *s)
{
    const char *layer = strchr(s->name, '%');

    return !layer ? 0 : strchr(layer + 1, '%') ? 2 : 1;
}

int32_t tensor_spec_count(const struct tensor_spec *s, const struct model_config *c)
{
    return tensor_spec_indices(s) == 2 || tensor_spec_stacked(s) ? c->experts.n : 1;
}

bool tensor_spec_stacked(const struct tensor_spec *s)
{
    return tensor_spec_step(s) == 2 || s->rows == DIM_STACKED_HIDDEN ||
           s->rows == DIM_STACKED_GATE_UP || s->rows == DIM_STACKED_EXPERT ||
           s->rows == DIM_STACKED_WIDTH;
}

int32_t tensor_spec_step(const struct tensor_spec *s)
{
    return s->rows == DIM_STACKED_GATE || s->rows == DIM_STACKED_UP ? 2 : 1;
}

void tensor_spec_name(const struct tensor_spec *s, struct tensor_index at, char *ret)
{
    const int32_t index[2] = {at.layer, at.expert};
    const char *from = s->name, *mark;
    size_t n = 0;

    for (int i = 0; i < 2 && n < NAME_BYTES && (mark = strchr(from, '%')) != NULL; i++) {
        char number[16] = "*";
        if (index[i] >= 0) {
            snprintf(number, sizeof(number), "%d", index[i]);
        }
        n += (size_t)snprintf(ret + n, NAME_BYTES - n, "%.*s%s", (int)(mark - from), from, number);
        from = mark + 2;
    }
    if (n < NAME_BYTES) {
        snprintf(ret + n, NAME_BYTES - n, "%s", from);
    }
}

const struct tensor *tensor_spec_find(const struct tensor_spec *s, const struct checkpoint *c,
                                      struct tensor_index at)
{
    char name[NAME_BYTES];

    tensor_spec_name(s, at, name);
    const struct tensor *t = checkpoint_find(c, name);
    if (t) {
        return t;
    }
    static const char *const PREFIXES[] = {"model.", "transformer."};
    static const char *const WRAPPERS[] = {"model.language_", "language_model.", "model.text_"};
    for (size_t i = 0; i < ARRAY_LEN(WRAPPERS); i++) { /* the text part of a vision model */
        char whole[NAME_BYTES + 32];
        snprintf(whole, sizeof(whole), "%s%s", WRAPPERS[i], name);
        t = checkpoint_find(c, whole);
        if (t) {
            return t;
        }
    }
    static const char LAYER[] = "model.layers.0."; /* EAGLE-3's only one has a name, too */
    if (strncmp(name, LAYER, sizeof(LAYER) - 1) == 0) {
        char whole[NAME_BYTES + 32];
        snprintf(whole, sizeof(whole), "midlayer.%s", name + sizeof(LAYER) - 1);
        t = checkpoint_find(c, whole);
        if (t) {
            return t;
        }
    }
    for (size_t i = 0; i < ARRAY_LEN(PREFIXES); i++) {
        size_t len = strlen(PREFIXES[i]);
        if (strncmp(name, PREFIXES[i], len) == 0) {
            return checkpoint_find(c, name + len);
        }
    }
    return NULL;
}

static void report(struct problems *p, const char *text)
{
    p->n++;
    if (p->n_left_out > 0 || buf_printf(&p->text, "%s%s", p->text.len ? "; " : "", text) < 0) {
        p->n_left_out++;
    }
}

/* "[49152, 576]" */
static void print_shape(char *ret, size_t cap, const int64_t *dim, int32_t n_dims)
{
    size_t len = (size_t)snprintf(ret, cap, "[");

    for (int32_t i = 0; i < n_dims && len < cap; i++) {
        len += (size_t)snprintf(ret + len, cap - len, "%s%lld", i ? ", " : "", (long long)dim[i]);
    }
    if (len < cap) {
        snprintf(ret + len, cap - len, "]");
    }
}

/* The shape of a stored tensor. */
struct shape {
    int64_t dim[3];
    int32_t n_dims;
};

static struct shape shape_of(const struct tensor_spec *s, const struct model_config *c)
{
    struct shape h = {.n_dims = tensor_spec_stacked(s) ? 1 : 0};
    int64_t rows, cols;

    tensor_spec_shape(s, c, &rows, &cols);
    h.dim[0] = c->experts.n;
    h.dim[h.n_dims++] = rows;
    if (s->cols != DIM_ONE) {
        h.dim[h.n_dims++] = cols;
    }
    h.dim[h.n_dims - 1] *= tensor_spec_step(s);
    return h;
}

/* The weight of a convolution, [channels, 1, kernel]. */
static bool right_conv_shape(const struct tensor *t, const struct shape *want)
{
    return t->n_dims == 3 && t->dim[1] == 1 && t->dim[0] * t->dim[2] == want->dim[0];
}

static bool right_shape(const struct tensor *t, const struct shape *want)
{
    if (want->n_dims == 1 && t->n_dims == 2 && t->dim[0] == 1) { /* a vector stored as a row */
        return t->dim[1] == want->dim[0];
    }
    if (want->n_dims == 1 && t->n_dims == 3 && t->dim[0] == 1 && t->dim[1] == 1) {
        return t->dim[2] == want->dim[0];
    }
    return t->n_dims == want->n_dims &&
           memcmp(t->dim, want->dim, sizeof(t->dim[0]) * (size_t)want->n_dims) == 0;
}

static bool right_type(const struct tensor *t)
{
    return t->usable && t->dtype != DTYPE_I32;
}

/* ", 30 such" */
static void such(char *ret, size_t cap, int32_t n)
{
    ret[0] = 0;
    if (n > 1) {
        snprintf(ret, cap, ", %d such", n);
    }
}

/* What is wrong with the tensors of one row of the table. */
struct row_problems {
    struct shape want;                          /* that they must have */
    int32_t n_missing, n_misshapen, n_mistyped; /* tensors */
    bool some;                                  /* not all of them are missing */
    struct tensor_index missing;                /* the first that is */
    const struct tensor *misshapen, *mistyped;  /* the first of each, or NULL */
};

/* Count what is wrong in one layer. */
static void check_layer(struct problems *p, struct row_problems *row, const struct tensor_spec *s,
                        const struct model_config *c, const struct checkpoint *ck, int32_t layer)
{
    int32_t n = tensor_spec_stacked(s) ? 1 : tensor_spec_count(s, c);

    for (int32_t i = 0; i < n && tensor_spec_wanted(s, c, layer); i++) {
        const struct tensor *t =
            tensor_spec_find(s, ck, (struct tensor_index){c->head.layer + layer, i});
        if (!t) {
            row->missing = row->n_missing++ == 0 ? (struct tensor_index){layer, i} : row->missing;
            continue;
        }
        row->some = true;
        p->used[t - checkpoint_at(ck, 0)] = true;
        bool right =
            s->rows == DIM_CONV ? right_conv_shape(t, &row->want) : right_shape(t, &row->want);
        if (!right && row->n_misshapen++ == 0) {
            row->misshapen = t;
        }
        /* slices need values as they are, or matrices that are decoded one by one */
        bool plain = t->data || t->quantised || !tensor_spec_stacked(s);
        if ((!right_type(t) || !plain) && row->n_mistyped++ == 0) {
            row->mistyped = t;
        }
    }
}

static void report_row(struct problems *p, const struct row_problems *row,
                       const struct tensor_spec *s)
{
    char name[NAME_BYTES], text[2 * NAME_BYTES + 64], is[96], must[64], times[64] = "";

    if (row->n_missing > 0) {
        bool one = row->some && row->n_missing == 1 && tensor_spec_indices(s) == 2;
        tensor_spec_name(s, one ? row->missing : (struct tensor_index){-1, -1}, name);
        if (row->n_missing > 1 && row->some && tensor_spec_indices(s) == 2) {
            snprintf(times, sizeof(times), " (%d times, first layer %d, expert %d)", row->n_missing,
                     row->missing.layer, row->missing.expert);
        } else if (row->n_missing > 1) {
            snprintf(times, sizeof(times), " (%d times)", row->n_missing);
        }
        snprintf(text, sizeof(text), "missing %s%s", name, times);
        report(p, text);
    }
    if (row->misshapen) {
        print_shape(is, sizeof(is), row->misshapen->dim, row->misshapen->n_dims);
        print_shape(must, sizeof(must), row->want.dim, row->want.n_dims);
        such(times, sizeof(times), row->n_misshapen);
        snprintf(text, sizeof(text), "%.200s is %s, must be %s%s", row->misshapen->name, is, must,
                 times);
        report(p, text);
    }
    if (row->mistyped) {
        such(times, sizeof(times), row->n_mistyped);
        snprintf(text, sizeof(text), "%.200s is %s, must be BF16, F16 or F32%s",
                 row->mistyped->name, row->mistyped->stored_type, times);
        report(p, text);
    }
}

/* Whether an earlier row is of the same tensors, of which it takes another part. */
static bool is_repeated(const struct tensor_spec *table, const struct tensor_spec *s)
{
    for (const struct tensor_spec *other = table; other < s; other++) {
        if (other->when == s->when && strcmp(other->name, s->name) == 0) {
            return true;
        }
    }
    return false;
}

/* Check one row of the table in all layers. */
static void check_spec(struct problems *p, const struct tensor_spec *table,
                       const struct tensor_spec *s, const struct model_config *c,
                       const struct checkpoint *ck)
{
    struct row_problems row = {.want = shape_of(s, c)};
    int32_t n = tensor_spec_indices(s) > 0 ? c->n_layers : 1;

    for (int32_t i = 0; i < n; i++) {
        check_layer(p, &row, s, c, ck, i);
    }
    if (!is_repeated(table, s)) {
        report_row(p, &row, s);
    }
}

/* Whether a tensor is of a layer behind the last, which predicts further tokens, or of
 * the part of a model that does (of Qwen's hybrids, K-EXAONE and Mellum, of ERNIE). */
static bool is_draft(const char *name, const struct model_config *c)
{
    static const char LAYERS[] = "layers.", APART[] = "mtp.", ERNIE[] = "model.mtp_";
    const char *at = strstr(name, LAYERS);

    if ((c->recurrent.n_heads > 0 || c->n_draft_layers > 0) &&
        strncmp(name, APART, sizeof(APART) - 1) == 0) {
        return true;
    }
    if (strncmp(name, ERNIE, sizeof(ERNIE) - 1) == 0) {
        return true;
    }
    if (!at) {
        return false;
    }
    long layer = strtol(at + sizeof(LAYERS) - 1, NULL, 10);
    return layer >= c->n_layers && layer < (long)c->n_layers + c->n_draft_layers;
}

/* Whether a tensor is of the layer that is an MTP head. */
static bool is_of_head(const char *name, const struct model_config *c)
{
    static const char LAYERS[] = "layers.";
    const char *at = strstr(name, LAYERS);

    if (c->head.named) {
        return strncmp(name, "mtp.", 4) == 0;
    }
    return at && strtol(at + sizeof(LAYERS) - 1, NULL, 10) == c->head.layer;
}

bool tensor_is_read(const char *name, const struct model_config *c)
{
    return c->head.kind == HEAD_NONE  ? !is_draft(name, c)
           : c->head.kind == HEAD_MTP ? is_of_head(name, c)
                                      : true;
}

/* Whether a tensor makes embeddings of images. */
static bool is_of_vision(const char *name)
{
    static const char *const PARTS[] = {
        "vision_tower.", "multi_modal_projector.", "vision_model.",   "visual.",
        "audio_tower.",  "embed_vision.",          "embed_audio.",    "connector.",
        "mm_projector.", "image_newline",          "vision_encoder.", "vision_projection."};

    for (size_t i = 0; i < ARRAY_LEN(PARTS); i++) {
        if (strstr(name, PARTS[i])) {
            return true;
        }
    }
    return strncmp(name, "mlp1.", 5) == 0; /* InternVL's projector */
}

/* Whether a tensor makes keys and values in a layer that has another's (Gemma-4). */
static bool is_of_shared_kv(const char *name, const struct model_config *c)
{
    static const char *const PARTS[] = {".self_attn.k_", ".self_attn.v_"};
    const char *at = strstr(name, "layers.");
    bool is = false;

    for (size_t i = 0; i < ARRAY_LEN(PARTS); i++) {
        is = is || strstr(name, PARTS[i]);
    }
    return is && at && strtol(at + strlen("layers."), NULL, 10) >= c->sharing_from;
}

bool transformer_is_tied(const struct model_family *f, const struct checkpoint *c)
{
    const struct tensor *head = NULL, *embed = NULL;

    for (const struct tensor_spec *s = f->tensors; s->name; s++) {
        if (s->target == IN_MODEL(head) && !head) {
            head = tensor_spec_find(s, c, (struct tensor_index){-1, -1});
        } else if (s->target == IN_MODEL(embed) && !embed) {
            embed = tensor_spec_find(s, c, (struct tensor_index){-1, -1});
        }
    }
    return !head || !embed ||
           (head->data && embed->data && head->dtype == embed->dtype &&
            head->n_bytes == embed->n_bytes &&
            memcmp(head->data, embed->data, (size_t)head->n_bytes) == 0);
}

/* Whether an unknown tensor is one that inference does not need. */
static bool ignorable(const char *name, const struct model_family *f, const struct model_config *c)
{
    size_t len = strlen(name);

    if (is_draft(name, c) || is_of_shared_kv(name, c) || (c->wrapped && is_of_vision(name))) {
        return true;
    }

    if (c->tied && strcmp(name, "lm_head.weight") == 0) {
        return true;
    }
    for (const char *const *end = f->ignored; *end; end++) {
        size_t n = strlen(*end);
        if (len >= n && strcmp(name + len - n, *end) == 0) {
            return true;
        }
    }
    return c->head.kind == HEAD_MTP && !is_of_head(name, c);
}

/* "h.3.attn.x" -> "h.*.attn.x" */
static void pattern_of(const char *name, char *ret)
{
    size_t n = 0;

    for (const char *p = name; *p && n < NAME_BYTES - 1;) {
        bool number = isdigit((unsigned char)*p) && (p == name || p[-1] == '.');
        ret[n++] = number ? '*' : *p;
        p += number ? strspn(p, "0123456789") : 1;
    }
    ret[n] = 0;
}

static void check_unknown(struct problems *p, const struct model_family *f,
                          const struct model_config *c, const struct checkpoint *ck)
{
    char pattern[NAME_BYTES], other[NAME_BYTES], text[NAME_BYTES + 64];
    int32_t n = checkpoint_count(ck);

    for (int32_t i = 0; i < n; i++) {
        if (p->used[i] || checkpoint_at(ck, i)->part ||
            ignorable(checkpoint_at(ck, i)->name, f, c)) {
            continue;
        }
        int32_t n_alike = 0;
        pattern_of(checkpoint_at(ck, i)->name, pattern);
        for (int32_t k = i; k < n && p->n < 64; k++) { /* all of the same pattern at once */
            if (p->used[k]) {
                continue;
            }
            pattern_of(checkpoint_at(ck, k)->name, other);
            if (strcmp(pattern, other) == 0) {
                p->used[k] = true;
                n_alike++;
            }
        }
        if (n_alike > 1) {
            snprintf(text, sizeof(text), "unknown %s (%d times)", pattern, n_alike);
        } else {
            snprintf(text, sizeof(text), "unknown %.250s", checkpoint_at(ck, i)->name);
        }
        report(p, text);
    }
}

int transformer_check(const struct model_family *f, const struct model_config *c,
                      const struct checkpoint *checkpoint, struct err *e)
{
    struct problems p = {.used =
                             calloc((size_t)MAX(checkpoint_count(checkpoint), 1), sizeof(*p.used))};

    buf_init(&p.text, TEXT_BYTES - sizeof(c->architecture));
    if (!p.used) {
        return err_nomem(e, "check of the tensors");
    }
    for (const struct tensor_spec *s = f->tensors; s->name; s++) {
        check_spec(&p, f->tensors, s, c, checkpoint);
    }
    check_unknown(&p, f, c, checkpoint);
    int rc = 0;
    if (p.n > 0) {
        char more[32] = "";
        if (p.n_left_out > 0) {
            snprintf(more, sizeof(more), "; and %d more", p.n_left_out);
        }
        rc = err_set(e, ERR_INVALID, "the weights do not match this %s: %s%s", c->architecture,
                     p.text.data ? p.text.data : "", more);
    }
    buf_release(&p.text);
    free(p.used);
    return rc;
}
