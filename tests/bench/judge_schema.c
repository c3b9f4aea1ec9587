/* Compiles JSON Schemas and tries texts against them, for scripts/judge-maskbench and
 * scripts/judge-json-schema-suite:
 *
 *     judge_schema [DIR]     the vocabulary of a model's directory; none: one token a byte
 *
 * It reads frames (a letter, uint32 length, bytes) and answers each with a line:
 *
 *     S schema    ok MICROSECONDS BYTES, or error CODE MESSAGE
 *     T text      yes or no, then the tokens taken: is every token allowed, and the text
 *                 complete
 *     M text      the same, and the time of each mask and of taking the token behind it,
 *                 in nanoseconds
 *     R           ok: back to the start
 *     P text      how many bytes were taken, up to the first that is not allowed (needs the
 *                 vocabulary of bytes)
 *     B count     ok: as many bytes are taken back; the count is in decimal digits
 *     E           yes or no: whether the text so far is complete
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/constrain/constrain.h"
#include "models/tokenizer/tokenizer.h"

enum { FRAME_MAX = 64 << 20 };

struct judge {
    struct tokenizer *t;
    struct constrain_vocab *v;
    struct grammar *g;
    struct constraint *c;
    uint32_t *mask;
    struct grammar_limits limits;
    int32_t n; /* ids */
};

/* Of this thread's processor time: others may have the processor, too. */
static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static const char *bytes_of(const void *arg, int32_t id, size_t *ret_len)
{
    return tokenizer_bytes(arg, id, ret_len);
}

static bool is_special(const void *arg, int32_t id)
{
    return tokenizer_is_special(arg, id);
}

static bool open_vocab(struct judge *j, const char *dir)
{
    struct err e = {0};
    int rc = dir ? tokenizer_open(&j->t, dir, &e) : tokenizer_open_bytes(&j->t, &e);

    if (rc == 0) {
        int32_t eos = tokenizer_eos(j->t);
        j->n = tokenizer_vocab_size(j->t);
        struct constrain_tokens tokens = {.n = j->n,
                                          .n_eos = eos >= 0 ? 1 : 0,
                                          .eos = &eos,
                                          .bytes = bytes_of,
                                          .special = is_special,
                                          .arg = j->t};
        rc = constrain_vocab_new(&j->v, &tokens, &e);
        j->mask = calloc((size_t)j->n / 32 + 1, sizeof(*j->mask));
    }
    if (rc != 0) {
        fprintf(stderr, "%s\n", e.text);
    }
    return rc == 0 && j->mask;
}

static void reset(struct judge *j)
{
    struct err e = {0};

    constraint_free(j->c);
    j->c = NULL;
    if (j->g && constraint_new(&j->c, j->g, &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
    }
}

static void compile(struct judge *j, const char *text, size_t len)
{
    struct err e = {0};

    constraint_free(j->c);
    grammar_unref(j->g);
    j->c = NULL;
    j->g = NULL;
    int64_t start = now_ns();
    int rc = grammar_new(&j->g, j->v, GRAMMAR_JSON_SCHEMA, text, len, &j->limits, &e);
    int64_t took = (now_ns() - start) / 1000;
    if (rc != 0) {
        printf("error %d %s\n", rc, e.text);
        return;
    }
    reset(j);
    printf("ok %lld %zu\n", (long long)took, grammar_bytes(j->g));
}

static void try_text(struct judge *j, const char *text, size_t len, bool masks)
{
    struct token_list ids = {0};
    struct err e = {0};
    int32_t n = 0;

    reset(j);
    tokenizer_encode(j->t, text, len, false, INT32_MAX, &ids, &e);
    int64_t *took = calloc((size_t)ids.n + 1, sizeof(*took));
    bool fine = j->c && took;
    for (; fine && n < ids.n; n++) {
        int64_t start = now_ns();
        if (masks) {
            fine = constraint_mask(j->c, j->mask, &(int64_t){INT64_MAX}) == 0 &&
                   (j->mask[ids.id[n] / 32] >> (ids.id[n] % 32) & 1);
        }
        fine = constraint_accept(j->c, ids.id[n], &(int64_t){INT64_MAX}) == 0 && fine;
        constraint_settle(j->c);
        took[n] = now_ns() - start;
        if (!fine) {
            break;
        }
    }
    fine = fine && constraint_complete(j->c);
    printf("%s %d", fine ? "yes" : "no", n);
    for (int32_t i = 0; masks && took && i < MIN(n + 1, ids.n); i++) {
        printf(" %lld", (long long)took[i]);
    }
    putchar('\n');
    free(took);
    token_list_release(&ids);
}

static void push(struct judge *j, const char *text, size_t len)
{
    size_t n = 0;

    int rc = 0;
    while (j->c && n < len &&
           (rc = constraint_accept(j->c, (uint8_t)text[n], &(int64_t){INT64_MAX})) == 0) {
        n++;
    }
    printf("%zu %d\n", n, rc);
}

static void answer(struct judge *j, char kind, const char *text, size_t len)
{
    switch (kind) {
    case 'S':
        compile(j, text, len);
        break;
    case 'T':
    case 'M':
        try_text(j, text, len, kind == 'M');
        break;
    case 'R':
        reset(j);
        puts("ok");
        break;
    case 'P':
        push(j, text, len);
        break;
    case 'B':
        constraint_rollback(j->c, atoi(text));
        puts("ok");
        break;
    case 'E':
        puts(j->c && constraint_complete(j->c) ? "yes" : "no");
        break;
    default:
        puts("error");
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct judge j = {0};
    char kind;
    uint32_t len;

    if (!open_vocab(&j, argc > 1 ? argv[1] : NULL)) {
        return 1;
    }
    grammar_limits_init(&j.limits);
    while (fread(&kind, 1, 1, stdin) == 1 && fread(&len, sizeof(len), 1, stdin) == 1) {
        char *text = len <= FRAME_MAX ? calloc((size_t)len + 1, 1) : NULL;
        if (!text || fread(text, 1, len, stdin) != len) {
            free(text);
            break;
        }
        answer(&j, kind, text, len);
        free(text);
    }
    constraint_free(j.c);
    grammar_unref(j.g);
    constrain_vocab_free(j.v);
    tokenizer_free(j.t);
    free(j.mask);
    return 0;
}
