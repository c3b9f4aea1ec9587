/* Added tokens, mostly special ones: texts that are matched before the text is split.
 *
 * Matches are sought from left to right and the longest at a position wins, as in
 * Hugging Face tokenizers. A trie is walked from each byte that can begin a match; its
 * depth bounds the work per byte.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

static int32_t node_new(struct trie *tr, uint8_t byte)
{
    if (tr->n == tr->cap) {
        int32_t cap = tr->cap ? tr->cap * 2 : 256;
        struct trie_node *p = realloc(tr->node, (size_t)cap * sizeof(*p));
        if (!p) {
            return -1;
        }
        tr->node = p;
        tr->cap = cap;
    }
    tr->node[tr->n] = (struct trie_node){-1, -1, -1, byte};
    return tr->n++;
}

int32_t trie_child(const struct trie *tr, int32_t node, uint8_t byte)
{
    int32_t k = tr->node[node].child;

    while (k >= 0 && tr->node[k].byte != byte) {
        k = tr->node[k].sibling;
    }
    return k;
}

int trie_add(struct trie *tr, const char *text, size_t len, int32_t token)
{
    if (len == 0) {
        return 0;
    }
    int32_t at = 0;
    if (tr->n == 0 && node_new(tr, 0) < 0) {
        return ERR_NOMEM;
    }
    tr->first[(uint8_t)text[0]] = true;
    for (size_t i = 0; i < len; i++) {
        int32_t next = trie_child(tr, at, (uint8_t)text[i]);
        if (next < 0) {
            next = node_new(tr, (uint8_t)text[i]);
            if (next < 0) {
                return ERR_NOMEM;
            }
            tr->node[next].sibling = tr->node[at].child;
            tr->node[at].child = next;
        }
        at = next;
    }
    tr->node[at].token = token;
    return 0;
}

/* The longest text of the trie that s begins with: its token and length, or -1. */
static int32_t longest(const struct trie *tr, const char *s, size_t len, size_t *ret_len)
{
    int32_t at = 0, found = -1;

    for (size_t i = 0; i < len; i++) {
        at = trie_child(tr, at, (uint8_t)s[i]);
        if (at < 0) {
            break;
        }
        if (tr->node[at].token >= 0) {
            found = tr->node[at].token;
            *ret_len = i + 1;
        }
    }
    return found;
}

static int32_t char_before(const char *s, size_t at)
{
    int n;

    do {
        at--;
    } while (((uint8_t)s[at] & 0xC0) == 0x80);
    return utf8_get((const uint8_t *)s + at, &n);
}

static bool stands_alone(const char *s, size_t len, size_t start, size_t end)
{
    int n;

    return (start == 0 || !char_is_word(char_before(s, start))) &&
           (end == len || !char_is_word(utf8_get((const uint8_t *)s + end, &n)));
}

/* Extend a match over the white space that the token includes (lstrip, rstrip). */
static void take_space(const struct added_token *a, const char *s, size_t len, size_t from,
                       size_t *start, size_t *end)
{
    int n;

    if (a->lstrip) {
        while (*start > from) {
            int32_t c = char_before(s, *start);
            char text[4];
            if (!char_is_space(c)) {
                break;
            }
            *start -= (size_t)utf8_put(text, c);
        }
    }
    if (a->rstrip) {
        while (*end < len && char_is_space(utf8_get((const uint8_t *)s + *end, &n))) {
            *end += (size_t)n;
        }
    }
}

int added_split(struct encoder *enc, const struct trie *tr, const char *s, size_t len, bool first,
                int (*piece)(struct encoder *enc, const char *s, size_t len, bool first))
{
    size_t done = 0, at = 0, match_len = 0;

    while (tr->n > 0 && at < len) {
        int32_t found = tr->first[(uint8_t)s[at]] ? longest(tr, s + at, len - at, &match_len) : -1;
        if (found < 0) {
            at++;
            continue;
        }
        const struct added_token *a = &enc->t->added[found];
        size_t start = at, end = at + match_len;
        at = end;
        if (a->single_word && !stands_alone(s, len, start, end)) {
            continue;
        }
        take_space(a, s, len, done, &start, &end);
        int rc = start > done ? piece(enc, s + done, start - done, first && done == 0) : 0;
        if (rc == 0) {
            rc = encoder_emit(enc, &a->id, 1);
        }
        if (rc != 0) {
            return rc;
        }
        done = end;
    }
    return done < len ? piece(enc, s + done, len - done, first && done == 0) : 0;
}

int added_add(struct tokenizer *t, const struct added_token *a, const char *text, size_t len,
              bool special, struct err *e)
{
    int rc = vocab_add(t, a->id, text, len, e);

    if (rc != 0) {
        return rc;
    }
    t->token[a->id].flags |= (uint8_t)(TOKEN_ADDED | (special ? TOKEN_SPECIAL : 0));
    if ((t->n_added & (t->n_added - 1)) == 0) { /* capacity doubles at powers of two */
        struct added_token *p = realloc(t->added, (size_t)MAX(t->n_added * 2, 1) * sizeof(*p));
        if (!p) {
            return err_nomem(e, "the added tokens");
        }
        t->added = p;
    }
    t->added[t->n_added++] = *a;
    return 0;
}

int added_finish(struct tokenizer *t, struct err *e)
{
    struct encoder enc = {.t = t, .e = e};
    int rc = 0;

    for (int32_t i = 0; i < t->n_added && rc == 0; i++) {
        const struct token *k = &t->token[t->added[i].id];
        struct normalized n = {t->text + k->text_off, k->text_len, NULL};
        if (t->added[i].normalized) {
            rc = normalize(&enc, n.s, n.len, &n);
        }
        if (rc == 0 &&
            trie_add(t->added[i].normalized ? &t->normalized : &t->raw, n.s, n.len, i) != 0) {
            rc = err_nomem(e, "the added tokens");
        }
        free(n.own);
    }
    pcre2_match_data_free(enc.match);
    pcre2_match_context_free(enc.limits);
    return rc;
}

/* Whether texts get one of the ids from n on without an added token's text. */
static bool is_given(const struct tokenizer *t, int32_t n)
{
    const struct bpe *bpe = &t->bpe;
    bool given =
        t->bos >= n || t->eos >= n || bpe->unk >= n || t->unigram.unk >= n || t->unigram.n > n;

    for (int32_t i = 0; i < t->n_prefix; i++) {
        given = given || t->prefix[i] >= n;
    }
    for (int32_t i = 0; i < t->n_suffix; i++) {
        given = given || t->suffix[i] >= n;
    }
    for (int32_t i = 0; i < 256 && t->model == MODEL_BPE; i++) {
        given = given || bpe->byte_id[i] >= n || (i < 128 && bpe->ascii_id[i] >= n);
    }
    for (uint32_t i = 0; bpe->slot && i <= bpe->mask; i++) {
        given = given || (bpe->slot[i].rank >= 0 && bpe->slot[i].id >= n);
    }
    return given;
}

static void trie_cut(const struct tokenizer *t, struct trie *tr, int32_t n)
{
    for (int32_t i = 0; i < tr->n; i++) {
        int32_t token = tr->node[i].token;
        tr->node[i].token = token >= 0 && t->added[token].id >= n ? -1 : token;
    }
}

int tokenizer_limit(struct tokenizer *t, int32_t vocab, int32_t *ret_n, struct err *e)
{
    bool fits = !is_given(t, vocab);

    *ret_n = 0;
    for (int32_t id = vocab; id < t->n_vocab; id++) {
        uint8_t flags = t->token[id].flags;
        fits = fits && (!(flags & TOKEN_DEFINED) || (flags & TOKEN_ADDED));
        *ret_n += (flags & TOKEN_DEFINED) != 0;
    }
    if (!fits) {
        return err_set(e, ERR_INVALID,
                       "the tokenizer has ids up to %d, the model's logits end at vocab_size %d: "
                       "they do not belong together",
                       t->n_vocab - 1, vocab);
    }
    if (vocab >= t->n_vocab) {
        return 0;
    }
    trie_cut(t, &t->raw, vocab);
    trie_cut(t, &t->normalized, vocab);
    return vocab_cut(t, vocab) < 0 ? err_nomem(e, "the vocabulary") : 0;
}
