/* In which format a backend gets the tensors of a checkpoint: blocks as they are stored
 * where it multiplies them so, else values. */
#include <string.h>

#include "config/base/buf.h"
#include "config/base/log.h"
#include "models/checkpoint/quantised/quantised.h"
#include "models/families/layers.h"

bool tensor_spec_of_expert(const struct tensor_spec *s)
{
    return s->target == IN_LAYER(experts.up) || s->target == IN_LAYER(experts.down);
}

bool model_keeps_expert_format(const struct model *m, const struct weight_format *f,
                               int32_t group_cols, int32_t width)
{
    struct weight_support s = m->backend->ops->supports(m->backend, f);
    int32_t of = s.experts;

    return of > 0 && !(s.experts_bf16 && m->options.dtype != DTYPE_BF16) &&
           model_expert_width(&m->config) % of == 0 && width % of == 0 &&
           (s.expert_group == 0 || group_cols % s.expert_group == 0);
}

bool model_keeps_dummy_format(const struct model *m, int32_t width)
{
    enum { MX_GROUP = 32 }; /* columns that share a scale of OCP Microscaling formats */

    return m->expert_format && model_keeps_expert_format(m, m->expert_format, MX_GROUP, width);
}

/* Whether the codes of all experts of a layer, which are stored as [out, in] one after
 * another, are those of matrices that the row of the table names, and `width` of their
 * columns are whole groups. */
static bool stack_stays(const struct tensor_spec *s, const struct quant_tensor *q, int32_t width)
{
    return q && q->n_stacked > 1 && s->transposed && q->layout == CODES_ROWS &&
           q->scales.group_rows == 1 && q->scales.group_cols > 0 &&
           width % q->scales.group_cols == 0;
}

/* Whether the backend multiplies a tensor of one expert, or of all, as stored, where
 * the MLP of an expert is so wide. */
static bool expert_stays(const struct model *m, const struct tensor_spec *s, const struct tensor *t,
                         int32_t width)
{
    int32_t group = t->quantised ? t->quantised->scales.group_cols : 0;

    return (!tensor_spec_stacked(s) || stack_stays(s, t->quantised, width)) &&
           model_keeps_expert_format(m, t->format, group, width);
}

/* Whether products by head read views of the tensor's rows. */
static bool multiplied_by_head(const struct tensor_spec *s)
{
    return s->target == offsetof(struct layer, latent.k_up) ||
           s->target == offsetof(struct layer, latent.v_up);
}

/* Not a tensor that is divided into heads: their products read a view of the rows,
 * which a weight in blocks does not have. Codes with scales of their own are
 * multiplied, not embedded, and decoded where a group is no neighbours, or no multiple
 * of FORMAT_GROUP of them. Of tensors of all experts only those are stored in blocks
 * that stack_stays takes. */
bool tensor_stays_at_width(const struct model *m, const struct tensor_spec *s,
                           const struct tensor *t, int32_t expert_width)
{
    const struct quant_tensor *q = t ? t->quantised : NULL;

    if (q &&
        (s->kind != WEIGHT_LINEAR || q->column_group || q->scales.group_cols % FORMAT_GROUP != 0)) {
        return false;
    }
    return t && t->format && (s->kind == WEIGHT_LINEAR || s->kind == WEIGHT_EMBEDDING) &&
           s->cols != DIM_ONE &&
           (!tensor_spec_of_expert(s) || expert_stays(m, s, t, expert_width)) &&
           !multiplied_by_head(s) &&
           (tensor_spec_stacked(s) || s->transposed == (t->order == ORDER_TRANSPOSED)) &&
           m->backend->ops->supports(m->backend, t->format).as_stored;
}

bool tensor_stays_in_blocks(const struct model *m, const struct tensor_spec *s,
                            const struct tensor *t)
{
    return tensor_stays_at_width(m, s, t, m->weights->expert_intermediate);
}

bool tensor_stays_on_one_rank(const struct model *m, const struct tensor_spec *s,
                              const struct tensor *t)
{
    return tensor_stays_at_width(m, s, t, m->config.experts.intermediate);
}

/* Why a tensor of row s does not stay as stored (see tensor_stays_in_blocks). */
static const char *why_decoded(const struct model *m, const struct tensor_spec *s,
                               const struct tensor *t)
{
    const struct quant_tensor *q = t->quantised;

    return !m->backend->ops->supports(m->backend, t->format).as_stored ? "no kernel multiplies them"
           : q && q->column_group     ? "groups of columns that are no neighbours"
           : s->kind != WEIGHT_LINEAR ? "they are embedded"
           : q && q->scales.group_cols % FORMAT_GROUP != 0 ? "groups of no multiple of 16 columns"
           : tensor_spec_of_expert(s) && tensor_stays_on_one_rank(m, s, t)
               ? "slices of experts that its kernels do not take"
           : tensor_spec_stacked(s)   ? "all experts of a layer in one tensor"
           : tensor_spec_of_expert(s) ? "experts of other sizes or types than its kernels"
                                      : "a product by heads";
}

void model_count_format(const struct model *m, const struct tensor_spec *s,
                        const struct tensor *tensor, bool as_stored)
{
    struct transformer *t = m->weights;
    enum weight_format_id id =
        tensor->format ? tensor->format->id : (enum weight_format_id)tensor->dtype;

    (as_stored ? t->n_stored : t->n_decoded)[id]++;
    if (!as_stored && !t->why_decoded[id]) {
        bool own = tensor->quantised && !tensor_spec_of_expert(s);
        t->decoded_to[id] = own ? tensor->dtype : m->options.dtype;
        t->why_decoded[id] = why_decoded(m, s, tensor);
    }
}

static bool same_text(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

void model_note_use(const struct model *m, const struct weight_format *f, bool quantised,
                    struct mat w, int32_t row)
{
    struct transformer *t = m->weights;
    const struct backend_ops *ops = m->backend->ops;
    struct weight_use use = {.kernel = ops->supports(m->backend, f).kernel};

    if (ops->use) {
        use = ops->use(m->backend, w, row);
    }
    for (int32_t i = 0; i < t->n_uses; i++) {
        struct format_use *u = &t->use[i];
        if (u->format == f->id && u->quantised == quantised && u->use.decoded == use.decoded &&
            same_text(u->use.kernel, use.kernel) && same_text(u->use.why, use.why)) {
            u->n++;
            return;
        }
    }
    if (t->n_uses < FORMAT_USES) {
        t->use[t->n_uses++] =
            (struct format_use){.format = f->id, .quantised = quantised, .use = use, .n = 1};
    }
}

/* "12 of Q4_K by a kernel (why)". */
static void print_use(struct buf *text, const struct model *m, const struct format_use *u)
{
    buf_printf(text, "%s%d %s%s%s ", text->len ? "; " : "", u->n,
               u->quantised ? "quantised to " : "of ", weight_format_of(u->format)->name,
               u->quantised ? "," : "");
    if (u->use.decoded) {
        buf_printf(text, "decoded to %s", dtype_name(m->options.dtype));
    } else {
        buf_printf(text, "by %s", u->use.kernel);
    }
    if (u->use.why) {
        buf_printf(text, " (%s)", u->use.why);
    }
}

/* Whether the setting `quantization` quantised any weight. */
static bool some_quantised(const struct transformer *t)
{
    bool some = t->n_quantised > 0;

    for (int32_t i = 0; i < t->n_uses; i++) {
        some |= t->use[i].quantised;
    }
    return some;
}

void model_log_formats(const struct model *m)
{
    const struct transformer *t = m->weights;
    struct buf text;

    buf_init(&text, 1024);
    for (int32_t i = 0; i < WEIGHT_FORMATS; i++) {
        const struct weight_format *f = weight_format_of((enum weight_format_id)i);
        struct weight_support s = m->backend->ops->supports(m->backend, f);
        for (int32_t j = 0; j < t->n_uses; j++) {
            if (t->use[j].format == f->id) {
                print_use(&text, m, &t->use[j]);
            }
        }
        if (t->n_stored[i] > 0 && weight_format_is_plain(f)) {
            buf_printf(&text, "%s%d of %s by %s", text.len ? "; " : "", t->n_stored[i], f->name,
                       s.kernel);
        }
        if (t->n_decoded[i] > 0) {
            buf_printf(&text, "%s%d of %s decoded to %s (%s)", text.len ? "; " : "",
                       t->n_decoded[i], f->name, dtype_name(t->decoded_to[i]), t->why_decoded[i]);
        }
    }
    const struct weight_format *f = m->options.quantise;
    if (t->n_quantised > 0 && !m->backend->ops->supports(m->backend, f).as_stored) {
        buf_printf(&text, "%s%d quantised to %s, whose values are %s", text.len ? "; " : "",
                   t->n_quantised, f->name, dtype_name(m->options.dtype));
    }
    if (text.len > 0) {
        log_event(LOG_INFO, "weight formats", LOG_STR("tensors", text.data));
    }
    buf_release(&text);
    if (f && !some_quantised(t)) {
        log_event(LOG_WARN, "quantization has no effect", LOG_STR("format", f->name),
                  LOG_STR("because", "no linear layer is stored as floats of a width that its "
                                     "groups divide"));
    }
}
