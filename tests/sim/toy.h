/* A toy language model: the log-probability of a token is a hash of the context and the
 * token.
 *
 * The oracle executor and the reference share only this. The tests are about how
 * contexts, penalties, biases and random numbers reach it, so each side prepares them
 * on its own: the oracle from a batch, the reference from the request.
 */
#ifndef QUIRE_TESTS_SIM_TOY_H
#define QUIRE_TESTS_SIM_TOY_H

#include "config/base/base.h"

enum { TOY_MAX_VOCAB = 64 };

/* A context is a hash of the tokens read so far: of none, and with one more. */
uint64_t toy_start(void);
uint64_t toy_read(uint64_t context, int32_t token);
/* logprob[vocab] after a context: between -9 and -1, distinct. */
void toy_logprobs(uint64_t context, int32_t vocab, float *logprob);

struct toy_sampling {
    /* As in struct sample_row: */
    float temperature, top_p, min_p;
    int32_t top_k;
    uint64_t seed;
    int32_t position;
};
/* Sample a token from processed logits (-INFINITY: banned); -1: none is allowed. */
int32_t toy_sample(const float *logit, int32_t vocab, const struct toy_sampling *s);
/* The n best of value[vocab], best first, on a tie the smaller id first, without tokens
 * of -INFINITY. Returns how many. */
int32_t toy_top(const float *value, int32_t vocab, int32_t n, int32_t *token, float *best);
/* A logit after penalties. */
float toy_penalise(float logit, int32_t n_output, bool in_prompt, float presence, float frequency,
                   float repetition);

/* The random number generator of tests/sim: splitmix64. */
struct rng {
    uint64_t state; /* any value */
};
uint64_t rng_next(struct rng *r);
/* Uniform in [low, high]. */
int32_t rng_range(struct rng *r, int32_t low, int32_t high);
bool rng_chance(struct rng *r, int32_t percent);

#endif
