/* Clients' text through the demo model's tokenizer: what is encoded decodes to itself, at once and streamed; what is not UTF-8
 * is refused; special tokens in the text come back too. Run from the repository's root. */
/* covers: models/tokenizer_bpe.c models/tokenizer_scan.c models/tokenizer_added.c models/tokenizer_utf8.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/tokenizer_internal.h"

#define CHECK(x)                                                    \
    do {                                                            \
        if (!(x)) {                                                 \
            fprintf(stderr, "fuzz_encode: %s does not hold\n", #x); \
            abort();                                                \
        }                                                           \
    } while (0)

static void check_stream(const struct tokenizer *t, const struct token_list *l, const char *text, size_t len)
{
    struct detokenizer d;
    struct buf out;
    buf_init(&out, 1 << 22);
    detokenizer_init(&d, t, false, true);
    for (int32_t i = 0; i < l->n; i++) {
        CHECK(detokenizer_push(&d, l->id[i], &out) == 0);
        CHECK(out.len <= len && (out.len == 0 || memcmp(out.data, text, out.len) == 0));
    }
    CHECK(detokenizer_finish(&d, &out) == 0 && out.len == len);
    buf_release(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static struct tokenizer *t;
    struct err e = {0};
    struct token_list l = {0};
    const char *text = (const char *)data;
    if (!t && tokenizer_open(&t, "models/demo", &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        abort();
    }
    int code = tokenizer_encode(t, text, len, false, INT32_MAX, &l, &e);
    CHECK((code == 0) == utf8_valid(text, len));
    if (code == 0) {
        struct buf out;
        buf_init(&out, 1 << 22);
        CHECK(tokenizer_decode(t, l.id, l.n, false, &out, &e) == 0);
        CHECK(out.len == len && (len == 0 || memcmp(out.data, text, len) == 0));
        buf_release(&out);
        check_stream(t, &l, text, len);
    }
    token_list_release(&l);
    return 0;
}
