/* Inside commit: what decode.c and beam.c share. Nobody else includes this. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_COMMIT_H
#define QUIRE_ENGINE_SCHED_DECODE_COMMIT_H

#include "engine/sched/decode/decode.h"
#include "engine/sched/sched_impl.h"

struct commit {
    struct sched *s;
    const struct results *r;
    struct delta_out *out;
    int64_t now_us;
};

static inline bool id_in(const int32_t *list, int32_t n, int32_t token)
{
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == token) {
            return true;
        }
    }
    return false;
}

/* How `token`, as the n_out-th generated one, ends a sequence of the group;
 * FINISH_NONE: not. */
int finish_by_token(const struct sched *s, const struct group *g, int32_t token, int32_t n_out,
                    int32_t *ret_stop_token);
void seq_append(struct seq *q, int32_t token);
/* What clients are told where there is no next token: the model's fault, and the
 * request's. */
extern const char *const NO_NUMBER, *const IMPOSSIBLE;
void emit_finish(struct delta_out *out, const struct group *g, int32_t choice, int finish,
                 int32_t stop_token, const char *error);

#endif
