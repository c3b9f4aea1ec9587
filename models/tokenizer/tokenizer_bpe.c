/* Byte-pair encoding of one word: of all neighbouring pairs the one with the lowest
 * rank is merged, the leftmost of equal ones first, until no pair can be merged
 * (Sennrich et al. 2016, in the order of Hugging Face tokenizers).
 *
 * Without the byte-level alphabet a word can be a whole text (LLaMA 1 and 2, Mistral):
 * its spaces are U+2581 and no pre-tokenizer splits it. Such a text is split before
 * each U+2581 that follows another character, provided that no merged token contains
 * one there. No merge can then cross the split, so the ids are the same, and the
 * resulting words are found in the cache.
 *
 * A short word keeps the merge of every pair in an array and searches it for the lowest
 * rank. A long one (a megabyte of one character is one word) uses a linked list and a
 * heap, in O(n log n). The words of ordinary text come from the cache.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

enum { SHORT_WORD = 48 }; /* symbols; for longer words the heap is faster */

/* ---- merges ---- */

static uint32_t pair_hash(uint64_t pair)
{
    pair *= 0x9E3779B97F4A7C15u;
    return (uint32_t)(pair >> 32) ^ (uint32_t)(pair >> 15);
}

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* The slot of a pair, or the free slot for it. */
static struct merge_slot *find_slot(struct merge_slot *slot, uint32_t mask, uint64_t pair)
{
    uint32_t k = pair_hash(pair) & mask;

    while (slot[k].rank >= 0 && slot[k].pair != pair) {
        k = (k + 1) & mask;
    }
    return &slot[k];
}

int bpe_reserve(struct bpe *b, size_t n)
{
    uint32_t cap = b->slot ? b->mask + 1 : 1024;

    while (cap / 4 * 3 < MIN(n, (size_t)1 << 29)) { /* a quarter of the slots is free */
        cap *= 2;
    }
    if (b->slot && cap == b->mask + 1) {
        return 0;
    }
    struct merge_slot *slot = malloc(cap * sizeof(*slot));
    if (!slot) {
        return ERR_NOMEM;
    }
    for (uint32_t i = 0; i < cap; i++) {
        slot[i].rank = -1;
    }
    for (uint32_t i = 0; b->slot && i <= b->mask; i++) {
        if (b->slot[i].rank >= 0) {
            *find_slot(slot, cap - 1, b->slot[i].pair) = b->slot[i];
        }
    }
    free(b->slot);
    b->slot = slot;
    b->mask = cap - 1;
    return 0;
}

int bpe_add_merge(struct bpe *b, int32_t left, int32_t right, int32_t id, int32_t rank)
{
    if (bpe_reserve(b, (size_t)b->n + 1) != 0) {
        return ERR_NOMEM;
    }
    /* A pair that is listed twice has its last rank, as in a map that is filled in
     * order. */
    *find_slot(b->slot, b->mask, pair_of(left, right)) =
        (struct merge_slot){pair_of(left, right), rank, id};
    b->n++;
    return 0;
}

void bpe_fetch_merge(const struct bpe *b, int32_t left, int32_t right)
{
    if (b->slot) {
        __builtin_prefetch(&b->slot[pair_hash(pair_of(left, right)) & b->mask], 1);
    }
}

/* NULL: there is no merge of the pair. */
static const struct merge_slot *find_merge(const struct bpe *b, int32_t left, int32_t right)
{
    if (!b->slot) {
        return NULL;
    }
    const struct merge_slot *s = find_slot(b->slot, b->mask, pair_of(left, right));
    return s->rank >= 0 ? s : NULL;
}

/* ---- merging ---- */

/* Merge id[n], n <= SHORT_WORD, in place; returns how many are left. */
static int32_t merge_short(const struct bpe *b, int32_t *id, int32_t n)
{
    const struct merge_slot *merge[SHORT_WORD];

    for (int32_t i = 0; i + 1 < n; i++) {
        merge[i] = find_merge(b, id[i], id[i + 1]);
    }
    for (;;) {
        int32_t best = -1;
        for (int32_t i = 0; i + 1 < n; i++) {
            if (merge[i] && (best < 0 || merge[i]->rank < merge[best]->rank)) {
                best = i;
            }
        }
        if (best < 0) {
            return n;
        }
        id[best] = merge[best]->id;
        n--;
        memmove(&id[best + 1], &id[best + 2], (size_t)(n - best - 1) * sizeof(*id));
        if (best + 1 < n) {
            memmove(&merge[best + 1], &merge[best + 2], (size_t)(n - best - 1) * sizeof(*merge));
            merge[best] = find_merge(b, id[best], id[best + 1]);
        }
        if (best > 0) {
            merge[best - 1] = find_merge(b, id[best - 1], id[best]);
        }
    }
}

/* An element of a long word's linked list. */
struct symbol {
    int32_t id;         /* -1: merged into its predecessor */
    int32_t prev, next; /* positions, -1: none */
};

/* A binary heap of rank << 32 | position, the smallest first. */
static void heap_push(uint64_t *heap, size_t *n, uint64_t value)
{
    size_t i = (*n)++;

    for (; i > 0 && heap[(i - 1) / 2] > value; i = (i - 1) / 2) {
        heap[i] = heap[(i - 1) / 2];
    }
    heap[i] = value;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n)
{
    uint64_t top = heap[0], value = heap[--*n];
    size_t i = 0;

    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= *n) {
            break;
        }
        child += child + 1 < *n && heap[child + 1] < heap[child];
        if (heap[child] >= value) {
            break;
        }
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = value;
    return top;
}

static void push_pair(const struct bpe *b, const struct symbol *s, int32_t left, uint64_t *heap,
                      size_t *n)
{
    const struct merge_slot *m =
        s[left].next >= 0 ? find_merge(b, s[left].id, s[s[left].next].id) : NULL;

    if (m) {
        heap_push(heap, n, (uint64_t)(uint32_t)m->rank << 32 | (uint32_t)left);
    }
}

/* The heap has room for 3n pairs: n - 1 at the start, and each of fewer than n merges
 * pushes at most two. */
static void merge_long(const struct bpe *b, struct symbol *s, int32_t n, uint64_t *heap)
{
    size_t n_heap = 0;

    for (int32_t i = 0; i < n; i++) {
        s[i].prev = i - 1;
        s[i].next = i + 1 < n ? i + 1 : -1;
    }
    for (int32_t i = 0; i + 1 < n; i++) {
        push_pair(b, s, i, heap, &n_heap);
    }
    while (n_heap > 0) {
        uint64_t top = heap_pop(heap, &n_heap);
        int32_t left = (int32_t)(uint32_t)top, right = s[left].next;
        if (s[left].id < 0 || right < 0) {
            continue;
        }
        const struct merge_slot *m = find_merge(b, s[left].id, s[right].id);
        if (!m || (uint32_t)m->rank != top >> 32) {
            continue; /* stale: one of the two symbols has changed */
        }
        s[left].id = m->id;
        s[left].next = s[right].next;
        s[right].id = -1;
        if (s[right].next >= 0) {
            s[s[right].next].prev = left;
        }
        if (s[left].prev >= 0) {
            push_pair(b, s, s[left].prev, heap, &n_heap);
        }
        push_pair(b, s, left, heap, &n_heap);
    }
}

/* ---- a word's symbols before any merge ---- */

/* Write the ids of a word's symbols, at most `len`, `stride` bytes apart. */
static int32_t first_symbols(const struct tokenizer *t, const char *word, size_t len, int32_t *id,
                             size_t stride)
{
    const struct bpe *b = &t->bpe;
    const uint8_t *s = (const uint8_t *)word;
    int32_t n = 0;

#define PUT(value) (*(int32_t *)((char *)id + (size_t)n++ * stride) = (value))
    bool unk_before = false;
    for (size_t i = 0; i < len;) {
        int c_len = 1;
        int32_t c = -1;
        if (b->byte_level) {
            c = b->byte_id[s[i]];
        } else if (s[i] < 0x80) {
            c = b->ascii_id[s[i]];
        } else {
            utf8_get(s + i, &c_len);
            c = vocab_find(t, word + i, (size_t)c_len);
        }
        bool unk = false;
        if (c >= 0) {
            PUT(c);
        } else if (b->byte_fallback) {
            for (int k = 0; k < c_len; k++) {
                PUT(b->byte_id[s[i + (size_t)k]]);
            }
        } else if (b->unk >= 0) {
            unk = true;
            if (!(unk_before && b->fuse_unk)) {
                PUT(b->unk);
            }
        }
        unk_before = unk;
        i += (size_t)c_len;
    }
#undef PUT
    return n;
}

static int grow_scratch(struct encoder *enc, size_t n)
{
    if (n > enc->symbol_cap) {
        free(enc->symbol);
        free(enc->heap);
        enc->symbol_cap = 0;
        size_t cap = n + n / 2;
        enc->symbol = malloc(cap * sizeof(*enc->symbol));
        enc->heap = malloc(3 * cap * sizeof(*enc->heap));
        if (!enc->symbol || !enc->heap) {
            return err_nomem(enc->e, "encoding a long word");
        }
        enc->symbol_cap = cap;
    }
    return 0;
}

static int encode_long(struct encoder *enc, const char *s, size_t len)
{
    if (len > WORD_MAX_BYTES) {
        return err_set(enc->e, ERR_INVALID, "a word of %zu bytes; at most %d are allowed", len,
                       WORD_MAX_BYTES);
    }
    int rc = encoder_check_word(enc, len);
    if (rc == 0) {
        rc = grow_scratch(enc, len);
    }
    if (rc != 0) {
        return rc;
    }
    struct symbol *sym = enc->symbol;
    int32_t n = first_symbols(enc->t, s, len, &sym->id, sizeof(*sym));
    if (n == 0) {
        return 0;
    }
    merge_long(&enc->t->bpe, sym, n, enc->heap);
    for (int32_t i = 0; i >= 0 && rc == 0; i = sym[i].next) {
        rc = encoder_emit(enc, &sym[i].id, 1);
    }
    return rc;
}

/* ---- the word cache ---- */

/* Direct-mapped, one cache line an entry, shared by all threads without locks: a
 * sequence lock per entry. `state` is odd while an entry is written (the thread that
 * made it odd is the writer) and grows with every write, so a reader that sees the same
 * even value before and after has read one whole entry. Every field is atomic; acquire
 * loads keep the second read of `state` after them. */
enum { CACHE_ENTRIES = 1 << 14, CACHE_WORD_BYTES = 24, CACHE_IDS = 7 };

struct cache_entry {
    _Alignas(64) atomic_uint state; /* 0: never written */
    atomic_uint shape;              /* bytes << 8 | ids */
    atomic_ullong word[CACHE_WORD_BYTES / 8];
    atomic_int id[CACHE_IDS];
};
_Static_assert(sizeof(struct cache_entry) == 64, "one cache line");

struct word_cache {
    struct cache_entry entry[CACHE_ENTRIES];
};

struct cache_key {
    uint64_t word[CACHE_WORD_BYTES / 8]; /* zero after `len` bytes */
    uint32_t len;
};

static struct cache_entry *cache_entry(struct word_cache *c, const char *s, size_t len,
                                       struct cache_key *key)
{
    *key = (struct cache_key){.len = (uint32_t)len};
    memcpy(key->word, s, len);
    uint64_t h = (key->word[0] ^ len) * 0x9E3779B97F4A7C15u;
    if (len > 8) {
        h = (h ^ (h >> 29) ^ key->word[1] ^ key->word[2] << 1) * 0xBF58476D1CE4E5B9u;
    }
    return &c->entry[(h >> 40) % CACHE_ENTRIES];
}

/* The number of ids, or -1: the word is not in the cache. */
static int32_t cache_get(struct cache_entry *x, const struct cache_key *key, int32_t *ret_id)
{
    unsigned state = atomic_load_explicit(&x->state, memory_order_acquire);

    if (state == 0 || (state & 1)) {
        return -1;
    }
    unsigned shape = atomic_load_explicit(&x->shape, memory_order_acquire);
    bool same = shape >> 8 == key->len;
    for (size_t i = 0; i < ARRAY_LEN(key->word); i++) {
        same &= atomic_load_explicit(&x->word[i], memory_order_acquire) == key->word[i];
    }
    int32_t n = (int32_t)(shape & 0xFF);
    if (!same || n > CACHE_IDS) {
        return -1;
    }
    for (int32_t i = 0; i < n; i++) {
        ret_id[i] = atomic_load_explicit(&x->id[i], memory_order_acquire);
    }
    return atomic_load_explicit(&x->state, memory_order_relaxed) == state ? n : -1;
}

static void cache_put(struct cache_entry *x, const struct cache_key *key, const int32_t *id,
                      int32_t n)
{
    unsigned state = atomic_load_explicit(&x->state, memory_order_relaxed);

    if (n > CACHE_IDS || (state & 1) ||
        !atomic_compare_exchange_strong_explicit(&x->state, &state, state + 1, memory_order_acquire,
                                                 memory_order_relaxed)) {
        return; /* another thread is writing the entry */
    }
    /* Release stores: a reader that sees one of them sees the odd state too. */
    atomic_store_explicit(&x->shape, key->len << 8 | (unsigned)n, memory_order_release);
    for (size_t i = 0; i < ARRAY_LEN(key->word); i++) {
        atomic_store_explicit(&x->word[i], key->word[i], memory_order_release);
    }
    for (int32_t i = 0; i < n; i++) {
        atomic_store_explicit(&x->id[i], id[i], memory_order_release);
    }
    atomic_store_explicit(&x->state, state + 2 == 0 ? 2 : state + 2, memory_order_release);
}

/* ---- entry points ---- */

/* ignore_merges: the token that is the word as a whole, or -1. */
static int32_t whole_word(const struct tokenizer *t, const char *s, size_t len)
{
    char text[TOKEN_TEXT_BYTES];

    if (!t->bpe.byte_level) {
        return vocab_find(t, s, len);
    }
    if (len == 0) {
        return -1; /* lets gcc see that `text` is always written */
    }
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (n + 2 > sizeof(text)) {
            return -1;
        }
        n += (size_t)utf8_put(text + n, byte_to_char((uint8_t)s[i]));
    }
    return vocab_find(t, text, n);
}

static int encode_chunk(struct encoder *enc, const char *s, size_t len)
{
    const struct bpe *b = &enc->t->bpe;
    int32_t id[SHORT_WORD], n;
    struct cache_key key;
    struct cache_entry *entry = NULL;

    if (b->cache && len <= CACHE_WORD_BYTES) {
        entry = cache_entry(b->cache, s, len, &key);
        n = cache_get(entry, &key, id);
        if (n >= 0) {
            return encoder_emit(enc, id, n);
        }
    }
    int32_t whole = b->ignore_merges ? whole_word(enc->t, s, len) : -1;
    if (whole >= 0) {
        id[0] = whole;
        n = 1;
    } else if (len <= SHORT_WORD) {
        n = merge_short(b, id, first_symbols(enc->t, s, len, id, sizeof(*id)));
    } else {
        return encode_long(enc, s, len);
    }
    if (entry) {
        cache_put(entry, &key, id, n);
    }
    return encoder_emit(enc, id, n);
}

static const char MARK[] = "\xE2\x96\x81"; /* U+2581 */
enum { MARK_BYTES = sizeof(MARK) - 1 };

/* The first mark that follows a character other than a mark; NULL: none. */
static const char *find_split(const char *s, size_t len)
{
    const char *end = s + len, *p = s;
    bool other = false;

    while (p < end) {
        if (end - p >= MARK_BYTES && memcmp(p, MARK, MARK_BYTES) == 0) {
            if (other) {
                return p;
            }
            p += MARK_BYTES;
        } else {
            other = true;
            p = memchr(p + 1, MARK[0], (size_t)(end - p - 1));
            if (!p) {
                return NULL;
            }
        }
    }
    return NULL;
}

int bpe_encode_word(struct encoder *enc, const char *s, size_t len)
{
    int rc = 0;

    while (enc->t->bpe.split_at_marks && len > 0 && rc == 0) {
        const char *cut = find_split(s, len);
        size_t n = cut ? (size_t)(cut - s) : len;
        rc = encode_chunk(enc, s, n);
        s += n;
        len -= n;
    }
    return rc == 0 && len > 0 ? encode_chunk(enc, s, len) : rc;
}

/* Whether no merge makes a token that has a mark after another character. */
static bool marks_begin_words(const struct tokenizer *t)
{
    for (uint32_t i = 0; t->bpe.slot && i <= t->bpe.mask; i++) {
        const struct merge_slot *m = &t->bpe.slot[i];
        if (m->rank >= 0 &&
            find_split(t->text + t->token[m->id].text_off, t->token[m->id].text_len)) {
            return false;
        }
    }
    return !t->bpe.ignore_merges;
}

int bpe_finish(struct tokenizer *t, struct err *e)
{
    struct bpe *b = &t->bpe;
    char text[8];
    bool all_bytes = true;

    for (int i = 0; i < 256; i++) {
        if (b->byte_level) {
            b->byte_id[i] = vocab_find(t, text, (size_t)utf8_put(text, byte_to_char((uint8_t)i)));
        } else {
            static const char HEX[] = "0123456789ABCDEF";
            char name[] = {'<', '0', 'x', HEX[i >> 4], HEX[i & 15], '>'};
            b->byte_id[i] = vocab_find(t, name, sizeof(name));
        }
        all_bytes &= b->byte_id[i] >= 0;
    }
    if (b->byte_fallback && !all_bytes) {
        return err_set(e, ERR_UNSUPPORTED,
                       "byte_fallback without a token for each of <0x00> to <0xFF>");
    }
    for (int i = 0; i < 128; i++) {
        text[0] = (char)i;
        b->ascii_id[i] = vocab_find(t, text, 1);
    }
    if (all_bytes && (b->byte_level || b->byte_fallback)) {
        tokenizer_find_longest(t);
    }
    b->split_at_marks =
        !b->byte_level && vocab_find(t, MARK, MARK_BYTES) >= 0 && marks_begin_words(t);
    b->cache = aligned_alloc(64, sizeof(*b->cache));
    if (!b->cache) {
        return err_nomem(e, "the tokenizer's word cache");
    }
    memset(b->cache, 0, sizeof(*b->cache));
    return 0;
}

void bpe_release(struct bpe *b)
{
    free(b->slot);
    free(b->cache);
}
