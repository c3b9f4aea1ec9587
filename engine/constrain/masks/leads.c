#include "engine/constrain/masks/leads.h"

/* Configs that are looked at to find out whether any plain text may follow one: of a
 * chain, and where most lead back to earlier ones, as in a search for a long run. */
enum { OPEN_CHAIN = 48, OPEN_MOST = 400 };

/* ---- where any plain text leads back ---- */

/* The config that every byte of first .. last leads to, or CONFIG_DEAD; it is also
 * that if it is not `wanted`, unless that is CONFIG_UNKNOWN. */
static int32_t common_next(struct stepper *s, int32_t from, int first, int last, int32_t wanted)
{
    int32_t to = wanted, before = -1;

    for (int b = first; b <= last; b++) {
        int32_t symbol = symbol_of_byte(s->a, (uint8_t)b);
        if (symbol == before || (last < 0x80 && !is_plain(b))) {
            continue;
        }
        before = symbol;
        int32_t next = automaton_next(s, from, symbol);
        if (next < 0 || (to != CONFIG_UNKNOWN && next != to)) {
            return CONFIG_DEAD;
        }
        to = next;
    }
    return to;
}

/* Whether lead bytes first .. last and then continuation bytes, the first of them low
 * .. high, lead to `to`. */
static bool sequences_lead(struct stepper *s, int32_t from, int first, int last, int low, int high,
                           int n_more, int32_t to)
{
    int32_t before = -1;

    for (int b = first; b <= last; b++) {
        int32_t symbol = symbol_of_byte(s->a, (uint8_t)b);
        if (symbol == before) {
            continue;
        }
        before = symbol;
        int32_t c = automaton_next(s, from, symbol);
        for (int i = 0; i < n_more && c > 0; i++) {
            c = common_next(s, c, i == 0 ? low : 0x80, i == 0 ? high : 0xbf,
                            i == n_more - 1 ? to : CONFIG_UNKNOWN);
        }
        if (c != to) {
            return false;
        }
    }
    return true;
}

/* Characters by their lead bytes, and the first byte behind those; any follow. */
struct by_lead {
    uint8_t first, last, low, high, n_more;
};
/* Characters of three bytes by the first two, and the last. */
struct by_two {
    uint8_t first, second, low, high;
};

/* Whether the characters lead to `to`. */
static bool characters_lead(struct stepper *s, int32_t from, const struct by_lead *l, int n_l,
                            const struct by_two *t, int n_t, int32_t to)
{
    for (int i = 0; i < n_l; i++) {
        if (!sequences_lead(s, from, l[i].first, l[i].last, l[i].low, l[i].high, l[i].n_more, to)) {
            return false;
        }
    }
    for (int i = 0; i < n_t; i++) {
        int32_t c = automaton_next(s, from, symbol_of_byte(s->a, t[i].first));
        c = c > 0 ? automaton_next(s, c, symbol_of_byte(s->a, t[i].second)) : c;
        if (c <= 0 || common_next(s, c, t[i].low, t[i].high, to) != to) {
            return false;
        }
    }
    return true;
}

/* Whether all of KIND_BEYOND_ASCII leads to `to`. */
static bool beyond_ascii_leads(struct stepper *s, int32_t from, int32_t to)
{
    static const struct by_lead leads[] = {
        {0xc2, 0xc2, 0x80, 0x9f, 1}, {0xc2, 0xc2, 0xa1, 0xbf, 1}, {0xc3, 0xdf, 0x80, 0xbf, 1},
        {0xe0, 0xe0, 0xa0, 0xbf, 2}, {0xe1, 0xe1, 0x80, 0x99, 2}, {0xe1, 0xe1, 0x9b, 0xbf, 2},
        {0xe2, 0xe2, 0x82, 0xbf, 2}, {0xe3, 0xe3, 0x81, 0xbf, 2}, {0xe4, 0xec, 0x80, 0xbf, 2},
        {0xed, 0xed, 0x80, 0x9f, 2}, {0xee, 0xee, 0x80, 0xbf, 2}, {0xef, 0xef, 0x80, 0xba, 2},
        {0xef, 0xef, 0xbc, 0xbf, 2}, {0xf0, 0xf0, 0x90, 0xbf, 3}, {0xf1, 0xf3, 0x80, 0xbf, 3},
        {0xf4, 0xf4, 0x80, 0x8f, 3},
    };
    static const struct by_two twos[] = {
        {0xe1, 0x9a, 0x81, 0xbf}, {0xe2, 0x80, 0x8b, 0xa7}, {0xe2, 0x80, 0xaa, 0xae},
        {0xe2, 0x80, 0xb0, 0xbf}, {0xe2, 0x81, 0x80, 0x9e}, {0xe2, 0x81, 0xa0, 0xbf},
        {0xe3, 0x80, 0x81, 0xbf}, {0xef, 0xbb, 0x80, 0xbe},
    };

    return characters_lead(s, from, leads, ARRAY_LEN(leads), twos, ARRAY_LEN(twos), to);
}

/* Whether all of KIND_SPACE leads to `to`. */
static bool spaces_lead(struct stepper *s, int32_t from, int32_t to)
{
    static const struct by_lead leads[] = {{0xc2, 0xc2, 0xa0, 0xa0, 1}};
    static const struct by_two twos[] = {
        {0xe1, 0x9a, 0x80, 0x80}, {0xe2, 0x80, 0x80, 0x8a}, {0xe2, 0x80, 0xaf, 0xaf},
        {0xe2, 0x81, 0x9f, 0x9f}, {0xe3, 0x80, 0x80, 0x80}, {0xef, 0xbb, 0xbf, 0xbf},
    };

    return characters_lead(s, from, leads, ARRAY_LEN(leads), twos, ARRAY_LEN(twos), to);
}

/* ---- what plain characters lead to ---- */

/* Configs without repetition, as many as a config may note. */
struct next_set {
    int32_t config[CONFIG_NEXT], n;
    bool dead, many; /* some character may not come next; there are more configs */
};

static void add_next(struct next_set *set, int32_t config)
{
    for (int32_t i = 0; i < set->n; i++) {
        if (set->config[i] == config) {
            return;
        }
    }
    if (config <= 0) {
        set->dead = true;
    } else if (set->n == CONFIG_NEXT) {
        set->many = true;
    } else {
        set->config[set->n++] = config;
    }
}

/* What the last n bytes of characters lead to, the first of these in low .. high. */
static void add_endings(struct stepper *s, int32_t from, int low, int high, int n,
                        struct next_set *set)
{
    int32_t before = -1, last = CONFIG_UNKNOWN;

    for (int b = low; b <= high && !set->dead && !set->many; b++) {
        int32_t symbol = symbol_of_byte(s->a, (uint8_t)b);
        if (symbol == before || (high < 0x80 && !is_plain(b))) {
            continue;
        }
        before = symbol;
        int32_t to = automaton_next(s, from, symbol);
        if (n == 1 || to <= 0) {
            add_next(set, to);
        } else if (to != last) {
            add_endings(s, to, 0x80, 0xbf, n - 1, set);
        }
        last = to;
    }
}

/* The same of characters whose first byte is first .. last. */
static void add_characters(struct stepper *s, int32_t from, int first, int last, int low, int high,
                           int n_more, struct next_set *set)
{
    int32_t before = CONFIG_UNKNOWN;

    for (int b = first; b <= last && !set->dead && !set->many; b++) {
        int32_t to = automaton_next(s, from, symbol_of_byte(s->a, (uint8_t)b));
        if (to <= 0) {
            set->dead = true;
        } else if (to != before) {
            add_endings(s, to, low, high, n_more, set);
        }
        before = to;
    }
}

/* U+2000 to U+203F but the separators of lines, U+2028 and U+2029. */
static void add_but_separators(struct stepper *s, int32_t from, struct next_set *set)
{
    int32_t to = automaton_next(s, from, symbol_of_byte(s->a, 0xe2));

    to = to > 0 ? automaton_next(s, to, symbol_of_byte(s->a, 0x80)) : to;
    if (to <= 0) {
        set->dead = true;
        return;
    }
    add_endings(s, to, 0x80, 0xa7, 1, set);
    add_endings(s, to, 0xaa, 0xbf, 1, set);
}

static void add_plain(struct stepper *s, int32_t from, struct next_set *set)
{
    add_endings(s, from, 0x20, 0x7f, 1, set);
    add_characters(s, from, 0xc2, 0xdf, 0x80, 0xbf, 1, set);
    add_characters(s, from, 0xe0, 0xe0, 0xa0, 0xbf, 2, set);
    add_characters(s, from, 0xe1, 0xe1, 0x80, 0xbf, 2, set);
    add_characters(s, from, 0xe2, 0xe2, 0x81, 0xbf, 2, set);
    add_but_separators(s, from, set);
    add_characters(s, from, 0xe3, 0xec, 0x80, 0xbf, 2, set);
    add_characters(s, from, 0xed, 0xed, 0x80, 0x9f, 2, set);
    add_characters(s, from, 0xee, 0xef, 0x80, 0xbf, 2, set);
    add_characters(s, from, 0xf0, 0xf0, 0x90, 0xbf, 3, set);
    add_characters(s, from, 0xf1, 0xf3, 0x80, 0xbf, 3, set);
    add_characters(s, from, 0xf4, 0xf4, 0x80, 0x8f, 3, set);
}

int32_t plain_next(struct stepper *s, int32_t c, int32_t *next)
{
    struct config *config = config_at(s->a, c);
    int32_t n = atomic_load_explicit(&config->n_next, memory_order_acquire);

    if (n == NEXT_UNKNOWN) {
        struct next_set set = {.n = 0};
        add_plain(s, c, &set);
        n = set.dead ? NEXT_DEAD : set.many ? NEXT_MANY : set.n;
        if (s->paused) {
            return NEXT_DEAD;
        }
        for (int32_t i = 0; i < n; i++) { /* others store the same */
            atomic_store_explicit(&config->next[i], set.config[i], memory_order_relaxed);
        }
        atomic_store_explicit(&config->n_next, (int8_t)n, memory_order_release);
    }
    for (int32_t i = 0; i < n; i++) {
        next[i] = atomic_load_explicit(&config->next[i], memory_order_relaxed);
    }
    return n;
}

/* The configs that plain texts lead to from `c`, into seen[OPEN_MOST + CONFIG_NEXT], up
 * to one that stops a text or until there are too many. Whether these are all. */
static bool plain_closure(struct stepper *s, int32_t c, int32_t *seen, int32_t *ret_n)
{
    int32_t n_seen = 1, n = 0, next[CONFIG_NEXT], most = OPEN_CHAIN, returns = 0;

    seen[0] = c;
    for (int32_t i = 0; i < n_seen && n_seen <= most && n >= 0; i++) {
        bool back = false;
        n = plain_next(s, seen[i], next);
        for (int32_t k = 0; k < n; k++) {
            int32_t j = 0;
            while (j < n_seen && seen[j] != next[k]) {
                j++;
            }
            seen[n_seen] = next[k];
            n_seen += j == n_seen;
            back = back || j < i;
        }
        returns += back;
        most = 2 * returns > i ? OPEN_MOST : OPEN_CHAIN;
    }
    *ret_n = MIN(n_seen, most);
    return n >= 0 && n_seen <= most;
}

static int32_t behind(struct stepper *s, int32_t c, char plain)
{
    return automaton_next(s, c, symbol_of_byte(s->a, (uint8_t)plain));
}

/* Whether some character leads to a config that it leads back to. */
static bool settles(struct stepper *s, int32_t c)
{
    for (const char *at = "x ~"; *at; at++) {
        int32_t to = behind(s, c, *at);
        if (to <= 0) {
            return false;
        }
        if (behind(s, to, *at) == to) {
            return true;
        }
    }
    return false;
}

bool is_open(struct stepper *s, int32_t c)
{
    int32_t seen[OPEN_MOST + CONFIG_NEXT], n = 1;
    uint8_t note = atomic_load_explicit(&config_at(s->a, c)->open, memory_order_relaxed);

    if (note != NOTE_UNKNOWN) {
        return note == NOTE_YES;
    }
    seen[0] = c;
    bool open = settles(s, c) && plain_closure(s, c, seen, &n);
    for (int32_t i = 0; i < n && (open || !s->paused); i++) {
        atomic_store_explicit(&config_at(s->a, seen[i])->open, open ? NOTE_YES : NOTE_NO,
                              memory_order_relaxed);
    }
    return open;
}

bool is_body(struct stepper *s, int32_t c)
{
    uint8_t note = atomic_load_explicit(&config_at(s->a, c)->open, memory_order_relaxed);

    return note == NOTE_YES || (note == NOTE_UNKNOWN && behind(s, c, 'x') == c && is_open(s, c));
}

bool has_room(struct stepper *s, int32_t c, int32_t chars)
{
    _Atomic(uint8_t) *room = &config_at(s->a, c)->room;
    int32_t next[CONFIG_NEXT];

    if (chars <= atomic_load_explicit(room, memory_order_relaxed)) {
        return true;
    }
    if (plain_next(s, c, next) != 1 || !has_room(s, next[0], chars - 1)) {
        return false;
    }
    atomic_store_explicit(room, (uint8_t)chars, memory_order_relaxed);
    return true;
}

/* ---- what bytes of some kinds lead to ---- */

/* CONFIG_DEAD, which is noted unless it is only not known yet. */
static int32_t note_unlike(const struct stepper *s, struct config *config, uint64_t kinds)
{
    if (!s->paused) {
        atomic_fetch_or_explicit(&config->unlike, kinds, memory_order_relaxed);
    }
    return CONFIG_DEAD;
}

/* Where the config's kinds of bytes lead, if they are alike: where one of these does, a
 * letter if there is one. Without any of ASCII it is taken to be the config itself. */
static int32_t alike_to(struct stepper *s, int32_t c, uint64_t kinds)
{
    struct config *config = config_at(s->a, c);
    int32_t to = atomic_load_explicit(&config->alike_to, memory_order_relaxed);

    if (to != CONFIG_UNKNOWN) {
        return to;
    }
    to = c;
    for (int b = 'z'; b >= ' '; b--) {
        if (kinds >> s->a->vocab->kind[b] & 1) {
            to = automaton_next(s, c, symbol_of_byte(s->a, (uint8_t)b));
            break;
        }
    }
    if (to == CONFIG_PAUSED) {
        return CONFIG_DEAD;
    }
    to = to > 0 ? to : CONFIG_DEAD;
    int32_t noted = CONFIG_UNKNOWN; /* others may ask by other kinds: one answer counts */
    bool first = atomic_compare_exchange_strong(&config->alike_to, &noted, to);
    return first ? to : noted;
}

/* The config that all bytes, or characters, of these kinds lead to, or CONFIG_DEAD.
 * What is asked is asked of many subtrees, so it is noted by kind; the first kind that
 * leads elsewhere ends the question. */
static int32_t after_kinds(struct stepper *s, int32_t c, uint64_t kinds)
{
    struct config *config = config_at(s->a, c);
    const uint64_t beyond = (uint64_t)1 << KIND_BEYOND_ASCII, broken = (uint64_t)1 << KIND_BROKEN;
    const uint64_t space = (uint64_t)1 << KIND_SPACE;
    uint64_t open = kinds & ~atomic_load_explicit(&config->alike, memory_order_relaxed);

    if (open & (broken | atomic_load_explicit(&config->unlike, memory_order_relaxed))) {
        return CONFIG_DEAD;
    }
    int32_t to = alike_to(s, c, kinds);
    if (to == CONFIG_DEAD || !open) {
        return to;
    }
    if (to != c && open & (beyond | space)) {
        return CONFIG_DEAD; /* it would take more steps than walking the few tokens */
    }
    for (int b = 0; b < 0x80 && open & ~(beyond | space); b++) {
        uint64_t kind = (uint64_t)1 << s->a->vocab->kind[b];
        if (open & kind && automaton_next(s, c, symbol_of_byte(s->a, (uint8_t)b)) != to) {
            return note_unlike(s, config, kind);
        }
    }
    if (open & beyond && !beyond_ascii_leads(s, c, to)) {
        return note_unlike(s, config, beyond);
    }
    if (open & space && !spaces_lead(s, c, to)) {
        return note_unlike(s, config, space);
    }
    atomic_fetch_or_explicit(&config->alike, open, memory_order_relaxed);
    return to;
}

bool takes(struct stepper *s, int32_t c, uint64_t kinds, int32_t most)
{
    for (int32_t i = 0; i < most; i++) {
        int32_t to = after_kinds(s, c, kinds);
        if (to == CONFIG_DEAD || to == c) {
            return to == c;
        }
        c = to;
    }
    return true;
}
