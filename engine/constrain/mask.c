#include "engine/constrain/mask.h"

#include <string.h>

/* Nodes of subtrees about which it is worth asking. */
enum { SMALL_SUBTREE = 12, ASKED_SUBTREE = 8 };

/* Configs that are looked at to find out whether any plain text may follow one. */
enum { OPEN_MOST = 48 };

/* What is asked while the stepper is paused is answered with no, which costs time at
 * most: every answer of no leads to a walk of all, and that ends at the first step
 * which is not made. Such answers are not noted. */

/* ---- where any plain text leads back ---- */

static bool is_plain(int byte)
{
    return byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\';
}

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

/* Whether U+2000 to U+203F but the separators of lines, U+2028 and U+2029, lead to
 * `to`. */
static bool but_separators(struct stepper *s, int32_t from, int32_t to)
{
    int32_t c = automaton_next(s, from, symbol_of_byte(s->a, 0xe2));

    c = c > 0 ? automaton_next(s, c, symbol_of_byte(s->a, 0x80)) : c;
    return c > 0 && common_next(s, c, 0x80, 0xa7, to) == to &&
           common_next(s, c, 0xaa, 0xbf, to) == to;
}

/* Whether every character beyond ASCII but those separators leads to `to`. */
static bool beyond_ascii_leads(struct stepper *s, int32_t from, int32_t to)
{
    return sequences_lead(s, from, 0xc2, 0xdf, 0x80, 0xbf, 1, to) &&
           sequences_lead(s, from, 0xe0, 0xe0, 0xa0, 0xbf, 2, to) &&
           sequences_lead(s, from, 0xe1, 0xe1, 0x80, 0xbf, 2, to) &&
           sequences_lead(s, from, 0xe2, 0xe2, 0x81, 0xbf, 2, to) && but_separators(s, from, to) &&
           sequences_lead(s, from, 0xe3, 0xec, 0x80, 0xbf, 2, to) &&
           sequences_lead(s, from, 0xed, 0xed, 0x80, 0x9f, 2, to) &&
           sequences_lead(s, from, 0xee, 0xef, 0x80, 0xbf, 2, to) &&
           sequences_lead(s, from, 0xf0, 0xf0, 0x90, 0xbf, 3, to) &&
           sequences_lead(s, from, 0xf1, 0xf3, 0x80, 0xbf, 3, to) &&
           sequences_lead(s, from, 0xf4, 0xf4, 0x80, 0x8f, 3, to);
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

/* The configs that plain characters lead to, into next[CONFIG_NEXT]: how many, or
 * NEXT_DEAD where not all may follow, NEXT_MANY. */
static int32_t plain_next(struct stepper *s, int32_t c, int32_t *next)
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
    int32_t n_seen = 1, n = 0, next[CONFIG_NEXT];

    seen[0] = c;
    for (int32_t i = 0; i < n_seen && n_seen <= OPEN_MOST && n >= 0; i++) {
        n = plain_next(s, seen[i], next);
        for (int32_t k = 0; k < n; k++) {
            int32_t j = 0;
            while (j < n_seen && seen[j] != next[k]) {
                j++;
            }
            seen[n_seen] = next[k];
            n_seen += j == n_seen;
        }
    }
    *ret_n = MIN(n_seen, OPEN_MOST);
    return n >= 0 && n_seen <= OPEN_MOST;
}

static int32_t behind_letter(struct stepper *s, int32_t c)
{
    return automaton_next(s, c, symbol_of_byte(s->a, 'x'));
}

/* Whether any plain text may follow. It is asked only where a letter leads to a config
 * that it leads back to, which leaves out what counts characters; and of those that are
 * found on the way the answer is the same, or is taken to be no. */
static bool is_open(struct stepper *s, int32_t c)
{
    int32_t seen[OPEN_MOST + CONFIG_NEXT], n = 1;
    uint8_t note = atomic_load_explicit(&config_at(s->a, c)->open, memory_order_relaxed);

    if (note != NOTE_UNKNOWN) {
        return note == NOTE_YES;
    }
    int32_t to = behind_letter(s, c);
    seen[0] = c;
    bool open = to > 0 && behind_letter(s, to) == to && plain_closure(s, c, seen, &n);
    for (int32_t i = 0; i < n && (open || !s->paused); i++) {
        atomic_store_explicit(&config_at(s->a, seen[i])->open, open ? NOTE_YES : NOTE_NO,
                              memory_order_relaxed);
    }
    return open;
}

/* The same, asked only where it is likely. */
static bool is_body(struct stepper *s, int32_t c)
{
    uint8_t note = atomic_load_explicit(&config_at(s->a, c)->open, memory_order_relaxed);

    return note == NOTE_YES || (note == NOTE_UNKNOWN && behind_letter(s, c) == c && is_open(s, c));
}

/* Whether any text of so many plain characters may follow, and leads to where all texts
 * of as many lead. (Others, as of words that are counted, have so many configs on the
 * way that a walk takes less.) */
static bool has_room(struct stepper *s, int32_t c, int32_t chars)
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
    uint64_t open = kinds & ~atomic_load_explicit(&config->alike, memory_order_relaxed);

    if (open & (broken | atomic_load_explicit(&config->unlike, memory_order_relaxed))) {
        return CONFIG_DEAD;
    }
    int32_t to = alike_to(s, c, kinds);
    if (to == CONFIG_DEAD || !open) {
        return to;
    }
    for (int b = 0; b < 0x80 && open & ~beyond; b++) {
        uint64_t kind = (uint64_t)1 << s->a->vocab->kind[b];
        if (open & kind && automaton_next(s, c, symbol_of_byte(s->a, (uint8_t)b)) != to) {
            return note_unlike(s, config, kind);
        }
    }
    if (open & beyond && !beyond_ascii_leads(s, c, to)) {
        return note_unlike(s, config, beyond);
    }
    atomic_fetch_or_explicit(&config->alike, open, memory_order_relaxed);
    return to;
}

/* Whether any text of these kinds and of at most `most` bytes may come next: all lead
 * back to the config, or on through as many as there may be characters. */
static bool takes(struct stepper *s, int32_t c, uint64_t kinds, int32_t most)
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

/* ---- walking a trie ---- */

struct walk {
    struct stepper *s;
    const struct constrain_vocab *v;
    uint32_t *mask;
    int32_t failed; /* 0, or CONFIG_FULL and those behind it */
};

static void set_tokens(const struct walk *w, int32_t token)
{
    bool more = token & TRIE_SAME;

    token &= ~TRIE_SAME;
    mask_set(w->mask, token);
    while (more && w->v->same[token] >= 0) {
        token = w->v->same[token];
        mask_set(w->mask, token);
    }
}

static void walk_rest(struct walk *w, const struct trie *t, int32_t i, int32_t end, int32_t config);

/* Below a node of TRIE_ALL, in a config where all plain text leads back. */
static void take_plain(struct walk *w, int32_t node, int32_t config)
{
    const struct constrain_vocab *v = w->v;
    int32_t end = (int32_t)v->trie[TRIE_ALL].node[node].end;

    for (int32_t i = v->plain_at[node + 1]; i < v->plain_at[end]; i++) {
        mask_set(w->mask, v->plain_ids[i]);
    }
    walk_rest(w, &v->trie[TRIE_NOT_PLAIN], v->rest_at[node + 1], v->rest_at[end], config);
}

/* Below a node of TRIE_ALL, all that is there. */
static void take_all(struct walk *w, int32_t node)
{
    const struct constrain_vocab *v = w->v;
    int32_t end = v->all_at[v->trie[TRIE_ALL].node[node].end];

    for (int32_t i = v->all_at[node + 1]; i < end; i++) {
        mask_set(w->mask, v->all_ids[i]);
    }
}

/* Nodes i .. end, children of one node and what is below, entered in `config`. */
static void walk_rest(struct walk *w, const struct trie *t, int32_t i, int32_t end, int32_t config)
{
    struct {
        int32_t end, config;
        bool large; /* worth asking what leads back */
        const _Atomic(int32_t) *edges;
    } path[MAX_TOKEN_BYTES + 1];
    int32_t depth = 0;
    const bool all = t == &w->v->trie[TRIE_ALL];
    const uint8_t *class_of = w->s->a->rx.class_of;

    path[0].end = end;
    path[0].config = config;
    path[0].large = end - i > ASKED_SUBTREE;
    path[0].edges = edges_of(w->s->a, config);
    while (i < end) {
        while (i >= path[depth].end) {
            depth--;
        }
        const struct trie_node n = t->node[i];
        int32_t symbol = class_of[n.byte];
        int32_t to = atomic_load_explicit(path[depth].edges + symbol, memory_order_acquire);
        if (to == CONFIG_UNKNOWN) {
            to = automaton_step(w->s, path[depth].config, symbol);
        }
        if (to < 0) {
            if (to != CONFIG_DEAD) {
                w->failed = to;
                return;
            }
            i = (int32_t)n.end;
            continue;
        }
        if (n.token >= 0) {
            set_tokens(w, n.token);
        }
        bool back = to == path[depth].config, large = back ? path[depth].large : false;
        if (all && !back && (int32_t)n.end - i > SMALL_SUBTREE) {
            if (is_body(w->s, to)) {
                take_plain(w, i, to);
                i = (int32_t)n.end;
                continue;
            }
            large = (int32_t)n.end - i > ASKED_SUBTREE;
        }
        if (all && large && takes(w->s, to, w->v->below[i], w->v->height[i])) {
            take_all(w, i);
            i = (int32_t)n.end;
            continue;
        }
        i++;
        if (i < (int32_t)n.end) {
            depth++;
            path[depth].end = (int32_t)n.end;
            path[depth].config = to;
            path[depth].large = large;
            path[depth].edges = edges_of(w->s->a, to);
        }
    }
}

/* ---- masks ---- */

/* What is set at once, and what is walked: plain tokens and the others, or plain tokens
 * of at most SLICE_CHARS characters and the others. */
struct slice {
    const uint32_t *mask;
    const struct trie *trie;
    const int32_t *child; /* nodes of `trie` where those of vocab->child are */
};

static bool fits_slice(struct stepper *s, int32_t c)
{
    return has_room(s, c, SLICE_CHARS);
}

/* A config that most plain characters lead to, and that fits: that of a string's body.
 * CONFIG_DEAD: none. */
static int32_t find_body(struct stepper *s, int32_t config, bool (*fits)(struct stepper *, int32_t))
{
    if (fits(s, config)) {
        return config;
    }
    for (int b = 0x7e; b >= 0x20; b -= 0x10) {
        int32_t to = is_plain(b) ? automaton_next(s, config, symbol_of_byte(s->a, (uint8_t)b)) : 0;
        if (to > 0 && fits(s, to)) {
            return to;
        }
    }
    return CONFIG_DEAD;
}

/* All plain tokens of the slice but those whose first byte leads elsewhere. */
static void mask_in_body(struct walk *w, int32_t config, int32_t body, const struct slice *slice)
{
    const struct constrain_vocab *v = w->v;
    const struct trie *all = &v->trie[TRIE_ALL];

    memcpy(w->mask, slice->mask, (size_t)v->words * sizeof(*w->mask));
    if (config == body) {
        walk_rest(w, slice->trie, 0, slice->trie->n, config);
        return;
    }
    for (int32_t k = 0; k < v->n_children && !w->failed; k++) {
        int32_t first = v->child[k], end = v->child[k + 1];
        int32_t symbol = symbol_of_byte(w->s->a, (uint8_t)all->node[first].byte);
        int32_t to = automaton_next(w->s, config, symbol);
        if (to > 0 && to == automaton_next(w->s, body, symbol)) {
            walk_rest(w, slice->trie, slice->child[k], slice->child[k + 1], config);
            continue;
        }
        for (int32_t i = v->plain_at[first]; i < v->plain_at[end]; i++) {
            w->mask[v->plain_ids[i] / 32] &= ~(1u << (v->plain_ids[i] % 32));
        }
        walk_rest(w, all, first, end, config);
    }
}

/* Whether no plain character may follow. */
static bool takes_no_plain(struct stepper *s, int32_t config)
{
    int32_t before = -1;

    for (int b = 0x20; b < 0xf5; b = b == 0x7f ? 0xc2 : b + 1) {
        int32_t symbol = symbol_of_byte(s->a, (uint8_t)b);
        if (symbol == before || (b < 0x80 && !is_plain(b))) {
            continue;
        }
        before = symbol;
        if (automaton_next(s, config, symbol) != CONFIG_DEAD) {
            return false;
        }
    }
    return true;
}

/* How many plain characters may follow, whatever they are, if no other may follow
 * those: fewer than SLICE_CHARS; else 0. */
static int32_t bounded_room(struct stepper *s, int32_t config)
{
    int32_t next[CONFIG_NEXT];

    for (int32_t i = 0; i < SLICE_CHARS; i++) {
        if (plain_next(s, config, next) != 1) {
            return i > 0 && takes_no_plain(s, config) ? i : 0;
        }
        config = next[0];
    }
    return 0;
}

static void mask_text(struct walk *w, int32_t config)
{
    const struct constrain_vocab *v = w->v;
    const struct trie *t = v->trie;
    const size_t words = (size_t)v->words;
    struct slice plain = {v->plain[0], &t[TRIE_NOT_PLAIN], v->rest_child};
    struct slice few = {v->few + (SLICE_CHARS - 1) * words, &t[TRIE_LONG], v->long_child};
    int32_t body = find_body(w->s, config, is_open), room;

    if (body > 0) {
        mask_in_body(w, config, body, &plain);
    } else if ((body = find_body(w->s, config, fits_slice)) > 0) {
        mask_in_body(w, config, body, &few);
    } else if ((room = bounded_room(w->s, config)) > 0) {
        memcpy(w->mask, v->few + (size_t)(room - 1) * words, words * sizeof(*w->mask));
        walk_rest(w, &t[TRIE_NOT_PLAIN], 0, t[TRIE_NOT_PLAIN].n, config);
    } else {
        memset(w->mask, 0, words * sizeof(*w->mask));
        walk_rest(w, &t[TRIE_ALL], 0, t[TRIE_ALL].n, config);
    }
}

static int32_t compute(struct stepper *s, int32_t config, uint32_t *mask)
{
    struct walk w = {s, s->a->vocab, mask, 0};

    mask_text(&w, config);
    for (int32_t k = 0; k < s->a->rx.n_tokens && !w.failed; k++) {
        int32_t to = automaton_next(s, config, s->a->rx.n_classes + k);
        if (to > 0) {
            mask_set(mask, s->a->rx.token[k]);
        } else if (to != CONFIG_DEAD) {
            w.failed = to;
        }
    }
    if (config_at(s->a, config)->complete) {
        for (int32_t i = 0; i < s->a->vocab->words; i++) {
            mask[i] |= s->a->vocab->eos[i];
        }
    }
    return w.failed;
}

/* Masks of configs that come again are kept; the hand passes those used since. */
static void keep(struct automaton *a, int32_t config, const uint32_t *mask)
{
    size_t words = (size_t)a->vocab->words;

    pthread_mutex_lock(&a->mask_lock);
    while (a->slot[a->hand].used) {
        a->slot[a->hand].used = false;
        a->hand = (a->hand + 1) % a->n_slots;
    }
    a->n_kept = MAX(a->n_kept, a->hand + 1);
    a->slot[a->hand] = (struct mask_slot){config, false};
    memcpy(a->masks + (size_t)a->hand * words, mask, words * sizeof(*mask));
    atomic_store_explicit(&config_at(a, config)->slot, a->hand, memory_order_relaxed);
    a->hand = (a->hand + 1) % a->n_slots;
    pthread_mutex_unlock(&a->mask_lock);
}

static bool recall(struct automaton *a, int32_t config, uint32_t *mask)
{
    int32_t at = atomic_load_explicit(&config_at(a, config)->slot, memory_order_relaxed);
    size_t words = (size_t)a->vocab->words;

    if (at < 0) {
        return false;
    }
    pthread_mutex_lock(&a->mask_lock);
    bool there = a->slot[at].config == config;
    if (there) {
        a->slot[at].used = true;
        memcpy(mask, a->masks + (size_t)at * words, words * sizeof(*mask));
    }
    pthread_mutex_unlock(&a->mask_lock);
    return there;
}

int32_t mask_of(struct stepper *s, int32_t config, uint32_t *mask)
{
    if (recall(s->a, config, mask)) {
        return 0;
    }
    int32_t failed = compute(s, config, mask);
    if (failed == 0) {
        keep(s->a, config, mask);
    }
    return failed;
}

int32_t config_after(struct stepper *s, int32_t config, int32_t token)
{
    const struct constrain_vocab *v = s->a->vocab;

    for (int32_t k = 0; k < s->a->rx.n_tokens; k++) {
        if (s->a->rx.token[k] == token) {
            return automaton_next(s, config, s->a->rx.n_classes + k);
        }
    }
    if (token < 0 || token >= v->n || v->len[token] == 0 || v->special[token] ||
        mask_has(v->eos, token)) {
        return CONFIG_DEAD;
    }
    for (uint32_t i = 0; i < v->len[token] && config > 0; i++) {
        uint8_t byte = (uint8_t)v->text[v->at[token] + i];
        config = automaton_next(s, config, symbol_of_byte(s->a, byte));
    }
    return config;
}

bool config_ends(struct stepper *s, int32_t config)
{
    struct config *c = config_at(s->a, config);
    uint8_t note = atomic_load_explicit(&c->ends, memory_order_relaxed);

    if (note == NOTE_UNKNOWN) {
        note = c->complete ? NOTE_YES : NOTE_NO;
        for (int32_t symbol = 0; symbol < s->a->n_symbols && note == NOTE_YES; symbol++) {
            if (automaton_next(s, config, symbol) != CONFIG_DEAD) {
                note = NOTE_NO;
            }
        }
        if (s->paused) {
            return false;
        }
        atomic_store_explicit(&c->ends, note, memory_order_relaxed);
    }
    return note == NOTE_YES;
}
