/* The vocabulary: all token texts in one block of memory, and a hash map from a text to
 * its id. */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

uint32_t vocab_hash(const char *text, size_t len)
{
    return (uint32_t)(XXH3_64bits(text, len) >> 32);
}

/* Rehash into `cap` slots, a power of two; texts are not read. */
static int map_resize(struct token_map *m, uint32_t cap)
{
    struct token_slot *slot = malloc(cap * sizeof(*slot));

    if (!slot) {
        return ERR_NOMEM;
    }
    for (uint32_t i = 0; i < cap; i++) {
        slot[i].id = -1;
    }
    for (uint32_t i = 0; m->slot && i <= m->mask; i++) {
        if (m->slot[i].id < 0) {
            continue;
        }
        uint32_t k = m->slot[i].hash & (cap - 1);
        while (slot[k].id >= 0) {
            k = (k + 1) & (cap - 1);
        }
        slot[k] = m->slot[i];
    }
    free(m->slot);
    m->slot = slot;
    m->mask = cap - 1;
    return 0;
}

int vocab_reserve(struct tokenizer *t, size_t n)
{
    uint32_t cap = t->map.slot ? t->map.mask + 1 : 1024;

    while (cap < 2 * MIN(n, (size_t)LIMIT_VOCAB)) {
        cap *= 2;
    }
    return t->map.slot && cap == t->map.mask + 1 ? 0 : map_resize(&t->map, cap);
}

int vocab_cut(struct tokenizer *t, int32_t n)
{
    for (uint32_t i = 0; t->map.slot && i <= t->map.mask; i++) {
        if (t->map.slot[i].id >= n) {
            t->map.slot[i].id = -1;
            t->map.n--;
        }
    }
    t->n_vocab = MIN(t->n_vocab, n);
    return t->map.slot ? map_resize(&t->map, t->map.mask + 1) : 0;
}

bool vocab_is(const struct tokenizer *t, int32_t id, const char *text, size_t len)
{
    const struct token *k = &t->token[id];

    return k->text_len == len && memcmp(t->text + k->text_off, text, len) == 0;
}

/* The slot of a text, or the free slot for it; at least half of the slots are free. */
static struct token_slot *find_slot(const struct tokenizer *t, const char *text, size_t len,
                                    uint32_t hash)
{
    const struct token_map *m = &t->map;

    for (uint32_t k = hash & m->mask;; k = (k + 1) & m->mask) {
        struct token_slot *s = &m->slot[k];
        if (s->id < 0 || (s->hash == hash && s->text_len == len &&
                          memcmp(t->text + s->text_off, text, len) == 0)) {
            return s;
        }
    }
}

int32_t vocab_find(const struct tokenizer *t, const char *text, size_t len)
{
    return t->map.slot ? find_slot(t, text, len, vocab_hash(text, len))->id : -1;
}

int32_t vocab_find_hashed(const struct tokenizer *t, const char *text, size_t len, uint32_t hash)
{
    return t->map.slot ? find_slot(t, text, len, hash)->id : -1;
}

void vocab_fetch_slot(const struct tokenizer *t, uint32_t hash)
{
    if (t->map.slot) {
        __builtin_prefetch(&t->map.slot[hash & t->map.mask]);
    }
}

void vocab_fetch_text(const struct tokenizer *t, uint32_t hash)
{
    if (t->map.slot && t->map.slot[hash & t->map.mask].id >= 0) {
        __builtin_prefetch(t->text + t->map.slot[hash & t->map.mask].text_off);
    }
}

int vocab_text(struct tokenizer *t, const char *text, size_t len, uint32_t *ret_off, struct err *e)
{
    if (len > UINT32_MAX - t->text_len) {
        return err_set(e, ERR_INVALID, "the vocabulary's texts are over 4 GiB");
    }
    if (t->text_len + len >= t->text_cap) { /* an empty text needs an address too */
        size_t cap = MAX(t->text_cap * 2, t->text_len + len + 65536);
        char *p = realloc(t->text, cap);
        if (!p) {
            return err_nomem(e, "the vocabulary");
        }
        t->text = p;
        t->text_cap = cap;
    }
    *ret_off = (uint32_t)t->text_len;
    if (len > 0) {
        memcpy(t->text + t->text_len, text, len);
    }
    t->text_len += len;
    return 0;
}

int vocab_reserve_ids(struct tokenizer *t, int32_t n, struct err *e)
{
    if (n > t->token_cap) {
        int32_t cap = MAX(MAX(t->token_cap * 2, n), 1024);
        struct token *p = realloc(t->token, (size_t)cap * sizeof(*p));
        if (!p) {
            return err_nomem(e, "the vocabulary");
        }
        memset(p + t->token_cap, 0, (size_t)(cap - t->token_cap) * sizeof(*p));
        t->token = p;
        t->token_cap = cap;
    }
    t->n_vocab = MAX(t->n_vocab, n);
    return 0;
}

int vocab_add(struct tokenizer *t, int32_t id, const char *text, size_t len, struct err *e)
{
    if (id < 0 || id >= LIMIT_VOCAB) {
        return err_set(e, ERR_INVALID, "token \"%.40s\" has the id %d; 0 to %d are allowed", text,
                       id, LIMIT_VOCAB - 1);
    }
    int rc = vocab_reserve_ids(t, id + 1, e);
    if (rc != 0) {
        return rc;
    }
    struct token *k = &t->token[id];
    if (k->flags & TOKEN_DEFINED) {
        if (vocab_is(t, id, text, len)) {
            return 0;
        }
        return err_set(e, ERR_INVALID, "id %d belongs to two tokens, one is \"%.40s\"", id, text);
    }
    if (vocab_reserve(t, (size_t)t->map.n + 1) != 0) {
        return err_nomem(e, "the vocabulary");
    }
    uint32_t hash = vocab_hash(text, len), off;
    struct token_slot *s = find_slot(t, text, len, hash);
    if (s->id >= 0) {
        return err_set(e, ERR_INVALID, "token \"%.40s\" has two ids, %d and %d", text, s->id, id);
    }
    rc = vocab_text(t, text, len, &off, e);
    if (rc != 0) {
        return rc;
    }
    *k = (struct token){
        .text_off = off, .text_len = (uint32_t)len, .out_off = off, .flags = TOKEN_DEFINED};
    *s = (struct token_slot){hash, id, off, (uint32_t)len};
    t->map.n++;
    return 0;
}
