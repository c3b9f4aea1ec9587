#include "engine/sched/decode/constrained.h"

#include <assert.h>
#include <string.h>

#include "engine/sched/sched_impl.h"

/* ---- nodes ---- */

static void drop_if_unused(struct sched *s, struct constraint_node *n)
{
    if (n->n_held == 0 && n->n_jobs == 0) {
        n->next = s->dropped;
        s->dropped = n;
    }
}

void seq_drop_constraint(struct sched *s, struct seq *q)
{
    struct constraint_node *n = q->constraint;

    if (!n) {
        return;
    }
    q->constraint = NULL;
    n->n_held--;
    drop_if_unused(s, n);
}

struct constraint_node *sched_take_dropped(struct sched *s)
{
    struct constraint_node *first = s->dropped;

    s->dropped = NULL;
    return first;
}

/* ---- the masks of a step ---- */

int32_t mask_set_plan(struct mask_set *set, const struct plan *p)
{
    set->step = p->step;
    set->n = set->n_masks = 0;
    for (int32_t i = 0; i < p->n_items; i++) {
        const struct plan_item *it = &p->item[i];
        if (it->n_sampled > 0 && it->seq->constraint) {
            struct mask_job *j = &set->job[set->n++];
            *j = (struct mask_job){.seq = it->seq,
                                   .first = set->n_masks,
                                   .n = it->n_verify + 1,
                                   .awaited = set->all_awaited || it->n_sampled > 1};
            set->n_masks += j->n;
        }
    }
    return set->n_masks;
}

int32_t mask_set_begin(struct mask_set *set)
{
    int32_t n = 0;

    for (int32_t i = 0; i < set->n; i++) {
        struct mask_job *j = &set->job[i];
        const struct seq *q = j->seq;
        struct constraint_node *node = q->constraint;
        if (!node) {
            continue; /* it ended after the step was planned */
        }
        j->n_tokens = q->n_out - node->n_read;
        assert(j->n_tokens >= 0 && j->n_tokens <= MASK_JOB_TOKENS);
        memcpy(j->token, q->out + node->n_read, (size_t)j->n_tokens * sizeof(*j->token));
        memcpy(j->draft, q->out + q->n_out, (size_t)(j->n - 1) * sizeof(*j->draft));
        j->node = node;
        j->in_place = node->n_held == 1 && node->n_jobs == 0;
        j->ends_ignored = q->group->request->params.ignore_eos;
        j->wants_forced = set->wants_forced && !q->group->beams;
        node->n_jobs++;
        n++;
    }
    return n;
}

/* The job's node goes back to its sequence, or where the sequence has ended, away.
 * Returns whether the sequence is still there. */
static bool give_back(struct sched *s, struct mask_job *j)
{
    struct constraint_node *made = j->made ? j->made : j->node;
    bool there = j->seq->constraint == j->node;

    j->node->n_jobs--;
    if (j->rc == 0) {
        made->n_read += j->n_taken;
        made->n_forced = j->n_forced;
        memcpy(made->forced, j->forced, (size_t)j->n_forced * sizeof(*made->forced));
    }
    if (there && made != j->node) {
        j->seq->constraint = made;
        made->n_held++;
        j->node->n_held--;
    }
    drop_if_unused(s, j->node);
    if (made != j->node) {
        drop_if_unused(s, made);
    }
    return there;
}

/* Marks all sequences in the state that the job has found: samples of one prompt share
 * one before their first token. */
static void mark_ends(const struct mask_job *j)
{
    struct group *g = j->seq->group;
    const struct constraint_node *at = j->seq->constraint;
    int32_t end = j->rc == 0             ? CONSTRAINT_SENTENCE
                  : j->rc == ERR_INVALID ? CONSTRAINT_REFUSED
                                         : CONSTRAINT_COSTLY;

    for (int32_t i = 0; i < g->n_seqs; i++) {
        if (g->seq[i].constraint == at) {
            g->seq[i].constraint_end = end;
        }
    }
}

/* The rows of a beam search are chosen from together. */
static void void_late(struct sched *s, struct seq *q)
{
    struct group *g = q->group;

    if (!g->beams) {
        seq_void(s, q);
        return;
    }
    for (int32_t i = 0; i < g->n_seqs; i++) {
        if (g->seq[i].state == SEQ_LIVE) {
            seq_void(s, &g->seq[i]);
        }
    }
}

void mask_set_collect(struct sched *s, struct mask_set *set)
{
    for (int32_t i = 0; i < set->n; i++) {
        struct mask_job *j = &set->job[i];
        if (!j->node || !give_back(s, j)) {
            continue;
        }
        if (set->step > j->seq->void_step) { /* else its rows do not count */
            j->seq->verify_rows = MIN(j->seq->verify_rows, MAX(j->n_masked, 1));
            if (j->late) {
                s->counted.late_masks++;
                void_late(s, j->seq);
            }
        }
        if (j->rc < 0 || j->ended) {
            mark_ends(j);
        }
    }
    set->n = 0;
}

const char *constraint_error(const struct seq *q)
{
    switch (q->constraint_end) {
    case CONSTRAINT_REFUSED:
        return "the grammar does not allow the token that was sampled";
    case CONSTRAINT_COSTLY:
        return "the grammar needs more work or memory for the next token than its limits allow";
    default:
        return NULL;
    }
}

void mask_set_drop(struct sched *s, struct mask_set *set)
{
    for (int32_t i = 0; i < set->n; i++) {
        if (set->job[i].node) {
            give_back(s, &set->job[i]);
        }
    }
    set->n = 0;
}
