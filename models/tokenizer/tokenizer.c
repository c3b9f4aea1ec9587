/* Opening a tokenizer, and encoding from the whole text down to words. */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"

void token_list_release(struct token_list *l)
{
    free(l->id);
    memset(l, 0, sizeof(*l));
}

int token_list_push(struct token_list *l, int32_t id)
{
    if (l->n == l->cap) {
        if (l->cap > INT32_MAX / 2) {
            return ERR_NOMEM;
        }
        int32_t cap = l->cap ? l->cap * 2 : 64;
        int32_t *p = realloc(l->id, (size_t)cap * sizeof(*p));
        if (!p) {
            return ERR_NOMEM;
        }
        l->id = p;
        l->cap = cap;
    }
    l->id[l->n++] = id;
    return 0;
}

/* ---- open and free ---- */

void tokenizer_free(struct tokenizer *t)
{
    if (!t) {
        return;
    }
    for (int32_t i = 0; i < t->n_stages; i++) {
        pattern_release(&t->stage[i].pattern);
    }
    for (int32_t i = 0; i < t->n_normal; i++) {
        pattern_release(&t->normal[i].pattern);
        free(t->normal[i].text);
    }
    bpe_release(&t->bpe);
    unigram_release(&t->unigram);
    free(t->raw.node);
    free(t->normalized.node);
    free(t->added);
    free(t->map.slot);
    free(t->token);
    free(t->text);
    free(t);
}

int tokenizer_open_bytes(struct tokenizer **ret, struct err *e)
{
    struct tokenizer *t = calloc(1, sizeof(*t));

    if (!t) {
        return err_nomem(e, "a tokenizer");
    }
    t->bos = t->eos = -1;
    t->model = MODEL_BYTES;
    for (int32_t i = 0; i < 256; i++) {
        char byte = (char)i;
        int rc = vocab_add(t, i, &byte, 1, e);
        if (rc != 0) {
            tokenizer_free(t);
            return rc;
        }
        t->token[i].out_len = t->longest = 1;
        t->token[i].flags |= i < 128 ? TOKEN_WHOLE : 0;
    }
    *ret = t;
    return 0;
}

int tokenizer_open_dummy(struct tokenizer **ret, int32_t vocab, struct err *e)
{
    static const char letters[] = "etaoin shrdlu cmfwyp vbgkqj xz ";
    struct tokenizer *t = NULL;
    uint32_t off = 0;
    int rc = tokenizer_open_bytes(&t, e);

    if (rc == 0) {
        rc = vocab_text(t, letters, sizeof(letters) - 1, &off, e);
    }
    if (rc == 0) {
        rc = vocab_reserve_ids(t, vocab, e);
    }
    if (rc != 0) {
        tokenizer_free(t);
        return rc;
    }
    t->longest = 4;
    for (int32_t id = 256; id < vocab; id++) {
        t->token[id] = (struct token){.out_off = off + (uint32_t)id % (sizeof(letters) - 4),
                                      .out_len = 4,
                                      .flags = TOKEN_DEFINED | TOKEN_WHOLE};
    }
    *ret = t;
    return 0;
}

int tokenizer_open_json(struct tokenizer **ret, const char *json, size_t len, struct err *e)
{
    struct tokenizer *t = calloc(1, sizeof(*t));

    if (!t) {
        return err_nomem(e, "a tokenizer");
    }
    int rc = tokenizer_parse(t, json, len, e);
    if (rc != 0) {
        tokenizer_free(t);
        return rc;
    }
    *ret = t;
    return 0;
}

/* "eos_token": "</s>", or {"content": "</s>", ...}, or null, which leaves *id alone. */
static void read_token_name(struct json *j, const struct tokenizer *t, int32_t *id)
{
    char text[TOKEN_TEXT_BYTES] = "";
    size_t len = 0;

    if (json_peek(j) == JSON_STRING) {
        json_read_string(j, text, sizeof(text), &len);
    } else if (json_peek(j) == JSON_OBJECT) {
        json_enter_object(j);
        while (json_next_member(j)) {
            if (json_key_is(j, "content")) {
                json_read_string(j, text, sizeof(text), &len);
            } else {
                json_skip(j);
            }
        }
    } else {
        json_skip(j);
    }
    if (!j->failed && len > 0) {
        *id = vocab_find(t, text, len);
    }
}

/* bos_token and eos_token of one file, if it exists. */
static int read_special_names(struct tokenizer *t, const char *dir, const char *name, struct err *e)
{
    char *text = NULL;
    size_t len = 0;

    if (!model_file_exists(dir, name)) {
        return 0;
    }
    int rc = model_file_read(dir, name, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);
    if (rc != 0) {
        return rc;
    }
    struct err own = {0};
    struct json j;
    json_init(&j, text, len, name, e ? e : &own);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        if (json_key_is(&j, "bos_token")) {
            read_token_name(&j, t, &t->bos);
        } else if (json_key_is(&j, "eos_token")) {
            read_token_name(&j, t, &t->eos);
        } else {
            json_skip(&j);
        }
    }
    json_finish(&j);
    free(text);
    return j.failed ? ERR_INVALID : 0;
}

static int open_json_file(struct tokenizer *t, const char *dir, struct err *e)
{
    char *text = NULL;
    size_t len = 0;
    int rc = model_file_read(dir, "tokenizer.json", LIMIT_TOKENIZER_JSON_BYTES, &text, &len, e);

    if (rc == 0) {
        rc = tokenizer_parse(t, text, len, e);
    }
    free(text);
    return rc;
}

static int open_spm_file(struct tokenizer *t, const char *dir, struct err *e)
{
    char *data = NULL;
    size_t len = 0;
    int rc = model_file_read(dir, "tokenizer.model", LIMIT_TOKENIZER_JSON_BYTES, &data, &len, e);

    if (rc == 0) {
        rc = tokenizer_parse_spm(t, (const uint8_t *)data, len, e);
    }
    free(data);
    return rc;
}

/* The forms of a tokenizer that are not read, if the directory has one of them. */
static const char *unread_form(const char *dir)
{
    return model_file_exists(dir, "tiktoken.model") ? "; tiktoken.model is not read, convert it"
           : model_file_exists(dir, "tekken.json")  ? "; tekken.json is not read, convert it"
                                                    : "";
}

/* Read the form of a tokenizer that the directory has. */
static int open_form(struct tokenizer *t, const char *dir, struct err *e)
{
    if (model_file_exists(dir, "tokenizer.json")) {
        return open_json_file(t, dir, e);
    }
    if (model_file_exists(dir, "tokenizer.model")) {
        return open_spm_file(t, dir, e);
    }
    if (model_file_exists(dir, "vocab.json")) {
        return tokenizer_open_gpt2(t, dir, e);
    }
    struct err why;
    int rc = open_json_file(t, dir, &why);
    return err_set(e, rc, "%s; nor is there a tokenizer.model, or vocab.json with merges.txt%s",
                   why.text, unread_form(dir));
}

int tokenizer_open(struct tokenizer **ret, const char *dir, struct err *e)
{
    if (gguf_is_file(dir)) {
        return gguf_tokenizer_open(ret, dir, e);
    }
    struct tokenizer *t = calloc(1, sizeof(*t));
    if (!t) {
        return err_nomem(e, "a tokenizer");
    }
    int rc = open_form(t, dir, e);
    if (rc == 0) {
        rc = read_special_names(t, dir, "special_tokens_map.json", e);
    }
    if (rc == 0) {
        rc = read_special_names(t, dir, "tokenizer_config.json", e);
    }
    if (rc != 0) {
        tokenizer_free(t);
        return rc;
    }
    *ret = t;
    return 0;
}

/* ---- the vocabulary ---- */

int32_t tokenizer_vocab_size(const struct tokenizer *t)
{
    return t->n_vocab;
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t len)
{
    return vocab_find(t, text, len);
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->n_vocab && (t->token[id].flags & TOKEN_SPECIAL);
}

size_t tokenizer_longest(const struct tokenizer *t)
{
    return t->longest;
}

const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *ret_len)
{
    if (id < 0 || id >= t->n_vocab) {
        *ret_len = 0;
        return "";
    }
    *ret_len = t->token[id].out_len;
    return t->text + t->token[id].out_off;
}

/* ---- encoding ---- */

static int too_many(struct encoder *enc)
{
    return err_set(enc->e, ERR_INVALID, "the text is more than %d tokens", enc->max_tokens);
}

int encoder_check_word(struct encoder *enc, size_t len)
{
    size_t left = (size_t)(enc->limit - enc->out->n), longest = enc->t->word_longest;

    return longest > 0 && len / longest > left ? too_many(enc) : 0;
}

void tokenizer_find_longest(struct tokenizer *t)
{
    for (int32_t id = 0; id < t->n_vocab; id++) {
        if (t->token[id].flags & TOKEN_DEFINED) {
            t->word_longest = MAX(t->word_longest, (size_t)t->token[id].text_len);
        }
    }
}

/* How many bytes of a text may become one byte by the normalizer; 0: any number. */
static size_t shrinks(const struct normal *nm)
{
    /* The two bytes of U+0390 may have been the seven of U+1FBE, U+0308 and U+0301; no
     * character has become so much shorter. */
    enum { CANONICAL = 4 };
    size_t literal = nm->pattern.literal_len;

    switch (nm->kind) {
    case NORMAL_NFC:
    case NORMAL_NFD:
        return CANONICAL;
    case NORMAL_PREPEND:
        return 1;
    case NORMAL_REPLACE:
        return literal > 0 && literal <= nm->text_len;
    default:
        return 0;
    }
}

size_t tokenizer_most_text(const struct tokenizer *t)
{
    size_t most = t->model == MODEL_BYTES ? 1 : t->word_longest;

    for (int32_t i = 0; most > 0 && i < t->n_added; i++) {
        const struct added_token *a = &t->added[i];
        most = a->lstrip || a->rstrip ? 0 : MAX(most, (size_t)t->token[a->id].text_len);
    }
    for (int32_t i = 0; i < t->n_stages; i++) {
        const struct stage *s = &t->stage[i];
        bool splits = s->kind == STAGE_SPLIT || s->kind == STAGE_CLASS;
        most = splits && s->behavior == SPLIT_REMOVED ? 0 : most;
    }
    for (int32_t i = 0; i < t->n_normal; i++) {
        most *= shrinks(&t->normal[i]);
    }
    return most;
}

int encoder_emit(struct encoder *enc, const int32_t *id, int32_t n)
{
    struct token_list *l = enc->out;

    if (n > enc->limit - l->n) {
        return too_many(enc);
    }
    for (int32_t i = 0; i < n; i++) {
        if (token_list_push(l, id[i]) != 0) {
            return err_nomem(enc->e, "token ids");
        }
    }
    return 0;
}

int encode_word(struct encoder *enc, const char *s, size_t len)
{
    if (enc->t->model == MODEL_BPE) {
        return bpe_encode_word(enc, s, len);
    }
    if (enc->t->model == MODEL_UNIGRAM) {
        return unigram_encode_word(enc, s, len);
    }
    for (size_t i = 0; i < len; i++) {
        int32_t id = (uint8_t)s[i];
        int rc = encoder_emit(enc, &id, 1);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int encode_normalized(struct encoder *enc, const char *s, size_t len, bool first)
{
    return encode_piece(enc, 0, s, len, first);
}

/* A piece between added tokens: normalized, then split at the added tokens that are
 * matched in normalized text. */
static int encode_raw(struct encoder *enc, const char *s, size_t len, bool first)
{
    struct normalized n = {s, len, NULL};
    int rc = enc->t->n_normal > 0 ? normalize(enc, s, len, &n) : 0;

    if (rc == 0) {
        rc = added_split(enc, &enc->t->normalized, n.s, n.len, first, encode_normalized);
    }
    free(n.own);
    return rc;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, bool add_special,
                     int32_t max_tokens, struct token_list *ret, struct err *e)
{
    if (!utf8_valid(text, len)) {
        return err_set(e, ERR_INVALID, "the text is not valid UTF-8");
    }
    int32_t before = ret->n;
    struct encoder enc = {.t = t, .out = ret, .max_tokens = max_tokens, .e = e};
    enc.limit = (int32_t)MIN((int64_t)before + max_tokens, (int64_t)INT32_MAX);
    int rc = add_special ? encoder_emit(&enc, t->prefix, t->n_prefix) : 0;
    if (rc == 0) {
        rc = added_split(&enc, &t->raw, text, len, true, encode_raw);
    }
    if (rc == 0 && add_special) {
        rc = encoder_emit(&enc, t->suffix, t->n_suffix);
    }
    pcre2_match_data_free(enc.match);
    pcre2_match_context_free(enc.limits);
    free(enc.symbol);
    free(enc.heap);
    if (rc != 0) {
        ret->n = before;
    }
    return rc;
}
