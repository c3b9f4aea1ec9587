/* Between commit (engine's thread) and emit (output thread): a ring of deltas, and the thread that empties it. */
#ifndef QUIRE_ENGINE_OUTPUT_H
#define QUIRE_ENGINE_OUTPUT_H

#include "engine/emit.h"

struct output_stage;

/* Starts the output thread. `em` is copied; what it points to must outlive the stage. `min_records`: deltas of the
 * largest step, so that one step always fits. */
int output_open(struct output_stage **ret, const struct emitter *em, int64_t min_records, struct err *e);
/* Emits what was committed, then ends the thread. */
void output_free(struct output_stage *o);

/* Engine's thread. Queue one delta (its arrays are copied). Waits while the ring is full. */
void output_push(struct output_stage *o, const struct delta *d);
/* The step's deltas are all there: hand them over and wake the output thread once, or, where they are few, emit them at once. */
void output_commit(struct output_stage *o);

#endif
