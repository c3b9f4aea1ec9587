/* A model of 256 tokens, one a byte, and at most 1000 positions, for tests of what
 * bodies may ask. */
#ifndef QUIRE_TESTS_UNIT_API_CONTEXT_H
#define QUIRE_TESTS_UNIT_API_CONTEXT_H

#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"

static void test_defaults(void *arg, struct gen_params *p)
{
    (void)arg;
    *p = (struct gen_params){.max_tokens = 16,
                             .n = 1,
                             .best_of = 1,
                             .length_penalty = 1,
                             .temperature = 1,
                             .top_p = 1,
                             .repetition_penalty = 1,
                             .n_logprobs = -1,
                             .n_prompt_logprobs = -1,
                             .skip_special = true,
                             .spaces_between_special = true};
}

/* Id 1 first where special tokens are added. */
static int test_encode(void *arg, const char *text, size_t len, bool add_special,
                       int32_t max_tokens, int32_t **ret_ids, int32_t *ret_n, struct err *e)
{
    (void)arg;
    if (len + add_special > (size_t)max_tokens) {
        return err_set(e, ERR_INVALID, "the text has more than %d tokens", max_tokens);
    }
    int32_t n = 0, *id = malloc((len + 1) * sizeof(*id));
    if (!id) {
        return err_nomem(e, "ids");
    }
    if (add_special) {
        id[n++] = 1;
    }
    for (size_t i = 0; i < len; i++) {
        id[n++] = (unsigned char)text[i];
    }
    *ret_ids = id;
    *ret_n = n;
    return 0;
}

static const char *test_token_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    static char all[256];

    (void)arg;
    all[id] = (char)id;
    *ret_len = 1;
    return &all[id];
}

static uint64_t test_new_seed(void *arg)
{
    static uint64_t n = 98;

    (void)arg;
    return ++n;
}

static const struct api_context test_context = {
    .info = {.model_name = "m", .fingerprint = "fp_1", .max_model_len = 1000, .vocab = 256},
    .max_logprobs = 20,
    .defaults = test_defaults,
    .new_seed = test_new_seed,
    .encode = test_encode,
    .token_bytes = test_token_bytes,
};

#endif
