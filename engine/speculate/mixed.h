/* Two sources of drafts, of which each sequence is drafted from the one that is
 * expected to bring it more: text that is there costs nothing, a draft model takes
 * time. */
#ifndef QUIRE_ENGINE_SPECULATE_MIXED_H
#define QUIRE_ENGINE_SPECULATE_MIXED_H

#include "engine/sched/draft.h"

struct mixed_drafts {
    struct draft_source base;
    struct draft_source *text, *model; /* borrowed */
    /* [n_slots] by slot: the key of the sequence whose drafts are the model's; 0:
     * none */
    uint64_t *from_model;
};

/* ERR_NOMEM. */
int mixed_drafts_init(struct mixed_drafts *d, struct draft_source *text, struct draft_source *model,
                      int32_t n_slots, struct err *e);
void mixed_drafts_release(struct mixed_drafts *d);

#endif
