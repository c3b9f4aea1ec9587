/* Clients' text through the demo model's tokenizer: what is encoded decodes to itself,
 * at once and streamed; what is not UTF-8 is refused; special tokens in the text come
 * back too. And the hand-written scanners cut as PCRE2 does. Run from the repository's
 * root. */
/* covers: models/tokenizer/tokenizer_scan.c config/base/utf8.c
 * models/tokenizer/tokenizer_byte_alphabet.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "models/tokenizer/tokenizer_internal.h"

#define CHECK(x)                                                    \
    do {                                                            \
        if (!(x)) {                                                 \
            fprintf(stderr, "fuzz_encode: %s does not hold\n", #x); \
            abort();                                                \
        }                                                           \
    } while (0)

static void check_stream(const struct tokenizer *t, const struct token_list *l, const char *text,
                         size_t len)
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

static const char *const REGEX[] = {
    GPT2_PATTERN,
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "\\p{L}", "\\p{N}"};
enum { N_SCANNERS = 3, N_REGEX = ARRAY_LEN(REGEX) };

/* Characters that one library's Unicode is too old to know are not its fault. */
static bool tables_agree(struct pattern *p, struct encoder *enc, const char *text, size_t len)
{
    size_t start, end;
    int n;

    for (size_t at = 0; at < len; at += (size_t)n) {
        utf8proc_category_t k = utf8proc_category(utf8_get((const uint8_t *)text + at, &n));
        bool letter = k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
        bool number = k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO;
        if (pattern_find(&p[N_SCANNERS], enc, text + at, (size_t)n, 0, &start, &end) != letter ||
            pattern_find(&p[N_SCANNERS + 1], enc, text + at, (size_t)n, 0, &start, &end) !=
                number) {
            return false;
        }
    }
    return true;
}

static void check_scanners(const char *text, size_t len)
{
    static struct pattern p[N_REGEX];
    struct err e = {0};
    struct encoder enc = {.e = &e};
    size_t start, end;

    for (int i = 0; i < N_REGEX && !p[i].code; i++) {
        CHECK(pattern_compile(&p[i], REGEX[i], strlen(REGEX[i]), &e) == 0);
    }
    for (int i = 0; i < N_SCANNERS && tables_agree(p, &enc, text, len); i++) {
        for (size_t at = 0; at < len; at = end) {
            CHECK(pattern_find(&p[i], &enc, text, len, at, &start, &end) == 1 && start == at);
            CHECK(p[i].scan((const uint8_t *)text + at, len - at) == end - start);
        }
    }
    pcre2_match_data_free(enc.match);
    pcre2_match_context_free(enc.limits);
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
    int rc = tokenizer_encode(t, text, len, false, INT32_MAX, &l, &e);
    CHECK((rc == 0) == utf8_valid(text, len));
    if (rc == 0) {
        struct buf out;
        buf_init(&out, 1 << 22);
        CHECK(tokenizer_decode(t, l.id, l.n, false, &out, &e) == 0);
        CHECK(out.len == len && (len == 0 || memcmp(out.data, text, len) == 0));
        buf_release(&out);
        check_stream(t, &l, text, len);
        check_scanners(text, len);
    }
    token_list_release(&l);
    return 0;
}
