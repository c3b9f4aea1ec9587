/* Unigram: the segmentation of a word into tokens with the highest sum of scores (Kudo
 * 2018), by the Viterbi algorithm from left to right. A character that is no token has
 * a lower score than any token; it becomes the unknown token or, with byte fallback,
 * its bytes. Neighbouring unknown characters become one unknown token.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHORT_WORD = 64 };
#define UNKNOWN_PENALTY 10.0 /* below the lowest score, as SentencePiece has it */

/* The best segmentation of a word's beginning up to some byte. */
struct path {
    double score;      /* sum over its tokens */
    int32_t start, id; /* of its last token; start -1: no segmentation ends here */
};

int unigram_finish(struct tokenizer *t, struct err *e)
{
    struct unigram *u = &t->unigram;

    u->min_score = t->n_vocab > 0 ? u->score[0] : 0;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        const struct token *k = &t->token[id];
        if (!(k->flags & TOKEN_DEFINED) || id >= u->n) {
            continue;
        }
        u->min_score = MIN(u->min_score, u->score[id]);
        if (trie_add(&u->trie, t->text + k->text_off, k->text_len, id) != 0) {
            return err_nomem(e, "the vocabulary");
        }
    }
    if (u->byte_fallback) {
        tokenizer_find_longest(t);
    }
    if (u->unk < 0 || u->unk >= u->n) {
        return err_set(e, ERR_INVALID, "unk_id %d is not in the vocabulary", u->unk);
    }
    for (int i = 0; i < 256 && u->byte_fallback; i++) {
        char name[8];
        snprintf(name, sizeof(name), "<0x%02X>", i);
        u->byte_id[i] = vocab_find(t, name, 6);
        if (u->byte_id[i] < 0) {
            return err_set(e, ERR_UNSUPPORTED,
                           "byte_fallback without a token for each of <0x00> to <0xFF>");
        }
    }
    return 0;
}

void unigram_release(struct unigram *u)
{
    free(u->score);
    free(u->trie.node);
}

static void offer(struct path *p, double score, int32_t start, int32_t id)
{
    if (p->start < 0 || score > p->score) {
        *p = (struct path){score, start, id};
    }
}

static void find_paths(const struct unigram *u, const char *s, int32_t len, struct path *best)
{
    const struct trie *tr = &u->trie;
    int c_len;

    for (int32_t i = 0; i <= len; i++) {
        best[i].start = -1;
    }
    best[0].score = 0;
    for (int32_t at = 0; at < len; at += c_len) {
        utf8_get((const uint8_t *)s + at, &c_len);
        bool whole_char = false;
        int32_t node = tr->n > 0 ? 0 : -1;
        for (int32_t end = at; end < len && node >= 0;) {
            node = trie_child(tr, node, (uint8_t)s[end++]);
            if (node < 0 || tr->node[node].token < 0) {
                continue;
            }
            offer(&best[end], best[at].score + u->score[tr->node[node].token], at,
                  tr->node[node].token);
            whole_char |= end - at == c_len;
        }
        if (!whole_char) {
            offer(&best[at + c_len], best[at].score + u->min_score - UNKNOWN_PENALTY, at, u->unk);
        }
    }
}

/* Emit the unknown characters s[start .. end). */
static int emit_unknown(struct encoder *enc, const char *s, int32_t start, int32_t end)
{
    const struct unigram *u = &enc->t->unigram;
    int rc = 0;
    /* the text may be that of the unknown token itself */
    int32_t id = vocab_find(enc->t, s + start, (size_t)(end - start));

    if (id >= 0 || !u->byte_fallback) {
        return encoder_emit(enc, id >= 0 ? &id : &u->unk, 1);
    }
    for (int32_t i = start; i < end && rc == 0; i++) {
        rc = encoder_emit(enc, &u->byte_id[(uint8_t)s[i]], 1);
    }
    return rc;
}

static int emit_path(struct encoder *enc, const char *s, int32_t len, struct path *best)
{
    int32_t end = len, ret = 0;

    /* Reverse the chain: `start` becomes the end of the token that begins there, so
     * that it can be walked forwards. */
    for (int32_t next = -1; end >= 0;) {
        int32_t start = best[end].start;
        best[end].start = next;
        next = end;
        end = start;
    }
    for (int32_t at = 0; at < len && ret == 0;) {
        int32_t to = best[at].start, id = best[to].id;
        if (id == enc->t->unigram.unk) {
            while (to < len && best[best[to].start].id == id) {
                to = best[to].start;
            }
            ret = emit_unknown(enc, s, at, to);
        } else {
            ret = encoder_emit(enc, &id, 1);
        }
        at = to;
    }
    return ret;
}

int unigram_encode_word(struct encoder *enc, const char *s, size_t len)
{
    struct path few[SHORT_WORD + 1], *best = few;

    if (len > WORD_MAX_BYTES) {
        return err_set(enc->e, ERR_INVALID, "a word of %zu bytes; at most %d are allowed", len,
                       WORD_MAX_BYTES);
    }
    if (len > SHORT_WORD) {
        int rc = encoder_check_word(enc, len);
        if (rc < 0) {
            return rc;
        }
        best = malloc((len + 1) * sizeof(*best));
        if (!best) {
            return err_nomem(enc->e, "encoding a long word");
        }
    }
    find_paths(&enc->t->unigram, s, (int32_t)len, best);
    int ret = emit_path(enc, s, (int32_t)len, best);
    if (best != few) {
        free(best);
    }
    return ret;
}
