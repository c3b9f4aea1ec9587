/* The vocabulary as tries over the tokens' bytes.
 *
 * A trie is an array of nodes in depth-first order, so that a walk is a loop and a
 * subtree a range. Tokens made of whole plain characters, which may stand in a JSON
 * string as they are, are most of a vocabulary; where any such text is allowed they are
 * allowed at once, and what is walked is a trie of the others. */
#ifndef QUIRE_ENGINE_CONSTRAIN_VOCAB_H
#define QUIRE_ENGINE_CONSTRAIN_VOCAB_H

#include "engine/constrain/constrain.h"

/* Tokens of at most so many plain characters are a slice of their own: a string of
 * bounded length mostly allows all of them. */
enum { SLICE_CHARS = 16 };

/* Longer tokens are never allowed. */
enum { MAX_TOKEN_BYTES = 1024 };

enum trie_kind {
    TRIE_ALL,       /* every token that is text */
    TRIE_LONG,      /* without plain tokens of at most SLICE_CHARS characters */
    TRIE_NOT_PLAIN, /* without plain tokens */
    N_TRIES,
};

/* Of a node's token: there are others of the same bytes. */
enum { TRIE_SAME = 1 << 30 };

struct trie_node {
    uint32_t end : 24; /* behind the last node of the subtree */
    uint32_t byte : 8; /* on the edge to the node */
    int32_t token;     /* the token that ends here, or -1; with TRIE_SAME */
};

struct trie {
    struct trie_node *node; /* [n] depth-first; the root has none; owned */
    int32_t n;              /* nodes */
};

struct constrain_vocab {
    int32_t n, words;          /* ids; words of a mask */
    struct trie trie[N_TRIES]; /* by enum trie_kind */
    int32_t depth;             /* of TRIE_ALL: bytes of the longest token */
    int32_t *same;             /* [n] the next token of the same bytes, or -1; owned */
    uint32_t *at;              /* [n] offset of a token's bytes in `text`, owned */
    uint32_t *len;             /* [n] bytes of a token; 0: none; owned */
    char *text;                /* bytes of all tokens, owned */
    bool *special;             /* [n] whether its text is a name; owned */
    uint32_t *eos;             /* mask of the tokens that end a text, owned */
    uint32_t *plain[2];        /* masks of plain tokens: all, those of few characters; owned */
    uint32_t *few;             /* [SLICE_CHARS][words] masks of those of 1, 2 ... at most; owned */
    /* [trie[TRIE_ALL].n + 1] nodes of TRIE_NOT_PLAIN before a node; owned */
    int32_t *rest_at;
    /* [trie[TRIE_ALL].n + 1] plain tokens before a node; owned */
    int32_t *plain_at;
    uint64_t *below;    /* [trie[TRIE_ALL].n] kinds of bytes below a node; owned */
    uint16_t *height;   /* [trie[TRIE_ALL].n] bytes of the longest text below a node; owned */
    int32_t *all_at;    /* [trie[TRIE_ALL].n + 1] tokens before a node; owned */
    int32_t *all_ids;   /* the tokens in the order of the trie; owned */
    int32_t *plain_ids; /* plain tokens in the order of the trie; owned */
    int32_t child[257]; /* nodes of TRIE_ALL at depth one; the last is its end */
    /* The same nodes of TRIE_NOT_PLAIN and of TRIE_LONG, or those behind where there
     * are none */
    int32_t rest_child[257], long_child[257];
    int32_t n_children; /* of them */
    uint8_t kind[128];  /* vocab_kind of each byte of ASCII */
    /* The model's encoding; see struct constrain_tokens. */
    int (*encode)(const void *arg, const char *text, size_t len, int32_t **ret_ids, int32_t *ret_n);
    const void *arg; /* of encode */
};

/* The first token of a node, or -1. */
static inline int32_t trie_token(const struct trie_node *n)
{
    return n->token < 0 ? -1 : n->token & ~TRIE_SAME;
}

/* Kinds of bytes: each letter is one, digits and some marks are others. The bytes of
 * characters beyond ASCII are of two kinds where they are whole characters, or begin
 * one: what a pattern's \s takes, and the others. Separators of lines, U+2028 and
 * U+2029, and all else are KIND_BROKEN. */
enum { KIND_BEYOND_ASCII, KIND_BROKEN = 62, KIND_SPACE, N_BYTE_KINDS };
/* Of a byte of ASCII. */
int vocab_kind(uint8_t byte);

static inline bool mask_has(const uint32_t *mask, int32_t id)
{
    return mask[id / 32] >> (id % 32) & 1;
}

static inline void mask_set(uint32_t *mask, int32_t id)
{
    mask[id / 32] |= 1u << (id % 32);
}

/* The special token of exactly this text, or -1. */
int32_t vocab_special(const struct constrain_vocab *v, const char *text, size_t len);

#endif
