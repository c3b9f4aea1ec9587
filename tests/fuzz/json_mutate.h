/* A mutator for inputs that are JSON bodies: it changes the value's tree, so that most
 * of what it makes is JSON still and reaches what stands behind the reader. One input
 * in eight, and what is no JSON or would become too long, is changed as bytes. */
#ifndef QUIRE_TESTS_FUZZ_JSON_MUTATE_H
#define QUIRE_TESTS_FUZZ_JSON_MUTATE_H

#include <stdlib.h>
#include <string.h>

#include "server/api/json_fields.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);

enum { MUTATE_NODES = 256, MUTATE_STRING = 256, MUTATE_BYTES_EVERY = 8, MUTATE_CHANGES = 2 };

/* The nodes of a tree, the root first; behind MUTATE_NODES none are changed. */
struct mutate_tree {
    cJSON *node[MUTATE_NODES], *parent[MUTATE_NODES];
    int n;
    uint32_t drawn; /* the state of the draws */
};

static inline uint32_t mutate_draw(struct mutate_tree *t, uint32_t n)
{
    t->drawn = t->drawn * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)t->drawn * n) >> 32);
}

static inline void mutate_list(struct mutate_tree *t, cJSON *node, cJSON *parent)
{
    if (t->n == MUTATE_NODES) {
        return;
    }
    t->parent[t->n] = parent;
    t->node[t->n++] = node;
    for (cJSON *v = node->child; v; v = v->next) {
        mutate_list(t, v, node);
    }
}

/* A copy of cJSON's ends at the first NUL of a string. */
static inline void mutate_set_lengths(cJSON *v)
{
    if (cJSON_IsString(v)) {
        v->valueint = (int)strlen(v->valuestring);
    }
    for (cJSON *m = v->child; m; m = m->next) {
        mutate_set_lengths(m);
    }
}

/* A string of one of the words, of bytes that libFuzzer changes, a plain value, or a
 * copy of another node; NULL when out of memory. */
static inline cJSON *mutate_value(struct mutate_tree *t, const char *const *words, int n_words)
{
    static const char *const plain[] = {
        "null",    "true", "false", "0",  "1",    "-1",   "0.5",           "1e400",
        "65536.0", "\"\"", "[]",    "{}", "[[]]", "[{}]", "\"a\\u0000b\"", "9223372036854775808"};
    uint32_t way = mutate_draw(t, 3);
    struct err e = {0};
    cJSON *v = NULL;

    if (way == 0) {
        const char *text = plain[mutate_draw(t, ARRAY_LEN(plain))];
        return json_parse(&v, text, strlen(text), &e) == 0 ? v : NULL;
    }
    if (way == 1) {
        const char *word = words[mutate_draw(t, (uint32_t)n_words)];
        v = cJSON_CreateString(word);
        if (v) {
            v->valueint = (int)strlen(word);
        }
        return v;
    }
    v = cJSON_Duplicate(t->node[mutate_draw(t, (uint32_t)t->n)], true);
    if (v) {
        mutate_set_lengths(v);
        free(v->string);
        v->string = NULL;
    }
    return v;
}

static inline void mutate_name(cJSON *v, const char *name)
{
    char *copy = strdup(name);

    free(v->string);
    v->string = copy;
}

/* Change a string's bytes. */
static inline void mutate_string(cJSON *v)
{
    size_t len = MIN(json_string_len(v), MUTATE_STRING);
    char *text = malloc(MUTATE_STRING + 1);

    if (!text) {
        return;
    }
    memcpy(text, v->valuestring, len);
    len = LLVMFuzzerMutate((uint8_t *)text, len, MUTATE_STRING);
    text[len] = '\0';
    free(v->valuestring);
    v->valuestring = text;
    v->valueint = (int)len;
}

/* One change: of a node, or of the list or object that it is in. */
static inline void mutate_once(struct mutate_tree *t, const char *const *words, int n_words)
{
    int i = (int)mutate_draw(t, (uint32_t)t->n);
    cJSON *v = t->node[i], *parent = t->parent[i], *made;
    uint32_t way = mutate_draw(t, 6);

    if (way == 0 && cJSON_IsString(v)) {
        mutate_string(v);
    } else if (way == 1 && v->string) {
        mutate_name(v, words[mutate_draw(t, (uint32_t)n_words)]);
    } else if (way == 2 && parent) {
        cJSON_Delete(cJSON_DetachItemViaPointer(parent, v));
    } else if ((made = mutate_value(t, words, n_words))) {
        const char *name = words[mutate_draw(t, (uint32_t)n_words)];
        if (cJSON_IsObject(v) && way > 3) {
            cJSON_AddItemToObject(v, name, made);
        } else if (cJSON_IsArray(v) && way > 3) {
            cJSON_AddItemToArray(v, made);
        } else if (!parent) {
            cJSON_Delete(made);
        } else {
            if (v->string) {
                mutate_name(made, v->string);
            }
            cJSON_ReplaceItemViaPointer(parent, v, made);
        }
    }
}

/* Change the JSON text in data [size, at most max]; returns its new size. `words` are
 * names of members and values that its readers know. */
static inline size_t mutate_json(uint8_t *data, size_t size, size_t max, uint32_t seed,
                                 const char *const *words, int n_words)
{
    struct mutate_tree t = {.drawn = seed};
    struct err e = {0};
    struct buf b;
    cJSON *root;

    if (mutate_draw(&t, MUTATE_BYTES_EVERY) == 0 ||
        json_parse(&root, (const char *)data, size, &e) != 0) {
        return LLVMFuzzerMutate(data, size, max);
    }
    for (uint32_t n = 1 + mutate_draw(&t, MUTATE_CHANGES); n > 0; n--) {
        t.n = 0;
        mutate_list(&t, root, NULL);
        mutate_once(&t, words, n_words);
    }
    buf_init(&b, max);
    json_put(&b, root);
    cJSON_Delete(root);
    size_t len = b.len;
    bool fits = !b.failed && len > 0;
    if (fits) {
        memcpy(data, b.data, len);
    }
    buf_release(&b);
    return fits ? len : LLVMFuzzerMutate(data, size, max);
}

#endif
