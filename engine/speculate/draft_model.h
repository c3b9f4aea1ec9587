/* Drafts from a second, small model of the same vocabulary (speculative decoding with
 * a draft model: Leviathan et al. 2023), whose executor runs in the same process.
 *
 * When a step is planned and none is in flight, the draft model computes the tokens
 * that its cache lacks (draft_cache.h) and drafts as many tokens as pay, for all
 * sequences at once (draft_steps.h). What pays follows from the costs of both models'
 * steps and from how often drafts held, which is learned for each sequence: where
 * drafting takes longer than its drafts save, nothing is drafted, and steps are planned
 * ahead as without.
 *
 * It runs on the engine's thread, waits for the device and allocates nothing after
 * start. A failure of its device ends the drafts, not the engine. */
#ifndef QUIRE_ENGINE_SPECULATE_DRAFT_MODEL_H
#define QUIRE_ENGINE_SPECULATE_DRAFT_MODEL_H

#include "engine/sched/sched.h"
#include "engine/workers/executor.h"

struct draft_model_config {
    struct executor *executor; /* borrowed; of as many blocks and slots as the target's */
    struct step_cost cost;     /* of its steps; all 0: unknown */
    int32_t vocab;             /* ids of the target */
    int32_t max_draft;         /* of a sequence in a step */
    /* 1: it is a draft head, whose entry at a position belongs to the token behind it
     * (models/families/heads/head.c); 0: a model */
    int32_t shift;
    int32_t mask_token;      /* of a head that drafts all tokens in one step; -1: it does not */
    uint64_t secret;         /* keys hashes of tokens */
    int64_t (*now_us)(void); /* the clock, in microseconds */
};

struct draft_model;
/* ERR_NOMEM. */
int draft_model_open(struct draft_model **ret, const struct draft_model_config *c, struct err *e);
/* NULL: nothing. */
void draft_model_free(struct draft_model *d);
/* For sched_speculate. */
struct draft_source *draft_model_source(struct draft_model *d);
/* For benchmarks: the n drafts of a sequence that it was just asked for were these. */
void draft_model_replace(struct draft_model *d, const struct seq *q, int32_t n,
                         const int32_t *token);
/* Microseconds spent in its steps so far. */
int64_t draft_model_us(const struct draft_model *d);
/* NULL, or why it drafts no more. */
const char *draft_model_death(const struct draft_model *d);

#endif
