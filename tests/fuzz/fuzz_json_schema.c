/* Schemas from anyone, and texts against them: a schema is compiled or refused with one
 * sentence inside its limits; what a mask allows is accepted, and nothing else. The
 * input is a schema, a NUL and bytes that choose a text; without a NUL a few are drawn
 * from its end. max_len: 384 covers: engine/constrain/json_schema/doc.c
 * engine/constrain/json_schema/refs.c
 * engine/constrain/json_schema/read.c engine/constrain/json_schema/keywords.c
 * engine/constrain/json_schema/properties.c engine/constrain/json_schema/sets.c
 * engine/constrain/json_schema/objects.c engine/constrain/json_schema/number.c
 * engine/constrain/json_schema/format.c engine/constrain/json_schema/emit.c
 * engine/constrain/json_schema/emit_object.c engine/constrain/json_schema/emit_array.c
 * engine/constrain/json_schema/schema.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/constrain.h"

#define CHECK(x)                                                         \
    do {                                                                 \
        if (!(x)) {                                                      \
            fprintf(stderr, "fuzz_json_schema: %s does not hold\n", #x); \
            abort();                                                     \
        }                                                                \
    } while (0)

enum { EOS = 256, STEPS = 16, MASK_WORDS = 9, MASK_WORK = 50000, COMPILE_WORK = 100000 };

static char letters[256];

static const char *bytes_of(const void *arg, int32_t id, size_t *ret_len)
{
    (void)arg;
    *ret_len = id < EOS;
    return &letters[id % 256];
}

static bool is_special(const void *arg, int32_t id)
{
    (void)arg;
    return id == EOS;
}

static struct constrain_vocab *open_vocab(void)
{
    static const int32_t eos = EOS;
    struct constrain_tokens t = {
        .n = EOS + 1, .n_eos = 1, .eos = &eos, .bytes = bytes_of, .special = is_special};
    struct constrain_vocab *v;
    struct err e = {0};

    for (int i = 0; i < 256; i++) {
        letters[i] = (char)i;
    }
    CHECK(constrain_vocab_new(&v, &t, &e) == 0);
    return v;
}

/* Write a text: each byte of the input chooses one of the bytes that are allowed. */
static void write_text(struct grammar *g, const uint8_t *data, size_t size)
{
    struct constraint *c;
    uint32_t mask[MASK_WORDS];
    struct err e = {0};
    int64_t work = MASK_WORK;

    CHECK(constraint_new(&c, g, &e) == 0);
    for (size_t i = 0; i < size && i < STEPS; i++) {
        int32_t id = data[i], n = 0;
        memset(mask, 0, sizeof(mask));
        if (constraint_mask(c, mask, &work) != 0) {
            break;
        }
        while (n < EOS + 1 && !(mask[id / 32] >> (id % 32) & 1)) {
            id = (id + 1) % (EOS + 1);
            n++;
        }
        CHECK(n < EOS + 1);
        CHECK(id != EOS || constraint_complete(c));
        int rc = constraint_accept(c, id, &(int64_t){INT64_MAX});
        CHECK(rc == 0 || rc == ERR_FULL || rc == ERR_NOMEM);
        if (rc != 0 || id == EOS) {
            break;
        }
    }
    constraint_free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct constrain_vocab *v;
    struct grammar_limits l;
    struct grammar *g = NULL;
    struct err e = {0};

    v = v ? v : open_vocab();
    grammar_limits_init(&l);
    l.bytes = (size_t)4 << 20;
    l.work = COMPILE_WORK;
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t len = nul ? (size_t)(nul - data) : size;
    int rc = grammar_new(&g, v, GRAMMAR_JSON_SCHEMA, size ? (const char *)data : "", len, &l, &e);
    CHECK(rc == 0 ? g && !e.code : e.code == rc && e.text[0]);
    if (rc == 0) {
        size_t rest = nul ? size - len - 1 : MIN(size, 16);
        write_text(g, data + size - rest, rest);
        grammar_unref(g);
    }
    return 0;
}
