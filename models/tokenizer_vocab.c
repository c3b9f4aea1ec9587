/* The vocabulary: token texts in one block of memory, and the way from a text to its id. */
#include "models/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

static uint32_t text_hash(const char *text, size_t len)
{
    return (uint32_t)(XXH3_64bits(text, len) >> 32);
}

static struct token_slot *map_slot(const struct token_map *m, uint32_t hash)
{
    return &m->slot[hash & m->mask];
}

/* Twice the slots; texts are not looked at. */
static int map_grow(struct token_map *m)
{
    uint32_t cap = m->slot ? (m->mask + 1) * 2 : 1024;
    struct token_slot *slot = malloc(cap * sizeof(*slot));
    if (!slot)
        return ERR_NOMEM;
    memset(slot, 0xFF, cap * sizeof(*slot)); /* id -1 */
    for (uint32_t i = 0; m->slot && i <= m->mask; i++) {
        if (m->slot[i].id < 0)
            continue;
        uint32_t k = m->slot[i].hash & (cap - 1);
        while (slot[k].id >= 0)
            k = (k + 1) & (cap - 1);
        slot[k] = m->slot[i];
    }
    free(m->slot);
    m->slot = slot;
    m->mask = cap - 1;
    return 0;
}

static bool token_is(const struct tokenizer *t, int32_t id, const char *text, size_t len)
{
    const struct token *k = &t->token[id];
    return k->text_len == len && memcmp(t->text + k->text_off, text, len) == 0;
}

static int32_t find_hashed(const struct tokenizer *t, const char *text, size_t len, uint32_t hash)
{
    const struct token_map *m = &t->map;
    if (!m->slot)
        return -1;
    for (uint32_t k = hash & m->mask; m->slot[k].id >= 0; k = (k + 1) & m->mask)
        if (m->slot[k].hash == hash && token_is(t, m->slot[k].id, text, len))
            return m->slot[k].id;
    return -1;
}

int32_t vocab_find(const struct tokenizer *t, const char *text, size_t len)
{
    return find_hashed(t, text, len, text_hash(text, len));
}

int vocab_text(struct tokenizer *t, const char *text, size_t len, uint32_t *ret_off, struct err *e)
{
    if (len > UINT32_MAX - t->text_len)
        return err_set(e, ERR_INVALID, "the vocabulary's texts are over 4 GiB");
    if (t->text_len + len > t->text_cap) {
        size_t cap = MAX(t->text_cap * 2, t->text_len + len + 65536);
        char *p = realloc(t->text, cap);
        if (!p)
            return err_nomem(e, "the vocabulary");
        t->text = p;
        t->text_cap = cap;
    }
    *ret_off = (uint32_t)t->text_len;
    if (len > 0)
        memcpy(t->text + t->text_len, text, len);
    t->text_len += len;
    return 0;
}

static int grow_tokens(struct tokenizer *t, int32_t n, struct err *e)
{
    if (n > t->token_cap) {
        int32_t cap = MAX(MAX(t->token_cap * 2, n), 1024);
        struct token *p = realloc(t->token, (size_t)cap * sizeof(*p));
        if (!p)
            return err_nomem(e, "the vocabulary");
        memset(p + t->token_cap, 0, (size_t)(cap - t->token_cap) * sizeof(*p));
        t->token = p;
        t->token_cap = cap;
    }
    t->n_vocab = MAX(t->n_vocab, n);
    return 0;
}

int vocab_add(struct tokenizer *t, int32_t id, const char *text, size_t len, struct err *e)
{
    if (id < 0 || id >= LIMIT_VOCAB)
        return err_set(e, ERR_INVALID, "token \"%.40s\" has the id %d; 0 to %d are allowed", text, id, LIMIT_VOCAB - 1);
    int ret = grow_tokens(t, id + 1, e);
    if (ret != 0)
        return ret;
    struct token *k = &t->token[id];
    if (k->flags & TOKEN_DEFINED) {
        if (token_is(t, id, text, len))
            return 0;
        return err_set(e, ERR_INVALID, "id %d belongs to two tokens, one is \"%.40s\"", id, text);
    }
    uint32_t hash = text_hash(text, len);
    int32_t other = find_hashed(t, text, len, hash);
    if (other >= 0)
        return err_set(e, ERR_INVALID, "token \"%.40s\" has two ids, %d and %d", text, other, id);
    if ((t->map.n + 1) * 2 > (t->map.slot ? t->map.mask + 1 : 0) && map_grow(&t->map) != 0)
        return err_nomem(e, "the vocabulary");
    uint32_t off;
    ret = vocab_text(t, text, len, &off, e);
    if (ret != 0)
        return ret;
    *k = (struct token){.text_off = off, .text_len = (uint32_t)len, .out_off = off, .flags = TOKEN_DEFINED};
    struct token_slot *s = map_slot(&t->map, hash);
    while (s->id >= 0)
        s = s == &t->map.slot[t->map.mask] ? t->map.slot : s + 1;
    *s = (struct token_slot){hash, id};
    t->map.n++;
    return 0;
}
