/* Drafts of a chosen quality, for benchmarks: what a request with the same prompt and
 * seed was answered before, each token right with a given chance. So the acceptance is
 * set, and everything else is as when serving; verified texts are real ones.
 *
 * Answers are kept for good, in memory that grows on the engine's thread. */
#ifndef QUIRE_ENGINE_SPECULATE_REPLAY_H
#define QUIRE_ENGINE_SPECULATE_REPLAY_H

#include "engine/speculate/draft_model.h"

struct replay;
/* Nothing is drafted yet. `model`, borrowed: it drafts as when serving, and its tokens
 * are replaced by those of the record; NULL: none. ERR_NOMEM. */
int replay_open(struct replay **ret, int32_t vocab, struct draft_model *model, struct err *e);
/* Draft i of a step holds, if those before it do, with the chance acceptance[i] in
 * [0, 1]; n <= LIMIT_DRAFT. One chance stands for any number of drafts, of several
 * there are no more drafts than chances, and with n 0 nothing is drafted. Only while no
 * request is at work. */
void replay_set(struct replay *r, const float *acceptance, int32_t n);
/* NULL: nothing. */
void replay_free(struct replay *r);
/* For sched_speculate. */
struct draft_source *replay_source(struct replay *r);

#endif
