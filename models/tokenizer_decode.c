/* Token ids to text: whole UTF-8 characters, one token at a time.
 *
 * A token is a run of bytes that may begin or end inside a character. What is not complete waits in
 * `detokenizer.pending` (three bytes at most); what can never become a character turns into one U+FFFD for
 * every maximal subpart (Unicode 15, section 3.9), which is what Rust's from_utf8_lossy and so Hugging Face gives.
 */
#include "models/tokenizer_internal.h"

#include <string.h>

static const char REPLACEMENT[] = "\xEF\xBF\xBD";

int utf8_next(const uint8_t *s, size_t len, int *ret_bad)
{
    uint8_t c = s[0];
    if (c < 0x80)
        return 1;
    *ret_bad = 1;
    int need = c >= 0xC2 && c <= 0xDF ? 2 : (c & 0xF0) == 0xE0 ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    if (need == 0)
        return 0;
    /* The second byte's range shuts out overlong forms, surrogates and code points over U+10FFFF. */
    uint8_t lo = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    uint8_t hi = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < need; i++) {
        if ((size_t)i >= len)
            return -1;
        if (s[i] < lo || s[i] > hi) {
            *ret_bad = i;
            return 0;
        }
        lo = 0x80;
        hi = 0xBF;
    }
    return need;
}

bool utf8_valid(const char *s, size_t len)
{
    const uint8_t *p = (const uint8_t *)s, *end = p + len;
    int bad;
    while (p < end) {
        if (end - p >= 8) {
            uint64_t w;
            memcpy(&w, p, 8);
            if (!(w & 0x8080808080808080u)) {
                p += 8;
                continue;
            }
        }
        int n = utf8_next(p, (size_t)(end - p), &bad);
        if (n <= 0)
            return false;
        p += n;
    }
    return true;
}

void detokenizer_init(struct detokenizer *d, const struct tokenizer *t, bool skip_special, bool spaces_between_special)
{
    memset(d, 0, sizeof(*d));
    d->tokenizer = t;
    d->skip_special = skip_special;
    d->spaces_between_special = spaces_between_special;
}

/* Append the whole characters of pending + bytes; keep the incomplete rest. */
static int push_bytes(struct detokenizer *d, const uint8_t *s, size_t len, struct buf *out)
{
    int ret = 0, bad;
    while (len > 0 && ret == 0) {
        if (d->n_pending > 0) {
            d->pending[d->n_pending++] = (char)*s;
            int n = utf8_next((const uint8_t *)d->pending, d->n_pending, &bad);
            if (n == 0) { /* the new byte does not go on with it: it is looked at again on its own */
                ret = buf_append(out, REPLACEMENT, 3);
                d->n_pending = 0;
                continue;
            }
            if (n > 0) {
                ret = buf_append(out, d->pending, (size_t)n);
                d->n_pending = 0;
            }
            s++;
            len--;
            continue;
        }
        size_t run = 0;
        int n = 1;
        while (run < len && (n = utf8_next(s + run, len - run, &bad)) > 0)
            run += (size_t)n;
        ret = run > 0 ? buf_append(out, s, run) : 0;
        s += run;
        len -= run;
        if (ret != 0 || len == 0)
            break;
        if (n < 0) {
            memcpy(d->pending, s, len);
            d->n_pending = (uint8_t)len;
            break;
        }
        ret = buf_append(out, REPLACEMENT, 3);
        s += bad;
        len -= (size_t)bad;
    }
    return ret;
}

int detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out)
{
    const struct tokenizer *t = d->tokenizer;
    if (id < 0 || id >= t->n_vocab)
        return 0;
    const struct token *k = &t->token[id];
    if (d->skip_special && (k->flags & TOKEN_SPECIAL))
        return 0;
    const char *s = t->text + k->out_off;
    size_t len = k->out_len;
    if (!d->started && t->strip_leading_space && len > 0 && s[0] == ' ' && !(k->flags & TOKEN_ADDED)) {
        s++;
        len--;
    }
    d->started = true;
    d->last_special = k->flags & TOKEN_SPECIAL;
    if (d->n_pending == 0 && (k->flags & TOKEN_WHOLE))
        return len > 0 ? buf_append(out, s, len) : 0;
    return push_bytes(d, (const uint8_t *)s, len, out);
}

int detokenizer_finish(struct detokenizer *d, struct buf *out)
{
    if (d->n_pending == 0)
        return 0;
    d->n_pending = 0;
    return buf_append(out, REPLACEMENT, 3); /* pending is a valid beginning, so it is one maximal subpart */
}

int tokenizer_decode(const struct tokenizer *t, const int32_t *id, int32_t n, bool skip_special, struct buf *out,
                     struct err *e)
{
    struct detokenizer d;
    int ret = 0;
    detokenizer_init(&d, t, skip_special, true);
    for (int32_t i = 0; i < n && ret == 0; i++)
        ret = detokenizer_push(&d, id[i], out);
    if (ret == 0)
        ret = detokenizer_finish(&d, out);
    return ret == 0 ? 0 : err_set(e, ret, "decoded text is too long: at most %zu bytes", out->max);
}
