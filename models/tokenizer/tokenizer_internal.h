/* The inside of a tokenizer, for models/tokenizer/ and the readers that make one.
 *
 * Encoding is a chain of stages, each of which passes on pieces of the text:
 *
 *     text ─► added tokens (tokenizer_added.c) ─► normalizer (tokenizer_normal.c)
 *          ─► added tokens that match normalized text
 *          ─► pre-tokenizer stages (tokenizer_split.c, tokenizer_scan.c) ─► words
 *          ─► model (tokenizer_bpe.c, tokenizer_unigram.c) ─► ids
 *
 * Pieces are not collected: a stage calls the next one for each piece (encode_piece).
 * The state of one encoding is in `struct encoder` and on the stack. The tokenizer is
 * never written to after it was opened, except for the word cache, which is lock-free.
 */
#ifndef QUIRE_MODELS_TOKENIZER_TOKENIZER_INTERNAL_H
#define QUIRE_MODELS_TOKENIZER_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "config/base/json.h"
#include "config/base/utf8.h"
#include "models/tokenizer/tokenizer.h"

enum {
    TOKENIZER_STAGES = 16,             /* of pre-tokenizers, normalizers and decoders each */
    TOKENIZER_TEMPLATE = 16,           /* ids that the post-processor adds on either side */
    TOKENIZER_PATTERN_BYTES = 4096,    /* of a regular expression */
    TOKEN_TEXT_BYTES = JSON_KEY_BYTES, /* of a token's text, and a NUL */
    TOKEN_OUT_BYTES = 1 << 16,         /* of what a token decodes to */
    WORD_MAX_BYTES = 1 << 28,          /* positions in a word fit 32 bits */
};

enum token_flag {
    TOKEN_DEFINED = 1, /* the id is in the vocabulary (others are holes) */
    TOKEN_ADDED = 2,   /* from added_tokens: matched in the text before it is split */
    TOKEN_SPECIAL = 4, /* omitted from decoded text with skip_special */
    TOKEN_WHOLE = 8,   /* its bytes are whole UTF-8 characters */
    TOKEN_BYTE = 16,   /* a byte-fallback token, <0x00> .. <0xFF> */
};

/* Both texts lie in tokenizer.text. */
struct token {
    uint32_t text_off, text_len; /* as written in the vocabulary */
    uint32_t out_off, out_len;   /* the bytes it decodes to in the middle of a text */
    uint8_t flags;               /* bits of enum token_flag */
};

/* From a token's text to its id, by open addressing. A vocabulary is larger than the
 * CPU's caches, so a slot holds all that a comparison needs except the text itself: a
 * look-up costs two cache misses. */
struct token_map {
    struct token_slot {
        uint32_t hash;               /* vocab_hash of the text */
        int32_t id;                  /* -1: free */
        uint32_t text_off, text_len; /* in tokenizer.text */
    } *slot;                         /* [mask + 1], a power of two */
    uint32_t mask, n;                /* n: slots in use, at most half of them */
};

/* ---- stages ---- */

/* What becomes of the matches of a split. */
enum split_behavior {
    SPLIT_REMOVED,         /* dropped */
    SPLIT_ISOLATED,        /* each match is a piece, and so is each gap */
    SPLIT_MERGED_PREVIOUS, /* a match belongs to the gap before it */
    SPLIT_MERGED_NEXT,     /* a match belongs to the gap after it */
    SPLIT_CONTIGUOUS       /* neighbouring matches are one piece */
};
/* Whether Metaspace puts a mark in front: never, only of the whole text, always. */
enum prepend_scheme { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS };

/* A literal, or a regular expression that runs under limits because text is untrusted;
 * a well-known one also has a hand-written scanner that cuts the same pieces. */
struct pattern {
    pcre2_code *code;   /* NULL: a literal */
    bool jit;           /* `code` has been compiled to machine code */
    char *literal;      /* [literal_len], owned; NULL: a regular expression */
    size_t literal_len; /* bytes */
    /* Bytes of the next piece at `s`, where len > 0 bytes are left; every byte belongs
     * to some piece. NULL: no well-known pattern. */
    size_t (*scan)(const uint8_t *s, size_t len);
};

enum stage_kind { STAGE_SPLIT, STAGE_CLASS, STAGE_PREFIX_SPACE, STAGE_METASPACE };

struct stage {
    enum stage_kind kind;
    struct pattern pattern;       /* STAGE_SPLIT */
    enum split_behavior behavior; /* STAGE_SPLIT, STAGE_CLASS */
    bool invert;                  /* STAGE_SPLIT: the gaps count as the matches */
    bool split;                   /* STAGE_METASPACE: a word begins at each replacement */
    enum prepend_scheme prepend;  /* STAGE_METASPACE */
    char replacement[8];          /* STAGE_METASPACE: one character in place of a space */
    uint8_t replacement_len;      /* bytes */
    bool (*is_match)(int32_t c);  /* STAGE_CLASS: a match is one such character */
};

enum normal_kind {
    NORMAL_NFC,
    NORMAL_NFD,
    NORMAL_NFKC,
    NORMAL_NFKD,
    NORMAL_LOWERCASE,
    NORMAL_STRIP,
    NORMAL_STRIP_ACCENTS,
    NORMAL_PREPEND,
    NORMAL_REPLACE
};

struct normal {
    enum normal_kind kind;
    struct pattern pattern; /* NORMAL_REPLACE */
    char *text;             /* prepended, or put in place of each match; owned */
    size_t text_len;        /* bytes */
    bool left, right;       /* NORMAL_STRIP: the ends that lose their white space */
};

/* ---- added tokens ---- */

struct added_token {
    int32_t id;          /* in the vocabulary */
    bool single_word;    /* matches only where no word character adjoins it */
    bool lstrip, rstrip; /* the match includes the white space before, after it */
    bool normalized;     /* matched in normalized text, not in the text as given */
};

/* Trie of texts, a byte a level; node 0 is the root. */
struct trie_node {
    int32_t child, sibling; /* the first child, the next of its parent's; -1: none */
    int32_t token;          /* of the text that ends here, as given to trie_add; -1: none */
    uint8_t byte;           /* that leads here from the parent */
};
struct trie {
    struct trie_node *node; /* [n] */
    int32_t n, cap;         /* nodes, and how many fit */
    bool first[256];        /* some text begins with this byte */
};

/* ---- models ---- */

/* One merge of a byte-pair encoding, in a table by pair. */
struct merge_slot {
    uint64_t pair; /* left id << 32 | right id */
    int32_t rank;  /* lower ranks merge first; -1: free */
    int32_t id;    /* the token that the pair becomes */
};

struct word_cache;

struct bpe {
    struct merge_slot *slot;  /* [mask + 1], a power of two, open addressing */
    uint32_t mask, n;         /* n: merges added */
    int32_t byte_id[256];     /* byte-level: the id of each byte; else of <0xNN>; -1: none */
    int32_t ascii_id[128];    /* not byte-level: ids of one-character tokens; -1: none */
    bool byte_level;          /* words are bytes, in the byte alphabet */
    bool byte_fallback;       /* a character without a token becomes tokens <0xNN> */
    bool fuse_unk;            /* neighbouring unknown characters become one unknown token */
    bool ignore_merges;       /* a word that is a token as a whole becomes that token */
    bool split_at_marks;      /* texts may be split before U+2581, see tokenizer_bpe.c */
    int32_t unk;              /* id of the unknown token; -1: unknown characters are dropped */
    struct word_cache *cache; /* NULL: words are not cached */
};

struct unigram {
    double *score;        /* [n] log probabilities, by id */
    int32_t n;            /* tokens with a score */
    double min_score;     /* of all tokens */
    struct trie trie;     /* of all tokens; trie_node.token is the id */
    bool byte_fallback;   /* unknown characters become tokens <0xNN> */
    int32_t byte_id[256]; /* ids of <0xNN>, set with byte_fallback */
    int32_t unk;          /* id of the unknown token */
};

enum model_kind { MODEL_BYTES, MODEL_BPE, MODEL_UNIGRAM };

/* What a decoder does to the beginning of a text. */
enum decode_start {
    DECODE_AS_IS,
    DECODE_STRIP,       /* removes one leading space */
    DECODE_FIRST_TOKEN, /* removes all spaces of the first token */
};

struct tokenizer {
    struct token *token;        /* [n_vocab] */
    int32_t n_vocab, token_cap; /* ids in use, holes included, and how many fit */
    size_t longest;             /* bytes that a token decodes to, at most */
    int32_t bos, eos;           /* -1: none */
    char *text;                 /* [text_len] every token's text and bytes */
    size_t text_len, text_cap;  /* bytes */
    struct token_map map;       /* from texts to ids */
    /* No token of an encoded word stands for more of the word's bytes; 0: not
     * bounded. */
    size_t word_longest;

    struct added_token *added; /* [n_added] */
    int32_t n_added;
    struct trie raw;                        /* added tokens that are matched in the text as given */
    struct trie normalized;                 /* and those that are matched in normalized text */
    struct normal normal[TOKENIZER_STAGES]; /* [n_normal] in the order they run */
    int32_t n_normal;
    struct stage stage[TOKENIZER_STAGES]; /* [n_stages] pre-tokenizers in their order */
    int32_t n_stages;
    enum model_kind model;                                          /* how words become tokens */
    struct bpe bpe;                                                 /* MODEL_BPE */
    struct unigram unigram;                                         /* MODEL_UNIGRAM */
    int32_t prefix[TOKENIZER_TEMPLATE], suffix[TOKENIZER_TEMPLATE]; /* what add_special adds */
    int32_t n_prefix, n_suffix;                                     /* ids of each */

    enum decode_start start; /* of a decoded text */
    bool has_byte_tokens;    /* some token is TOKEN_BYTE */
    bool join_spaces;        /* no decoder: tokens are joined with spaces */
};

/* The state of one call of tokenizer_encode. */
struct encoder {
    const struct tokenizer *t;   /* not written to, but for its word cache */
    struct token_list *out;      /* ids are appended */
    int32_t limit;               /* out->n never exceeds this */
    int32_t max_tokens;          /* that this call may append; for messages */
    pcre2_match_data *match;     /* NULL until a regular expression runs */
    pcre2_match_context *limits; /* made with `match` */
    struct symbol *symbol;       /* [symbol_cap] scratch for long words, as is `heap` */
    uint64_t *heap;              /* [3 * symbol_cap] */
    size_t symbol_cap;
    struct err *e; /* may be NULL */
};

/* ---- tokenizer_vocab.c ---- */

/* Make ids 0 .. n - 1 exist; new ones are holes until vocab_add defines them. */
int vocab_reserve_ids(struct tokenizer *t, int32_t n, struct err *e);
/* Give `id` this text. ERR_INVALID when the id is out of range, has another text, or
 * the text has another id. */
int vocab_add(struct tokenizer *t, int32_t id, const char *text, size_t len, struct err *e);
/* Only ids below `n` are there from now on. ERR_NOMEM: the map is broken. */
int vocab_cut(struct tokenizer *t, int32_t n);
int32_t vocab_find(const struct tokenizer *t, const char *text, size_t len);
/* Size the map for `n` tokens at once. */
int vocab_reserve(struct tokenizer *t, size_t n);
bool vocab_is(const struct tokenizer *t, int32_t id, const char *text, size_t len);
/* vocab_find in steps, to look up many texts without waiting for memory: the hash, a
 * prefetch of the slot, a prefetch of the text, the id. */
uint32_t vocab_hash(const char *text, size_t len);
void vocab_fetch_slot(const struct tokenizer *t, uint32_t hash);
void vocab_fetch_text(const struct tokenizer *t, uint32_t hash);
int32_t vocab_find_hashed(const struct tokenizer *t, const char *text, size_t len, uint32_t hash);
/* Append bytes to tokenizer.text; their offset in *ret_off. */
int vocab_text(struct tokenizer *t, const char *text, size_t len, uint32_t *ret_off, struct err *e);

/* ---- tokenizer_load.c, tokenizer_merges.c, tokenizer_components.c ---- */

/* A tokenizer from the text of tokenizer.json alone: its bos and eos are -1. */
int tokenizer_open_json(struct tokenizer **ret, const char *json, size_t len, struct err *e);
/* tokenizer.json's text into a zeroed tokenizer. */
int tokenizer_parse(struct tokenizer *t, const char *json, size_t len, struct err *e);
/* Fail the reader with an error that has a code and a text. */
void json_fail_with(struct json *j, const struct err *e);
void json_fail_nomem(struct json *j, const char *what);
/* {"token": id, ...}; errors stay in the reader. */
void read_vocab(struct json *j, struct tokenizer *t);
/* The value of "merges", once the vocabulary is known; errors stay in the reader. */
void read_merges(struct json *j, struct tokenizer *t);
/* The values of "normalizer", "pre_tokenizer", "post_processor" and "decoder"; errors
 * stay in the reader. */
void read_normalizer(struct json *j, struct tokenizer *t);
void read_pre_tokenizer(struct json *j, struct tokenizer *t);
void read_post_processor(struct json *j, struct tokenizer *t);

/* The decoders of a file in their order, as they act on one token. */
struct decoder_step {
    enum {
        DECODER_BYTE_LEVEL,
        DECODER_REPLACE,
        DECODER_BYTE_FALLBACK,
        DECODER_FUSE,
        DECODER_STRIP,
        DECODER_METASPACE
    } kind;
    char from[64], to[64]; /* DECODER_REPLACE, _METASPACE; `from` is what _STRIP removes */
    int32_t start;         /* DECODER_STRIP: characters to remove from the text's start */
    bool keep_first;       /* DECODER_METASPACE: prepend_scheme never */
};
struct decoder {
    struct decoder_step step[TOKENIZER_STAGES]; /* [n] */
    int32_t n;
};
void read_decoder(struct json *j, struct decoder *d);
/* Set the bytes and flags of every token, once. */
int decoder_apply(const struct decoder *d, struct tokenizer *t, struct err *e);

/* ---- tokenizer_split.c, tokenizer_scan.c ---- */

int pattern_compile(struct pattern *p, const char *regex, size_t len, struct err *e);
int pattern_literal(struct pattern *p, const char *text, size_t len, struct err *e);
void pattern_release(struct pattern *p);
/* The first match at or after `at`; 1: found, 0: none, negative: an error. */
int pattern_find(const struct pattern *p, struct encoder *enc, const char *s, size_t len, size_t at,
                 size_t *ret_start, size_t *ret_end);
/* Run the stages from number `at` on over one piece; `first`: it is the beginning of
 * the whole text. */
int encode_piece(struct encoder *enc, int32_t at, const char *s, size_t len, bool first);
/* The hand-written scanner for a regular expression, or NULL. */
size_t (*scan_for(const char *regex, size_t len))(const uint8_t *s, size_t len);
size_t scan_gpt2(const uint8_t *s, size_t len);
extern const char GPT2_PATTERN[];
/* Unicode's classes of characters. */
bool char_is_space(int32_t c);
bool char_is_number(int32_t c);
bool char_is_word(int32_t c); /* \w */
bool char_is_punctuation(int32_t c);

/* ---- tokenizer_normal.c ---- */

/* A text and, where normalizing made a new one, the memory that it lies in. */
struct normalized {
    const char *s; /* within the text that was given, or within `own` */
    size_t len;    /* bytes */
    char *own;     /* freed by the caller; NULL: no memory was needed */
};
int normalize(struct encoder *enc, const char *s, size_t len, struct normalized *ret);

/* ---- tokenizer_added.c ---- */

/* The node one byte further, or -1. */
int32_t trie_child(const struct trie *tr, int32_t node, uint8_t byte);
int trie_add(struct trie *tr, const char *text, size_t len, int32_t token);
int added_add(struct tokenizer *t, const struct added_token *a, const char *text, size_t len,
              bool special, struct err *e);
/* Build the tries, once all added tokens and normalizers are known. A token that is
 * matched in normalized text is normalized itself. */
int added_finish(struct tokenizer *t, struct err *e);
/* Split a text at the added tokens of `tr`: emits their ids and calls `piece` for the
 * text between them. */
int added_split(struct encoder *enc, const struct trie *tr, const char *s, size_t len, bool first,
                int (*piece)(struct encoder *enc, const char *s, size_t len, bool first));

/* ---- tokenizer_bpe.c ---- */

/* Size the table for `n` merges at once. */
int bpe_reserve(struct bpe *b, size_t n);
/* Prefetch the slot of a pair. */
void bpe_fetch_merge(const struct bpe *b, int32_t left, int32_t right);
/* left and right become `id`; lower ranks (0 .. INT32_MAX) merge first. */
int bpe_add_merge(struct bpe *b, int32_t left, int32_t right, int32_t id, int32_t rank);
/* Once the vocabulary and the merges are known. */
int bpe_finish(struct tokenizer *t, struct err *e);
void bpe_release(struct bpe *b);
int bpe_encode_word(struct encoder *enc, const char *s, size_t len);
/* ---- tokenizer.c ---- */

/* Encode a word with the tokenizer's model. */
int encode_word(struct encoder *enc, const char *s, size_t len);
/* Append ids to the output; ERR_INVALID over the limit. */
int encoder_emit(struct encoder *enc, const int32_t *id, int32_t n);
/* ERR_INVALID if a word of `len` bytes is certain to exceed the limit, before any work
 * is done on it. */
int encoder_check_word(struct encoder *enc, size_t len);
/* Set t->word_longest, for models that drop no byte of a word. */
void tokenizer_find_longest(struct tokenizer *t);

/* ---- tokenizer_unigram.c ---- */

/* Once the vocabulary and its scores are known. */
int unigram_finish(struct tokenizer *t, struct err *e);
void unigram_release(struct unigram *u);
int unigram_encode_word(struct encoder *enc, const char *s, size_t len);

/* ---- tokenizer_gpt2.c, tokenizer_spm.c: directories without a tokenizer.json ---- */

/* From vocab.json and merges.txt: byte-level BPE, split like GPT-2's. */
int tokenizer_open_gpt2(struct tokenizer *t, const char *dir, struct err *e);
/* From the bytes of a SentencePiece tokenizer.model. */
int tokenizer_parse_spm(struct tokenizer *t, const uint8_t *data, size_t len, struct err *e);

/* ---- tokenizer_byte_alphabet.c ---- */

/* GPT-2's alphabet: the character that stands for a byte, and back (-1: none). */
int32_t byte_to_char(uint8_t b);
int char_to_byte(int32_t c);

#endif
