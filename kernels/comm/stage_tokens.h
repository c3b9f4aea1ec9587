/* The sampled tokens of the step before, to which a step's token_src refers, where a
 * step comes as micro-batches and, with a pipeline, another process samples. For
 * backends; one thread. */
#ifndef QUIRE_KERNELS_COMM_STAGE_TOKENS_H
#define QUIRE_KERNELS_COMM_STAGE_TOKENS_H

#include "kernels/batch.h"
#include "kernels/comm/pipeline.h"

/* A micro-batch whose tokens have not arrived from the last stage. */
struct pending_microbatch {
    int32_t step_index; /* into stage_tokens.step */
    int32_t first, n;   /* its range of the step's sampling rows */
};
enum { PENDING_MAX = 256 }; /* two steps of one micro-batch for each possible stage */

/* The tokens sampled in a step, of all its micro-batches. */
struct step_tokens {
    int32_t *token; /* [max_samples] by sampling row; below 0: none could be sampled */
    int32_t n;      /* sampling rows of the micro-batches that have ended */
};

struct stage_tokens {
    struct pipeline *pipeline;  /* NULL: one stage */
    struct step_tokens step[2]; /* the step under way and the step before, in turn */
    int32_t now;                /* step[now] is the step under way */
    /* First stage: a ring of n_pending micro-batches, the oldest at pending_first
     * modulo PENDING_MAX. */
    struct pending_microbatch pending[PENDING_MAX];
    uint32_t n_pending, pending_first;
};

int stage_tokens_init(struct stage_tokens *t, struct pipeline *p, int32_t max_samples,
                      struct err *e);
void stage_tokens_release(struct stage_tokens *t);
/* A micro-batch begins: on return the tokens of the step before that it reads are
 * there. ERR_DEVICE: a stage is gone. */
int stage_tokens_begin(struct stage_tokens *t, const struct batch *b, struct err *e);
/* The micro-batch has ended; token[n_samples] are its sampled tokens, not read on a
 * pipeline's first stage. Rank 0 of the last stage sends them to the first stage. */
int stage_tokens_end(struct stage_tokens *t, const struct batch *b, const int32_t *token,
                     struct err *e);

/* The tokens of the step before. */
static inline const struct step_tokens *stage_tokens_before(const struct stage_tokens *t)
{
    return &t->step[1 - t->now];
}

#endif
