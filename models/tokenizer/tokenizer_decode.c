/* Token ids to text: whole UTF-8 characters, one token at a time.
 *
 * A token is a run of bytes that may begin or end inside a character. The bytes of an
 * incomplete character wait in `detokenizer.pending` (three at most). Bytes that cannot
 * become a character turn into one U+FFFD for each maximal subpart (Unicode 15, section
 * 3.9), as in Rust's from_utf8_lossy and hence in Hugging Face tokenizers.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

static const char REPLACEMENT[] = "\xEF\xBF\xBD";

void detokenizer_init(struct detokenizer *d, const struct tokenizer *t, bool skip_special,
                      bool spaces_between_special)
{
    memset(d, 0, sizeof(*d));
    d->tokenizer = t;
    d->skip_special = skip_special;
    d->spaces_between_special = spaces_between_special;
}

/* How many U+FFFDs n broken bytes become: one for each byte with byte fallback, else
 * one for all. */
static int replacements(const struct detokenizer *d, int n)
{
    return d->tokenizer->has_byte_tokens ? n : MIN(n, 1);
}

/* The pending bytes cannot become a character. */
static int push_broken(struct detokenizer *d, struct buf *out)
{
    int n = replacements(d, d->n_pending), ret = 0;

    if (d->n_carried > 0) {
        d->n_broken = d->n_pending;
        d->n_carried = 0;
    }
    d->n_pending = 0;
    while (n-- > 0 && ret == 0) {
        ret = buf_append(out, REPLACEMENT, 3);
    }
    return ret;
}

/* Append the whole characters of the pending bytes and s[len]; the rest is pending. */
static int push_bytes(struct detokenizer *d, const uint8_t *s, size_t len, struct buf *out)
{
    int rc = 0, bad;

    while (len > 0 && rc == 0) {
        if (d->n_pending > 0) {
            d->pending[d->n_pending++] = (char)*s;
            int n = utf8_next((const uint8_t *)d->pending, d->n_pending, &bad);
            /* the new byte does not continue the character: it is read again, alone */
            if (n == 0) {
                d->n_pending--;
                rc = push_broken(d, out);
                continue;
            }
            if (n > 0) {
                rc = buf_append(out, d->pending, (size_t)n);
                d->n_pending = d->n_carried = 0;
            }
            s++;
            len--;
            continue;
        }
        size_t run = 0;
        int n = 1;
        while (run < len && (n = utf8_next(s + run, len - run, &bad)) > 0) {
            run += (size_t)n;
        }
        rc = run > 0 ? buf_append(out, s, run) : 0;
        s += run;
        len -= run;
        if (rc != 0 || len == 0) {
            break;
        }
        if (n < 0) {
            memcpy(d->pending, s, len);
            d->n_pending = (uint8_t)len;
            break;
        }
        rc = buf_append(out, REPLACEMENT, 3);
        s += bad;
        len -= (size_t)bad;
    }
    return rc;
}

/* The text's first token, whose leading space the decoder may remove. */
static int push_first(struct detokenizer *d, const char *s, size_t len, struct buf *out)
{
    int rc = 0;

    if (d->tokenizer->start == DECODE_STRIP && len > 0 && s[0] == ' ') {
        return push_bytes(d, (const uint8_t *)s + 1, len - 1, out);
    }
    if (d->tokenizer->start != DECODE_FIRST_TOKEN) {
        return push_bytes(d, (const uint8_t *)s, len, out);
    }
    for (size_t i = 0; i < len && rc == 0; i++) {
        if (s[i] != ' ') {
            rc = push_bytes(d, (const uint8_t *)s + i, 1, out);
        }
    }
    return rc;
}

int detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out)
{
    const struct tokenizer *t = d->tokenizer;

    if (id < 0 || id >= t->n_vocab) {
        return 0;
    }
    const struct token *k = &t->token[id];
    if (!(k->flags & TOKEN_DEFINED) || (d->skip_special && (k->flags & TOKEN_SPECIAL))) {
        return 0;
    }
    const char *s = t->text + k->out_off;
    bool special = k->flags & TOKEN_SPECIAL, first = !d->started,
         joined = special && d->last_special && !d->spaces_between_special;
    d->started = true;
    d->last_special = special;
    d->n_carried = d->n_pending;
    d->n_broken = 0;
    if (t->join_spaces && !first && !joined) {
        int rc = push_bytes(d, (const uint8_t *)" ", 1, out);
        if (rc != 0) {
            return rc;
        }
    }
    if (first) {
        return push_first(d, s, k->out_len, out);
    }
    if (d->n_pending == 0 && (k->flags & TOKEN_WHOLE)) {
        return buf_append(out, s, k->out_len);
    }
    return push_bytes(d, (const uint8_t *)s, k->out_len, out);
}

int detokenizer_finish(struct detokenizer *d, struct buf *out)
{
    d->n_carried = d->n_pending;
    d->n_broken = 0;
    return d->n_pending == 0 ? 0 : push_broken(d, out);
}

size_t detokenizer_landed(const struct detokenizer *d, int32_t byte)
{
    int n = replacements(d, d->n_broken), last = byte < d->n_broken ? n - 1 : n;

    return (sizeof(REPLACEMENT) - 1) * (size_t)MIN(byte, last);
}

/* A run of byte-fallback tokens from id[i] on: its characters if all are whole, else a
 * U+FFFD for each byte. *ret_next is where the run ends. */
static int push_run(struct detokenizer *d, const int32_t *id, int32_t i, int32_t n, struct buf *out,
                    int32_t *ret_next)
{
    const struct tokenizer *t = d->tokenizer;
    size_t start = out->len;
    int32_t n_bytes = 0;
    int rc = 0;

    for (; i < n && rc == 0; i++) {
        const struct token *k = id[i] >= 0 && id[i] < t->n_vocab ? &t->token[id[i]] : NULL;
        if (!k || !(k->flags & TOKEN_DEFINED) || (d->skip_special && (k->flags & TOKEN_SPECIAL))) {
            continue;
        }
        if (!(k->flags & TOKEN_BYTE)) {
            break;
        }
        n_bytes++;
        /* The decoder strips a leading space: one from a byte token, too. */
        if (d->started || t->start == DECODE_AS_IS || t->text[k->out_off] != ' ') {
            rc = buf_append(out, t->text + k->out_off, 1);
        }
        d->started = true;
        d->last_special = false;
    }
    *ret_next = i;
    if (rc != 0 || n_bytes == 0 || out->len == start ||
        utf8_valid(out->data + start, out->len - start)) {
        return rc;
    }
    out->len = start;
    while (n_bytes-- > 0 && rc == 0) {
        rc = buf_append(out, REPLACEMENT, 3);
    }
    return rc;
}

int tokenizer_decode(const struct tokenizer *t, const int32_t *id, int32_t n, bool skip_special,
                     struct buf *out, struct err *e)
{
    struct detokenizer d;
    int rc = 0;

    detokenizer_init(&d, t, skip_special, true);
    for (int32_t i = 0; i < n && rc == 0;) {
        if (t->has_byte_tokens && id[i] >= 0 && id[i] < t->n_vocab &&
            (t->token[id[i]].flags & TOKEN_BYTE)) {
            rc = push_run(&d, id, i, n, out, &i);
        } else {
            rc = detokenizer_push(&d, id[i++], out);
        }
    }
    if (rc == 0) {
        rc = detokenizer_finish(&d, out);
    }
    return rc == 0 ? 0 : err_set(e, rc, "decoded text is too long: at most %zu bytes", out->max);
}

/* ---- every token's bytes ---- */

/* A token's text, which the decoder's steps turn into its bytes. */
struct token_text {
    char *s;
    size_t len, cap;
};

/* Replace a text in the byte alphabet by the bytes that it stands for; false: it has
 * other characters and is left alone. */
static bool from_byte_alphabet(struct token_text *x)
{
    size_t n = 0;
    int c_len;

    for (size_t i = 0; i < x->len; i += (size_t)c_len) {
        if (char_to_byte(utf8_get((const uint8_t *)x->s + i, &c_len)) < 0) {
            return false;
        }
    }
    for (size_t i = 0; i < x->len; i += (size_t)c_len) {
        x->s[n++] = (char)char_to_byte(utf8_get((const uint8_t *)x->s + i, &c_len));
    }
    x->len = n;
    return true;
}

/* The byte NN of "<0xNN>"; -1: another text. */
static int fallback_byte(const struct token_text *x)
{
    static const char HEX[] = "0123456789ABCDEFabcdef";

    if (x->len != 6 || memcmp(x->s, "<0x", 3) != 0 || x->s[5] != '>') {
        return -1;
    }
    const char *a = memchr(HEX, x->s[3], 22), *b = memchr(HEX, x->s[4], 22);
    if (!a || !b) {
        return -1;
    }
    int hi = (int)(a - HEX), lo = (int)(b - HEX);
    return (hi > 15 ? hi - 6 : hi) << 4 | (lo > 15 ? lo - 6 : lo);
}

/* Replace every `from` by `to`. */
static int replace_all(struct token_text *x, const char *from, const char *to)
{
    size_t from_len = strlen(from), to_len = strlen(to), n = 0;

    if (from_len == 0 || x->len < from_len) {
        return 0;
    }
    char *out = malloc(x->len * MAX(to_len, (size_t)1) + to_len + 1);
    if (!out) {
        return ERR_NOMEM;
    }
    for (size_t i = 0; i < x->len;) {
        bool match = x->len - i >= from_len && memcmp(x->s + i, from, from_len) == 0;
        memcpy(out + n, match ? to : x->s + i, match ? to_len : 1);
        n += match ? to_len : 1;
        i += match ? from_len : 1;
    }
    free(x->s);
    *x = (struct token_text){out, n, n};
    return 0;
}

static int apply_steps(const struct decoder *d, struct tokenizer *t, struct token_text *x,
                       uint8_t *flags)
{
    for (int32_t i = 0; i < d->n; i++) {
        const struct decoder_step *s = &d->step[i];
        int byte, ret = 0;
        switch (s->kind) {
        case DECODER_BYTE_LEVEL:
            from_byte_alphabet(x);
            break;
        case DECODER_REPLACE:
        case DECODER_METASPACE:
            ret = replace_all(x, s->from, s->to);
            break;
        case DECODER_BYTE_FALLBACK:
            byte = fallback_byte(x);
            if (byte >= 0) {
                x->s[0] = (char)byte;
                x->len = 1;
                *flags |= TOKEN_BYTE;
                t->has_byte_tokens = true;
            }
            break;
        case DECODER_FUSE:
        case DECODER_STRIP:
            break;
        }
        if (ret != 0) {
            return ret;
        }
    }
    return 0;
}

/* The effect of the steps that change only the beginning of the whole text. */
static void set_start(const struct decoder *d, struct tokenizer *t)
{
    for (int32_t i = 0; i < d->n; i++) {
        const struct decoder_step *s = &d->step[i];
        if (s->kind == DECODER_STRIP && s->start > 0 && strcmp(s->from, " ") == 0) {
            t->start = DECODE_STRIP;
        } else if (s->kind == DECODER_METASPACE && !s->keep_first) {
            t->start = DECODE_FIRST_TOKEN;
        }
    }
}

int decoder_apply(const struct decoder *d, struct tokenizer *t, struct err *e)
{
    int rc = 0;

    set_start(d, t);
    bool byte_level = d->n == 1 && d->step[0].kind == DECODER_BYTE_LEVEL;
    struct token_text x = {0};
    for (int32_t id = 0; id < t->n_vocab && rc == 0; id++) {
        struct token *k = &t->token[id];
        if (!(k->flags & TOKEN_DEFINED)) {
            continue;
        }
        if (k->text_len + 1 > x.cap) {
            free(x.s);
            x = (struct token_text){malloc(k->text_len + 256), 0, k->text_len + 256};
            if (!x.s) {
                return err_nomem(e, "the vocabulary");
            }
        }
        memcpy(x.s, t->text + k->text_off, k->text_len);
        x.len = k->text_len;
        rc = byte_level ? (from_byte_alphabet(&x), 0) : apply_steps(d, t, &x, &k->flags);
        if (rc != 0) {
            rc = err_nomem(e, "the vocabulary");
        }
        if (rc == 0 && x.len > TOKEN_OUT_BYTES) {
            rc = err_set(e, ERR_INVALID, "token %d decodes to %zu bytes; at most %d are allowed",
                         id, x.len, TOKEN_OUT_BYTES);
        }
        bool same = x.len == k->text_len && memcmp(x.s, t->text + k->text_off, x.len) == 0;
        if (rc == 0 && !same) {
            rc = vocab_text(t, x.s, x.len, &k->out_off, e);
        }
        k->out_len = (uint32_t)x.len;
        t->longest = MAX(t->longest, x.len);
        if (utf8_valid(x.s, x.len) && !(k->flags & TOKEN_BYTE)) {
            k->flags |= TOKEN_WHOLE;
        }
    }
    free(x.s);
    return rc;
}
