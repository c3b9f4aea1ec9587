/* A step cut into parts, the micro-batches of a pipeline: while a stage computes one,
 * the next stage computes the one before.
 *
 *     stage 0   a0 b0 c0 a1 b1 c1          step 0 in parts a, b, c; then step 1
 *     stage 1      a0 b0 c0 a1 b1 c1
 *     stage 2         a0 b0 c0 a1 b1 c1
 *
 * b0 begins on stage 0 while a0 is on stage 1. a1 begins when the tokens of a0 have
 * come back from the last stage, which is when c0 has left stage 0.
 *
 * The cut is of the step and not of the sequences (steps in flight over disjoint
 * sequences): scheduler, look-ahead and what tokens refer to stay as they are with one
 * stage, every rank makes the same cut of the same message, and a long prompt alone
 * keeps all stages at work. Tokens are dealt out evenly; a sequence may lie across two
 * parts, its earlier tokens come first.
 */
#ifndef QUIRE_ENGINE_WORKERS_MICROBATCH_H
#define QUIRE_ENGINE_WORKERS_MICROBATCH_H

#include "kernels/batch.h"

/* Memory of the arrays that a part has of its own. Zeroed: empty. */
struct microbatch {
    char *arena;
    size_t cap;
};

/* Into how many parts a step is cut for so many stages: at most one each, and none of
 * less than a few tokens, as which take a stage as long as one. */
int32_t microbatch_count(const struct batch *b, int32_t n_stages);
/* Part i of n, which is what microbatch_count said; its arrays are the step's or p's,
 * until the next call. 0 or ERR_NOMEM. */
int microbatch_split(struct microbatch *p, const struct batch *b, int32_t i, int32_t n,
                     struct batch *ret, struct err *e);
void microbatch_release(struct microbatch *p);

/* The results of a step, with memory of their own. Zeroed: empty. */
struct gathered {
    struct results results;
    char *memory;
    size_t cap;
};

/* Room for the results of a whole step. 0 or ERR_NOMEM. */
int gathered_begin(struct gathered *g, uint64_t step, int32_t n_samples, int32_t top_stride,
                   struct err *e);
/* Rows [first, first + r->n_samples) are r's. */
void gathered_add(struct gathered *g, int32_t first, const struct results *r);
/* The columns that a step's results need for the best tokens. */
int32_t gathered_stride(const struct batch *b);
void gathered_release(struct gathered *g);

#endif
