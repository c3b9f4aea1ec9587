/* A vocabulary of the 256 bytes and a token that ends a text, for tests of grammars. */
#ifndef QUIRE_TESTS_UNIT_BYTE_VOCAB_H
#define QUIRE_TESTS_UNIT_BYTE_VOCAB_H

#include "engine/constrain/constrain.h"

enum { EOS = 256, N_IDS = 257 };

static struct constrain_vocab *vocab; /* from open_vocab to close_vocab */

static inline const char *byte_of(const void *arg, int32_t id, size_t *ret_len)
{
    static char all[256];

    (void)arg;
    for (int i = 0; i < 256; i++) {
        all[i] = (char)i;
    }
    *ret_len = id < 256;
    return &all[id % 256];
}

static inline bool is_eos(const void *arg, int32_t id)
{
    (void)arg;
    return id == EOS;
}

/* Group setup and teardown of cmocka. */
static inline int open_vocab(void **state)
{
    static const int32_t eos = EOS;
    struct constrain_tokens t = {
        .n = N_IDS, .n_eos = 1, .eos = &eos, .bytes = byte_of, .special = is_eos};
    struct err e = {0};

    (void)state;
    return constrain_vocab_new(&vocab, &t, &e);
}

static inline int close_vocab(void **state)
{
    (void)state;
    constrain_vocab_free(vocab);
    return 0;
}

#endif
