#include "engine/sched/decode/forced.h"

#include <string.h>

#include "engine/sched/decode/constrained.h"

/* The forced tokens behind those of `q`; `in_flight` of them are being sampled. Returns
 * how many, and where in the node's list they begin. */
static int32_t forced_behind(const struct seq *q, int32_t in_flight, const int32_t **ret)
{
    const struct constraint_node *n = q->constraint;

    if (!n || n->n_forced == 0) {
        return 0;
    }
    int32_t there = q->n_out - n->n_read, left = n->n_forced - there - in_flight;
    if (left <= 0 ||
        memcmp(q->out + n->n_read, n->forced, (size_t)there * sizeof(*n->forced)) != 0) {
        return 0;
    }
    *ret = n->forced + there + in_flight;
    return left;
}

static float expect(struct draft_source *base, struct seq *q)
{
    const struct forced_drafts *d = CONTAINER_OF(base, struct forced_drafts, base);
    const int32_t *token;
    int32_t in_flight = q->n_tokens - q->group->n_prompt - q->n_out;
    int32_t n = forced_behind(q, in_flight, &token);

    return n > 0 ? (float)n * d->hold : d->next ? d->next->expect(d->next, q) : 0;
}

static int32_t draft(struct draft_source *base, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    const struct forced_drafts *d = CONTAINER_OF(base, struct forced_drafts, base);
    const int32_t *forced;
    int32_t n = MIN(forced_behind(q, 0, &forced), most);
    float all = 1;

    if (n <= 0) {
        return d->next ? d->next->draft(d->next, q, most, token, prob) : 0;
    }
    memcpy(token, forced, (size_t)n * sizeof(*token));
    for (int32_t i = 0; i < n; i++) {
        all *= d->hold;
        prob[i] = all;
    }
    return n;
}

/* The drafts are those that the grammar forces behind the tokens before them: whoever
 * drafted them, they tell how forced ones hold. */
static void verified(struct draft_source *base, struct seq *q, int32_t n, int32_t n_accepted)
{
    const float WEIGHT = 1.0F / 32, LEAST = 0.05F;
    struct forced_drafts *d = CONTAINER_OF(base, struct forced_drafts, base);
    const int32_t *forced;

    int32_t there = forced_behind(q, 0, &forced);
    if (there < n || memcmp(q->out + q->n_out, forced, (size_t)n * sizeof(*forced)) != 0) {
        if (d->next) {
            d->next->verified(d->next, q, n, n_accepted);
        }
        return;
    }
    d->drafted += (uint64_t)n;
    d->accepted += (uint64_t)n_accepted;
    for (int32_t i = 0; i < MIN(n_accepted + 1, n); i++) {
        d->hold += WEIGHT * ((i < n_accepted ? 1 : 0) - d->hold);
    }
    d->hold = MAX(d->hold, LEAST);
}

static void ended(struct draft_source *base, struct group *g)
{
    const struct forced_drafts *d = CONTAINER_OF(base, struct forced_drafts, base);

    if (d->next) {
        d->next->ended(d->next, g);
    }
}

static void outlook(struct draft_source *base, const struct draft_step *step, int32_t n)
{
    const struct forced_drafts *d = CONTAINER_OF(base, struct forced_drafts, base);

    if (d->next && d->next->outlook) {
        d->next->outlook(d->next, step, n);
    }
}

/* The next source drafts where nothing is forced. */
static double prepare(struct draft_source *base, struct draft_want *want, int32_t n,
                      const struct draft_step *step)
{
    const struct forced_drafts *d = CONTAINER_OF(base, struct forced_drafts, base);
    const int32_t *forced;
    int32_t kept = 0;

    if (!d->next || !d->next->prepare) {
        return 0;
    }
    for (int32_t i = 0; i < n; i++) {
        if (forced_behind(want[i].seq, 0, &forced) <= 0) {
            want[kept++] = want[i];
        }
    }
    return d->next->prepare(d->next, want, kept, step);
}

static void observed(struct draft_source *base, int32_t n_rows, double estimate_us, double us)
{
    const struct forced_drafts *d = CONTAINER_OF(base, struct forced_drafts, base);

    if (d->next && d->next->observed) {
        d->next->observed(d->next, n_rows, estimate_us, us);
    }
}

void forced_drafts_init(struct forced_drafts *d, struct draft_source *next)
{
    *d = (struct forced_drafts){.base = {.expect = expect,
                                         .draft = draft,
                                         .verified = verified,
                                         .ended = ended,
                                         .outlook = outlook,
                                         .prepare = prepare,
                                         .observed = observed},
                                .next = next,
                                .hold = 0.9F};
}
