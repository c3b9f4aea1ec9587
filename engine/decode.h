/* Commit (stage 9): the results of a step become tokens of sequences, ends, freed blocks, names in the prefix
 * cache, and deltas for the output side.
 *
 * What the output side sees, a choice at a time: DELTA_PROMPT from token 0 (its log-probability NaN), when asked
 * for; DELTA_TOKEN for every generated token, the end-of-sequence or stop id included as the last; DELTA_FINISH. A
 * choice whose stop mark (request->stop_at) was set gets DELTA_FINISH with FINISH_STOP, maybe after tokens past the
 * mark: the output side has closed the choice then and passes over both. After all choices DELTA_END, once.
 */
#ifndef QUIRE_ENGINE_DECODE_H
#define QUIRE_ENGINE_DECODE_H

#include "engine/delta.h"
#include "engine/sched.h"

/* Where deltas go. The pointers in `d` hold during the call; with DELTA_END `g` is about to be freed. */
struct delta_out {
    void (*emit)(struct delta_out *o, const struct group *g, const struct delta *d);
};

/* Commit the oldest step in flight. `plan` is free for the next sched_plan afterwards. */
void decode_commit(struct sched *s, struct plan *plan, const struct results *r, int64_t now_us, struct delta_out *out);
/* The oldest step in flight failed: as if it had never been; end its groups with sched_end_all. */
void decode_abandon(struct sched *s, struct plan *plan);
/* Report and free the groups that have ended and that no step in flight names. The number of them. */
int32_t decode_reap(struct sched *s, struct delta_out *out);

#endif
