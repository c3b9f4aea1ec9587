/* Commit: the results of a step become tokens of sequences, ends, freed blocks, entries
 * of the prefix cache, and deltas for the output side.
 *
 * The deltas of a choice, in order: DELTA_PROMPT from token 0 (its log-probability
 * NaN), if asked for; DELTA_TOKEN for every generated token, an end of sequence or stop
 * id included as the last; DELTA_FINISH. If the output side has set the choice's stop
 * mark (request->stop_at), DELTA_FINISH has FINISH_STOP and may come after tokens past
 * the mark; the output side has closed the choice by then and ignores both. After all
 * choices comes one DELTA_END.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_DECODE_H
#define QUIRE_ENGINE_SCHED_DECODE_DECODE_H

#include "engine/sched/decode/delta.h"
#include "engine/sched/sched.h"

/* Where deltas go: the receiver embeds this struct. */
struct delta_out {
    /* Takes one delta. Pointers in `d` are valid during the call; after DELTA_END `g`
     * is freed. */
    void (*emit)(struct delta_out *o, const struct group *g, const struct delta *d);
    /* Asked before deltas that can wait: the end of a group, and the report of a beam
     * search, which can be very long. Grants n deltas in this turn, or none, and these
     * are reported in a later turn. NULL grants any number. The deltas of a committed
     * step are emitted without asking. */
    bool (*take)(struct delta_out *o, int32_t n);
};

static inline bool delta_take(struct delta_out *o, int32_t n)
{
    return !o->take || o->take(o, n);
}

/* Commit the oldest step in flight, `plan`; the next sched_plan may reuse it. */
void decode_commit(struct sched *s, struct plan *plan, const struct results *r, int64_t now_us,
                   struct delta_out *out);
/* Drop the oldest step in flight, which failed. The caller ends all groups
 * (sched_end_all). */
void decode_abandon(struct sched *s, struct plan *plan);
/* Report and free the groups that have ended and that no step in flight names, as far
 * as `out` grants it. Returns the number of groups freed. */
int32_t decode_reap(struct sched *s, struct delta_out *out);
/* Drop the reports of beam searches that are over: their open choices end with
 * `finish`. */
void decode_give_up(struct sched *s, int finish, const char *error);
/* Whether another call of decode_reap could report something that is not held back by
 * the output side. */
bool decode_has_more(const struct sched *s);

#endif
