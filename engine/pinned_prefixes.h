/* The `prefixes` setting: texts whose KV blocks are computed at start and stay
 * cached. */
#ifndef QUIRE_ENGINE_PINNED_PREFIXES_H
#define QUIRE_ENGINE_PINNED_PREFIXES_H

#include "engine/engine_state.h"

/* Computes each text and pins its full blocks for the engine's lifetime;
 * config.n_pinned counts them. Called before the engine's thread runs. ERR_INVALID if
 * they need more than half of the pool or the prefix cache is off. */
int pinned_prefixes_compute(struct engine *e, const struct settings *s, struct err *err);

#endif
