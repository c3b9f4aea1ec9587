/* The time of steps that only decode, by their rows, as learned from the steps that
 * ran; and how many drafts are worth verifying in the next one.
 *
 * The cost model was measured at start in a few steps. Rows of a decode do not cost
 * the same each: products work in tiles, so time rises in stairs, and a device may
 * be slower than it was at start. So the scheduler estimates the logarithm of a
 * step's time over the cost model's, as a sum of two numbers: one of the device,
 * which wanders from step to step, and one of the step's rows, which hardly
 * changes. A Kalman filter tells them apart by steps of other sizes; of one size
 * alone only the sum is known. How far it doubts a difference says whether a step
 * is worth a trial.
 */
#ifndef QUIRE_ENGINE_SCHED_STEP_PACE_H
#define QUIRE_ENGINE_SCHED_STEP_PACE_H

#include "engine/sched/sched.h"

enum {
    STEP_SIZES = 32,  /* 1 to 16 rows each by itself, then four to an octave */
    ODDS_LEVELS = 64, /* classes of drafts by their chance to hold */
};

struct step_pace {
    bool has_seen;               /* a step; else all is 0 */
    double mean[1 + STEP_SIZES]; /* of the device, and by size */
    double cov[1 + STEP_SIZES][1 + STEP_SIZES];
    int32_t n_seen[STEP_SIZES]; /* for reports */
    uint64_t tried_step;        /* the last one that was only a trial */
    double gap_us;              /* between two steps of which the second is not planned ahead */
    double payoff;              /* what drafts made steps faster by of late, gaps aside */
    /* Time that drafts may still lose before they must have brought some. */
    double budget_us;
    uint64_t refilled_step; /* in which it was refilled last */
    bool text_begins;       /* since then one did */
    double token_us;        /* that one that holds brings, in the step planned last */
};

/* Drafts that could be verified: how many there are of each chance to hold, which is
 * that of the draft and of all before it. */
struct draft_odds {
    int32_t n[ODDS_LEVELS];
    double sum[ODDS_LEVELS]; /* of their chances */
};

/* A step before drafts. */
struct pace_step {
    int32_t rows;     /* of one token each, unless there is prefill */
    bool has_prefill; /* then a draft takes the cost model's time of a row */
    double tokens;    /* that it brings */
    double us;        /* with prefill: its time */
    double extra_us;  /* time beside that of its rows: contexts, drafting */
    double draft_us;  /* the same for each draft */
    double gain;      /* drafts must make the step so many times as fast; > 1 */
    uint64_t number;  /* of the step */
};

/* The size, below STEP_SIZES, of n >= 1 rows. */
int32_t step_size(int32_t n);
/* By the cost model: n rows that are all sampled, without their contexts. */
double step_model_us(const struct step_cost *c, int32_t n);
/* The same as far as learned. */
double step_pace_us(const struct step_pace *p, const struct step_cost *c, int32_t n);
/* A step of n rows took `us` without the contexts. */
void step_pace_saw(struct step_pace *p, const struct step_cost *c, int32_t n, double us);

static inline int32_t odds_level(float chance)
{
    return MIN(MAX((int32_t)(chance * ODDS_LEVELS), 0), ODDS_LEVELS - 1);
}

static inline void odds_add(struct draft_odds *o, float chance)
{
    int32_t i = odds_level(chance);

    o->n[i]++;
    o->sum[i] += (double)chance;
}

/* How many of the drafts, the likeliest first, at most `most` and no more than the
 * budget covers, make the most tokens in their time; 0: none do. Now and then it is a
 * trial, where the times compared are not known well enough for the difference: none
 * where drafts seem to pay, some where they seem not to. */
int32_t step_pace_choose(struct step_pace *p, const struct step_cost *c, const struct pace_step *s,
                         const struct draft_odds *o, int32_t most);
/* Between two steps, of which the second was not planned ahead, `us` passed. */
void step_pace_saw_gap(struct step_pace *p, double us);
/* Steps like this one could have such drafts: what they would make it faster by counts
 * among the payoffs. */
void step_pace_saw_odds(struct step_pace *p, const struct step_cost *c, const struct pace_step *s,
                        const struct draft_odds *o, int32_t most);
/* A text begins: what drafts brought to earlier ones is not for it to lose. */
void step_pace_text_begins(struct step_pace *p);
/* A step is planned, which without drafts would be `s`. Once in a step the budget grows
 * by a hundredth of its time, up to that of a step; drafts that held may have left that
 * of several. Returns whether it covers a draft. */
bool step_pace_refill(struct step_pace *p, const struct step_cost *c, const struct pace_step *s);
/* It waited for drafts if `waited`, and has n of them. What that takes is spent. */
void step_pace_spend(struct step_pace *p, const struct step_cost *c, const struct pace_step *s,
                     int32_t n, bool waited);
/* Of its drafts n held. */
void step_pace_earn(struct step_pace *p, int32_t n);
/* Whether a step should wait for drafts instead of being planned ahead: whether they
 * made up for the gap of late. */
bool step_pace_awaits(const struct step_pace *p, const struct step_cost *c,
                      const struct pace_step *s);

#endif
