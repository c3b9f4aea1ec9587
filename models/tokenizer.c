/* Text to token ids: opening a tokenizer, its vocabulary, and the stages of encoding. */
#include "models/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

void token_list_release(struct token_list *l)
{
    free(l->id);
    memset(l, 0, sizeof(*l));
}

int token_list_push(struct token_list *l, int32_t id)
{
    if (l->n == l->cap) {
        if (l->cap > INT32_MAX / 2)
            return ERR_NOMEM;
        int32_t cap = l->cap ? l->cap * 2 : 64;
        int32_t *p = realloc(l->id, (size_t)cap * sizeof(*p));
        if (!p)
            return ERR_NOMEM;
        l->id = p;
        l->cap = cap;
    }
    l->id[l->n++] = id;
    return 0;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t)
        return;
    free(t->token);
    free(t->text);
    free(t);
}

int tokenizer_open_bytes(struct tokenizer **ret, struct err *e)
{
    struct tokenizer *t = calloc(1, sizeof(*t));
    if (!t)
        return err_nomem(e, "a tokenizer");
    t->bos = t->eos = -1;
    t->n_vocab = 256;
    t->token = calloc(256, sizeof(*t->token));
    t->text = malloc(256);
    if (!t->token || !t->text) {
        tokenizer_free(t);
        return err_nomem(e, "a tokenizer");
    }
    t->text_len = t->text_cap = 256;
    for (uint32_t i = 0; i < 256; i++) {
        t->text[i] = (char)i;
        t->token[i] = (struct token){i, 1, i, 1, (uint8_t)(TOKEN_DEFINED | (i < 128 ? TOKEN_WHOLE : 0))};
    }
    *ret = t;
    return 0;
}

int tokenizer_open(struct tokenizer **ret, const char *dir, struct err *e)
{
    (void)ret;
    return err_set(e, ERR_UNSUPPORTED, "%s: this build reads no tokenizer.json", dir);
}

int32_t tokenizer_vocab_size(const struct tokenizer *t)
{
    return t->n_vocab;
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t len)
{
    for (int32_t i = 0; i < t->n_vocab; i++) {
        const struct token *k = &t->token[i];
        if ((k->flags & TOKEN_DEFINED) && k->text_len == len && memcmp(t->text + k->text_off, text, len) == 0)
            return i;
    }
    return -1;
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->n_vocab && (t->token[id].flags & TOKEN_SPECIAL);
}

const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *ret_len)
{
    if (id < 0 || id >= t->n_vocab) {
        *ret_len = 0;
        return "";
    }
    *ret_len = t->token[id].out_len;
    return t->text + t->token[id].out_off;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, bool add_special, int32_t max_tokens,
                     struct token_list *ret, struct err *e)
{
    (void)t;
    (void)add_special;
    if (!utf8_valid(text, len))
        return err_set(e, ERR_INVALID, "the text is not valid UTF-8");
    if (len > (size_t)max_tokens)
        return err_set(e, ERR_INVALID, "the text is %zu tokens, at most %d are allowed", len, max_tokens);
    for (size_t i = 0; i < len; i++)
        if (token_list_push(ret, (uint8_t)text[i]) != 0)
            return err_nomem(e, "token ids");
    return 0;
}
