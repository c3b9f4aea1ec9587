/* SentencePiece models: whatever the bytes, a sentence of refusal or a tokenizer that stays inside its vocabulary. */
/* covers: models/tokenizer_spm.c models/tokenizer_unigram.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/tokenizer_internal.h"

#define CHECK(x)                                                 \
    do {                                                         \
        if (!(x)) {                                              \
            fprintf(stderr, "fuzz_spm: %s does not hold\n", #x); \
            abort();                                             \
        }                                                        \
    } while (0)

static void use(const struct tokenizer *t)
{
    static const char TEXT[] = " the cat  <s> ab\xC3\xA9 123 don't  ! \n\xF0\x9F\x99\x82";
    struct token_list l = {0};
    struct err e = {0};
    struct buf out;
    buf_init(&out, 1 << 20);
    if (tokenizer_encode(t, TEXT, sizeof TEXT - 1, true, 1000, &l, &e) == 0) {
        for (int32_t i = 0; i < l.n; i++)
            CHECK(l.id[i] >= 0 && l.id[i] < tokenizer_vocab_size(t));
        if (tokenizer_decode(t, l.id, l.n, false, &out, &e) == 0)
            CHECK(out.len == 0 || utf8_valid(out.data, out.len));
    }
    buf_release(&out);
    token_list_release(&l);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct err e = {0};
    struct tokenizer *t = calloc(1, sizeof(*t));
    if (!t)
        return 0;
    if (tokenizer_parse_spm(t, data, len, &e) == 0)
        use(t);
    else
        CHECK(e.code < 0 && e.text[0] && !strchr(e.text, '\n'));
    tokenizer_free(t);
    return 0;
}
