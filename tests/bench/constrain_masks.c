/* Masks of constrained decoding: how long they take with a real vocabulary.
 *
 *     build/tests/bench/constrain_masks MODEL_DIR CASES [ROUNDS]
 *
 * CASES has lines "KIND<tab>GRAMMAR<tab>TEXT": regex, choice, lark, json_object or
 * json_schema, the grammar, and a text of it. Each text is encoded as the model does
 * and walked through token by token, with a mask before each. Prints, in microseconds,
 * the time from the grammar's text to the first mask, and of the other masks; for each
 * the median, the 99th percentile and the worst; and the bytes of a state behind each
 * token. With ROUNDS, texts are walked so many
 * times with one grammar, as many requests would. A line without tabs is a JSON Schema:
 * what is walked is drawn, ROUNDS texts of DRAWN tokens, each one of those allowed with
 * the same chance, as a model without training would write them.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/constrain/constrain.h"
#include "kernels/batch.h"
#include "models/tokenizer/tokenizer.h"

enum { DRAWN = 256 }; /* tokens of a text that is drawn */

struct times {
    double *us;
    size_t n, cap;
};

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void add_time(struct times *t, double us)
{
    if (t->n == t->cap) {
        t->cap = t->cap ? t->cap * 2 : 1024;
        t->us = realloc(t->us, t->cap * sizeof(*t->us));
        if (!t->us) {
            exit(1);
        }
    }
    t->us[t->n++] = us;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void print_times(const char *what, const char *unit, struct times *t)
{
    if (t->n == 0) {
        return;
    }
    qsort(t->us, t->n, sizeof(*t->us), by_value);
    double sum = 0;
    for (size_t i = 0; i < t->n; i++) {
        sum += t->us[i];
    }
    printf("%-12s %8zu   mean %9.1f   p50 %9.1f   p90 %9.1f   p99 %9.1f   worst %9.1f %s\n", what,
           t->n, sum / (double)t->n, t->us[t->n / 2], t->us[t->n * 9 / 10], t->us[t->n * 99 / 100],
           t->us[t->n - 1], unit);
}

static const char *token_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    return tokenizer_bytes(arg, id, ret_len);
}

static bool token_special(const void *arg, int32_t id)
{
    return tokenizer_is_special(arg, id);
}

static const char *const kinds[] = {"json_object", "json_schema", "regex", "choice", "lark"};

struct bench {
    const struct tokenizer *tokenizer;
    struct constrain_vocab *vocab;
    uint32_t *mask;
    int32_t n_ids;
    uint64_t drawn;                    /* state of what is drawn */
    struct times first, next;          /* first masks, the others */
    struct times taken;                /* of taking a drawn token */
    struct times bytes;                /* of a state behind a token */
    int64_t refused, rejected, tokens; /* grammars, texts, tokens walked */
    int64_t work, most_work;           /* of the masks of given texts, and of one */
    int rounds;
};

/* Walk through the text; false: a token is not allowed. `start_us`: when the grammar's
 * text arrived. */
static bool walk(struct bench *b, struct grammar *g, const struct token_list *ids, double start_us)
{
    struct constraint *c;
    struct err e = {0};
    bool ok = constraint_new(&c, g, &e) == 0;

    for (int32_t i = 0; ok && i <= ids->n; i++) {
        double at = i == 0 && start_us > 0 ? start_us : now_us();
        int64_t work = INT64_MAX;
        ok = constraint_mask(c, b->mask, &work) == 0;
        b->most_work = MAX(b->most_work, INT64_MAX - work);
        b->work += INT64_MAX - work;
        add_time(i == 0 && start_us > 0 ? &b->first : &b->next, now_us() - at);
        if (!ok || i == ids->n) {
            ok = ok && constraint_complete(c);
            break;
        }
        b->tokens++;
        ok = b->mask[ids->id[i] / 32] >> (ids->id[i] % 32) & 1;
        ok = ok && constraint_accept(c, ids->id[i], &(int64_t){INT64_MAX}) == 0;
        constraint_settle(c);
        add_time(&b->bytes, (double)constraint_bytes(c));
    }
    constraint_free(c);
    return ok;
}

static void run_case(struct bench *b, int kind, const char *grammar, const char *text)
{
    struct grammar_limits limits;
    struct grammar *g;
    struct token_list ids = {0};
    struct err e = {0};

    grammar_limits_init(&limits);
    if (tokenizer_encode(b->tokenizer, text, strlen(text), false, 1 << 20, &ids, &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        exit(1);
    }
    double start = now_us();
    if (grammar_new(&g, b->vocab, (enum grammar_kind)kind, grammar, strlen(grammar), &limits, &e)) {
        b->refused++;
        printf("refused: %s: %.200s\n", e.text, grammar);
    } else {
        bool ok = walk(b, g, &ids, start);
        for (int i = 1; i < b->rounds && ok; i++) {
            ok = walk(b, g, &ids, 0);
        }
        if (!ok) {
            b->rejected++;
            printf("rejected: %.200s: %.200s\n", grammar, text);
        }
        grammar_unref(g);
    }
    token_list_release(&ids);
}

/* A text of tokens that are drawn, or its beginning. */
static void walk_drawn(struct bench *b, struct grammar *g)
{
    struct constraint *c;
    struct err e = {0};

    if (constraint_new(&c, g, &e) != 0) {
        exit(1);
    }
    for (int i = 0; i < DRAWN && !constraint_ended(c, &(int64_t){INT64_MAX}); i++) {
        double at = now_us();
        int rc = constraint_mask(c, b->mask, &(int64_t){INT64_MAX});
        int32_t n = 0, words = mask_words(b->n_ids), chosen = -1;
        add_time(&b->next, now_us() - at);
        for (int32_t w = 0; w < words; w++) {
            n += __builtin_popcount(b->mask[w]);
        }
        b->drawn = b->drawn * 6364136223846793005u + 1442695040888963407u;
        n = n > 0 ? (int32_t)((b->drawn >> 33) % (uint64_t)n) : -1;
        for (int32_t id = 0; n >= 0 && id < b->n_ids; id++) {
            bool allowed = b->mask[id / 32] >> (id % 32) & 1;
            chosen = allowed && n == 0 ? id : chosen;
            n -= allowed;
        }
        at = now_us();
        if (rc != 0 || chosen < 0 || constraint_accept(c, chosen, &(int64_t){INT64_MAX}) != 0) {
            b->rejected++;
            break;
        }
        constraint_settle(c);
        add_time(&b->taken, now_us() - at);
        add_time(&b->bytes, (double)constraint_bytes(c));
        b->tokens++;
    }
    constraint_free(c);
}

static void run_drawn(struct bench *b, const char *schema)
{
    struct grammar_limits limits;
    struct grammar *g;
    struct err e = {0};

    grammar_limits_init(&limits);
    if (grammar_new(&g, b->vocab, GRAMMAR_JSON_SCHEMA, schema, strlen(schema), &limits, &e) != 0) {
        b->refused++;
        printf("refused: %s: %.200s\n", e.text, schema);
        return;
    }
    for (int i = 0; i < b->rounds; i++) {
        walk_drawn(b, g);
    }
    grammar_unref(g);
}

static void run_file(struct bench *b, FILE *f)
{
    char *line = NULL;
    size_t cap = 0;

    while (getline(&line, &cap, f) > 0) {
        line[strcspn(line, "\n")] = '\0';
        if (!strchr(line, '\t')) {
            run_drawn(b, line);
            continue;
        }
        char *grammar = strchr(line, '\t'), *text = grammar ? strchr(grammar + 1, '\t') : NULL;
        if (!text) {
            continue;
        }
        *grammar++ = '\0';
        *text++ = '\0';
        for (int k = 0; k < (int)ARRAY_LEN(kinds); k++) {
            if (strcmp(line, kinds[k]) == 0) {
                run_case(b, k, grammar, text);
            }
        }
    }
    free(line);
}

int main(int argc, char **argv)
{
    struct tokenizer *t;
    struct err e = {0};
    FILE *f = argc > 2 ? fopen(argv[2], "r") : NULL;

    if (!f) {
        fprintf(stderr, "usage: constrain_masks MODEL_DIR CASES [ROUNDS]\n");
        return 2;
    }
    if (tokenizer_open(&t, argv[1], &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        return 1;
    }
    int32_t eos = tokenizer_eos(t);
    struct constrain_tokens tokens = {.n = tokenizer_vocab_size(t),
                                      .n_eos = eos >= 0,
                                      .eos = &eos,
                                      .bytes = token_bytes,
                                      .special = token_special,
                                      .arg = t};
    struct bench b = {.tokenizer = t, .n_ids = tokens.n, .rounds = argc > 3 ? atoi(argv[3]) : 1};
    double start = now_us();
    if (constrain_vocab_new(&b.vocab, &tokens, &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        return 1;
    }
    printf("vocabulary of %d tokens: %.1f ms\n", tokens.n, (now_us() - start) / 1e3);
    b.mask = calloc((size_t)tokens.n / 32 + 1, sizeof(*b.mask));
    run_file(&b, f);
    printf("%lld tokens; %lld grammars refused, %lld texts rejected\n", (long long)b.tokens,
           (long long)b.refused, (long long)b.rejected);
    printf("%lld units of work for the masks of given texts, %lld for one at most\n",
           (long long)b.work, (long long)b.most_work);
    print_times("first mask", "us", &b.first);
    print_times("masks", "us", &b.next);
    print_times("tokens", "us", &b.taken);
    print_times("state", "bytes", &b.bytes);
    free(b.first.us);
    free(b.next.us);
    free(b.taken.us);
    free(b.bytes.us);
    free(b.mask);
    constrain_vocab_free(b.vocab);
    tokenizer_free(t);
    fclose(f);
    return 0;
}
