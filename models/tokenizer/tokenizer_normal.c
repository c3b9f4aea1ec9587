/* Normalizers: changes of the text before it is split. Unicode's tables are
 * utf8proc's.
 *
 * utf8proc orders combining marks by insertion, which takes quadratic time on a long
 * run of marks. So the decomposition is ordered here, by a stable merge sort, before
 * utf8proc composes it.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

/* Replace the text by `own`, which x then owns; the old memory is freed. */
static int text_set(struct normalized *x, char *own, size_t len)
{
    free(x->own);
    *x = (struct normalized){own, len, own};
    return 0;
}

/* ---- Unicode forms ---- */

/* Whether the form may change the text: NFC changes no character below U+0300, no form
 * changes one below U+0080. */
static bool needs_form(const char *s, size_t len, enum normal_kind kind)
{
    uint8_t limit = kind == NORMAL_NFC ? 0xCC : 0x80;

    for (size_t i = 0; i < len; i++) {
        if ((uint8_t)s[i] >= limit) {
            return true;
        }
    }
    return false;
}

/* Stable merge sort of one run of marks by combining class. */
static void sort_marks(int32_t *c, int32_t *scratch, size_t n)
{
    if (n < 2) {
        return;
    }
    size_t half = n / 2, i = 0, j = half, k = 0;
    sort_marks(c, scratch, half);
    sort_marks(c + half, scratch, n - half);
    while (i < half || j < n) {
        bool left = j == n || (i < half && utf8proc_get_property(c[i])->combining_class <=
                                               utf8proc_get_property(c[j])->combining_class);
        scratch[k++] = left ? c[i++] : c[j++];
    }
    memcpy(c, scratch, n * sizeof(*c));
}

static void order_marks(int32_t *c, int32_t *scratch, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t start = i;
        while (i < n && utf8proc_get_property(c[i])->combining_class != 0) {
            i++;
        }
        sort_marks(c + start, scratch, i - start);
        i += i == start;
    }
}

/* Decompose into *ret, which the caller frees; returns the number of characters, or -1:
 * no memory. */
static utf8proc_ssize_t decompose(const char *s, size_t len, utf8proc_option_t options,
                                  int32_t **ret)
{
    size_t cap = len + 64, n = 0;
    int32_t *c = malloc(cap * sizeof(*c));

    for (size_t i = 0; i < len && c;) {
        int c_len;
        int32_t one = utf8_get((const uint8_t *)s + i, &c_len);
        i += (size_t)c_len;
        if (n + 32 > cap) { /* the longest decomposition has 18 characters */
            cap *= 2;
            int32_t *more = realloc(c, cap * sizeof(*c));
            if (!more) {
                free(c);
                return -1;
            }
            c = more;
        }
        utf8proc_ssize_t made =
            utf8proc_decompose_char(one, c + n, (utf8proc_ssize_t)(cap - n), options, NULL);
        if (made < 0) { /* unassigned code points are kept */
            c[n] = one;
            made = 1;
        }
        n += (size_t)made;
    }
    *ret = c;
    return c ? (utf8proc_ssize_t)n : -1;
}

static int form(struct normalized *x, enum normal_kind kind)
{
    bool compat = kind == NORMAL_NFKC || kind == NORMAL_NFKD,
         compose = kind == NORMAL_NFC || kind == NORMAL_NFKC;
    int32_t *c = NULL, *scratch = NULL;
    int rc = ERR_NOMEM;
    utf8proc_ssize_t n =
        decompose(x->s, x->len, UTF8PROC_DECOMPOSE | (compat ? UTF8PROC_COMPAT : 0), &c);

    if (n < 0) {
        return ERR_NOMEM;
    }
    scratch = malloc((size_t)n * sizeof(*scratch) + 1);
    char *out = malloc((size_t)n * 4 + 1);
    if (!scratch || !out) {
        goto done;
    }
    order_marks(c, scratch, (size_t)n);
    if (compose) {
        n = utf8proc_normalize_utf32(c, n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    }
    size_t len = 0;
    for (utf8proc_ssize_t i = 0; i < n; i++) {
        len += (size_t)utf8_put(out + len, c[i]);
    }
    rc = text_set(x, out, len);
    out = NULL;
done:
    free(c);
    free(scratch);
    free(out);
    return rc;
}

/* ---- the others ---- */

static bool is_mark(int32_t c)
{
    utf8proc_category_t k = utf8proc_category(c);

    return k >= UTF8PROC_CATEGORY_MN && k <= UTF8PROC_CATEGORY_ME;
}

/* Character by character: lower case, or combining marks left out. */
static int map_chars(struct normalized *x, enum normal_kind kind)
{
    char *out = malloc(x->len * 3 + 1); /* one byte becomes at most three in lower case */

    if (!out) {
        return ERR_NOMEM;
    }
    size_t len = 0;
    int n;
    for (size_t i = 0; i < x->len; i += (size_t)n) {
        int32_t c = utf8_get((const uint8_t *)x->s + i, &n);
        if (kind == NORMAL_STRIP_ACCENTS) {
            if (!is_mark(c)) {
                len += (size_t)utf8_put(out + len, c);
            }
        } else {
            len += (size_t)utf8_put(out + len, c == 0x130 ? 'i' : utf8proc_tolower(c));
            if (c == 0x130) { /* the only lower case of two characters */
                len += (size_t)utf8_put(out + len, 0x307);
            }
        }
    }
    return text_set(x, out, len);
}

static void strip(struct normalized *x, bool left, bool right)
{
    int n;

    while (left && x->len > 0 && char_is_space(utf8_get((const uint8_t *)x->s, &n))) {
        x->s += n;
        x->len -= (size_t)n;
    }
    while (right && x->len > 0) {
        size_t at = x->len - 1;
        while (((uint8_t)x->s[at] & 0xC0) == 0x80) {
            at--;
        }
        if (!char_is_space(utf8_get((const uint8_t *)x->s + at, &n))) {
            break;
        }
        x->len = at;
    }
}

static int prepend(struct normalized *x, const char *text, size_t len)
{
    char *out = malloc(x->len + len + 1);

    if (!out) {
        return ERR_NOMEM;
    }
    memcpy(out, text, len);
    memcpy(out + len, x->s, x->len);
    return text_set(x, out, x->len + len);
}

/* Replace every match of the pattern by `text`. The first pass computes the size. */
static int replace(struct normalized *x, const struct normal *nm, struct encoder *enc)
{
    size_t start, end, at = 0, n_matches = 0, matched = 0;
    int rc;

    while ((rc = pattern_find(&nm->pattern, enc, x->s, x->len, at, &start, &end)) == 1) {
        n_matches++;
        matched += end - start;
        at = end;
    }
    if (rc < 0 || n_matches == 0) {
        return rc;
    }
    char *out = malloc(x->len - matched + n_matches * nm->text_len + 1);
    if (!out) {
        return ERR_NOMEM;
    }
    size_t len = 0, done = 0;
    while (n_matches-- > 0 &&
           (rc = pattern_find(&nm->pattern, enc, x->s, x->len, done, &start, &end)) == 1) {
        memcpy(out + len, x->s + done, start - done);
        len += start - done;
        memcpy(out + len, nm->text, nm->text_len);
        len += nm->text_len;
        done = end;
    }
    if (rc < 0) {
        free(out);
        return rc;
    }
    memcpy(out + len, x->s + done, x->len - done);
    return text_set(x, out, len + x->len - done);
}

static int apply(struct normalized *x, const struct normal *nm, struct encoder *enc)
{
    if (x->len == 0) {
        return 0;
    }
    switch (nm->kind) {
    case NORMAL_NFC:
    case NORMAL_NFD:
    case NORMAL_NFKC:
    case NORMAL_NFKD:
        return needs_form(x->s, x->len, nm->kind) ? form(x, nm->kind) : 0;
    case NORMAL_LOWERCASE:
    case NORMAL_STRIP_ACCENTS:
        return map_chars(x, nm->kind);
    case NORMAL_STRIP:
        strip(x, nm->left, nm->right);
        return 0;
    case NORMAL_PREPEND:
        return prepend(x, nm->text, nm->text_len);
    case NORMAL_REPLACE:
        return replace(x, nm, enc);
    }
    return 0;
}

int normalize(struct encoder *enc, const char *s, size_t len, struct normalized *ret)
{
    struct normalized x = {s, len, NULL};

    for (int32_t i = 0; i < enc->t->n_normal; i++) {
        int rc = apply(&x, &enc->t->normal[i], enc);
        if (rc != 0) {
            free(x.own);
            return rc == ERR_NOMEM ? err_nomem(enc->e, "normalizing a text") : rc;
        }
    }
    *ret = x;
    return 0;
}
