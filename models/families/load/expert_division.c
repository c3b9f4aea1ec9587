/* Whether ranks hold a slice of every expert or whole experts, where that is left open
 * (setting `expert_parallel: auto`).
 *
 * Slices are the rule: every rank has the same work, whatever the router chooses. Whole
 * experts are taken where slices would be refused, because they cut groups of
 * quantised weights, or be multiplied in a slower way than an expert as a whole:
 * kernels that read codes, and those of tensor cores, want rows and columns in certain
 * multiples. Other codes are decoded to several times their memory, and other floats
 * multiplied by a kernel for any shape.
 *
 * All tensors of experts of the whole model are looked at, so every rank and every
 * pipeline stage decides alike.
 */
#include <stdio.h>

#include "config/base/buf.h"
#include "config/base/log.h"
#include "models/families/load/load.h"

enum expert_way expert_floats_way(const struct weight_support *s, int32_t hidden, int32_t width)
{
    int32_t of = s->experts_floats;

    return of > 0 && hidden % of == 0 && width % of == 0 ? EXPERTS_FLOATS : EXPERTS_ANY_SHAPE;
}

bool experts_pay_whole(int32_t n_ranks, int32_t n_experts, enum expert_way whole,
                       enum expert_way sliced)
{
    return n_ranks > 1 && n_experts % n_ranks == 0 && sliced < whole;
}

/* How the tensor of row s is multiplied where experts are `width` columns wide; t NULL:
 * a dummy. */
static enum expert_way way_of(const struct model *m, const struct tensor_spec *s,
                              const struct tensor *t, int32_t width)
{
    int32_t hidden = model_expert_width(&m->config);
    int32_t cols = s->target == IN_LAYER(experts.down) ? width : hidden;

    if ((!t && model_keeps_dummy_format(m, width)) || tensor_stays_at_width(m, s, t, width) ||
        (!(t && t->format) && model_quantises_at_width(m, s, cols, width))) {
        return EXPERTS_CODES;
    }
    const struct weight_format *floats = weight_format_of((enum weight_format_id)m->options.dtype);
    struct weight_support support = m->backend->ops->supports(m->backend, floats);
    return expert_floats_way(&support, hidden, width);
}

/* Take the tensor into account: of all tensors that one counts which loses most by
 * being sliced, and among equal ones the slowest. */
static void look_at(const struct model *m, const struct tensor_spec *s, const struct tensor *t,
                    struct expert_division *d)
{
    int32_t width = m->config.experts.intermediate;
    enum expert_way whole = way_of(m, s, t, width);
    enum expert_way sliced =
        tensor_is_cut(m, s, t) ? EXPERTS_REFUSED : way_of(m, s, t, width / m->options.n_ranks);

    if (!d->known || whole - sliced > d->whole - d->sliced ||
        (whole - sliced == d->whole - d->sliced && whole < d->whole)) {
        *d = (struct expert_division){
            .known = true, .whole = whole, .sliced = sliced, .format = t ? t->format : NULL};
    }
}

void expert_division_choose(struct model *m)
{
    const struct model_config *c = &m->config;
    struct expert_division *d = &m->weights->division;

    for (const struct tensor_spec *s = m->family->tensors; s->name; s++) {
        for (int32_t i = 0; tensor_spec_of_expert(s) && i < c->n_layers; i++) {
            if (!tensor_spec_wanted(s, c, i)) {
                continue;
            }
            struct tensor_index at = {c->head.layer + i, 0};
            look_at(m, s, m->checkpoint ? tensor_spec_find(s, m->checkpoint, at) : NULL, d);
        }
    }
    d->by_itself = d->known && m->options.expert_parallel_auto && !m->options.expert_parallel &&
                   experts_pay_whole(m->options.n_ranks, c->experts.n, d->whole, d->sliced);
    m->options.expert_parallel |= d->by_itself;
}

/* What becomes of slices that lose by it. */
static void put_loss(struct buf *text, const struct model *m)
{
    const struct expert_division *d = &m->weights->division;
    int32_t width = m->config.experts.intermediate;

    buf_printf(text, "slices of %d of %d columns ", width / m->options.n_ranks, width);
    if (d->sliced == EXPERTS_REFUSED) {
        buf_puts(text, "cut groups");
    } else if (d->whole < EXPERTS_CODES) {
        buf_puts(text, "have no fast kernel");
    } else if (d->format) {
        buf_printf(text, "are decoded to %s", dtype_name(m->options.dtype));
    } else {
        buf_puts(text, "are not quantised");
    }
    if (d->format) {
        buf_printf(text, " (%s)", d->format->name);
    }
}

/* The line about the division: one that was chosen, or the chosen one that is slow. */
static void log_division(const struct model *m)
{
    const struct expert_division *d = &m->weights->division;
    int32_t n = m->options.n_ranks;
    bool whole = m->options.expert_parallel, possible = m->config.experts.n % n == 0;
    struct buf why;

    if (n == 1 || (whole && !d->by_itself) || d->sliced >= d->whole) {
        return;
    }
    buf_init(&why, 512);
    put_loss(&why, m);
    if (whole) {
        log_event(LOG_INFO, "ranks hold whole experts", LOG_STR("expert_parallel", "auto"),
                  LOG_I64("experts", m->config.experts.n / n), LOG_STR("because", why.data));
    } else {
        log_event(LOG_WARN, "ranks hold slices of experts, which is slow",
                  LOG_STR("because", why.data),
                  LOG_STR("instead", possible ? "expert_parallel: true"
                                              : "a number of ranks that divides the experts"));
    }
    buf_release(&why);
}

void model_log_experts(const struct model *m)
{
    const struct expert_division *d = &m->weights->division;
    int32_t width = m->weights->expert_intermediate, hidden = model_expert_width(&m->config);
    struct weight_support s = m->backend->ops->supports(
        m->backend, weight_format_of((enum weight_format_id)m->options.dtype));
    char what[160], why[160];

    if (!d->known || m->options.rank > 0 || m->options.stage > 0) {
        return;
    }
    log_division(m);
    if ((m->options.expert_parallel ? d->whole : d->sliced) != EXPERTS_ANY_SHAPE) {
        return;
    }
    snprintf(what, sizeof(what), "%s%s%s, %d x %d", d->format ? d->format->name : "",
             d->format ? " decoded to " : "", dtype_name(m->options.dtype), width, hidden);
    if (s.experts_floats > 0) {
        snprintf(why, sizeof(why), "fast ones take multiples of %d rows and columns",
                 s.experts_floats);
    } else {
        snprintf(why, sizeof(why), "there is no faster one for %s", dtype_name(m->options.dtype));
    }
    log_event(LOG_WARN, "a slow kernel multiplies experts", LOG_STR("experts", what),
              LOG_STR("kernel", "for any shape"), LOG_STR("because", why));
}
