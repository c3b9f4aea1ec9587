/* Commit (stage 9): the results of a step become tokens of sequences, ends, freed
 * blocks, names in the prefix cache, and deltas for the output side.
 *
 * What the output side sees, a choice at a time: DELTA_PROMPT from token 0 (its
 * log-probability NaN), when asked for; DELTA_TOKEN for every generated token, the
 * end-of-sequence or stop id included as the last; DELTA_FINISH. A choice whose stop
 * mark (request->stop_at) was set gets DELTA_FINISH with FINISH_STOP, maybe after
 * tokens past the mark: the output side has closed the choice then and passes over
 * both. After all choices DELTA_END, once.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_DECODE_H
#define QUIRE_ENGINE_SCHED_DECODE_DECODE_H

#include "engine/sched/decode/delta.h"
#include "engine/sched/sched.h"

/* Where deltas go. The pointers in `d` hold during the call; with DELTA_END `g` is
 * about to be freed.
 *
 * The deltas of a committed step are always taken. What can wait is asked for first:
 * the end of a group, and the texts of a beam search, which come at once and may be
 * very many. `take` grants room for n deltas of this turn or none; NULL grants any
 * number. What is not granted is reported in a later turn.
 */
struct delta_out {
    void (*emit)(struct delta_out *o, const struct group *g, const struct delta *d);
    bool (*take)(struct delta_out *o, int32_t n);
};

static inline bool delta_take(struct delta_out *o, int32_t n)
{
    return !o->take || o->take(o, n);
}

/* Commit the oldest step in flight. `plan` is free for the next sched_plan
 * afterwards. */
void decode_commit(struct sched *s, struct plan *plan, const struct results *r, int64_t now_us,
                   struct delta_out *out);
/* The oldest step in flight failed: as if it had never been; end its groups with
 * sched_end_all. */
void decode_abandon(struct sched *s, struct plan *plan);
/* Report and free the groups that have ended and that no step in flight names, as far
 * as `out` grants it. The number of those freed. */
int32_t decode_reap(struct sched *s, struct delta_out *out);
/* Report no more texts of searches that are over: their open choices end with
 * `finish`. */
void decode_give_up(struct sched *s, int finish, const char *error);
/* Whether a call of decode_reap has something to report that it did not, and that the
 * output side does not hold back. */
bool decode_has_more(const struct sched *s);

#endif
