#include "engine/constrain/masks/mask.h"

#include <stdlib.h>
#include <string.h>

#include "engine/constrain/masks/leads.h"

/* Nodes of subtrees about which it is worth asking. */
enum { SMALL_SUBTREE = 12, ASKED_SUBTREE = 8 };

/* Tokens about which two bounds of a mask may differ, to be tried one by one. */
enum { DIFFER_MOST = 512 };

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

static int32_t computed(struct stepper *s, int32_t config, uint32_t *mask)
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

/* ---- masks between two others ---- */

/* Whether several letters or digits may come next: a walk is long. */
static bool many_letters(struct stepper *s, int32_t config)
{
    int n = 0;

    for (const char *at = "etasbm01"; *at && n < 2; at++) {
        n += automaton_next(s, config, symbol_of_byte(s->a, (uint8_t)*at)) > 0;
    }
    return n == 2;
}

enum { BETWEEN_NOT = 1 }; /* in place of a failure: no bounds help */

/* `mask` is that of config's lower bound and `high` that of its upper one: add the
 * tokens of the upper one that may follow, if few have to be tried. 0, BETWEEN_NOT, or
 * why not. */
static int32_t add_between(struct stepper *s, int32_t config, uint32_t *mask, const uint32_t *high)
{
    const int32_t words = s->a->vocab->words;
    int32_t n = 0;

    for (int32_t i = 0; i < words; i++) {
        n += __builtin_popcount(high[i] & ~mask[i]);
    }
    if (n > DIFFER_MOST) {
        return BETWEEN_NOT;
    }
    for (int32_t i = 0; n > 0 && i < words; i++) {
        for (uint32_t left = high[i] & ~mask[i]; left != 0; left &= left - 1) {
            int32_t id = i * 32 + __builtin_ctz(left), to = config_after(s, config, id);
            if (to > 0) {
                mask_set(mask, id);
            } else if (to != CONFIG_DEAD) {
                return to;
            }
        }
    }
    return 0;
}

/* The mask of a config that counts, by those of two that many counts share. */
static int32_t between(struct stepper *s, int32_t config, uint32_t *mask)
{
    int32_t low, high;

    if (!many_letters(s, config) || !config_bounds(s, config, &low, &high)) {
        return BETWEEN_NOT;
    }
    uint32_t *above = malloc((size_t)s->a->vocab->words * sizeof(*above));
    if (!above) {
        return CONFIG_NOMEM;
    }
    int32_t failed = computed(s, high, above);
    if (failed == 0) {
        failed = computed(s, low, mask);
    }
    if (failed == 0) {
        failed = add_between(s, config, mask, above);
    }
    free(above);
    return failed;
}

int32_t mask_of(struct stepper *s, int32_t config, uint32_t *mask)
{
    if (recall(s->a, config, mask)) {
        return 0;
    }
    int32_t failed = between(s, config, mask);
    if (failed == 0) {
        keep(s->a, config, mask);
    }
    return failed == BETWEEN_NOT ? computed(s, config, mask) : failed;
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
