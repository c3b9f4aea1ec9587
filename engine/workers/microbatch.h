/* Splits a step into micro-batches for a pipeline: while one stage computes a
 * micro-batch, the next stage computes the one before.
 *
 *     stage 0   a0 b0 c0 a1 b1 c1          step 0 in micro-batches a, b, c; then step 1
 *     stage 1      a0 b0 c0 a1 b1 c1
 *     stage 2         a0 b0 c0 a1 b1 c1
 *
 * b0 begins on stage 0 while a0 is on stage 1. a1 begins when the tokens of a0 have
 * come back from the last stage, which is when c0 has left stage 0.
 *
 * The step is split, not the set of sequences (with steps in flight over disjoint
 * sequences): the scheduler, look-ahead and references to tokens stay as with one
 * stage, every rank derives the same split from the same message, and a single long
 * prompt keeps all stages busy. Tokens are divided evenly; a sequence may span two
 * micro-batches, its earlier tokens in the first. */
#ifndef QUIRE_ENGINE_WORKERS_MICROBATCH_H
#define QUIRE_ENGINE_WORKERS_MICROBATCH_H

#include "kernels/batch.h"

/* Memory for the arrays of a micro-batch that cannot point into the step's. Zeroed:
 * empty. */
struct microbatch {
    char *arena; /* [cap] owned */
    size_t cap;  /* bytes */
};

/* Into how many micro-batches a step is split for so many stages: at most one per
 * stage, and none of just a few tokens, which would take a stage as long as one
 * token. */
int32_t microbatch_count(const struct batch *b, int32_t n_stages);
/* n, or fewer: sequences that verify drafts stay whole, which could leave a micro-batch
 * empty. */
int32_t microbatch_most(const struct batch *b, int32_t n);
/* Micro-batch i of n, where n is microbatch_count's. Its arrays are the step's or in
 * p's memory, valid until the next call. 0 or ERR_NOMEM. */
int microbatch_split(struct microbatch *p, const struct batch *b, int32_t i, int32_t n,
                     struct batch *ret, struct err *e);
void microbatch_release(struct microbatch *p);

/* The results of a step, gathered from its micro-batches, with memory of their own.
 * Zeroed: empty. */
struct gathered {
    struct results results; /* its arrays point into `memory` */
    char *memory;           /* [cap] owned */
    size_t cap;             /* bytes */
};

/* Makes room for the results of a whole step. 0 or ERR_NOMEM. */
int microbatch_results_begin(struct gathered *g, uint64_t step, int32_t n_samples,
                             int32_t top_stride, struct err *e);
/* Copies r's rows to rows [first, first + r->n_samples). */
void microbatch_results_add(struct gathered *g, int32_t first, const struct results *r);
/* The largest number of top tokens that a row of the step needs. */
int32_t microbatch_results_stride(const struct batch *b);
void microbatch_results_release(struct gathered *g);

#endif
