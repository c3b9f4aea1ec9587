/* Speculative decoding: where the scheduler gets drafts from.
 *
 * A draft is a token that a sequence may turn out to have. A step that verifies n
 * drafts computes them behind the sequence's last token and samples n + 1 rows: the row
 * at position p draws what a step without drafts would draw there, because its noise is
 * a function of (seed, position, token). So the draft for p holds if it is the token
 * drawn, the rows behind the first one that does not hold are void, and the text is
 * that of a run without drafts, whatever was drafted.
 *
 * The scheduler chooses how many of the drafts a step verifies (sched_draft.c). It
 * calls these functions on the thread that plans and commits; they allocate nothing and
 * keep no pointer into a sequence.
 */
#ifndef QUIRE_ENGINE_SCHED_DRAFT_H
#define QUIRE_ENGINE_SCHED_DRAFT_H

#include "engine/sched/seq.h"

/* A sequence whose drafts the next step could verify. */
struct draft_want {
    struct seq *seq; /* all its tokens are known */
    int32_t most;    /* drafts; its tables have blocks for their keys and values */
};

/* A step without drafts, by the cost model. */
struct draft_step {
    double tokens;   /* that it brings */
    double us;       /* its time; 0: costs are unknown */
    double token_us; /* time of a further token */
    double row_us;   /* the same where it is sampled from */
};

struct draft_source {
    /* How many drafts of `q` would hold in its next step, as far as its known tokens
     * tell; 0: none are likely. Its last token may be in flight. Called for every
     * sequence that decodes while a step runs, so it must be cheap. */
    float (*expect)(struct draft_source *d, struct seq *q);
    /* Drafts behind the tokens of `q`, which are all known: at most `most` (>= 1) into
     * token[]. prob[i] in [0, 1] estimates that drafts 0 .. i all hold. Returns how
     * many. */
    int32_t (*draft)(struct draft_source *d, struct seq *q, int32_t most, int32_t *token,
                     float *prob);
    /* Of n drafts of `q` that were verified the first n_accepted held. The tokens are
     * not in `q` yet. */
    void (*verified)(struct draft_source *d, struct seq *q, int32_t n, int32_t n_accepted);
    /* A group that has started ends; its sequences have the tokens that they got. */
    void (*ended)(struct draft_source *d, struct group *g);
    /* A step like this one, of n sequences that decode, is what `expect` is asked about
     * next. (optional) */
    void (*outlook)(struct draft_source *d, const struct draft_step *step, int32_t n);
    /* Drafts for n sequences at once, before `draft` is called for any, and only while
     * no step is in flight: the one function that may wait, for a device of its own. It
     * may change want[]. Returns the microseconds it has taken by the source's cost
     * model. (optional) */
    double (*prepare)(struct draft_source *d, struct draft_want *want, int32_t n,
                      const struct draft_step *step);
    /* A step that only decodes, of so many rows, took `us` on the device, and by the
     * cost model `estimate_us`. (optional) */
    void (*observed)(struct draft_source *d, int32_t n_rows, double estimate_us, double us);
};

#endif
