/* Answers that are given, for benchmarks: whatever the model samples, a request with a
 * known prompt gets the tokens of its script. The steps, their drafts and their times
 * are those of a model that would write so. */
#ifndef QUIRE_ENGINE_SPECULATE_SCRIPT_H
#define QUIRE_ENGINE_SPECULATE_SCRIPT_H

#include "engine/sched/sched.h"

struct script;
/* For steps of at most max_samples sampling rows. ERR_NOMEM. */
int script_open(struct script **ret, int32_t max_samples, struct err *e);
/* NULL: nothing. */
void script_free(struct script *s);
/* What answers a prompt; both are copied. Behind the answer the model goes on.
 * ERR_NOMEM. */
int script_add(struct script *s, const int32_t *prompt, int32_t n_prompt, const int32_t *answer,
               int32_t n_answer, struct err *e);
/* Put the scripts' tokens into a step's results, before it is committed; they are kept
 * until the next call. */
void script_apply(struct script *s, const struct plan *p, struct results *r);

#endif
