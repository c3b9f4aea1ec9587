/* Text to token ids and back, for whole prompts and one generated token at a time.
 *
 * A tokenizer is immutable once open; any number of threads may use it at once.
 */
#ifndef QUIRE_MODELS_TOKENIZER_TOKENIZER_H
#define QUIRE_MODELS_TOKENIZER_TOKENIZER_H

#include "config/base/base.h"
#include "config/base/buf.h"

struct tokenizer;

/* A growable list of token ids. Zeroed: empty. */
struct token_list {
    int32_t *id;    /* [n], owned */
    int32_t n, cap; /* ids, and how many fit */
};
void token_list_release(struct token_list *l);
int token_list_push(struct token_list *l, int32_t id); /* 0 or ERR_NOMEM */

/* The tokenizer of a model directory: tokenizer.json, else tokenizer.model, else
 * vocab.json and merges.txt; special_tokens_map.json and tokenizer_config.json name BOS
 * and EOS. Or the vocabulary of a GGUF file. */
int tokenizer_open(struct tokenizer **ret, const char *dir, struct err *e);
/* 256 ids, one for each byte: for `--model null` and tests. */
int tokenizer_open_bytes(struct tokenizer **ret, struct err *e);
/* For random weights: ids below 256 are bytes; those up to `vocab` decode to four
 * letters, and no text is encoded to them. */
int tokenizer_open_dummy(struct tokenizer **ret, int32_t vocab, struct err *e);
/* Forget the added tokens from the id `vocab` on, for which a model has no logits:
 * their texts become text like any other. *ret_n: how many. ERR_INVALID: a token that
 * is not added has such an id, or one that texts begin or end with; ERR_NOMEM. After an
 * error the tokenizer can only be freed. */
int tokenizer_limit(struct tokenizer *t, int32_t vocab, int32_t *ret_n, struct err *e);
void tokenizer_free(struct tokenizer *t);

/* Ids are 0 .. vocab_size - 1, added tokens included; some may be holes (empty
 * text). */
int32_t tokenizer_vocab_size(const struct tokenizer *t);
/* -1 where the model has none. */
int32_t tokenizer_bos(const struct tokenizer *t);
int32_t tokenizer_eos(const struct tokenizer *t);
/* The id of a token by its exact text (special tokens too), or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t len);
bool tokenizer_is_special(const struct tokenizer *t, int32_t id);

/* Append the ids of `len` bytes of UTF-8 to `ret`. Special tokens written out in the
 * text are recognised, as Hugging Face tokenizers do. `add_special`: with what the
 * post-processor adds (BOS, EOS). ERR_INVALID: more than `max_tokens` ids, or invalid
 * UTF-8; ERR_UNSUPPORTED: the tokenizer's own regular expression cannot split the text
 * in bounded time. After an error `ret` is as before. O(n log n) for any input. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, bool add_special,
                     int32_t max_tokens, struct token_list *ret, struct err *e);
/* The most bytes of a text that one id of its encoding can stand for; 0: not bounded. A
 * longer text than n times this has more than n ids. */
size_t tokenizer_most_text(const struct tokenizer *t);
/* The bytes that one id decodes to in the middle of a text; they may be part of a
 * character. */
const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *ret_len);

/* The greatest length that tokenizer_bytes returns. */
size_t tokenizer_longest(const struct tokenizer *t);

/* Decoding one token at a time into whole UTF-8 characters. A plain struct without
 * heap memory: a copy of it goes on independently (beam search forks it). */
struct detokenizer {
    const struct tokenizer *tokenizer; /* not owned */
    bool skip_special;                 /* omit special tokens */
    bool spaces_between_special;       /* join_spaces joins neighbouring special tokens too */
    bool started;      /* a token was decoded: leading spaces are kept from here on */
    bool last_special; /* the last token decoded was special */
    uint8_t n_pending; /* bytes in `pending` */
    /* While a token is decoded: the bytes that were pending before it, until they are
     * part of the text. */
    uint8_t n_carried;
    uint8_t n_broken; /* pending bytes that the last token turned into U+FFFD */
    char pending[32]; /* bytes of a character that is not complete */
};
void detokenizer_init(struct detokenizer *d, const struct tokenizer *t, bool skip_special,
                      bool spaces_between_special);
/* Append the text that token `id` completes; invalid bytes become U+FFFD as in Hugging
 * Face tokenizers. 0 or a buf error. */
int detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out);
/* End of the sequence: pending bytes become U+FFFD. */
int detokenizer_finish(struct detokenizer *d, struct buf *out);
/* Where a byte of the sequence is in the text that the last push or finish appended.
 * `byte` counts from the first byte that was pending before that call; the result is
 * the offset of its character, or of the U+FFFD in place of it. */
size_t detokenizer_landed(const struct detokenizer *d, int32_t byte);

/* Decode a whole sequence. */
int tokenizer_decode(const struct tokenizer *t, const int32_t *id, int32_t n, bool skip_special,
                     struct buf *out, struct err *e);

#endif
