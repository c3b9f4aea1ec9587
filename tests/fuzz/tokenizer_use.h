/* What the fuzz targets of tokenizers have in common: a tokenizer that was accepted
 * encodes and decodes inside its vocabulary, and what was refused has its sentence. */
#ifndef QUIRE_TESTS_FUZZ_TOKENIZER_USE_H
#define QUIRE_TESTS_FUZZ_TOKENIZER_USE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/tokenizer/tokenizer_internal.h"

#define CHECK(x)                                                     \
    do {                                                             \
        if (!(x)) {                                                  \
            fprintf(stderr, "%s: %s does not hold\n", __FILE__, #x); \
            abort();                                                 \
        }                                                            \
    } while (0)

static void check_use(const struct tokenizer *t, const char *text)
{
    struct token_list l = {0};
    struct err e = {0};
    struct buf out;

    buf_init(&out, 1 << 20);
    if (tokenizer_encode(t, text, strlen(text), true, 1000, &l, &e) == 0) {
        for (int32_t i = 0; i < l.n; i++) {
            CHECK(l.id[i] >= 0 && l.id[i] < tokenizer_vocab_size(t));
        }
        if (tokenizer_decode(t, l.id, l.n, false, &out, &e) == 0) {
            CHECK(out.len == 0 || utf8_valid(out.data, out.len));
        }
    } else {
        CHECK(l.n == 0 && e.text[0]);
    }
    buf_release(&out);
    token_list_release(&l);
}

static void check_refusal(const struct err *e)
{
    CHECK(e->code < 0 && e->text[0] && !strchr(e->text, '\n'));
}

#endif
