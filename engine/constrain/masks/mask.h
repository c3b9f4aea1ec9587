/* Which tokens may follow a config. */
#ifndef QUIRE_ENGINE_CONSTRAIN_MASKS_MASK_H
#define QUIRE_ENGINE_CONSTRAIN_MASKS_MASK_H

#include "engine/constrain/automaton.h"

/* Set the bits of the tokens that may follow, end-of-sequence tokens included, in
 * mask[words of the vocabulary]. 0, or why not: CONFIG_FULL and those behind it. A mask
 * that was paused is begun anew, over the steps that are made by then. */
int32_t mask_of(struct stepper *s, int32_t config, uint32_t *mask);
/* The config behind a token that is text or named by the grammar: as automaton_next. */
int32_t config_after(struct stepper *s, int32_t config, int32_t token);
/* Two configs whose masks are within and around that of `config`: what it counts is
 * bounded by less, or by nothing, so that many configs share them. False: it counts
 * nothing, or is a lower bound itself, or `s` is paused. */
bool config_bounds(struct stepper *s, int32_t config, int32_t *ret_low, int32_t *ret_high);
/* Whether nothing may follow; false too if `s` was paused. */
bool config_ends(struct stepper *s, int32_t config);

#endif
