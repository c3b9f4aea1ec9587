/* SentencePiece's tokenizer.model, for directories without a tokenizer.json: a protocol
 * buffer of pieces with scores.
 *
 *   ModelProto      1: SentencePiece, repeated   2: TrainerSpec   3: NormalizerSpec
 *   SentencePiece   1: text   2: score (float)
 *                   3: type (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused,
 *                      6 byte)
 *   TrainerSpec     3: model type (1 unigram, 2 BPE)   35: byte fallback
 *                   41: BOS id   42: EOS id
 *   NormalizerSpec  2: character map   3: add a dummy prefix
 *                   4: remove extra white space
 *
 * BPE models have no list of merges: of all neighbours that together are a piece, those
 * that make the piece with the highest score are merged, the leftmost first. This
 * equals a merge for every way to divide a piece into two pieces, ranked by the score
 * of the whole; equal scores have equal ranks. A BOS is added in front, as in LLaMA's
 * and Mistral's tokenizers.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum piece_type {
    PIECE_NORMAL = 1,
    PIECE_UNKNOWN,
    PIECE_CONTROL,
    PIECE_USER,
    PIECE_UNUSED,
    PIECE_BYTE
};
enum { UNIGRAM = 1, BPE = 2 };

struct piece {
    float score;
    int32_t id;
    uint8_t type;
};

struct spm {
    struct tokenizer *t;
    struct piece *piece; /* [n] */
    int32_t n;
    int64_t model_type, bos, eos;
    bool byte_fallback, dummy_prefix, remove_spaces, has_map;
    struct err *e;
};

/* ---- the wire format ---- */

struct wire {
    const uint8_t *at, *end;
};

/* The value of a field; its wire type says which member holds it. */
struct field {
    uint64_t number;
    struct wire bytes;
    uint32_t fixed32;
};

static bool read_varint(struct wire *w, uint64_t *ret)
{
    uint64_t value = 0;

    for (int shift = 0; shift < 64; shift += 7) {
        if (w->at == w->end) {
            return false;
        }
        uint8_t b = *w->at++;
        value |= (uint64_t)(b & 0x7F) << shift;
        if (!(b & 0x80)) {
            *ret = value;
            return true;
        }
    }
    return false;
}

/* Read a field; returns its number, 0 at the end, or -1: the message is malformed. */
static int next_field(struct wire *w, struct field *f)
{
    uint64_t tag, len;

    if (w->at == w->end) {
        return 0;
    }
    if (!read_varint(w, &tag) || tag >> 3 == 0 || tag >> 3 > 536870911) {
        return -1;
    }
    memset(f, 0, sizeof(*f));
    size_t left = (size_t)(w->end - w->at), size = (tag & 7) == 5 ? 4 : 8;
    switch (tag & 7) {
    case 0:
        return read_varint(w, &f->number) ? (int)(tag >> 3) : -1;
    case 2:
        if (!read_varint(w, &len) || len > (uint64_t)(w->end - w->at)) {
            return -1;
        }
        f->bytes = (struct wire){w->at, w->at + len};
        w->at += len;
        return (int)(tag >> 3);
    case 1:
    case 5:
        if (left < size) {
            return -1;
        }
        if (size == 4) {
            memcpy(&f->fixed32, w->at, 4);
        }
        w->at += size;
        return (int)(tag >> 3);
    default:
        return -1;
    }
}

/* ---- the messages ---- */

static int broken(struct spm *m)
{
    return err_set(m->e, ERR_INVALID, "tokenizer.model: not a SentencePiece model, or broken");
}

static int read_piece(struct spm *m, struct wire w)
{
    struct field f;
    struct wire text = {0};
    struct piece p = {.id = m->n, .type = PIECE_NORMAL};
    int key;

    while ((key = next_field(&w, &f)) > 0) {
        if (key == 1) {
            text = f.bytes;
        } else if (key == 2) {
            memcpy(&p.score, &f.fixed32, 4);
        } else if (key == 3) {
            p.type = f.number >= PIECE_NORMAL && f.number <= PIECE_BYTE ? (uint8_t)f.number : 0;
        }
    }
    size_t len = (size_t)(text.end - text.at);
    if (key < 0 || len == 0 || len >= TOKEN_TEXT_BYTES || p.type == 0 || !isfinite(p.score) ||
        !utf8_valid((const char *)text.at, len)) {
        return broken(m);
    }
    if ((m->n & (m->n - 1)) == 0) { /* capacity doubles at powers of two */
        struct piece *more = realloc(m->piece, (size_t)MAX(m->n * 2, 1) * sizeof(*more));
        if (!more) {
            return err_nomem(m->e, "the vocabulary");
        }
        m->piece = more;
    }
    char copy[TOKEN_TEXT_BYTES]; /* NUL-terminated, for messages */
    memcpy(copy, text.at, len);
    copy[len] = 0;
    int rc = vocab_add(m->t, p.id, copy, len, m->e);
    if (rc == 0) {
        m->piece[m->n++] = p;
    }
    return rc;
}

static int read_trainer(struct spm *m, struct wire w)
{
    struct field f;
    int key;

    while ((key = next_field(&w, &f)) > 0) {
        if (key == 3) {
            m->model_type = (int64_t)f.number;
        } else if (key == 35) {
            m->byte_fallback = f.number != 0;
        } else if (key == 41) {
            m->bos = (int32_t)f.number;
        } else if (key == 42) {
            m->eos = (int32_t)f.number;
        }
    }
    return key < 0 ? broken(m) : 0;
}

static int read_normalizer_spec(struct spm *m, struct wire w)
{
    struct field f;
    int key;

    while ((key = next_field(&w, &f)) > 0) {
        if (key == 2) {
            m->has_map = f.bytes.end > f.bytes.at;
        } else if (key == 3) {
            m->dummy_prefix = f.number != 0;
        } else if (key == 4) {
            m->remove_spaces = f.number != 0;
        }
    }
    return key < 0 ? broken(m) : 0;
}

static int read_model_proto(struct spm *m, struct wire w)
{
    struct field f;
    int key, ret = 0;

    while (ret == 0 && (key = next_field(&w, &f)) != 0) {
        if (key < 0) {
            ret = broken(m);
        } else if (key == 1) {
            ret = read_piece(m, f.bytes);
        } else if (key == 2) {
            ret = read_trainer(m, f.bytes);
        } else if (key == 3) {
            ret = read_normalizer_spec(m, f.bytes);
        }
    }
    return ret;
}

/* ---- to a tokenizer ---- */

static int by_score(const void *a, const void *b)
{
    const struct piece *x = a, *y = b;

    return x->score > y->score ? -1 : x->score < y->score ? 1 : (x->id > y->id) - (x->id < y->id);
}

/* Whether pieces of this type are made by merging; the others are matched as a whole or
 * byte by byte. */
static bool merges(const uint8_t *type, int32_t id)
{
    return id >= 0 &&
           (type[id] == PIECE_NORMAL || type[id] == PIECE_USER || type[id] == PIECE_UNUSED);
}

/* Add a merge for every way to divide a piece into two pieces. */
static int add_merges(struct spm *m, const uint8_t *type, int32_t id, int32_t rank)
{
    struct tokenizer *t = m->t;
    char text[TOKEN_TEXT_BYTES];
    size_t len = t->token[id].text_len;
    int n;

    memcpy(text, t->text + t->token[id].text_off, len);
    for (size_t at = 0; at < len; at += (size_t)n) {
        utf8_get((const uint8_t *)text + at, &n);
        if (at == 0) {
            continue;
        }
        int32_t left = vocab_find(t, text, at), right = vocab_find(t, text + at, len - at);
        if (merges(type, left) && merges(type, right) &&
            bpe_add_merge(&t->bpe, left, right, id, rank) != 0) {
            return err_nomem(m->e, "the merges");
        }
    }
    return 0;
}

static int make_bpe(struct spm *m)
{
    struct tokenizer *t = m->t;
    uint8_t *type = malloc((size_t)m->n);

    if (!type) {
        return err_nomem(m->e, "the merges");
    }
    for (int32_t i = 0; i < m->n; i++) {
        type[i] = m->piece[i].type;
    }
    qsort(m->piece, (size_t)m->n, sizeof(*m->piece), by_score);
    int rc = 0;
    int32_t rank = 0;
    for (int32_t i = 0; i < m->n && rc == 0; i++) {
        rank += i > 0 && m->piece[i].score != m->piece[i - 1].score;
        if (merges(type, m->piece[i].id)) {
            rc = add_merges(m, type, m->piece[i].id, rank);
        }
    }
    free(type);
    t->model = MODEL_BPE;
    t->bpe.byte_fallback = m->byte_fallback;
    t->bpe.fuse_unk = true;
    return rc == 0 ? bpe_finish(t, m->e) : rc;
}

static int make_unigram(struct spm *m)
{
    struct unigram *u = &m->t->unigram;

    u->score = malloc((size_t)m->n * sizeof(*u->score));
    if (!u->score) {
        return err_nomem(m->e, "the vocabulary");
    }
    for (int32_t i = 0; i < m->n; i++) {
        u->score[i] = m->piece[i].score;
    }
    u->n = m->n;
    u->byte_fallback = m->byte_fallback;
    m->t->model = MODEL_UNIGRAM;
    return unigram_finish(m->t, m->e);
}

static int add_normal(struct spm *m, enum normal_kind kind, const char *from, const char *to)
{
    struct normal *n = &m->t->normal[m->t->n_normal++];

    *n = (struct normal){.kind = kind, .text = strdup(to), .text_len = strlen(to)};
    if (!n->text) {
        return err_nomem(m->e, "a normalizer");
    }
    return kind == NORMAL_REPLACE ? pattern_compile(&n->pattern, from, strlen(from), m->e) : 0;
}

/* SentencePiece's treatment of white space: runs become one space, a mark is added in
 * front, spaces become marks. */
static int make_normalizers(struct spm *m)
{
    int rc = 0;

    if (m->remove_spaces) {
        m->t->normal[m->t->n_normal++] =
            (struct normal){.kind = NORMAL_STRIP, .left = true, .right = true};
        rc = add_normal(m, NORMAL_REPLACE, " {2,}", " ");
    }
    if (rc == 0 && m->dummy_prefix) {
        rc = add_normal(m, NORMAL_PREPEND, "", "\xE2\x96\x81");
    }
    return rc == 0 ? add_normal(m, NORMAL_REPLACE, " ", "\xE2\x96\x81") : rc;
}

static int make_added(struct spm *m)
{
    struct tokenizer *t = m->t;
    int rc = 0;

    for (int32_t i = 0; i < m->n && rc == 0; i++) {
        const struct piece *p = &m->piece[i];
        if (p->type != PIECE_CONTROL && p->type != PIECE_UNKNOWN && p->type != PIECE_USER) {
            continue;
        }
        char text[TOKEN_TEXT_BYTES];
        struct added_token a = {.id = p->id};
        size_t len = t->token[p->id].text_len;
        memcpy(text, t->text + t->token[p->id].text_off, len);
        text[len] = 0;
        rc = added_add(t, &a, text, len, p->type != PIECE_USER, m->e);
        if (p->type == PIECE_UNKNOWN) {
            t->bpe.unk = t->unigram.unk = p->id;
        }
    }
    return rc == 0 ? added_finish(t, m->e) : rc;
}

static int make_decoder(struct spm *m)
{
    struct decoder d = {.step = {{.kind = DECODER_REPLACE, .from = "\xE2\x96\x81", .to = " "},
                                 {.kind = DECODER_BYTE_FALLBACK},
                                 {.kind = DECODER_FUSE}},
                        .n = 3};

    if (m->dummy_prefix) {
        d.step[d.n++] = (struct decoder_step){.kind = DECODER_STRIP, .from = " ", .start = 1};
    }
    return decoder_apply(&d, m->t, m->e);
}

int tokenizer_parse_spm(struct tokenizer *t, const uint8_t *data, size_t len, struct err *e)
{
    struct spm m = {.t = t,
                    .model_type = UNIGRAM,
                    .bos = 1,
                    .eos = 2,
                    .dummy_prefix = true,
                    .remove_spaces = true,
                    .e = e};

    t->bos = t->eos = t->bpe.unk = t->unigram.unk = -1;
    int rc = read_model_proto(&m, (struct wire){data, data + len});
    if (rc == 0 && m.n == 0) {
        rc = broken(&m);
    }
    if (rc == 0 && m.has_map) {
        rc =
            err_set(e, ERR_UNSUPPORTED,
                    "tokenizer.model: its character map is not supported; a tokenizer.json may be");
    }
    if (rc == 0 && m.model_type != UNIGRAM && m.model_type != BPE) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "tokenizer.model: model type %lld; unigram (1) and BPE (2) are supported",
                     (long long)m.model_type);
    }
    if (rc == 0) {
        rc = make_normalizers(&m);
    }
    if (rc == 0) {
        rc = make_added(&m);
    }
    if (rc == 0) {
        rc = m.model_type == BPE ? make_bpe(&m) : make_unigram(&m);
    }
    if (rc == 0) {
        rc = make_decoder(&m);
    }
    if (rc == 0) {
        t->bos = m.bos >= 0 && m.bos < m.n ? (int32_t)m.bos : -1;
        t->eos = m.eos >= 0 && m.eos < m.n ? (int32_t)m.eos : -1;
        t->prefix[0] = t->bos;
        t->n_prefix = t->bos >= 0;
    }
    free(m.piece);
    return rc;
}
