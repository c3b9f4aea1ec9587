/* tokenizer.json: whatever the bytes, either one sentence says what is wrong, or the tokenizer that came of it encodes and
 * decodes without leaving its vocabulary. */
/* covers: models/tokenizer_load.c models/tokenizer_merges.c models/tokenizer_parts.c models/tokenizer_vocab.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/tokenizer_internal.h"

#define CHECK(x)                                                            \
    do {                                                                    \
        if (!(x)) {                                                         \
            fprintf(stderr, "fuzz_tokenizer_json: %s does not hold\n", #x); \
            abort();                                                        \
        }                                                                   \
    } while (0)

static void use(const struct tokenizer *t)
{
    static const char TEXT[] = " a <s> ab\xC3\xA9\xCC\x81 123 don't  ! \n\xF0\x9F\x99\x82";
    struct token_list l = {0};
    struct err e = {0};
    struct buf out;
    buf_init(&out, 1 << 20);
    if (tokenizer_encode(t, TEXT, sizeof TEXT - 1, true, 1000, &l, &e) == 0) {
        for (int32_t i = 0; i < l.n; i++)
            CHECK(l.id[i] >= 0 && l.id[i] < tokenizer_vocab_size(t));
        if (tokenizer_decode(t, l.id, l.n, false, &out, &e) == 0)
            CHECK(out.len == 0 || utf8_valid(out.data, out.len));
    } else {
        CHECK(l.n == 0 && e.text[0]);
    }
    buf_release(&out);
    token_list_release(&l);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (tokenizer_open_json(&t, (const char *)data, len, &e) == 0) {
        CHECK(tokenizer_vocab_size(t) > 0);
        use(t);
        tokenizer_free(t);
    } else {
        CHECK(!t && e.code < 0 && e.text[0] && !strchr(e.text, '\n'));
    }
    return 0;
}
