/* Divisions among ranks that cut a block or a group of a quantised weight: they are
 * refused. A part of a block has no scale of its own, and decoding the tensor instead
 * would take several times its memory without a word.
 */
#include "models/checkpoint/quantised/quantised.h"
#include "models/families/load/load.h"

/* Values that lie in one block, or share a scale. */
struct grouping {
    const struct weight_format *format; /* NULL: the tensor is decoded, or of floats */
    int32_t rows, cols;                 /* of a group; 0: any part of the axis will do */
};

/* The groups of a tensor as one rank would multiply it: stored, or quantised while it
 * is loaded. */
static struct grouping grouping_of(const struct model *m, const struct tensor_spec *s,
                                   const struct tensor *t, const struct tensor_part *part)
{
    if (tensor_stays_on_one_rank(m, s, t)) {
        const struct weight_scales *q = t->quantised ? &t->quantised->scales : NULL;
        int32_t block = t->format->block_values;
        return (struct grouping){t->format, q ? q->group_rows : 0,
                                 q ? MAX(q->group_cols, block) : block};
    }
    if (!(t && t->format) && model_quantises_on_one_rank(m, s, (int32_t)part->n_in)) {
        return (struct grouping){m->options.quantise, 0, m->options.quantise_group};
    }
    return (struct grouping){0};
}

/* Whether a range of an axis of `size` values begins or ends inside a group. */
static bool is_cut(struct axis_range r, int64_t size, int32_t group)
{
    return group > 0 && (r.first % group != 0 || (r.n % group != 0 && r.first + r.n != size));
}

/* The extent of the groups that a part cuts; 0: it cuts none. */
static int32_t cut_extent(const struct tensor_part *part, const struct grouping *g)
{
    if (is_cut(part->in[0], part->n_in, g->cols)) {
        return g->cols;
    }
    for (int32_t i = 0; i < part->n_parts; i++) {
        if (is_cut(part->out[i], part->n_out, g->rows)) {
            return g->rows;
        }
    }
    return 0;
}

/* Whether a part of one of n ranks, which the model's heads allow, cuts groups. */
static bool some_rank_cuts(const struct model *m, const struct tensor_spec *s,
                           const struct grouping *g, int32_t n)
{
    struct model of_rank = *m;
    struct tensor_part part;

    of_rank.options.n_ranks = n;
    for (int32_t i = 0; i < n; i++) {
        of_rank.options.rank = i;
        tensor_part_of(&of_rank, s, &part);
        if (cut_extent(&part, g) > 0) {
            return true;
        }
    }
    return false;
}

/* The most ranks, fewer than there are and dividing them, none of which cuts a
 * group. */
static int32_t ranks_without_cuts(const struct model *m, const struct tensor_spec *s,
                                  const struct grouping *g)
{
    for (int32_t n = m->options.n_ranks / 2; n > 1; n--) {
        if (m->options.n_ranks % n == 0 && !some_rank_cuts(m, s, g, n)) {
            return n;
        }
    }
    return 1;
}

bool tensor_is_cut(const struct model *m, const struct tensor_spec *s, const struct tensor *t)
{
    struct tensor_part part;

    tensor_part_of(m, s, &part);
    struct grouping g = grouping_of(m, s, t, &part);
    return g.format && some_rank_cuts(m, s, &g, m->options.n_ranks);
}

int tensor_part_check(const struct model *m, const struct tensor_spec *s, const struct tensor *t,
                      struct tensor_index at, struct err *e)
{
    struct tensor_part part;
    char name[TENSOR_NAME_BYTES];

    if (m->options.n_ranks == 1) {
        return 0;
    }
    tensor_part_of(m, s, &part);
    struct grouping g = grouping_of(m, s, t, &part);
    int32_t cut = g.format ? cut_extent(&part, &g) : 0;
    if (cut == 0) {
        return 0;
    }
    tensor_spec_name(s, at, name);
    return err_set_param(e, ERR_UNSUPPORTED, "tensor_parallel_size",
                         "tensor_parallel_size %d cuts the %s of %d values of %s (%s): use %d%s",
                         m->options.n_ranks, t && t->blocks ? "blocks" : "groups", cut,
                         t ? t->name : name, g.format->name, ranks_without_cuts(m, s, &g),
                         tensor_spec_by_expert(s) ? " or expert_parallel" : "");
}
