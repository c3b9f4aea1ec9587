/* A model that scores texts on the CPU: for `quire quantize` and for measurements.
 *
 * A text is cut into windows, each of which is computed in one step, with nothing in
 * the cache before it. */
#ifndef QUIRE_MODELS_QUANTISE_SCORER_H
#define QUIRE_MODELS_QUANTISE_SCORER_H

#include "models/model.h"

enum { SCORER_WINDOW = 512 }; /* tokens of a window, at most */

struct scorer {
    struct model_config config;
    struct model_options options;
    struct backend *backend; /* owned, as is the model */
    struct model *model;
    struct model_kv_groups groups;
    float *logits; /* [max_logits, vocab], owned */
    uint64_t n_steps;
};

/* Open the model of `dir`, a directory or a GGUF file, with the weights as they are
 * stored; of *how the members quantise... count, NULL: as stored. `threads` 0: one a
 * core. The caller releases *s after success. */
int scorer_init(struct scorer *s, const char *dir, const struct model_options *how, int32_t threads,
                struct err *e);
void scorer_release(struct scorer *s);

/* Gets the logits of `rows` tokens of the window, the first of which is `first`:
 * [rows, vocab]. A negative result ends the window and is returned. */
typedef int scorer_fn(void *ctx, int32_t first, int32_t rows, const float *logits, struct err *e);
/* Compute a window of n tokens, at least one, whose ids are in the vocabulary. */
int scorer_window(struct scorer *s, const int32_t *token, int32_t n, scorer_fn *fn, void *ctx,
                  struct err *e);
/* *ret: the sum of -ln p(token[i] | the tokens before it in its window) over all but
 * the first token of each window of n tokens; *ret_n, how many they are. ERR_INVALID:
 * logits that are no numbers. */
int scorer_loss(struct scorer *s, const int32_t *token, int32_t n, double *ret, int32_t *ret_n,
                struct err *e);

#endif
