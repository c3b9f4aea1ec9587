/* `prefixes:` of the settings: texts that are computed at start and stay in the
 * cache. */
#ifndef QUIRE_ENGINE_PINNED_PREFIXES_H
#define QUIRE_ENGINE_PINNED_PREFIXES_H

#include "engine/engine_state.h"

/* Before the engine's thread runs: compute each text and hold its full blocks for good;
 * config.n_pinned counts them. ERR_INVALID when they need more than half of the pool,
 * or the prefix cache is off. */
int pinned_prefixes_compute(struct engine *e, const struct settings *s, struct err *err);

#endif
