/* Text to token ids and back (stage 3 encode; stage 10's incremental decoding).
 *
 * A tokenizer is immutable once open and may be used by any number of threads at once.
 */
#ifndef QUIRE_MODELS_TOKENIZER_TOKENIZER_H
#define QUIRE_MODELS_TOKENIZER_TOKENIZER_H

#include "config/base/base.h"
#include "config/base/buf.h"

struct tokenizer;

/* A growable list of token ids. Zeroed: empty. */
struct token_list {
    int32_t *id;
    int32_t n, cap;
};
void token_list_release(struct token_list *l);
int token_list_push(struct token_list *l, int32_t id); /* 0 or ERR_NOMEM */

/* Read tokenizer.json, or else tokenizer.model, or else vocab.json and merges.txt, from
 * a model directory; and the names of the special ids in tokenizer_config.json. Or the
 * vocabulary of a GGUF file. */
int tokenizer_open(struct tokenizer **ret, const char *dir, struct err *e);
/* 256 ids, one a byte: for `--model null` and tests. */
int tokenizer_open_bytes(struct tokenizer **ret, struct err *e);
/* For random weights: ids below 256 are bytes, the others up to `vocab` four letters
 * that no text is encoded to. */
int tokenizer_open_dummy(struct tokenizer **ret, int32_t vocab, struct err *e);
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
 * text are recognised, as Hugging Face tokenizers do. `add_special`: what the
 * post-processor adds (BOS, EOS). At most `max_tokens` are made, then ERR_INVALID.
 * Invalid UTF-8 is ERR_INVALID; a text that the vocabulary's own regular expression
 * cannot split in bounded time ERR_UNSUPPORTED. O(n log n) for any input. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, bool add_special,
                     int32_t max_tokens, struct token_list *ret, struct err *e);
/* The bytes that one id stands for, as decoding gives them in the middle of a text; may
 * be part of a character. */
const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *ret_len);

/* The greatest length of those. */
size_t tokenizer_longest(const struct tokenizer *t);

/* Decoding one token at a time into whole UTF-8 characters. Plain struct, no heap: may
 * be copied (forked). */
struct detokenizer {
    const struct tokenizer *tokenizer;
    bool skip_special; /* leave special tokens out */
    bool spaces_between_special;
    bool started; /* something was decoded: a leading space is kept from here on */
    bool last_special;
    uint8_t n_pending;
    /* while a token is decoded: the bytes pending before it, until they have become
     * text */
    uint8_t n_carried;
    uint8_t n_broken; /* pending bytes that the token decoded last turned into U+FFFD */
    char pending[32]; /* bytes of a character not complete yet */
};
void detokenizer_init(struct detokenizer *d, const struct tokenizer *t, bool skip_special,
                      bool spaces_between_special);
/* Append the text that token `id` completes; invalid bytes become U+FFFD as Hugging
 * Face does. 0 or a buf error. */
int detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out);
/* Nothing more comes: what is pending becomes U+FFFD. */
int detokenizer_finish(struct detokenizer *d, struct buf *out);
/* Of the text that the last push or finish appended: the byte where the character
 * begins, or its U+FFFD, that holds the byte which came as number `byte` (from 0) to
 * those pending before the call. */
size_t detokenizer_landed(const struct detokenizer *d, int32_t byte);

/* All at once. */
int tokenizer_decode(const struct tokenizer *t, const int32_t *id, int32_t n, bool skip_special,
                     struct buf *out, struct err *e);

#endif
