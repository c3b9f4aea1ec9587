/* What a step costs on this executor, measured at start: the table that target_itl_ms
 * and preemption: auto go by. */
#ifndef QUIRE_ENGINE_LOOP_COST_H
#define QUIRE_ENGINE_LOOP_COST_H

#include "engine/sched/sched.h"
#include "engine/workers/executor.h"

/* Runs a dozen steps, before anything else has run: they write into KV blocks that
 * nobody holds yet. `now_us`: the clock to go by, microseconds (clock_us). */
int cost_measure(struct executor *x, int64_t (*now_us)(void), struct step_cost *ret, struct err *e);

#endif
