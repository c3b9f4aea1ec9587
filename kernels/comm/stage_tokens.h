/* The tokens of the step before, which a step's token_src names, where a step comes in
 * parts and, with a pipeline, tokens are drawn by another process. For backends; one
 * thread. */
#ifndef QUIRE_KERNELS_COMM_STAGE_TOKENS_H
#define QUIRE_KERNELS_COMM_STAGE_TOKENS_H

#include "kernels/batch.h"
#include "kernels/comm/pipeline.h"

/* A part whose tokens come from the last stage. */
struct awaited_part {
    int32_t which, first, n; /* step_tokens; rows */
};
enum { AWAITED_PARTS = 256 }; /* two steps of as many parts as there may be stages */

/* The tokens drawn in a step, all its parts. */
struct step_tokens {
    int32_t *token; /* [max_samples]; -1: none could be drawn */
    int32_t n;
};

struct stage_tokens {
    struct pipeline *pipeline; /* NULL: one stage */
    struct step_tokens step[2];
    int32_t now; /* of the step under way; the other one's is the step before */
    /* first stage: n_awaited from awaited_first on, in a ring */
    struct awaited_part awaited[AWAITED_PARTS];
    uint32_t n_awaited, awaited_first;
};

int stage_tokens_init(struct stage_tokens *t, struct pipeline *p, int32_t max_samples,
                      struct err *e);
void stage_tokens_release(struct stage_tokens *t);
/* A part begins: what it reads of the step before is there on return. ERR_DEVICE: a
 * stage is gone. */
int stage_tokens_begin(struct stage_tokens *t, const struct batch *b, struct err *e);
/* It ended, and drew token[n_samples]; the first stage passes NULL. The last stage's
 * first rank sends them to the first. */
int stage_tokens_end(struct stage_tokens *t, const struct batch *b, const int32_t *token,
                     struct err *e);

static inline const struct step_tokens *stage_tokens_before(const struct stage_tokens *t)
{
    return &t->step[1 - t->now];
}

#endif
