#include "engine/speculate/mixed.h"

#include <stdlib.h>

static struct mixed_drafts *mixed_of(struct draft_source *base)
{
    return CONTAINER_OF(base, struct mixed_drafts, base);
}

/* Not 0; different for sequences that live at the same time. */
static uint64_t key_of(const struct seq *q)
{
    return q->group->order * (LIMIT_CHOICES + 1) + (uint64_t)q->index + 1;
}

/* The source of the sequence's drafts in the step at hand. */
static struct draft_source *source_of(const struct mixed_drafts *d, const struct seq *q)
{
    return q->slot >= 0 && d->from_model[q->slot] == key_of(q) ? d->model : d->text;
}

static float expect(struct draft_source *base, struct seq *q)
{
    struct mixed_drafts *d = mixed_of(base);
    float text = d->text->expect(d->text, q), model = d->model->expect(d->model, q);

    return MAX(text, model);
}

static void outlook(struct draft_source *base, const struct draft_step *step, int32_t n)
{
    struct mixed_drafts *d = mixed_of(base);

    d->model->outlook(d->model, step, n);
}

static double prepare(struct draft_source *base, struct draft_want *want, int32_t n,
                      const struct draft_step *step)
{
    struct mixed_drafts *d = mixed_of(base);
    int32_t kept = 0;

    d->model->outlook(d->model, step, n);
    for (int32_t i = 0; i < n; i++) {
        struct seq *q = want[i].seq;
        float model = d->model->expect(d->model, q);
        bool is_better = model > 0 && model > d->text->expect(d->text, q);
        d->from_model[q->slot] = is_better ? key_of(q) : 0;
        if (is_better) {
            want[kept++] = want[i];
        }
    }
    return kept > 0 ? d->model->prepare(d->model, want, kept, step) : 0;
}

/* Where the model has nothing yet, because it still reads the sequence, there may be
 * text. */
static int32_t draft(struct draft_source *base, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    struct mixed_drafts *d = mixed_of(base);
    struct draft_source *from = source_of(d, q);
    int32_t n = from->draft(from, q, most, token, prob);

    if (n == 0 && from == d->model) {
        d->from_model[q->slot] = 0;
        n = d->text->draft(d->text, q, most, token, prob);
    }
    return n;
}

static void verified(struct draft_source *base, struct seq *q, int32_t n, int32_t n_accepted)
{
    struct mixed_drafts *d = mixed_of(base);
    struct draft_source *from = source_of(d, q);

    from->verified(from, q, n, n_accepted);
}

static void ended(struct draft_source *base, struct group *g)
{
    struct mixed_drafts *d = mixed_of(base);

    d->text->ended(d->text, g);
    d->model->ended(d->model, g);
}

static void observed(struct draft_source *base, int32_t n_rows, double estimate_us, double us)
{
    struct mixed_drafts *d = mixed_of(base);

    d->model->observed(d->model, n_rows, estimate_us, us);
}

int mixed_drafts_init(struct mixed_drafts *d, struct draft_source *text, struct draft_source *model,
                      int32_t n_slots, struct err *e)
{
    *d = (struct mixed_drafts){.base = {.expect = expect,
                                        .draft = draft,
                                        .verified = verified,
                                        .ended = ended,
                                        .outlook = outlook,
                                        .prepare = prepare,
                                        .observed = observed},
                               .text = text,
                               .model = model};
    d->from_model = calloc((size_t)n_slots, sizeof(*d->from_model));
    return d->from_model ? 0 : err_nomem(e, "drafts");
}

void mixed_drafts_release(struct mixed_drafts *d)
{
    free(d->from_model);
    *d = (struct mixed_drafts){0};
}
