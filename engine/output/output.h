/* Between commit (engine's thread) and emit (output thread): a ring of deltas, and the
 * thread that empties it. */
#ifndef QUIRE_ENGINE_OUTPUT_OUTPUT_H
#define QUIRE_ENGINE_OUTPUT_OUTPUT_H

#include "engine/engine.h"
#include "engine/output/emit.h"

struct output_stage;

enum { OUTPUT_DELTA_CELLS = 4 }; /* that a delta takes of the ring at most */

/* Starts the output thread. `proc` is copied; what it points to must outlive the stage.
 * The ring has min_cells at least. */
int output_open(struct output_stage **ret, const struct output_processor *proc, int64_t min_cells,
                struct err *e);
/* Emits what was committed, then ends the thread. */
void output_free(struct output_stage *o);

/* Engine's thread. Cells that are free, of how many. */
int64_t output_free_cells(struct output_stage *o);
int64_t output_cells(const struct output_stage *o);
/* Engine's thread. Where the next delta will stand, and whether the output side has
 * taken all that stands before a mark. */
uint64_t output_mark(const struct output_stage *o);
bool output_passed(const struct output_stage *o, uint64_t mark);
/* Engine's thread. Queue one delta (its arrays are copied), for which there is room. */
void output_push(struct output_stage *o, const struct delta *d);
/* The step's deltas are all there: hand them over and wake the output thread once, or,
 * where they are few, emit them at once. */
void output_commit(struct output_stage *o);

#endif
