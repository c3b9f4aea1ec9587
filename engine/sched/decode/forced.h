/* Drafts that a grammar forces: where it leaves no choice for some bytes, the tokens that
 * the model's own encoding makes of them are drafted, so that a step verifies them
 * together instead of one after another. The job that computes a sequence's mask finds
 * them on its way (struct mask_job); a node keeps those behind its state. The model may
 * write the same bytes in other tokens: a draft is verified like any other. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_FORCED_H
#define QUIRE_ENGINE_SCHED_DECODE_FORCED_H

#include "engine/sched/draft.h"

/* A source of drafts in front of another one, which is asked where nothing is forced. */
struct forced_drafts {
    struct draft_source base;
    struct draft_source *next; /* borrowed; NULL: none */
    /* Of forced tokens, the part that held lately: models mostly write as their encoding
     * does. */
    float hold;
    /* counters: of forced tokens, those that were verified, and of them those that held */
    uint64_t drafted, accepted;
};

void forced_drafts_init(struct forced_drafts *d, struct draft_source *next);

#endif
