/* The output stage, between commit (engine's thread) and emit (output thread): a ring
 * of deltas and the thread that empties it. */
#ifndef QUIRE_ENGINE_OUTPUT_OUTPUT_H
#define QUIRE_ENGINE_OUTPUT_OUTPUT_H

#include "engine/engine.h"
#include "engine/output/emit.h"

struct output_stage;

enum { OUTPUT_DELTA_CELLS = 6 }; /* at most, for one delta */

/* Starts the output thread. `proc` is copied; what it points to must outlive the stage.
 * The ring gets at least min_cells cells. */
int output_open(struct output_stage **ret, const struct output_processor *proc, int64_t min_cells,
                struct err *e);
/* Emits what was committed, then stops the thread. */
void output_free(struct output_stage *o);

/* Engine's thread: cells of the ring that are free, and in all. */
int64_t output_free_cells(struct output_stage *o);
int64_t output_cells(const struct output_stage *o);
/* Engine's thread: the position of the next delta, and whether the output side has
 * consumed everything before a position. */
uint64_t output_mark(const struct output_stage *o);
bool output_passed(const struct output_stage *o, uint64_t mark);
/* Engine's thread: queues one delta, copying its arrays. There must be room for it. */
void output_push(struct output_stage *o, const struct delta *d);
/* Engine's thread: publishes the step's deltas and wakes the output thread once, or, if
 * they are few and it sleeps, emits them itself. */
void output_commit(struct output_stage *o);

#endif
