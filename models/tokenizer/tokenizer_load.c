/* tokenizer.json: the vocabulary, its merges and its added tokens. The normalizer, the
 * pre-tokenizer, the post-processor and the decoder are read by
 * tokenizer_components.c.
 *
 * The file is read once, in its own order. Only merges that precede the vocabulary are
 * read again at the end, and the decoder is applied last.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct loader {
    struct tokenizer *t;
    char model_type[32];
    bool have_model, have_vocab, have_merges, have_decoder;
    char unk[TOKEN_TEXT_BYTES]; /* unk_token; "": none */
    struct json merges;         /* a reader at the merges, to read them later */
    bool merges_waiting;        /* they precede the vocabulary */
    struct decoder decoder;
    struct err *e;
};

void json_fail_with(struct json *j, const struct err *e)
{
    struct err copy = *e; /* e may be the reader's own */

    if (j->failed) {
        return;
    }
    json_fail(j, "%s", copy.text);
    if (j->err) {
        j->err->code = copy.code;
    }
}

void json_fail_nomem(struct json *j, const char *what)
{
    struct err e;

    err_nomem(&e, what);
    json_fail_with(j, &e);
}

/* ---- the model ---- */

void read_vocab(struct json *j, struct tokenizer *t)
{
    struct err e = {0};

    json_enter_object(j);
    while (json_next_member(j)) {
        int64_t id;
        if (!json_read_int(j, &id)) {
            return;
        }
        if (id < 0 || id >= LIMIT_VOCAB) {
            json_fail(j, "token \"%.40s\" has the id %lld; 0 to %d are allowed", j->key,
                      (long long)id, LIMIT_VOCAB - 1);
            return;
        }
        if (vocab_add(t, (int32_t)id, j->key, j->key_len, &e) != 0) {
            json_fail_with(j, &e);
            return;
        }
    }
}

/* [["<unk>", 0.0], ["▁the", -3.1], ...]: an id is an index into the list. */
static void read_scored_vocab(struct json *j, struct loader *l)
{
    struct unigram *u = &l->t->unigram;
    char text[TOKEN_TEXT_BYTES];
    size_t len;
    double score;

    json_enter_array(j);
    while (json_next_element(j)) {
        json_enter_array(j);
        if (!json_next_element(j) || !json_read_string(j, text, sizeof(text), &len) ||
            !json_next_element(j) || !json_read_double(j, &score) || json_next_element(j) ||
            !isfinite(score)) {
            json_fail(j, "entry %d of the vocabulary is not a token and its score", u->n);
            return;
        }
        if ((u->n & (u->n - 1)) == 0) { /* capacity doubles at powers of two */
            double *p = realloc(u->score, (size_t)MAX(u->n * 2, 1) * sizeof(*p));
            if (!p) {
                json_fail_nomem(j, "the vocabulary");
                return;
            }
            u->score = p;
        }
        if (vocab_add(l->t, u->n, text, len, l->e) != 0) {
            json_fail_with(j, l->e);
            return;
        }
        u->score[u->n++] = score;
    }
}

static bool read_flag(struct json *j)
{
    bool value = false;

    if (json_peek(j) == JSON_NULL) {
        json_skip(j);
    } else {
        json_read_bool(j, &value);
    }
    return value;
}

/* A string, or "" for null. */
static void read_text_or_null(struct json *j, char *ret, size_t cap)
{
    ret[0] = 0;
    if (json_peek(j) == JSON_NULL) {
        json_skip(j);
    } else {
        json_read_string(j, ret, cap, NULL);
    }
}

static void read_unk_id(struct json *j, struct loader *l)
{
    int64_t id = -1;

    if (json_peek(j) == JSON_NULL) {
        json_skip(j);
    } else if (json_read_int(j, &id) && (id < 0 || id >= LIMIT_VOCAB)) {
        json_fail(j, "unk_id %lld is no token id", (long long)id);
    }
    l->t->unigram.unk = (int32_t)id;
}

static void read_model(struct json *j, struct loader *l)
{
    struct bpe *b = &l->t->bpe;
    char affix[64];

    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "type")) {
            read_text_or_null(j, l->model_type, sizeof(l->model_type));
        } else if (json_key_is(j, "vocab")) {
            if (json_peek(j) == JSON_ARRAY) {
                read_scored_vocab(j, l);
            } else {
                read_vocab(j, l->t);
            }
            l->have_vocab = true;
        } else if (json_key_is(j, "merges")) {
            l->merges = *j;
            l->merges_waiting = !l->have_vocab;
            l->have_merges = true;
            if (l->have_vocab) {
                read_merges(j, l->t);
            } else {
                json_skip(j);
            }
        } else if (json_key_is(j, "unk_token")) {
            read_text_or_null(j, l->unk, sizeof(l->unk));
        } else if (json_key_is(j, "unk_id")) {
            read_unk_id(j, l);
        } else if (json_key_is(j, "byte_fallback")) {
            b->byte_fallback = l->t->unigram.byte_fallback = read_flag(j);
        } else if (json_key_is(j, "fuse_unk")) {
            b->fuse_unk = read_flag(j);
        } else if (json_key_is(j, "ignore_merges")) {
            b->ignore_merges = read_flag(j);
        } else if (json_key_is(j, "continuing_subword_prefix") ||
                   json_key_is(j, "end_of_word_suffix")) {
            read_text_or_null(j, affix, sizeof(affix));
            if (affix[0]) {
                json_fail(j, "%s \"%s\": marks at the edges of words are not supported", j->key,
                          affix);
            }
        } else {
            json_skip(j);
        }
    }
    l->have_model = true;
}

/* ---- added tokens ---- */

static void read_added_token(struct json *j, struct loader *l)
{
    struct added_token a = {.id = -1, .normalized = true};
    char text[TOKEN_TEXT_BYTES];
    size_t len = 0;
    int64_t id = -1;
    bool special = false;

    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "id")) {
            json_read_int(j, &id);
        } else if (json_key_is(j, "content")) {
            json_read_string(j, text, sizeof(text), &len);
        } else if (json_key_is(j, "special")) {
            special = read_flag(j);
        } else if (json_key_is(j, "single_word")) {
            a.single_word = read_flag(j);
        } else if (json_key_is(j, "lstrip")) {
            a.lstrip = read_flag(j);
        } else if (json_key_is(j, "rstrip")) {
            a.rstrip = read_flag(j);
        } else if (json_key_is(j, "normalized")) {
            a.normalized = read_flag(j);
        } else {
            json_skip(j);
        }
    }
    if (j->failed) {
        return;
    }
    if (len == 0 || id < 0 || id >= LIMIT_VOCAB) {
        json_fail(j,
                  "an added token needs a \"content\" that is not empty and an \"id\" of 0 to %d",
                  LIMIT_VOCAB - 1);
        return;
    }
    a.id = (int32_t)id;
    if (added_add(l->t, &a, text, len, special, l->e) != 0) {
        json_fail_with(j, l->e);
    }
}

/* ---- the file ---- */

static void read_all(struct json *j, struct loader *l)
{
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "model")) {
            read_model(j, l);
        } else if (json_key_is(j, "added_tokens")) {
            json_enter_array(j);
            while (json_next_element(j)) {
                read_added_token(j, l);
            }
        } else if (json_key_is(j, "normalizer")) {
            read_normalizer(j, l->t);
        } else if (json_key_is(j, "pre_tokenizer")) {
            read_pre_tokenizer(j, l->t);
        } else if (json_key_is(j, "post_processor")) {
            read_post_processor(j, l->t);
        } else if (json_key_is(j, "decoder")) {
            l->t->join_spaces = json_peek(j) == JSON_NULL;
            l->have_decoder = true;
            read_decoder(j, &l->decoder);
        } else {
            json_skip(j);
        }
    }
    json_finish(j);
    if (!j->failed && l->merges_waiting) {
        read_merges(&l->merges, l->t);
        j->failed = l->merges.failed;
    }
}

/* Ids that the post-processor adds to a text must be in the vocabulary. */
static int check_around(const int32_t *id, int32_t n, const struct tokenizer *t, struct err *e)
{
    for (int32_t i = 0; i < n; i++) {
        if (id[i] >= t->n_vocab) {
            return err_set(e, ERR_INVALID, "post_processor: id %d, the vocabulary ends at %d",
                           id[i], t->n_vocab - 1);
        }
    }
    return 0;
}

int tokenizer_parse(struct tokenizer *t, const char *text, size_t len, struct err *e)
{
    struct err none = {0};
    struct loader l = {.t = t, .e = e ? e : &none};
    struct json j;

    t->bos = t->eos = t->bpe.unk = t->unigram.unk = -1;
    json_init(&j, text, len, "tokenizer.json", l.e);
    /* An estimate from the file's length; a wrong one costs only time or memory. */
    if (vocab_reserve(t, len / 96) != 0 || bpe_reserve(&t->bpe, len / 96) != 0) {
        return err_nomem(e, "the vocabulary");
    }
    read_all(&j, &l);
    if (j.failed) {
        return l.e->code < 0 ? l.e->code : ERR_INVALID;
    }
    if (!l.have_model || !l.have_vocab || t->n_vocab == 0) {
        return err_set(e, ERR_INVALID, "tokenizer.json: no model with a vocabulary");
    }
    bool scored = t->unigram.n > 0, is_unigram = strcmp(l.model_type, "Unigram") == 0;
    if (scored != is_unigram ||
        (!scored && strcmp(l.model_type, "BPE") != 0 && (l.model_type[0] || !l.have_merges))) {
        return err_set(
            e, ERR_UNSUPPORTED,
            "tokenizer.json: the model type \"%s\" with %s is not supported; BPE and Unigram are",
            l.model_type, scored ? "scores" : "ids");
    }
    if (scored && t->bpe.byte_level) {
        return err_set(e, ERR_UNSUPPORTED,
                       "tokenizer.json: a Unigram model over bytes is not supported");
    }
    if (!l.have_decoder) {
        t->join_spaces = true;
    }
    t->model = scored ? MODEL_UNIGRAM : MODEL_BPE;
    if (l.unk[0]) {
        t->bpe.unk = vocab_find(t, l.unk, strlen(l.unk));
    }
    int rc = scored ? unigram_finish(t, e) : bpe_finish(t, e);
    if (rc == 0) {
        rc = added_finish(t, e);
    }
    if (rc == 0) {
        rc = check_around(t->prefix, t->n_prefix, t, e);
    }
    if (rc == 0) {
        rc = check_around(t->suffix, t->n_suffix, t, e);
    }
    if (rc == 0) {
        rc = decoder_apply(&l.decoder, t, e);
    }
    return rc == 0 ? 0 : err_prefix(e, "tokenizer.json");
}
