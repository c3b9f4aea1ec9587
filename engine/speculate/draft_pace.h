/* What steps take while a draft model drafts: the cost models of both executors, which
 * were measured in a few steps of one sequence, corrected by what steps of so many rows
 * really took. */
#ifndef QUIRE_ENGINE_SPECULATE_DRAFT_PACE_H
#define QUIRE_ENGINE_SPECULATE_DRAFT_PACE_H

#include "engine/sched/draft.h"
#include "engine/sched/sched.h"

enum { PACE_SIZES = 24 }; /* half octaves of rows */

struct draft_pace {
    struct step_cost cost; /* of the draft model's steps; all 0: unknown */
    bool one_step;         /* all drafts are made in one of them */
    /* [by rows] the time of the target's steps that only decode, over its cost model's;
     * 0: none was seen */
    float target[PACE_SIZES];
    /* [by sequences] the time of all steps that draft for one step of the target, over
     * the cost model's; 0: none was seen */
    float drafting[PACE_SIZES];
    double gap_us;  /* between two steps that are not planned ahead */
    double context; /* tokens that a sequence has, the mean of those drafted last */
};

/* Whether costs are known. */
static inline bool pace_is_known(const struct draft_pace *p, const struct draft_step *step)
{
    return p->cost.token_us > 0 && step->us > 0;
}

/* The time of a step of the draft model that decodes n sequences, by its cost model. */
double pace_decode_us(const struct draft_pace *p, int32_t n);
/* The time of the target's step if k drafts of n sequences join it, and of drafting
 * them. */
double pace_step_us(const struct draft_pace *p, const struct draft_step *step, int32_t n,
                    int32_t k);
double pace_drafting_us(const struct draft_pace *p, int32_t n, int32_t k);
/* A step of the target of so many rows, all decodes, took `us`, by the model
 * `estimate_us`. */
void pace_saw_target(struct draft_pace *p, int32_t rows, double estimate_us, double us);
/* Drafting k tokens of n sequences took `us`. */
void pace_saw_drafting(struct draft_pace *p, int32_t n, int32_t k, double us);
/* Nothing is drafted: what was seen of drafting counts less and less, so that it is
 * tried again one day. */
void pace_forget(struct draft_pace *p);

#endif
