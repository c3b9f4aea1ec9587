/* The part of commit that samples (decode.c) and beams (beam.c) share. For these files
 * only. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_COMMIT_H
#define QUIRE_ENGINE_SCHED_DECODE_COMMIT_H

#include "engine/sched/decode/decode.h"
#include "engine/sched/sched_impl.h"

/* The commit of one step. */
struct commit {
    struct sched *s;
    const struct results *r; /* of the step */
    struct delta_out *out;   /* where its deltas go */
    int64_t now_us;          /* time of the commit */
};

/* How `token`, as the n_out-th generated one, ends a sequence of the group:
 * FINISH_STOP, FINISH_LENGTH or FINISH_NONE. *ret_stop_token is set if it is a stop
 * id. */
int finish_by_token(const struct sched *s, const struct group *g, int32_t token, int32_t n_out,
                    int32_t *ret_stop_token);
/* A sampled token has become known. */
static inline void seq_append(struct seq *q, int32_t token)
{
    q->out[q->n_out++] = token;
}
/* Errors for the client if there is no next token: because of the model's output, or of
 * what the request bans. */
extern const char *const NO_NUMBER, *const IMPOSSIBLE;
void emit_finish(struct delta_out *out, const struct group *g, int32_t choice, int finish,
                 int32_t stop_token, const char *error);

#endif
