/* The inside of a tokenizer, shared by models/tokenizer*.c and by nobody else. */
#ifndef QUIRE_MODELS_TOKENIZER_INTERNAL_H
#define QUIRE_MODELS_TOKENIZER_INTERNAL_H

#include "models/tokenizer.h"

enum token_flag {
    TOKEN_DEFINED = 1, /* the id is in the vocabulary (others are holes) */
    TOKEN_ADDED = 2,   /* from added_tokens: matched in the text before anything else */
    TOKEN_SPECIAL = 4, /* left out by skip_special */
    TOKEN_WHOLE = 8,   /* its bytes are whole UTF-8 characters */
    TOKEN_BYTE = 16,   /* a byte-fallback token, <0x00> .. <0xFF> */
};

/* Both texts lie in tokenizer.text. */
struct token {
    uint32_t text_off, text_len; /* as written in the vocabulary */
    uint32_t out_off, out_len;   /* the bytes it decodes to in the middle of a text */
    uint8_t flags;
};

struct tokenizer {
    struct token *token; /* [n_vocab] */
    int32_t n_vocab;
    int32_t bos, eos; /* -1: none */
    char *text;       /* every token's text and bytes */
    size_t text_len, text_cap;
    bool strip_leading_space; /* decoding drops one space at the start of a text */
};

/* Length of the UTF-8 character at `s` (1 to 4); 0: the bytes are invalid; -1: they end inside a character that is valid
 * so far. On 0, *ret_bad is how many bytes one U+FFFD replaces (the maximal subpart, Unicode 3.9 D93b). `len` > 0. */
int utf8_next(const uint8_t *s, size_t len, int *ret_bad);
/* Whether all of it is whole, valid characters. */
bool utf8_valid(const char *s, size_t len);

#endif
