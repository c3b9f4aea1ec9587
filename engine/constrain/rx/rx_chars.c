/* Characters as bytes: UTF-8, and the escaped forms of JSON strings (RFC 8259).
 *
 * Both cut the code points into blocks, of 64 by a continuation byte and of 16 by a
 * hexadecimal digit. A block's expression depends on what it holds alone, so equal
 * blocks are one node. */
#include <stdlib.h>
#include <string.h>

#include "config/base/utf8.h"
#include "engine/constrain/builder.h"

enum { LAST_CODE = 0x10ffff, FIRST_ASTRAL = 0x10000, CLASS_WORK = 8 };
/* Of sets of many ranges, letters say: those that were made are looked up, and a block
 * of them takes more work. */
enum { MANY_RANGES = 32, MANY_WORK = 3 };

struct chars_view {
    struct rx *rx;
    const struct code_range *range; /* [n], sorted, apart */
    int32_t n;
    uint32_t first, last; /* code points outside count as absent */
    int radix;            /* 64: continuation bytes; 16: hexadecimal digits */
    rx_id whole[5];       /* any digits, by their number; 0: not made yet */
};

/* 1: all of first .. last are in the set, 0: none, -1: some. */
static int coverage(const struct chars_view *v, uint32_t first, uint32_t last)
{
    int32_t lo = 0, hi = v->n;

    if (last < v->first || first > v->last) {
        return 0;
    }
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (v->range[mid].last < first) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    if (lo == v->n || v->range[lo].first > last) {
        return 0;
    }
    bool whole = v->range[lo].first <= first && v->range[lo].last >= last && first >= v->first &&
                 last <= v->last;
    return whole ? 1 : -1;
}

static void add_digit(struct byte_set *s, int radix, int digit)
{
    int byte = radix == 64 ? 0x80 + digit : "0123456789abcdef"[digit];

    s->bit[byte / 32] |= 1u << (byte % 32);
    if (radix == 16 && digit >= 10) {
        byte = 'A' + digit - 10;
        s->bit[byte / 32] |= 1u << (byte % 32);
    }
}

/* Digits with the same rest, which share a set. */
struct branches {
    struct byte_set set[64];
    rx_id rest[64];
    int n; /* of them */
};

static struct byte_set *branch(struct branches *b, rx_id rest)
{
    int i = b->n - 1;

    while (i >= 0 && b->rest[i] != rest) {
        i--;
    }
    if (i < 0) {
        i = b->n++;
        b->rest[i] = rest;
        b->set[i] = (struct byte_set){0};
    }
    return &b->set[i];
}

static rx_id join_branches(struct rx *r, const struct branches *b)
{
    rx_id all = RX_ID_NEVER;

    for (int i = 0; i < b->n; i++) {
        all = rx_make_or(r, all, rx_make_concat(r, rx_make_set(r, &b->set[i]), b->rest[i]));
    }
    return all;
}

/* Any `digits` digits. */
static rx_id whole_block(struct chars_view *v, int digits)
{
    struct byte_set s = {0};

    if (digits == 0) {
        return RX_ID_EMPTY;
    }
    if (!v->whole[digits]) {
        for (int d = 0; d < v->radix; d++) {
            add_digit(&s, v->radix, d);
        }
        v->whole[digits] =
            rx_make_concat(v->rx, rx_make_set(v->rx, &s), whole_block(v, digits - 1));
    }
    return v->whole[digits];
}

/* `digits` digits, at least one, that count from `base`. */
static rx_id block(struct chars_view *v, int digits, uint32_t base)
{
    uint32_t step = 1;
    struct branches b;

    for (int i = 1; i < digits; i++) {
        step *= (uint32_t)v->radix;
    }
    int whole = coverage(v, base, base + step * (uint32_t)v->radix - 1);
    if (whole >= 0) {
        return whole ? whole_block(v, digits) : RX_ID_NEVER;
    }
    b.n = 0;
    int work = v->n > MANY_RANGES ? MANY_WORK : 1;
    for (int d = 0; d < v->radix && budget_work(v->rx->budget, work); d++) {
        uint32_t at = base + step * (uint32_t)d;
        rx_id rest = digits > 1            ? block(v, digits - 1, at)
                     : coverage(v, at, at) ? RX_ID_EMPTY
                                           : RX_ID_NEVER;
        if (rest != RX_ID_NEVER) {
            add_digit(branch(&b, rest), v->radix, d);
        }
    }
    return join_branches(v->rx, &b);
}

/* The characters of first .. last, whose lead bytes are lead .. last_lead. */
static rx_id with_lead(struct chars_view v, int lead, int last_lead, int digits, uint32_t first,
                       uint32_t last)
{
    struct branches b;
    int n = last_lead - lead + 1;

    if (v.n == 0 || v.range[v.n - 1].last < first) {
        return RX_ID_NEVER;
    }
    b.n = 0;
    v.first = first;
    v.last = last;
    for (int i = 0; i < n; i++) {
        rx_id rest = block(&v, digits, (uint32_t)i << (6 * digits));
        if (rest != RX_ID_NEVER) {
            branch(&b, rest)->bit[(lead + i) / 32] |= 1u << ((lead + i) % 32);
        }
    }
    return join_branches(v.rx, &b);
}

static rx_id ascii(const struct chars_view *v, bool raw_json)
{
    struct byte_set s = {0};

    for (int32_t i = 0; i < v->n && v->range[i].first < 0x80; i++) {
        for (uint32_t c = v->range[i].first; c <= MIN(v->range[i].last, 0x7fu); c++) {
            s.bit[c / 32] |= 1u << (c % 32);
        }
    }
    if (raw_json) {
        s.bit[0] = 0;
        s.bit['"' / 32] &= ~(1u << '"' % 32);
        s.bit['\\' / 32] &= ~(1u << '\\' % 32);
    }
    return rx_make_set(v->rx, &s);
}

static rx_id utf8(struct chars_view *v, bool raw_json)
{
    rx_id x = ascii(v, raw_json);

    x = rx_make_or(v->rx, x, with_lead(*v, 0xc0, 0xdf, 1, 0x80, 0x7ff));
    x = rx_make_or(v->rx, x, with_lead(*v, 0xe0, 0xef, 2, 0x800, 0xffff));
    return rx_make_or(v->rx, x, with_lead(*v, 0xf0, 0xf4, 3, FIRST_ASTRAL, LAST_CODE));
}

rx_id rx_utf8(struct rx *r, const struct code_range *range, int32_t n)
{
    struct chars_view v = {r, range, n, 0, LAST_CODE, 64, {0}};

    return utf8(&v, false);
}

/* ---- JSON ---- */

static rx_id one_byte(struct rx *r, char c)
{
    return rx_make_range(r, (uint8_t)c, (uint8_t)c);
}

static rx_id behind_backslash_u(struct rx *r, rx_id digits)
{
    return rx_make_concat(r, one_byte(r, '\\'), rx_make_concat(r, one_byte(r, 'u'), digits));
}

static rx_id short_escapes(const struct chars_view *v)
{
    static const char code[] = "\"\\/\b\f\n\r\t", name[] = "\"\\/bfnrt";
    struct byte_set s = {0};

    for (int i = 0; code[i]; i++) {
        if (coverage(v, (uint8_t)code[i], (uint8_t)code[i])) {
            s.bit[name[i] / 32] |= 1u << (name[i] % 32);
        }
    }
    return rx_make_concat(v->rx, one_byte(v->rx, '\\'), rx_make_set(v->rx, &s));
}

/* The four digits of first .. last. */
static rx_id hex(struct rx *r, uint32_t first, uint32_t last)
{
    struct code_range range = {first, last};
    struct chars_view v = {r, &range, 1, 0, 0xffff, 16, {0}};

    return block(&v, 4, 0);
}

/* Characters above U+FFFF as two escapes. Each high one stands for 1024 characters. */
static rx_id pairs(const struct chars_view *v)
{
    struct rx *r = v->rx;
    rx_id all = RX_ID_NEVER;

    if (v->n == 0 || v->range[v->n - 1].last < FIRST_ASTRAL) {
        return all;
    }
    for (uint32_t h = 0; h < 1024 && !r->budget->failed;) {
        uint32_t base = FIRST_ASTRAL + h * 1024, end = h;
        int covered = coverage(v, base, base + 1023);
        if (covered == 0) {
            h++;
            continue;
        }
        struct code_range low[1024];
        int32_t n = 0;
        for (uint32_t c = 0; c < 1024 && covered < 0; c++) {
            if (coverage(v, base + c, base + c)) {
                bool goes_on = n > 0 && low[n - 1].last == 0xdc00 + c - 1;
                n += !goes_on;
                low[n - 1].last = 0xdc00 + c;
                low[n - 1].first = goes_on ? low[n - 1].first : 0xdc00 + c;
            }
        }
        while (covered > 0 && end < 1023 &&
               coverage(v, base + (end - h + 1) * 1024, base + (end - h + 2) * 1024 - 1) > 0) {
            end++;
        }
        struct chars_view lows = {r, low, n, 0, 0xffff, 16, {0}};
        rx_id rest = covered > 0 ? hex(r, 0xdc00, 0xdfff) : block(&lows, 4, 0);
        rx_id high = behind_backslash_u(r, hex(r, 0xd800 + h, 0xd800 + end));
        all = rx_make_or(r, all, rx_make_concat(r, high, behind_backslash_u(r, rest)));
        h = end + 1;
    }
    return all;
}

/* Sets of very many ranges (letters, say) are escaped within ASCII only: their
 * characters would make thousands of nodes, and are written as themselves. */
enum { MAX_ESCAPED_RANGES = 64 };

rx_id rx_escaped(struct rx *r, const struct code_range *range, int32_t n)
{
    struct chars_view v = {r, range, n, 0, LAST_CODE, 64, {0}}, digits = v;
    bool many = n > MAX_ESCAPED_RANGES;

    digits.radix = 16;
    digits.last = many ? 0x7f : 0xffff;
    rx_id x = rx_make_or(r, utf8(&v, true), short_escapes(&v));
    x = rx_make_or(r, x, behind_backslash_u(r, block(&digits, 4, 0)));
    return many ? x : rx_make_or(r, x, pairs(&v));
}

/* ---- sets of characters ---- */

static int by_first(const void *a, const void *b)
{
    const struct code_range *x = a, *y = b;

    return (x->first > y->first) - (x->first < y->first);
}

/* Append first .. last without the surrogates. */
static void append(struct grammar_builder *b, uint32_t first, uint32_t last)
{
    if (first < 0xd800 && last >= 0xd800) {
        append(b, first, 0xd7ff);
        first = 0xe000;
    } else if (first >= 0xd800 && first <= 0xdfff) {
        first = 0xe000;
    }
    last = MIN(last, (uint32_t)LAST_CODE);
    if (first <= last && budget_work(&b->budget, 1) &&
        budget_grow(&b->budget, &b->range, &b->cap_ranges, (int64_t)b->n_ranges + 1,
                    sizeof(*b->range))) {
        b->range[b->n_ranges++] = (struct code_range){first, last};
    }
}

/* Append the ranges, sorted and merged, or what lies between them. */
static void append_all(struct grammar_builder *b, struct code_range *sorted, int32_t n,
                       bool negated)
{
    uint32_t next = 0; /* of a negated set: the first code point that is not told yet */

    qsort(sorted, (size_t)n, sizeof(*sorted), by_first);
    for (int32_t i = 0; i < n;) {
        struct code_range all = sorted[i];
        for (i++; i < n && sorted[i].first <= all.last + 1; i++) {
            all.last = MAX(all.last, sorted[i].last);
        }
        if (!negated) {
            append(b, all.first, all.last);
        } else if (all.first > next) {
            append(b, next, all.first - 1);
        }
        next = all.last + 1;
    }
    if (negated && next <= LAST_CODE) {
        append(b, next, LAST_CODE);
    }
}

static void remember(struct grammar_builder *b, rx_id x, int32_t first)
{
    int32_t before = b->cap_chars_of;

    if (x <= RX_ID_ALL || !budget_grow(&b->budget, &b->chars_of, &b->cap_chars_of, (int64_t)x + 1,
                                       sizeof(*b->chars_of))) {
        return;
    }
    if (b->cap_chars_of > before) {
        memset(b->chars_of + before, 0, (size_t)(b->cap_chars_of - before) * sizeof(*b->chars_of));
    }
    if (!b->chars_of[x] && budget_grow(&b->budget, &b->chars, &b->cap_chars,
                                       (int64_t)b->n_chars + 1, sizeof(*b->chars))) {
        b->chars[b->n_chars] = (struct rx_chars){first, b->n_ranges - first, x, 0};
        b->chars_of[x] = ++b->n_chars;
    } else {
        b->n_ranges = first;
    }
}

/* The node that was made of the same ranges as [first, n_ranges), if they are many; 0:
 * none. */
static rx_id find_class(struct grammar_builder *b, int32_t first)
{
    int32_t n = b->n_ranges - first;

    for (int32_t i = 0; n > MANY_RANGES && i < b->n_chars && budget_work(&b->budget, 1); i++) {
        const struct rx_chars *c = &b->chars[i];
        if (c->n == n &&
            memcmp(b->range + c->first, b->range + first, (size_t)n * sizeof(*b->range)) == 0) {
            return c->x;
        }
    }
    return 0;
}

rx_id rx_class(struct grammar_builder *b, const struct code_range *range, int32_t n, bool negated)
{
    int32_t first = b->n_ranges;

    if (n == 0 && negated && b->any_char) {
        return b->any_char;
    }
    struct code_range *sorted = malloc(((size_t)n + 1) * sizeof(*sorted));

    if (!sorted || !budget_work(&b->budget, CLASS_WORK + n)) {
        free(sorted);
        budget_fail(&b->budget, ERR_NOMEM, NULL);
        return 0;
    }
    if (n > 0) {
        memcpy(sorted, range, (size_t)n * sizeof(*sorted));
    }
    budget_grow(&b->budget, &b->range, &b->cap_ranges, 1, sizeof(*b->range));
    append_all(b, sorted, n, negated);
    free(sorted);
    if (b->budget.failed) {
        return 0;
    }
    rx_id x = find_class(b, first);
    if (x) {
        b->n_ranges = first;
        return x;
    }
    x = rx_utf8(&b->rx, b->range + first, b->n_ranges - first);
    remember(b, x, first);
    if (n == 0 && negated) {
        b->any_char = x;
    }
    return x;
}

rx_id rx_any(struct grammar_builder *b)
{
    if (!b->any) {
        b->any = rx_repeat(b, rx_class(b, NULL, 0, true), 0, -1);
    }
    return b->any;
}

/* Whether a text has more characters, each a node of its own, than a grammar may have
 * nodes: none of them need be made. */
static bool too_long(struct grammar_builder *b, const char *text, size_t len)
{
    int64_t n = 0;

    for (size_t i = 0; i < len; i++) {
        n += ((uint8_t)text[i] & 0xc0) != 0x80;
    }
    return n > b->budget.max_items && !budget_fail(&b->budget, ERR_FULL, "items");
}

static rx_id bytes_of(struct grammar_builder *b, const char *text, size_t len, bool any_case)
{
    rx_id x = RX_ID_EMPTY;

    if (too_long(b, text, len)) {
        return 0;
    }
    for (size_t at = len; at > 0 && x;) {
        size_t from = at - 1;
        while (from > 0 && at - from < 4 && ((uint8_t)text[from] & 0xc0) == 0x80) {
            from--;
        }
        rx_id one;
        uint8_t c = (uint8_t)text[at - 1], other = c ^ 0x20;
        if (at - from > 1 && utf8_char_len(text + from, at - from) == at - from) {
            int len_read;
            uint32_t code = (uint32_t)utf8_get((const uint8_t *)text + from, &len_read);
            one = rx_class(b, &(struct code_range){code, code}, 1, false);
            at = from;
        } else {
            bool letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
            one = rx_make_range(&b->rx, c, c);
            if (any_case && letter) {
                one = rx_make_or(&b->rx, one, rx_make_range(&b->rx, other, other));
            }
            at--;
        }
        x = rx_make_concat(&b->rx, one, x);
    }
    return x;
}

rx_id rx_bytes(struct grammar_builder *b, const char *text, size_t len)
{
    return bytes_of(b, text, len, false);
}

rx_id rx_bytes_any_case(struct grammar_builder *b, const char *text, size_t len)
{
    return bytes_of(b, text, len, true);
}
