#include "engine/constrain/mask.h"

#include <string.h>

/* Nodes of subtrees about which it is worth asking. */
enum { SMALL_SUBTREE = 12, ASKED_SUBTREE = 32 };

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

/* The config that every plain character leads to, or CONFIG_DEAD; `wanted` as above. */
static int32_t after_plain(struct stepper *s, int32_t from, int32_t wanted)
{
    int32_t to = common_next(s, from, 0x20, 0x7f, wanted);

    return to > 0 && beyond_ascii_leads(s, from, to) ? to : CONFIG_DEAD;
}

static bool loops(struct stepper *s, int32_t c)
{
    struct config *config = config_at(s->a, c);
    uint8_t note = atomic_load_explicit(&config->loops, memory_order_relaxed);

    if (note == NOTE_UNKNOWN) {
        note = after_plain(s, c, c) == c ? NOTE_YES : NOTE_NO;
        if (s->paused) {
            return false;
        }
        atomic_store_explicit(&config->loops, note, memory_order_relaxed);
    }
    return note == NOTE_YES;
}

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
            if (loops(w->s, to)) {
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

/* A config that all plain text but a few first characters leads to for good: that of a
 * string's body. CONFIG_DEAD: none. */
static int32_t find_body(struct stepper *s, int32_t config)
{
    if (loops(s, config)) {
        return config;
    }
    for (int b = 0x7e; b >= 0x20; b -= 0x10) {
        int32_t to = is_plain(b) ? automaton_next(s, config, symbol_of_byte(s->a, (uint8_t)b)) : 0;
        if (to > 0 && loops(s, to)) {
            return to;
        }
    }
    return CONFIG_DEAD;
}

/* All plain tokens but those whose first byte leads elsewhere. */
static void mask_in_body(struct walk *w, int32_t config, int32_t body)
{
    const struct constrain_vocab *v = w->v;
    const struct trie *all = &v->trie[TRIE_ALL];

    memcpy(w->mask, v->plain[0], (size_t)v->words * sizeof(*w->mask));
    if (config == body) {
        walk_rest(w, &v->trie[TRIE_NOT_PLAIN], 0, v->trie[TRIE_NOT_PLAIN].n, config);
        return;
    }
    for (int32_t k = 0; k < v->n_children && !w->failed; k++) {
        int32_t first = v->child[k], end = v->child[k + 1];
        int32_t symbol = symbol_of_byte(w->s->a, (uint8_t)all->node[first].byte);
        int32_t to = automaton_next(w->s, config, symbol);
        if (to > 0 && to == automaton_next(w->s, body, symbol)) {
            walk_rest(w, &v->trie[TRIE_NOT_PLAIN], v->rest_at[first], v->rest_at[end], config);
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

static int32_t plain_next(struct stepper *s, int32_t from)
{
    struct config *config = config_at(s->a, from);
    int32_t to = atomic_load_explicit(&config->plain, memory_order_relaxed);

    if (to == CONFIG_UNKNOWN) {
        to = after_plain(s, from, CONFIG_UNKNOWN);
        to = to > 0 ? to : CONFIG_DEAD;
        if (s->paused) {
            return CONFIG_DEAD;
        }
        atomic_store_explicit(&config->plain, to, memory_order_relaxed);
    }
    return to;
}

/* How many plain characters may follow, whatever they are: SLICE_CHARS, or fewer if no
 * other may follow those; else 0. */
static int32_t plain_room(struct stepper *s, int32_t config)
{
    for (int32_t i = 0; i < SLICE_CHARS; i++) {
        int32_t to = plain_next(s, config);
        if (to <= 0) {
            return i > 0 && takes_no_plain(s, config) ? i : 0;
        }
        config = to;
    }
    return SLICE_CHARS;
}

static void mask_text(struct walk *w, int32_t config)
{
    const struct constrain_vocab *v = w->v;
    int32_t body = find_body(w->s, config), room = body > 0 ? 0 : plain_room(w->s, config);

    if (body > 0) {
        mask_in_body(w, config, body);
    } else if (room > 0) { /* of a string of bounded length */
        const struct trie *t = &v->trie[room == SLICE_CHARS ? TRIE_LONG : TRIE_NOT_PLAIN];
        memcpy(w->mask, v->few + (size_t)(room - 1) * (size_t)v->words,
               (size_t)v->words * sizeof(*w->mask));
        walk_rest(w, t, 0, t->n, config);
    } else {
        memset(w->mask, 0, (size_t)v->words * sizeof(*w->mask));
        walk_rest(w, &v->trie[TRIE_ALL], 0, v->trie[TRIE_ALL].n, config);
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
