/* The vocabulary of a GGUF file as a tokenizer.
 *
 * A "gpt2" vocabulary (byte-level BPE) is written as the text of a tokenizer.json, a
 * "llama" one (SentencePiece) as a tokenizer.model, and read by the readers of those.
 * The file only names its pre-tokenizer; the table below defines those names.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/buf.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/tokenizer/tokenizer_internal.h"

/* Token types, the same numbers as SentencePiece's. */
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER, TYPE_UNUSED, TYPE_BYTE };

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TAIL "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define LLAMA3 CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" TAIL
#define QWEN2 CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" TAIL
#define LING                                                     \
    "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define QWEN35                                                   \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}" \
                 "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define DEEPSEEK3                                                             \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"                   \
    "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" \
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SEED                                             \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" \
                 "| ?[^\\s\\p{L}\\p{N}\\r\\n]+|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TEKKEN                                                                              \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" \
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define GPT4O                                                                                  \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" CONTRACTIONS "?|[^\\r\\n\\p{L}\\p{N}]?" UPPER \
    "+" LOWER "*" CONTRACTIONS                                                                 \
    "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define YOUTU                                                                                  \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" CONTRACTIONS "?|[^\\r\\n\\p{L}\\p{N}]?" UPPER \
    "+" LOWER "*" CONTRACTIONS                                                                 \
    "?|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define EXAONE_MOE                                                                     \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+|\\p{N}" \
                 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define JAIS2                                                                                 \
    CONTRACTIONS                                                                              \
    "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" \
    "|\\s{512}(?!\\S)|\\s{256}(?!\\S)|\\s{128}(?!\\S)|\\s{64}(?!\\S)|\\s{32}(?!\\S)"          \
    "|\\s{16}(?!\\S)|\\s{8}(?!\\S)|\\s{4}(?!\\S)|\\s{1,2}(?!\\S)|\\s{1}"
/* Moonshot's: Chinese characters are words of their own. */
#define KIMI_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define KIMI_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define KIMI                                                                            \
    "[\\p{Han}]+|[^\\r\\n\\p{L}\\p{N}]?" KIMI_UPPER "*" KIMI_LOWER "+" CONTRACTIONS "?" \
    "|[^\\r\\n\\p{L}\\p{N}]?" KIMI_UPPER "+" KIMI_LOWER "*" CONTRACTIONS "?|\\p{N}{1,3}" TAIL
/* Digits in threes, counted from the last. */
#define DIGITS_FROM_RIGHT "\\p{N}{1,3}(?=(?:\\p{N}{3})*(?!\\p{N}))"
#define ASIAN                                                                         \
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f" \
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\ua9e0-\ua9ff"  \
    "\uaa60-\uaa7f\uac00-\ud7af\u1100-\u11ff]+"
/* Letters that have a case. */
#define DEEPSEEK_LETTERS                                                       \
    "\\s?[A-Za-z"                                                              \
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"  \
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-"   \
    "\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"  \
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"  \
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-" \
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-"   \
    "\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-"  \
    "\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"   \
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"    \
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"   \
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-"  \
    "\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"  \
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"       \
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"          \
    "\U000118df\U0001e900-\U0001e943"                                          \
    "]+"
#define DEEPSEEK_CJK "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

/* A value of tokenizer.ggml.pre, and what the tokenizer.json of such models says. */
struct pre {
    const char *name;
    const char *regex;    /* NULL: GPT-2's */
    const char *first[5]; /* expressions that split before it does; NULL: none */
    bool digits;          /* each digit is a word */
    bool nfc;
    bool ignore_merges;
    bool add_bos; /* unless the file says otherwise */
};

static const struct pre PRES[] = {
    {.name = "default"},
    {.name = "gpt-2"},
    {.name = "gpt2"},
    {.name = "phi-2"},
    {.name = "mellum"},
    {.name = "a.x-4.0"},
    {.name = "smollm", .digits = true},
    {.name = "mellum2", .digits = true},
    {.name = "starcoder", .digits = true},
    {.name = "refact", .digits = true},
    {.name = "command-r", .digits = true},
    {.name = "olmo"},
    {.name = "exaone4"},
    {.name = "exaone", .digits = true},
    {.name = "granite-docling"},
    {.name = "llama-bpe", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "llama3", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "llama-v3", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "falcon3", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "midm-2.0", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "lfm2", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "falcon-h1", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "pixtral", .regex = LLAMA3, .ignore_merges = true, .add_bos = true},
    {.name = "glm4", .regex = LLAMA3, .ignore_merges = true},
    {.name = "chatglm-bpe", .regex = LLAMA3},
    {.name = "smaug-bpe", .regex = LLAMA3},
    {.name = "dbrx", .regex = LLAMA3},
    {.name = "qwen2", .regex = QWEN2, .nfc = true},
    {.name = "qwen35", .regex = QWEN35, .nfc = true},
    {.name = "deepseek-r1-qwen", .regex = QWEN2},
    {.name = "deepseek-v3",
     .regex = DEEPSEEK3,
     .first = {"\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"}},
    {.name = "hunyuan-dense",
     .regex = DEEPSEEK3,
     .first = {"\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"}},
    {.name = "deepseek-llm",
     .regex = "\\p{N}+",
     .first = {"[\r\n]", DEEPSEEK_LETTERS,
               "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", "\\s+$",
               DEEPSEEK_CJK}},
    {.name = "deepseek-coder",
     .regex = "\\p{N}",
     .first = {"[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", DEEPSEEK_CJK}},
    {.name = "falcon", .regex = "[0-9][0-9][0-9]", .first = {"[\\p{P}\\$\\+<=>\\^~\\|`]+", GPT2}},
    {.name = "hunyuan", .regex = QWEN2},
    {.name = "solar-open", .regex = QWEN2},
    {.name = "bailingmoe2", .regex = LING},
    {.name = "stablelm2", .regex = QWEN2},
    {.name = "seed-coder", .regex = SEED},
    {.name = "tekken", .regex = TEKKEN, .ignore_merges = true, .add_bos = true},
    {.name = "gpt-4o", .regex = GPT4O},
    {.name = "minimax-m2", .regex = GPT4O},
    {.name = "llama4", .regex = GPT4O},
    {.name = "kanana2", .regex = GPT4O},
    {.name = "youtu",
     .regex = YOUTU,
     .first =
         {"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
          "\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f"
          "\u30a0-\u30ff]+"},
     .ignore_merges = true},
    {.name = "kimi-k2", .regex = KIMI, .ignore_merges = true},
    {.name = "exaone-moe", .regex = EXAONE_MOE},
    {.name = "jais-2", .regex = JAIS2},
    {.name = "afmoe", .regex = DEEPSEEK3, .first = {DIGITS_FROM_RIGHT, ASIAN}},
};

/* Gemma-4's BPE over the characters of the whole text, whose spaces are marked. */
static const struct pre MARKED = {.name = "gemma4", .add_bos = true};

/* The vocabulary in the metadata. */
struct vocabulary {
    const struct gguf *g;
    const struct gguf_pair *tokens, *types, *scores, *merges;
    const struct pre *pre;
    bool sentencepiece;
    bool add_bos, add_eos, add_space, remove_spaces;
    int32_t bos, eos; /* -1: none */
    struct err *e;
};

/* ---- reading ---- */

static int read_id(const struct vocabulary *v, const char *key, int32_t *ret)
{
    int64_t id = -1;
    int found = gguf_int(v->g, key, &id, v->e);

    if (found > 0 && (id < 0 || (uint64_t)id >= v->tokens->n)) {
        return err_set(v->e, ERR_INVALID, "%s: %s is %lld, the vocabulary has %llu tokens",
                       v->g->file, key, (long long)id, (unsigned long long)v->tokens->n);
    }
    *ret = found > 0 ? (int32_t)id : -1;
    return found;
}

static int read_pre(struct vocabulary *v)
{
    char known[1024] = "";
    struct gguf_text name = {"default", 7};
    int found = gguf_string(v->g, "tokenizer.ggml.pre", &name, v->e);

    if (found < 0) {
        return found;
    }
    for (size_t i = 0; i < ARRAY_LEN(PRES); i++) {
        if (gguf_text_is(name, PRES[i].name)) {
            v->pre = &PRES[i];
            return 0;
        }
        size_t len = strlen(known);
        snprintf(known + len, sizeof(known) - len, "%s%s", len ? ", " : "", PRES[i].name);
    }
    return err_set(v->e, ERR_UNSUPPORTED,
                   "%s: tokenizer.ggml.pre '%.*s' is not known; known are %s", v->g->file,
                   (int)MIN(name.len, (size_t)40), name.at, known);
}

static int read_lists(struct vocabulary *v)
{
    int rc = gguf_array(v->g, "tokenizer.ggml.tokens", GGUF_STRING, &v->tokens, v->e);

    if (rc == 0 || (rc > 0 && (v->tokens->n == 0 || v->tokens->n > LIMIT_VOCAB))) {
        return err_set(v->e, ERR_INVALID,
                       "%s: tokenizer.ggml.tokens is missing, or not 1 to %d tokens", v->g->file,
                       LIMIT_VOCAB);
    }
    if (rc > 0) {
        rc = gguf_array(v->g, "tokenizer.ggml.token_type", GGUF_I32, &v->types, v->e);
    }
    if (rc >= 0) {
        rc = gguf_array(v->g, "tokenizer.ggml.scores", GGUF_F32, &v->scores, v->e);
    }
    if (rc >= 0) {
        rc = gguf_array(v->g, "tokenizer.ggml.merges", GGUF_STRING, &v->merges, v->e);
    }
    if (rc < 0) {
        return rc;
    }
    if ((v->types && v->types->n != v->tokens->n) || (v->scores && v->scores->n != v->tokens->n)) {
        return err_set(v->e, ERR_INVALID,
                       "%s: tokenizer.ggml has %llu tokens, but not as many types and scores",
                       v->g->file, (unsigned long long)v->tokens->n);
    }
    if (v->sentencepiece ? !v->scores || !v->types : !v->merges) {
        return err_set(v->e, ERR_INVALID, "%s: tokenizer.ggml.%s is missing", v->g->file,
                       v->sentencepiece ? "scores or token_type" : "merges");
    }
    return 0;
}

static int read_vocabulary(struct vocabulary *v)
{
    struct gguf_text model = {0};
    int rc = gguf_string(v->g, "tokenizer.ggml.model", &model, v->e);

    if (rc < 0) {
        return rc;
    }
    v->sentencepiece = rc > 0 && gguf_text_is(model, "llama");
    bool marked = rc > 0 && gguf_text_is(model, "gemma4");
    if (!v->sentencepiece && !marked && !(rc > 0 && gguf_text_is(model, "gpt2"))) {
        return err_set(v->e, ERR_UNSUPPORTED,
                       "%s: tokenizer.ggml.model is '%.*s'; gpt2, llama and gemma4 are read",
                       v->g->file, (int)MIN(model.len, (size_t)40), model.at ? model.at : "");
    }
    rc = read_lists(v);
    if (rc >= 0 && marked) {
        v->pre = &MARKED;
    } else if (rc >= 0 && !v->sentencepiece) {
        rc = read_pre(v);
    }
    if (rc < 0) {
        return rc;
    }
    v->add_bos = v->sentencepiece || v->pre->add_bos;
    v->add_space = v->sentencepiece;
    const struct {
        const char *key;
        bool *value;
    } flags[] = {{"tokenizer.ggml.add_bos_token", &v->add_bos},
                 {"tokenizer.ggml.add_eos_token", &v->add_eos},
                 {"tokenizer.ggml.add_space_prefix", &v->add_space},
                 {"tokenizer.ggml.remove_extra_whitespaces", &v->remove_spaces}};
    for (size_t i = 0; i < ARRAY_LEN(flags) && rc >= 0; i++) {
        rc = gguf_bool(v->g, flags[i].key, flags[i].value, v->e);
    }
    if (rc >= 0) {
        rc = read_id(v, "tokenizer.ggml.bos_token_id", &v->bos);
    }
    return rc < 0 ? rc : MIN(read_id(v, "tokenizer.ggml.eos_token_id", &v->eos), 0);
}

static int32_t type_of(const struct vocabulary *v, uint64_t id)
{
    return v->types ? gguf_item_i32(v->types, id) : TYPE_NORMAL;
}

static int check_text(const struct vocabulary *v, struct gguf_text t, const char *what, uint64_t i)
{
    if (utf8_valid(t.at, t.len)) {
        return 0;
    }
    return err_set(v->e, ERR_INVALID, "%s: %s %llu is not UTF-8", v->g->file, what,
                   (unsigned long long)i);
}

/* ---- byte-level BPE as tokenizer.json ---- */

static void put_string(struct buf *b, const char *text, size_t len)
{
    buf_putc(b, '"');
    buf_json_escape(b, text, len);
    buf_putc(b, '"');
}

static void put_decimal(struct buf *b, uint64_t n)
{
    char digits[20];
    size_t at = sizeof(digits);

    do {
        digits[--at] = (char)('0' + n % 10);
        n /= 10;
    } while (n > 0);
    buf_append(b, digits + at, sizeof(digits) - at);
}

static int put_model(const struct vocabulary *v, struct buf *b)
{
    const uint8_t *at = v->tokens->at;
    const char *comma = "";
    int rc = 0;

    buf_printf(b,
               "{\"model\":{\"type\":\"BPE\",\"byte_fallback\":%s,\"ignore_merges\":%s,\"vocab\":{",
               v->pre == &MARKED ? "true" : "false", v->pre->ignore_merges ? "true" : "false");
    for (uint64_t i = 0; i < v->tokens->n && rc == 0; i++) {
        struct gguf_text t = gguf_next_string(&at);
        rc = check_text(v, t, "token", i);
        if (type_of(v, i) == TYPE_CONTROL || type_of(v, i) == TYPE_USER) {
            continue;
        }
        buf_puts(b, comma);
        put_string(b, t.at, t.len);
        buf_putc(b, ':');
        put_decimal(b, i);
        comma = ",";
    }
    return rc;
}

static int put_merges(const struct vocabulary *v, struct buf *b)
{
    const uint8_t *at = v->merges->at;
    int rc = 0;

    buf_puts(b, "},\"merges\":[");
    for (uint64_t i = 0; i < v->merges->n && rc == 0; i++) {
        struct gguf_text t = gguf_next_string(&at);
        rc = check_text(v, t, "merge", i);
        if (i > 0) {
            buf_putc(b, ',');
        }
        put_string(b, t.at, t.len);
    }
    buf_puts(b, "]}");
    return rc;
}

/* Control and user-defined tokens are both matched before the text is split; only
 * control tokens are omitted from decoded text. */
static void put_added(const struct vocabulary *v, struct buf *b)
{
    const uint8_t *at = v->tokens->at;
    const char *comma = "";

    buf_puts(b, ",\"added_tokens\":[");
    for (uint64_t i = 0; i < v->tokens->n; i++) {
        struct gguf_text t = gguf_next_string(&at);
        int32_t type = type_of(v, i);
        if (type != TYPE_CONTROL && type != TYPE_USER) {
            continue;
        }
        buf_printf(b, "%s{\"id\":%llu,\"normalized\":false,\"special\":%s,\"content\":", comma,
                   (unsigned long long)i, type == TYPE_CONTROL ? "true" : "false");
        put_string(b, t.at, t.len);
        buf_putc(b, '}');
        comma = ",";
    }
    buf_putc(b, ']');
}

/* Words end where a match does. regex NULL: nothing. */
static void put_split(struct buf *b, const char *regex)
{
    if (regex) {
        buf_puts(b, "{\"type\":\"Split\",\"behavior\":\"Isolated\",\"invert\":false,"
                    "\"pattern\":{\"Regex\":");
        put_string(b, regex, strlen(regex));
        buf_puts(b, "}},");
    }
}

static void put_parts(const struct vocabulary *v, struct buf *b)
{
    static const char BYTE_LEVEL[] =
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":";

    if (v->pre == &MARKED) {
        buf_puts(b, ",\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},"
                    "\"content\":\"\u2581\"},\"decoder\":{\"type\":\"Sequence\",\"decoders\":["
                    "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\u2581\"},\"content\":\" \"},"
                    "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}}");
        return;
    }
    if (v->pre->nfc) {
        buf_puts(b, ",\"normalizer\":{\"type\":\"NFC\"}");
    }
    buf_puts(b, ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[");
    if (v->pre->digits) {
        buf_puts(b, "{\"type\":\"Digits\",\"individual_digits\":true},");
    }
    for (size_t i = 0; i < ARRAY_LEN(v->pre->first); i++) {
        put_split(b, v->pre->first[i]);
    }
    put_split(b, v->pre->regex);
    buf_printf(b, "%s%s}]},\"decoder\":%strue}}", BYTE_LEVEL, v->pre->regex ? "false" : "true",
               BYTE_LEVEL);
}

static int make_bpe(struct tokenizer *t, const struct vocabulary *v)
{
    struct buf b;

    buf_init(&b, LIMIT_TOKENIZER_JSON_BYTES);
    int rc = put_model(v, &b);
    if (rc == 0) {
        rc = put_merges(v, &b);
    }
    if (rc == 0) {
        put_added(v, &b);
        put_parts(v, &b);
        rc = b.failed ? err_nomem(v->e, "the vocabulary") : tokenizer_parse(t, b.data, b.len, v->e);
        if (rc < 0) {
            err_prefix(v->e, "%s, its vocabulary as tokenizer.json", v->g->file);
        }
    }
    buf_release(&b);
    return rc;
}

/* ---- SentencePiece as tokenizer.model ---- */

/* Protocol buffers: a field is its number and wire type, then a varint, four bytes, or
 * a length and that many bytes. */
enum { WIRE_VARINT, WIRE_BYTES = 2, WIRE_FIXED32 = 5 };

static void put_varint(struct buf *b, uint64_t n)
{
    for (; n >= 128; n >>= 7) {
        buf_putc(b, (char)(n | 128));
    }
    buf_putc(b, (char)n);
}

static void put_number(struct buf *b, int field, uint64_t n)
{
    put_varint(b, (uint64_t)field << 3 | WIRE_VARINT);
    put_varint(b, n);
}

static void put_bytes(struct buf *b, int field, const char *at, size_t len)
{
    put_varint(b, (uint64_t)field << 3 | WIRE_BYTES);
    put_varint(b, len);
    buf_append(b, at, len);
}

/* A ModelProto: its pieces, then trainer_spec (model_type BPE, byte_fallback), then
 * normalizer_spec. */
static int put_proto(const struct vocabulary *v, struct buf *b, struct buf *part)
{
    const uint8_t *at = v->tokens->at;
    bool bytes = false;
    int rc = 0;

    for (uint64_t i = 0; i < v->tokens->n && rc == 0; i++) {
        struct gguf_text t = gguf_next_string(&at);
        rc = check_text(v, t, "token", i);
        buf_clear(part);
        put_bytes(part, 1, t.at, t.len);
        put_varint(part, 2 << 3 | WIRE_FIXED32);
        buf_append(part, v->scores->at + 4 * i, 4);
        put_number(part, 3, (uint32_t)type_of(v, i));
        put_bytes(b, 1, part->data, part->len);
        bytes |= type_of(v, i) == TYPE_BYTE;
        b->failed |= part->failed;
    }
    buf_clear(part);
    put_number(part, 3, 2);
    put_number(part, 35, bytes);
    put_bytes(b, 2, part->data, part->len);
    buf_clear(part);
    put_number(part, 3, v->add_space);
    put_number(part, 4, v->remove_spaces);
    put_bytes(b, 3, part->data, part->len);
    return rc;
}

static int make_sentencepiece(struct tokenizer *t, const struct vocabulary *v)
{
    struct buf b, part;

    buf_init(&b, LIMIT_TOKENIZER_JSON_BYTES);
    buf_init(&part, LIMIT_TOKENIZER_JSON_BYTES);
    int rc =
        buf_reserve(&part, 256) < 0 ? err_nomem(v->e, "the vocabulary") : put_proto(v, &b, &part);
    if (rc == 0) {
        rc = b.failed ? err_nomem(v->e, "the vocabulary")
                      : tokenizer_parse_spm(t, (const uint8_t *)b.data, b.len, v->e);
        if (rc < 0) {
            err_prefix(v->e, "%s, its vocabulary as tokenizer.model", v->g->file);
        }
    }
    buf_release(&b);
    buf_release(&part);
    return rc;
}

int gguf_tokenizer(struct tokenizer **ret, const struct gguf *g, struct err *e)
{
    struct vocabulary v = {.g = g, .bos = -1, .eos = -1, .e = e};
    int rc = read_vocabulary(&v);

    if (rc < 0) {
        return rc;
    }
    struct tokenizer *t = calloc(1, sizeof(*t));
    if (!t) {
        return err_nomem(e, "a tokenizer");
    }
    rc = v.sentencepiece ? make_sentencepiece(t, &v) : make_bpe(t, &v);
    if (rc < 0) {
        tokenizer_free(t);
        return rc;
    }
    t->bos = v.bos;
    t->eos = v.eos;
    t->prefix[0] = v.bos;
    t->n_prefix = v.add_bos && v.bos >= 0;
    t->suffix[0] = v.eos;
    t->n_suffix = v.add_eos && v.eos >= 0;
    *ret = t;
    return 0;
}

int gguf_tokenizer_open(struct tokenizer **ret, const char *path, struct err *e)
{
    struct gguf *g = NULL;
    int rc = gguf_open_one(&g, path, e);

    if (rc == 0) {
        rc = gguf_tokenizer(ret, g, e);
    }
    gguf_free(g);
    return rc;
}
