/* What the fuzz targets of grammars do with one: compile it under small limits, draw a
 * text of it, and hold the engine to its word. */
#ifndef QUIRE_TESTS_FUZZ_GRAMMAR_USE_H
#define QUIRE_TESTS_FUZZ_GRAMMAR_USE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/constrain.h"

#define CHECK(x)                                                                  \
    do {                                                                          \
        if (!(x)) {                                                               \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x); \
            abort();                                                              \
        }                                                                         \
    } while (0)

enum { USE_WORDS = 256, USE_NAME = 264, USE_END, USE_TOKENS, USE_STEPS = 8 };

/* What compiling a grammar may take, and what the masks of one text may: much of each
 * for one input in sixteen, so that most take little time. */
enum { USE_WORK = 15000, USE_MUCH_WORK = 200000, USE_MUCH_EVERY = 16 };

static inline const char *use_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    static const char *const words[] = {"ab", "abc", "{\"", "\":", " \n", "\xc3\xa9", "12", "))"};
    static char bytes[256];

    (void)arg;
    *ret_len = 1;
    if (id >= USE_WORDS) {
        const char *text = id == USE_NAME ? "<a>" : id == USE_END ? "" : words[id - USE_WORDS];
        *ret_len = strlen(text);
        return text;
    }
    bytes[id] = (char)id;
    return &bytes[id];
}

static inline bool use_special(const void *arg, int32_t id)
{
    (void)arg;
    return id == USE_NAME;
}

static inline struct constrain_vocab *use_vocab(void)
{
    static struct constrain_vocab *v;
    static const int32_t eos = USE_END;
    struct constrain_tokens t = {
        .n = USE_TOKENS, .n_eos = 1, .eos = &eos, .bytes = use_bytes, .special = use_special};
    struct err e;

    CHECK(v || constrain_vocab_new(&v, &t, &e) == 0);
    return v;
}

/* Draw a text of the grammar, taking tokens back now and then, while its masks take no
 * more work than a hundred of most grammars do. */
static inline void use_walk(struct grammar *g, uint32_t drawn)
{
    enum { WORDS = (USE_TOKENS + 31) / 32 };
    uint32_t mask[WORDS], again[WORDS];
    struct constraint *c;
    struct err e;
    int64_t work = drawn % USE_MUCH_EVERY ? USE_WORK : USE_MUCH_WORK / 2;

    CHECK(constraint_new(&c, g, &e) == 0);
    for (int i = 0; i < USE_STEPS; i++) {
        int rc = constraint_mask(c, mask, &work);
        CHECK(rc == 0 || rc == ERR_FULL || (rc == CONSTRAINT_UNFINISHED && work <= 0));
        if (rc != 0) {
            break;
        }
        drawn = drawn * 1664525u + 1013904223u;
        int32_t id = (int32_t)((drawn >> 8) % USE_TOKENS);
        for (int32_t other = USE_WORDS - 1; other < USE_NAME; other++) {
            CHECK(constraint_allows(c, other) == (mask[other / 32] >> (other % 32) & 1));
        }
        CHECK(constraint_allows(c, id) == (mask[id / 32] >> (id % 32) & 1));
        while (!(mask[id / 32] >> (id % 32) & 1)) {
            id = (id + 1) % USE_TOKENS;
        }
        CHECK((mask[USE_END / 32] >> (USE_END % 32) & 1) == constraint_complete(c));
        CHECK(constraint_accept(c, id, &(int64_t){INT64_MAX}) == 0);
        if (drawn >> 30 == 0) {
            constraint_rollback(c, 1);
            CHECK(constraint_mask(c, again, &(int64_t){INT64_MAX}) == 0 &&
                  memcmp(mask, again, sizeof(mask)) == 0);
            CHECK(constraint_accept(c, id, &(int64_t){INT64_MAX}) == 0);
        }
        if (id == USE_END) {
            CHECK(constraint_ended(c, &(int64_t){INT64_MAX}));
            break;
        }
    }
    CHECK(constraint_bytes(c) <= 4096);
    constraint_free(c);
}

static inline void use_grammar(enum grammar_kind kind, const char *text, size_t len)
{
    struct grammar_limits l;
    struct grammar *g;
    struct err e = {0};
    uint32_t seed = 1;

    for (size_t i = 0; i < len; i++) {
        seed = seed * 31 + (uint8_t)text[i];
    }
    grammar_limits_init(&l);
    l.items = 4000;
    l.bytes = (size_t)1 << 20;
    l.work = seed % USE_MUCH_EVERY ? USE_WORK : USE_MUCH_WORK;
    int rc = grammar_new(&g, use_vocab(), kind, text, len, &l, &e);
    CHECK(rc == 0 || rc == ERR_INVALID || rc == ERR_UNSUPPORTED);
    if (rc != 0) {
        CHECK(e.code == rc && e.text[0] != '\0');
        return;
    }
    use_walk(g, seed);
    grammar_unref(g);
}

#endif
