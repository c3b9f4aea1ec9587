/* Sets of numbers as regular expressions over their decimal texts.
 *
 * A set has two parts. `plain`, over texts without an exponent, is exact: a value's
 * texts (1, 1.0, 1.00) are all in it or none is, so intersection, union and complement
 * of the expressions are those of the sets. `power`, over texts with an exponent, has
 * only texts that are known to be in the set; after a complement it has none. */
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

enum { DIGITS_MAX = 400, SUFFIXES_MAX = 2048, RESTS_MAX = 1024, ENDING_MAX = 7 };

/* ---- decimals ---- */

static int64_t read_exponent(const char *text)
{
    bool negative = *text == '-';
    int64_t e = 0;

    for (text += *text == '-' || *text == '+'; *text; text++) {
        e = MIN(e * 10 + (*text - '0'), 1000000);
    }
    return negative ? -e : e;
}

bool decimal_read(struct schema *s, const struct value *number, struct decimal *ret)
{
    const char *text = number->text + (number->text[0] == '-');
    size_t whole = strcspn(text, ".eE"), part = 0;
    const char *fraction = text[whole] == '.' ? text + whole + 1 : "";
    part = strcspn(fraction, "eE");
    const char *power = text + strcspn(text, "eE");
    int64_t e = *power ? read_exponent(power + 1) : 0, n = (int64_t)(whole + part);
    char *digits = NULL;

    if (n <= DIGITS_MAX && e >= -DIGITS_MAX && e <= DIGITS_MAX) {
        digits = schema_alloc(s, (size_t)n + 2 * DIGITS_MAX + 2, 1);
    } else {
        grammar_build_fail(s->b, ERR_UNSUPPORTED, "schema: the number %.40s has too many digits",
                           number->text);
    }
    if (!digits) {
        return false;
    }
    /* DIGITS_MAX zeros, the digits, and as many zeros: the point moves by e in it. */
    int64_t point = DIGITS_MAX + 1 + (int64_t)whole + e, all = n + 2 * DIGITS_MAX + 1;
    memset(digits, '0', (size_t)all);
    memcpy(digits + DIGITS_MAX + 1, text, whole);
    memcpy(digits + DIGITS_MAX + 1 + whole, fraction, part);
    int64_t first = 0, last = all;
    while (first < point - 1 && digits[first] == '0') {
        first++;
    }
    while (last > point && digits[last - 1] == '0') {
        last--;
    }
    *ret = (struct decimal){.negative = number->text[0] == '-',
                            .whole = digits + first,
                            .n_whole = (int32_t)(point - first),
                            .part = digits + point,
                            .n_part = (int32_t)(last - point)};
    if (ret->n_whole == 1 && ret->whole[0] == '0' && ret->n_part == 0) {
        ret->negative = false;
    }
    return true;
}

bool decimal_equal(const struct decimal *a, const struct decimal *b)
{
    return a->negative == b->negative && a->n_whole == b->n_whole && a->n_part == b->n_part &&
           memcmp(a->whole, b->whole, (size_t)a->n_whole) == 0 &&
           memcmp(a->part, b->part, (size_t)a->n_part) == 0;
}

static bool is_zero(const struct decimal *d)
{
    return d->n_whole == 1 && d->whole[0] == '0' && d->n_part == 0;
}

/* ---- expressions ---- */

static rx_id bytes(struct schema *s, const char *text, int32_t n)
{
    return rx_bytes(s->b, text, (size_t)n);
}

static rx_id cat(struct schema *s, rx_id a, rx_id b)
{
    return rx_concat(s->b, a, b);
}

/* One digit from `low` to `high`; nothing if there is none. */
static rx_id digit(struct schema *s, int low, int high)
{
    struct code_range r = {(uint32_t)('0' + low), (uint32_t)('0' + high)};

    return low > high ? rx_never(s->b) : rx_class(s->b, &r, 1, false);
}

/* From min to max digits; max -1: any number. */
static rx_id digits(struct schema *s, int32_t min, int32_t max)
{
    return rx_repeat(s->b, digit(s, 0, 9), min, max);
}

static rx_id optional(struct schema *s, rx_id x)
{
    return rx_or(s->b, rx_empty(s->b), x);
}

static rx_id zeros(struct schema *s)
{
    return rx_repeat(s->b, digit(s, 0, 0), 0, -1);
}

/* A fraction, or none. */
static rx_id any_part(struct schema *s)
{
    return optional(s, cat(s, bytes(s, ".", 1), digits(s, 1, -1)));
}

/* A fraction of zeros, or none. */
static rx_id no_part(struct schema *s)
{
    return optional(s, cat(s, bytes(s, ".", 1), cat(s, digit(s, 0, 0), zeros(s))));
}

/* A number in front of the point. */
static rx_id any_whole(struct schema *s)
{
    return rx_or(s->b, bytes(s, "0", 1), cat(s, digit(s, 1, 9), digits(s, 0, -1)));
}

static rx_id minus(struct schema *s)
{
    return bytes(s, "-", 1);
}

/* ---- bounds ---- */

/* One digit that is above, or below, d[i]. `lead`: the first of several before the
 * point, no zero. */
static rx_id other_digit(struct schema *s, const char *d, int32_t i, bool above, bool lead)
{
    int at = d[i] - '0';

    return above ? digit(s, at + 1, 9) : digit(s, lead && i == 0 ? 1 : 0, at - 1);
}

/* Fractions (with their point, or empty) that are at least, or at most, d's. */
static rx_id part_bound(struct schema *s, const struct decimal *d, bool above, bool exclusive)
{
    rx_id some = cat(s, digits(s, 0, -1), cat(s, digit(s, 1, 9), digits(s, 0, -1)));
    rx_id point = bytes(s, ".", 1), x;

    if (d->n_part == 0) {
        rx_id same = exclusive ? rx_never(s->b) : no_part(s);
        return above ? rx_or(s->b, same, cat(s, point, some)) : same;
    }
    /* What may stand behind all digits of d, then behind all but one, and so on. */
    x = above ? (exclusive ? some : digits(s, 0, -1)) : exclusive ? rx_never(s->b) : zeros(s);
    for (int32_t i = d->n_part - 1; i >= 0; i--) {
        rx_id other = cat(s, other_digit(s, d->part, i, above, false), digits(s, 0, -1));
        x = rx_or(s->b, other, cat(s, bytes(s, d->part + i, 1), x));
        if (!above && i > 0) {
            x = rx_or(s->b, x, rx_empty(s->b));
        }
    }
    x = cat(s, point, x);
    return above ? x : optional(s, x);
}

/* Texts without a sign that are at least, or at most, |d|. */
static rx_id size_bound(struct schema *s, const struct decimal *d, bool above, bool exclusive)
{
    int32_t n = d->n_whole;
    rx_id x = part_bound(s, d, above, exclusive);

    for (int32_t i = n - 1; i >= 0; i--) {
        rx_id behind = cat(s, digits(s, n - 1 - i, n - 1 - i), any_part(s));
        rx_id other = cat(s, other_digit(s, d->whole, i, above, n > 1), behind);
        x = rx_or(s->b, other, cat(s, bytes(s, d->whole + i, 1), x));
    }
    if (above) {
        rx_id longer = cat(s, digit(s, 1, 9), digits(s, n, -1));
        return rx_or(s->b, x, cat(s, longer, any_part(s)));
    }
    if (n > 1) {
        rx_id shorter = cat(s, digit(s, 1, 9), digits(s, 0, n - 2));
        x = rx_or(s->b, x, cat(s, rx_or(s->b, bytes(s, "0", 1), shorter), any_part(s)));
    }
    return x;
}

/* Texts with an exponent that are above, or below, zero. */
static rx_id power_bound(struct schema *s, bool above, bool exclusive)
{
    struct code_range e[] = {{'E', 'E'}, {'e', 'e'}}, sign[] = {{'+', '+'}, {'-', '-'}};
    rx_id size = cat(s, any_whole(s), any_part(s)), nought = cat(s, bytes(s, "0", 1), no_part(s));
    rx_id power = cat(s, rx_class(s->b, e, 2, false),
                      cat(s, optional(s, rx_class(s->b, sign, 2, false)), digits(s, 1, -1)));

    if (exclusive) {
        size = rx_and(s->b, size, rx_not(s->b, nought));
    }
    rx_id x = above ? size : cat(s, minus(s), size);
    if (!exclusive) {
        x = rx_or(s->b, x, above ? cat(s, minus(s), nought) : nought);
    }
    return cat(s, x, power);
}

struct number_set number_bound(struct schema *s, const struct value *bound, bool above,
                               bool exclusive)
{
    struct number_set set = number_none(s);
    struct decimal d;

    if (!decimal_read(s, bound, &d)) {
        return set;
    }
    set.whole = false;
    /* The bound lies on one side of zero; on the other are all numbers or none. */
    bool outward = d.negative ? !above : above; /* away from zero, beyond the bound */
    bool zero = is_zero(&d);
    rx_id size = size_bound(s, &d, outward, exclusive);
    rx_id all = cat(s, any_whole(s), any_part(s));
    if (zero) {
        rx_id nought = cat(s, bytes(s, "0", 1), no_part(s));
        nought = rx_or(s->b, nought, cat(s, minus(s), nought));
        rx_id side = above ? all : cat(s, minus(s), all);
        set.plain =
            exclusive ? rx_and(s->b, side, rx_not(s->b, nought)) : rx_or(s->b, side, nought);
        set.power = power_bound(s, above, exclusive);
        return set;
    }
    set.plain = d.negative ? cat(s, minus(s), size) : size;
    if (!outward) {
        set.plain = rx_or(s->b, set.plain, d.negative ? all : cat(s, minus(s), all));
        /* Zero is inside the bound with both its signs. */
        rx_id nought = cat(s, bytes(s, "0", 1), no_part(s));
        set.plain = rx_or(s->b, set.plain, rx_or(s->b, nought, cat(s, minus(s), nought)));
    }
    return set;
}

/* ---- constants and multiples ---- */

struct number_set number_equal(struct schema *s, const struct value *number)
{
    struct number_set set = number_none(s);
    struct decimal d;

    if (!decimal_read(s, number, &d)) {
        return set;
    }
    rx_id x = bytes(s, d.whole, d.n_whole);
    if (d.n_part == 0) {
        x = cat(s, x, no_part(s));
    } else {
        x = cat(s, x, cat(s, bytes(s, ".", 1), cat(s, bytes(s, d.part, d.n_part), zeros(s))));
    }
    set.plain = d.negative    ? cat(s, minus(s), x)
                : is_zero(&d) ? rx_or(s->b, x, cat(s, minus(s), x))
                              : x;
    set.whole = d.n_part == 0;
    return set;
}

/* Whole numbers whose last digits are u[0, n): zeros in front do not count. */
static rx_id whole_ending(struct schema *s, const char *u, int32_t n)
{
    int32_t lead = 0;

    if (n == 0) {
        return any_whole(s);
    }
    while (lead < n - 1 && u[lead] == '0') {
        lead++;
    }
    rx_id longer = cat(s, cat(s, digit(s, 1, 9), digits(s, 0, -1)), bytes(s, u, n));
    return rx_or(s->b, longer, bytes(s, u + lead, n - lead));
}

/* Sizes whose digits up to the k-th behind the point, as a whole number, end in
 * u[0, t). Shorter fractions are those with zeros at the end. */
static rx_id sizes_ending(struct schema *s, const char *u, int32_t t, int32_t k)
{
    rx_id x = rx_never(s->b);

    for (int32_t j = k; j >= 0; j--) {
        int32_t rest = MAX(t - (k - j), 0);
        for (int32_t i = rest; i < t; i++) {
            if (u[i] != '0') {
                return x;
            }
        }
        int32_t behind = MIN(rest, j);
        rx_id part = rx_empty(s->b);
        if (j > 0) {
            part = cat(s, digits(s, j - behind, j - behind), bytes(s, u + rest - behind, behind));
            part = cat(s, bytes(s, ".", 1), part);
        }
        if (j == k) {
            part = j > 0 ? cat(s, part, zeros(s)) : no_part(s);
        }
        x = rx_or(s->b, x, cat(s, whole_ending(s, u, rest - behind), part));
    }
    return x;
}

struct multiples {
    struct schema *s;
    uint64_t q;
    rx_id *known; /* [ENDING_MAX + 1][q] completions by their digits and the rest; or NULL */
};

/* The `n` digits, the first at least `low`, that complete digits whose number is `rest`
 * modulo q to a multiple of q. */
static rx_id completions(struct multiples *m, uint64_t rest, int32_t n, int low)
{
    struct schema *s = m->s;
    rx_id x = rx_never(s->b), *known = m->known ? &m->known[(uint64_t)n * m->q + rest] : NULL;
    uint64_t power = 1, q = m->q;

    if (n == 0) {
        return rest == 0 ? rx_empty(s->b) : x;
    }
    if (known && *known && low == 0) {
        return *known;
    }
    for (int32_t i = 1; i < n; i++) {
        power *= 10;
    }
    for (int d = low; d <= 9 && grammar_build_work(s->b, 1); d++) {
        uint64_t next = (rest * 10 + (uint64_t)d) % q;
        if ((q - next * power % q) % q < power) { /* some are left */
            char c = (char)('0' + d);
            x = rx_or(s->b, x, cat(s, bytes(s, &c, 1), completions(m, next, n - 1, 0)));
        }
    }
    if (known && low == 0) {
        *known = x;
    }
    return x;
}

/* Sizes of whole multiples of q, which divides 10^t. */
static rx_id whole_multiples(struct schema *s, uint64_t q, int32_t t)
{
    rx_id x = cat(s, digit(s, 1, 9), digits(s, 0, -1));
    struct multiples m = {.s = s, .q = q};

    if (q <= RESTS_MAX) {
        m.known = schema_alloc(s, (size_t)q * (ENDING_MAX + 1), sizeof(*m.known));
    }

    x = rx_or(s->b, bytes(s, "0", 1), cat(s, x, completions(&m, 0, t, 0)));
    for (int32_t n = 1; n <= t; n++) {
        x = rx_or(s->b, x, completions(&m, 0, n, 1));
    }
    return cat(s, x, no_part(s));
}

/* Sizes of the multiples of q / 10^k, where the last t digits decide and q divides
 * 10^t = `power`. */
static rx_id part_multiples(struct schema *s, uint64_t q, uint64_t power, int32_t t, int32_t k)
{
    rx_id *x = schema_alloc(s, (size_t)(power / q), sizeof(*x));
    char u[8];

    for (uint64_t i = 0; x && i < power / q; i++) {
        uint64_t n = i * q;
        for (int32_t at = t - 1; at >= 0; at--, n /= 10) {
            u[at] = (char)('0' + n % 10);
        }
        x[i] = sizes_ending(s, u, t, k);
    }
    return x ? rx_any_of(s, x, (int32_t)(power / q)) : 0;
}

struct number_set number_multiples(struct schema *s, const struct value *of)
{
    struct number_set set = number_none(s);
    struct decimal d;
    uint64_t q = 0, power = 1;
    int32_t t = 0;

    if (!decimal_read(s, of, &d)) {
        return set;
    }
    if (d.negative || is_zero(&d)) {
        schema_invalid(s, "multipleOf", "a number above zero");
        return set;
    }
    for (int32_t i = 0; i < d.n_whole + d.n_part && q < 1000000000000; i++) {
        q = q * 10 + (uint64_t)((i < d.n_whole ? d.whole[i] : d.part[i - d.n_whole]) - '0');
    }
    /* The last t digits decide where q divides 10^t. */
    while (power % q != 0 && t < ENDING_MAX) {
        power *= 10;
        t++;
    }
    bool few = (d.n_part == 0 && q <= RESTS_MAX) || power / q <= SUFFIXES_MAX;
    if (power % q != 0 || !few) {
        grammar_build_fail(s->b, ERR_UNSUPPORTED,
                           "schema: the keyword 'multipleOf' of %.40s cannot be enforced",
                           of->text);
        return set;
    }
    rx_id size =
        d.n_part == 0 ? whole_multiples(s, q, t) : part_multiples(s, q, power, t, d.n_part);
    set.plain = rx_or(s->b, size, cat(s, minus(s), size));
    set.whole = d.n_part == 0;
    return set;
}

/* ---- sets ---- */

void number_constants(struct schema *s)
{
    rx_id size = cat(s, any_whole(s), any_part(s));

    s->plain = cat(s, optional(s, minus(s)), size);
    s->power = rx_or(s->b, power_bound(s, true, false), power_bound(s, false, false));
}

struct number_set number_all(struct schema *s)
{
    return (struct number_set){s->plain, s->power, false};
}

struct number_set number_none(struct schema *s)
{
    return (struct number_set){s->never, s->never, true};
}

struct number_set number_integers(struct schema *s)
{
    rx_id x = cat(s, any_whole(s), no_part(s));

    return (struct number_set){cat(s, optional(s, minus(s)), x), s->never, true};
}

struct number_set number_and(struct schema *s, struct number_set a, struct number_set b)
{
    if (a.plain == s->plain && a.power == s->power) {
        return b;
    }
    if (b.plain == s->plain && b.power == s->power) {
        return a;
    }
    return (struct number_set){rx_and(s->b, a.plain, b.plain), rx_and(s->b, a.power, b.power),
                               a.whole || b.whole};
}

struct number_set number_or(struct schema *s, struct number_set a, struct number_set b)
{
    return (struct number_set){rx_or(s->b, a.plain, b.plain), rx_or(s->b, a.power, b.power),
                               a.whole && b.whole};
}

struct number_set number_not(struct schema *s, struct number_set a)
{
    if (a.plain == s->never) {
        return number_all(s);
    }
    if (a.plain == s->plain) {
        return number_none(s);
    }
    return (struct number_set){rx_and(s->b, s->plain, rx_not(s->b, a.plain)), s->never, false};
}

rx_id number_text(struct schema *s, struct number_set a)
{
    if (a.whole) {
        return rx_and(s->b, a.plain, cat(s, optional(s, minus(s)), any_whole(s)));
    }
    return rx_or(s->b, a.plain, a.power);
}
