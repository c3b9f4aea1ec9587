/* The inside of a tokenizer, shared by models/tokenizer*.c and by nobody else.
 *
 * Encoding is a row of stages, each of which hands on pieces of the text:
 *
 *     text ─► added tokens (tokenizer_added.c) ─► normalizer (tokenizer_normal.c)
 *          ─► added tokens that match normalized text
 *          ─► pre-tokenizer stages (tokenizer_split.c, tokenizer_scan.c) ─► words
 *          ─► model (tokenizer_bpe.c, tokenizer_unigram.c) ─► ids
 *
 * No list of pieces is ever made: a stage calls the next one for each piece
 * (`encode_piece`). Whatever an encoding needs beyond its own stack is in `struct
 * encoder`, so the tokenizer itself is never written to, but for the word cache, which
 * is lock-free.
 */
#ifndef QUIRE_MODELS_TOKENIZER_TOKENIZER_INTERNAL_H
#define QUIRE_MODELS_TOKENIZER_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "config/base/json.h"
#include "config/base/utf8.h"
#include "models/tokenizer/tokenizer.h"

enum {
    TOKENIZER_STAGES = 16,   /* pre-tokenizers in a row; normalizers in a row */
    TOKENIZER_TEMPLATE = 16, /* ids that the post-processor adds on either side */
    TOKENIZER_PATTERN_BYTES = 4096,
    TOKEN_TEXT_BYTES = JSON_KEY_BYTES,
    TOKEN_OUT_BYTES = 1 << 16, /* what a token decodes to, at most */
    WORD_MAX_BYTES = 1 << 28,  /* positions in a word fit 32 bits with room to spare */
};

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

/* Open addressing over token texts. A slot has all that a comparison needs but the text
 * itself: a vocabulary is larger than the caches, and every further look costs a
 * miss. */
struct token_map {
    struct token_slot {
        uint32_t hash;
        int32_t id; /* -1: free */
        uint32_t text_off, text_len;
    } *slot;
    uint32_t mask, n;
};

/* ---- stages ---- */

enum split_behavior {
    SPLIT_REMOVED,
    SPLIT_ISOLATED,
    SPLIT_MERGED_PREVIOUS,
    SPLIT_MERGED_NEXT,
    SPLIT_CONTIGUOUS
};
enum prepend_scheme { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS };

/* A regular expression with the limits that untrusted text asks for, and the
 * hand-written equal of a well-known one. */
struct pattern {
    pcre2_code *code; /* NULL: a literal */
    bool jit;
    char *literal;
    size_t literal_len;
    /* Bytes of the next piece at `s` (`len` > 0 bytes follow); every byte is in some
     * piece. NULL: not a known pattern. */
    size_t (*scan)(const uint8_t *s, size_t len);
};

enum stage_kind { STAGE_SPLIT, STAGE_CLASS, STAGE_PREFIX_SPACE, STAGE_METASPACE };

struct stage {
    enum stage_kind kind;
    struct pattern pattern; /* STAGE_SPLIT */
    enum split_behavior behavior;
    bool invert;
    bool split; /* STAGE_METASPACE: a word begins at each replacement */
    enum prepend_scheme prepend;
    char replacement[8];
    uint8_t replacement_len;
    bool (*is_match)(int32_t c); /* STAGE_CLASS: one character */
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
    char *text;             /* what is prepended or put in place of a match */
    size_t text_len;
    bool left, right; /* NORMAL_STRIP */
};

/* ---- added tokens ---- */

struct added_token {
    int32_t id;
    bool single_word, lstrip, rstrip, normalized;
};

/* Trie of the texts to look for; node 0 is the root. */
struct trie_node {
    int32_t child, sibling; /* -1: none */
    int32_t token;          /* index into tokenizer.added, -1: none ends here */
    uint8_t byte;
};
struct trie {
    struct trie_node *node;
    int32_t n, cap;
    bool first[256]; /* a text begins with this byte */
};

/* ---- models ---- */

struct merge_slot {
    uint64_t pair; /* left id << 32 | right id */
    int32_t rank;  /* -1: free */
    int32_t id;
};

struct word_cache;

struct bpe {
    struct merge_slot *slot;
    uint32_t mask, n;
    int32_t byte_id[256];  /* byte-level: the id of each byte; else of <0xNN>; -1: none */
    int32_t ascii_id[128]; /* not byte-level: ids of one-character tokens */
    bool byte_level, byte_fallback, fuse_unk, ignore_merges;
    bool cut_at_marks; /* texts may be cut before U+2581, see tokenizer_bpe.c */
    int32_t unk;
    struct word_cache *cache; /* NULL: words are not cached */
};

struct unigram {
    double *score; /* [n], by id */
    int32_t n;
    double min_score;
    struct trie trie; /* its tokens are ids */
    bool byte_fallback;
    int32_t byte_id[256];
    int32_t unk;
};

enum model_kind { MODEL_BYTES, MODEL_BPE, MODEL_UNIGRAM };

/* What a decoder does to the beginning of a text. */
enum decode_start {
    DECODE_AS_IS,
    DECODE_STRIP,       /* one space goes */
    DECODE_FIRST_TOKEN, /* all leading-space marks of the first token go */
};

struct tokenizer {
    struct token *token; /* [n_vocab], capacity token_cap */
    int32_t n_vocab, token_cap;
    size_t longest;   /* bytes that a token decodes to, at most */
    int32_t bos, eos; /* -1: none */
    char *text;       /* every token's text and bytes */
    size_t text_len, text_cap;
    struct token_map map;
    /* no token of an encoded word stands for more of its bytes; 0: there is no such
     * bound */
    size_t word_longest;

    struct added_token *added; /* [n_added] */
    int32_t n_added;
    struct trie raw, normalized;
    struct normal normal[TOKENIZER_STAGES];
    int32_t n_normal;
    struct stage stage[TOKENIZER_STAGES];
    int32_t n_stages;
    enum model_kind model;
    struct bpe bpe;
    struct unigram unigram;
    int32_t prefix[TOKENIZER_TEMPLATE], suffix[TOKENIZER_TEMPLATE]; /* what add_special adds */
    int32_t n_prefix, n_suffix;

    enum decode_start start;
    bool has_byte_tokens;
    bool join_spaces; /* no decoder: tokens are joined with spaces */
};

/* One call of tokenizer_encode. */
struct encoder {
    const struct tokenizer *t;
    struct token_list *out;
    int32_t limit; /* out->n never passes this */
    int32_t max_tokens;
    pcre2_match_data *match; /* NULL until a regular expression runs */
    pcre2_match_context *limits;
    struct symbol *symbol; /* scratch of long words */
    uint64_t *heap;
    size_t symbol_cap;
    struct err *e;
};

/* ---- tokenizer_vocab.c ---- */

/* Ids 0 .. n - 1 exist; those that are new are holes. */
int vocab_reserve_ids(struct tokenizer *t, int32_t n, struct err *e);
/* Give `id` this text. ERR_INVALID when the id is out of range, has another text, or
 * the text has another id. */
int vocab_add(struct tokenizer *t, int32_t id, const char *text, size_t len, struct err *e);
int32_t vocab_find(const struct tokenizer *t, const char *text, size_t len);
/* Room for `n` tokens, so that the map need not grow step by step. */
int vocab_reserve(struct tokenizer *t, size_t n);
bool vocab_is(const struct tokenizer *t, int32_t id, const char *text, size_t len);
/* vocab_find in steps, for whoever looks up many: the hash, fetching the slot, fetching
 * the text, the id. */
uint32_t vocab_hash(const char *text, size_t len);
void vocab_fetch_slot(const struct tokenizer *t, uint32_t hash);
void vocab_fetch_text(const struct tokenizer *t, uint32_t hash);
int32_t vocab_find_hashed(const struct tokenizer *t, const char *text, size_t len, uint32_t hash);
/* Append bytes to tokenizer.text; their offset in *ret_off. */
int vocab_text(struct tokenizer *t, const char *text, size_t len, uint32_t *ret_off, struct err *e);

/* ---- tokenizer_load.c, tokenizer_merges.c, tokenizer_parts.c ---- */

/* A tokenizer from tokenizer.json's text alone, without the names of its special
 * ids. */
int tokenizer_open_json(struct tokenizer **ret, const char *json, size_t len, struct err *e);
/* tokenizer.json's text into a zeroed tokenizer. */
int tokenizer_parse(struct tokenizer *t, const char *json, size_t len, struct err *e);
/* Record in the reader an error that has its code and text already. */
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

/* Decoders in the order of the file, as they act on one token. */
struct decoder_step {
    enum {
        DECODER_BYTE_LEVEL,
        DECODER_REPLACE,
        DECODER_BYTE_FALLBACK,
        DECODER_FUSE,
        DECODER_STRIP,
        DECODER_METASPACE
    } kind;
    char from[64], to[64];
    int32_t start;
    bool keep_first; /* DECODER_METASPACE: prepend_scheme never */
};
struct decoder {
    struct decoder_step step[TOKENIZER_STAGES];
    int32_t n;
};
void read_decoder(struct json *j, struct decoder *d);
/* Work out every token's bytes, once. */
int decoder_apply(const struct decoder *d, struct tokenizer *t, struct err *e);

/* ---- tokenizer_split.c, tokenizer_scan.c ---- */

int pattern_compile(struct pattern *p, const char *regex, size_t len, struct err *e);
int pattern_literal(struct pattern *p, const char *text, size_t len, struct err *e);
void pattern_release(struct pattern *p);
/* The first match at or after `at`; 1: found, 0: none, negative: an error. */
int pattern_find(const struct pattern *p, struct encoder *enc, const char *s, size_t len, size_t at,
                 size_t *ret_start, size_t *ret_end);
/* Stages `at` and following on one piece; `first`: it begins where the whole text
 * does. */
int encode_piece(struct encoder *enc, int32_t at, const char *s, size_t len, bool first);
/* The hand-written equal of a regular expression, or NULL. */
size_t (*scan_for(const char *regex, size_t len))(const uint8_t *s, size_t len);
size_t scan_gpt2(const uint8_t *s, size_t len);
extern const char GPT2_PATTERN[];
/* General categories. */
bool char_is_space(int32_t c);
bool char_is_number(int32_t c);
bool char_is_word(int32_t c); /* \w */
bool char_is_punctuation(int32_t c);

/* ---- tokenizer_normal.c ---- */

/* `s` is the text that was given, a part of it, or a part of `own`, which the caller
 * frees. */
struct normalized {
    const char *s;
    size_t len;
    char *own;
};
int normalize(struct encoder *enc, const char *s, size_t len, struct normalized *ret);

/* ---- tokenizer_added.c ---- */

/* The node one byte further, or -1. */
int32_t trie_child(const struct trie *tr, int32_t node, uint8_t byte);
int trie_add(struct trie *tr, const char *text, size_t len, int32_t token);
int added_add(struct tokenizer *t, const struct added_token *a, const char *text, size_t len,
              bool special, struct err *e);
/* Once all are there, and the normalizers: what to look for. A token that is matched in
 * normalized text is normalized. */
int added_finish(struct tokenizer *t, struct err *e);
/* Cut a text at its added tokens: `piece` for what lies between, the tokens' ids in
 * between. */
int added_split(struct encoder *enc, const struct trie *tr, const char *s, size_t len, bool first,
                int (*piece)(struct encoder *enc, const char *s, size_t len, bool first));

/* ---- tokenizer_bpe.c ---- */

/* left and right make `id`. Lower ranks go first; 0 .. INT32_MAX. */
int bpe_reserve(struct bpe *b, size_t n);
void bpe_fetch_merge(const struct bpe *b, int32_t left, int32_t right);
int bpe_add_merge(struct bpe *b, int32_t left, int32_t right, int32_t id, int32_t rank);
int bpe_finish(struct tokenizer *t, struct err *e);
void bpe_release(struct bpe *b);
int bpe_encode_word(struct encoder *enc, const char *s, size_t len);
/* tokenizer.c: a word to whichever model there is; one id to the output, or ERR_INVALID
 * over the limit. */
int encode_word(struct encoder *enc, const char *s, size_t len);
int encoder_emit(struct encoder *enc, const int32_t *id, int32_t n);
/* ERR_INVALID where a word of so many bytes surely makes more tokens than there is room
 * for: before any work is done for it. */
int encoder_check_word(struct encoder *enc, size_t len);
/* Sets t->word_longest: every byte of a word is part of some token. */
void tokenizer_find_longest(struct tokenizer *t);

/* ---- tokenizer_unigram.c ---- */

/* Once the vocabulary and its scores are there. */
int unigram_finish(struct tokenizer *t, struct err *e);
void unigram_release(struct unigram *u);
int unigram_encode_word(struct encoder *enc, const char *s, size_t len);

/* ---- tokenizer_gpt2.c, tokenizer_spm.c: directories without a tokenizer.json ---- */

/* vocab.json and merges.txt: byte-level BPE as GPT-2 has it. */
int tokenizer_open_gpt2(struct tokenizer *t, const char *dir, struct err *e);
/* The bytes of a SentencePiece tokenizer.model. */
int tokenizer_parse_spm(struct tokenizer *t, const uint8_t *data, size_t len, struct err *e);

/* ---- tokenizer_byte_alphabet.c ---- */

/* GPT-2's alphabet: the character that stands for a byte, and back (-1: none). */
int32_t byte_to_char(uint8_t b);
int char_to_byte(int32_t c);

#endif
