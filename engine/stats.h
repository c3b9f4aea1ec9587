/* Updates struct engine_stats (engine.h): the engine's thread sets gauges and step
 * counters, the output thread the rest. */
#ifndef QUIRE_ENGINE_STATS_H
#define QUIRE_ENGINE_STATS_H

#include "engine/engine.h"
#include "engine/sched/sched.h"

void engine_stats_init(struct engine_stats *s);
/* Sets gauges from the scheduler's counts; `queued` requests are accepted but not yet
 * in the scheduler. */
void engine_stats_gauges(struct engine_stats *s, const struct sched_counts *c, int64_t queued);
/* Records a committed step: tokens computed, the engine thread's own time on it, and
 * from its results the device's time and how its experts were loaded. */
void engine_stats_step(struct engine_stats *s, int32_t n_tokens, int64_t host_us,
                       const struct results *r);

#endif
