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

/* This rank's rows and columns of a tensor. */
struct tensor_part {
    int64_t n_out, n_in; /* of the whole tensor, as [out, in] */
    struct axis_range out[LIMIT_HEADS], in[LIMIT_HEADS];
    int32_t n_parts; /* ranges of rows; of columns the first one counts */
};
void tensor_part_of(const struct model *m, const struct tensor_spec *s, struct tensor_part *ret);
/* Whether a tensor has rows of one expert, or of all experts. */
bool tensor_spec_by_expert(const struct tensor_spec *s);
/* cuts.c: whether a part of some rank cuts blocks or groups of the tensor t (NULL: a
 * dummy) that one rank would multiply as stored, or quantise. */
bool tensor_is_cut(const struct model *m, const struct tensor_spec *s, const struct tensor *t);
/* ERR_UNSUPPORTED where this rank's part of the tensor `at` (t, NULL: a dummy)
 * cuts blocks or groups that one rank would multiply as stored, or quantise. */
int tensor_part_check(const struct model *m, const struct tensor_spec *s, const struct tensor *t,
                      struct tensor_index at, struct err *e);

/* ---- expert_division.c ---- */

/* How floats of experts, which read and make `hidden` values and are `width` columns
 * wide, are multiplied by a backend of such support for them. */
enum expert_way expert_floats_way(const struct weight_support *s, int32_t hidden, int32_t width);
/* Whether ranks do better with whole experts: they can be had, and slices are refused
 * or multiplied in a slower way. */
bool experts_pay_whole(int32_t n_ranks, int32_t n_experts, enum expert_way whole,
                       enum expert_way sliced);
/* Find out how the experts are multiplied, and set options.expert_parallel where that
 * is left open and whole experts do better. Once, before weights are loaded. */
void expert_division_choose(struct model *m);

#endif
