/* The merges of tokenizer.json. There are hundreds of thousands, and each takes three
 * look-ups in tables that are larger than the CPU's caches.
 *
 * They are read in batches: the slots that a batch needs are prefetched while the rest
 * of the batch is parsed, so that look-ups do not wait for memory.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <string.h>

enum { BATCH = 16, MERGE_BYTES = 2 * TOKEN_TEXT_BYTES };

struct merge {
    char text[MERGE_BYTES]; /* left and right, joined */
    size_t left_len, len;   /* bytes of left, and of both */
    uint32_t left_hash, right_hash;
    int32_t left, right;
};

struct merge_batch {
    struct merge merge[BATCH];
    int32_t n;
    int32_t last_result;
};

/* One merge, "left right" or ["left", "right"]. */
static bool read_merge(struct json *j, uint32_t number, struct merge *m)
{
    size_t right_len = 0;

    if (json_peek(j) == JSON_ARRAY) {
        json_enter_array(j);
        if (!json_next_element(j) ||
            !json_read_string(j, m->text, TOKEN_TEXT_BYTES, &m->left_len) ||
            !json_next_element(j) ||
            !json_read_string(j, m->text + m->left_len, TOKEN_TEXT_BYTES, &right_len) ||
            json_next_element(j)) {
            return json_fail(j, "merge %u is not two strings", number);
        }
        m->len = m->left_len + right_len;
        return true;
    }
    if (!json_read_string(j, m->text, sizeof(m->text), &m->len)) {
        return false;
    }
    char *space = memchr(m->text, ' ', m->len);
    if (!space || memchr(space + 1, ' ', m->len - (size_t)(space + 1 - m->text))) {
        return json_fail(j, "merge %u, \"%.40s\", is not two tokens with a space between", number,
                         m->text);
    }
    m->left_len = (size_t)(space - m->text);
    m->len--;
    memmove(space, space + 1, m->len - m->left_len);
    return true;
}

static int32_t look_up(struct json *j, const struct tokenizer *t, const char *text, size_t len,
                       uint32_t hash)
{
    int32_t id = vocab_find_hashed(t, text, len, hash);

    if (id < 0) {
        json_fail(j, "after merge %u: \"%.*s\" is not in the vocabulary", t->bpe.n,
                  (int)MIN(len, (size_t)40), text);
    }
    return id;
}

/* The token that a merge makes. Files list merges in the order of the ids that they
 * make, so it is nearly always the last one's or the next. */
static int32_t look_up_result(struct json *j, const struct tokenizer *t, const struct merge *m,
                              int32_t *last)
{
    for (int32_t id = *last; id < MIN(*last + 2, t->n_vocab); id++) {
        if ((t->token[id].flags & TOKEN_DEFINED) && vocab_is(t, id, m->text, m->len)) {
            return *last = id;
        }
    }
    int32_t id = look_up(j, t, m->text, m->len, vocab_hash(m->text, m->len));
    *last = MAX(id, 0);
    return id;
}

static void finish_batch(struct json *j, struct tokenizer *t, struct merge_batch *b)
{
    for (int32_t i = 0; i < b->n; i++) {
        vocab_fetch_text(t, b->merge[i].left_hash);
        vocab_fetch_text(t, b->merge[i].right_hash);
    }
    for (int32_t i = 0; i < b->n; i++) {
        struct merge *m = &b->merge[i];
        m->left = look_up(j, t, m->text, m->left_len, m->left_hash);
        m->right = look_up(j, t, m->text + m->left_len, m->len - m->left_len, m->right_hash);
        bpe_fetch_merge(&t->bpe, m->left, m->right);
    }
    for (int32_t i = 0; i < b->n && !j->failed; i++) {
        const struct merge *m = &b->merge[i];
        int32_t id = look_up_result(j, t, m, &b->last_result);
        if (id >= 0 && bpe_add_merge(&t->bpe, m->left, m->right, id, (int32_t)t->bpe.n) != 0) {
            json_fail_nomem(j, "the merges");
        }
    }
    b->n = 0;
}

void read_merges(struct json *j, struct tokenizer *t)
{
    struct merge_batch b;

    b.n = b.last_result = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        struct merge *m = &b.merge[b.n];
        if (!read_merge(j, t->bpe.n + (uint32_t)b.n, m)) {
            return;
        }
        m->left_hash = vocab_hash(m->text, m->left_len);
        m->right_hash = vocab_hash(m->text + m->left_len, m->len - m->left_len);
        vocab_fetch_slot(t, m->left_hash);
        vocab_fetch_slot(t, m->right_hash);
        if (++b.n == BATCH) {
            finish_batch(j, t, &b);
        }
    }
    finish_batch(j, t, &b);
}
