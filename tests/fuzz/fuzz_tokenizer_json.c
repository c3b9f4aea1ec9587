/* tokenizer.json: whatever the bytes, either one sentence says what is wrong, or the
 * tokenizer that came of it encodes and decodes without leaving its vocabulary. */
/* covers: models/tokenizer/tokenizer_load.c models/tokenizer/tokenizer_merges.c
 * models/tokenizer/tokenizer_components.c models/tokenizer/tokenizer_vocab.c */
#include "tests/fuzz/tokenizer_use.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct tokenizer *t = NULL;
    struct err e = {0};

    if (tokenizer_open_json(&t, (const char *)data, len, &e) == 0) {
        CHECK(tokenizer_vocab_size(t) > 0);
        check_use(t, " a <s> ab\xC3\xA9\xCC\x81 123 don't  ! \n\xF0\x9F\x99\x82");
        tokenizer_free(t);
    } else {
        CHECK(!t);
        check_refusal(&e);
    }
    return 0;
}
