/* Drafts of every quality for the oracle's runs: tokens that the request gives alone,
 * or those of a draft model, mixed with wrong ones. They are a function of the scenario
 * and of where a sequence stands, so a run can be replayed. */
#ifndef QUIRE_TESTS_SIM_DRAFTS_H
#define QUIRE_TESTS_SIM_DRAFTS_H

#include "engine/sched/draft.h"
#include "tests/sim/scenario.h"

struct sim_drafts {
    struct draft_source base;
    const struct scenario *s;
    struct sim_totals *totals;
    struct draft_source *model; /* NULL: none */
    /* What a choice gives alone, NULL: unknown; and its request. */
    const struct sim_choice *(*want)(const struct seq *q, const struct sim_request **ret);
    char why[160]; /* "": nothing wrong */
};

/* `model`, borrowed: the draft model's; NULL: none. */
void sim_drafts_init(struct sim_drafts *d, const struct scenario *s, struct draft_source *model,
                     struct sim_totals *t);

#endif
