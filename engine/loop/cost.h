/* Measures the executor's step costs at start, for target_itl_ms and preemption:
 * auto. */
#ifndef QUIRE_ENGINE_LOOP_COST_H
#define QUIRE_ENGINE_LOOP_COST_H

#include "engine/sched/sched.h"
#include "engine/workers/executor.h"

/* Runs some steps before any other; they write into KV blocks that are not allocated
 * yet. `now_us` is the clock to use, in microseconds (clock_us). */
int cost_measure(struct executor *x, int64_t (*now_us)(void), struct step_cost *ret, struct err *e);

#endif
