/* The parts of the loader. */
#ifndef QUIRE_MODELS_FAMILIES_LOAD_LOAD_H
#define QUIRE_MODELS_FAMILIES_LOAD_LOAD_H

#include "models/families/layers.h"

/* weights.c: the weights of this rank and stage, into m->weights; 0 or an error that
 * names the tensor. */
int load_weights(struct model *m, struct err *e);
/* cache_scales.c: k_scale and v_scale of each layer's attention, where the model has an
 * fp8 cache and the checkpoint has them. */
int load_cache_scales(struct model *m, struct err *e);
/* scratch.c: the memory that operations of a step share. */
int transformer_make_scratch(struct model *m, struct err *e);
/* This rank's ids: equal ranges, of which the last may be shorter. */
struct axis_range vocab_range(const struct model *m);
/* The ids of its rows of the output head: the same, or of those that a head drafts. */
struct axis_range logits_range(const struct model *m);
/* The experts of a layer that this rank holds. */
struct axis_range expert_range(const struct model *m);

#endif
