/* SentencePiece models: whatever the bytes, a sentence of refusal or a tokenizer that
 * stays inside its vocabulary. */
/* covers: models/tokenizer/tokenizer_spm.c models/tokenizer/tokenizer_unigram.c */
#include "tests/fuzz/tokenizer_use.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct err e = {0};
    struct tokenizer *t = calloc(1, sizeof(*t));

    if (!t) {
        return 0;
    }
    if (tokenizer_parse_spm(t, data, len, &e) == 0) {
        check_use(t, " the cat  <s> ab\xC3\xA9 123 don't  ! \n\xF0\x9F\x99\x82");
    } else {
        check_refusal(&e);
    }
    tokenizer_free(t);
    return 0;
}
