/* The counters of engine.h's struct engine_stats: the engine's thread sets gauges and
 * steps, the output thread the rest. */
#ifndef QUIRE_ENGINE_STATS_H
#define QUIRE_ENGINE_STATS_H

#include "engine/engine.h"
#include "engine/sched/sched.h"

void engine_stats_init(struct engine_stats *s);
/* The scheduler's counts as gauges; `queued` requests are accepted but not in its hands
 * yet. */
void engine_stats_gauges(struct engine_stats *s, const struct sched_counts *c, int64_t queued);
/* One committed step: tokens computed, the engine thread's own time on it, the device's
 * (0: unknown). */
void engine_stats_step(struct engine_stats *s, int32_t n_tokens, int64_t host_us,
                       int64_t device_us);

#endif
