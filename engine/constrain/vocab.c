#include "engine/constrain/vocab.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/utf8.h"

enum { MAX_NODES = (1 << 24) - 2 };

/* ---- the tokens ---- */

static int copy_tokens(struct constrain_vocab *v, const struct constrain_tokens *t, struct err *e)
{
    size_t total = 0, len;

    for (int32_t id = 0; id < t->n; id++) {
        t->bytes(t->arg, id, &len);
        total += len;
    }
    if (total > MAX_NODES) {
        return err_set(e, ERR_UNSUPPORTED, "the tokens have %zu bytes, at most %d are taken", total,
                       MAX_NODES);
    }
    v->text = malloc(total + 1);
    if (!v->text) {
        return err_nomem(e, "the vocabulary of constrained decoding");
    }
    total = 0;
    for (int32_t id = 0; id < t->n; id++) {
        const char *bytes = t->bytes(t->arg, id, &len);
        v->at[id] = (uint32_t)total;
        v->len[id] = len > MAX_TOKEN_BYTES ? 0 : (uint32_t)len;
        v->special[id] = t->special && t->special(t->arg, id);
        if (len > 0) {
            memcpy(v->text + total, bytes, len);
        }
        total += len;
    }
    return 0;
}

/* U+2028 and U+2029 end lines, and a pattern's dot excludes them. */
static bool ends_line(const uint8_t *text, size_t len)
{
    return len >= 3 && text[0] == 0xe2 && text[1] == 0x80 && (text[2] | 1) == 0xa9;
}

/* Characters if the bytes are whole plain characters, else 0. */
static int32_t plain_chars(const struct constrain_vocab *v, int32_t id)
{
    const char *text = v->text + v->at[id];
    int32_t n = 0;

    for (size_t i = 0, len = v->len[id]; i < len; n++) {
        size_t size = utf8_char_len(text + i, len - i);
        if (ends_line((const uint8_t *)text + i, len - i)) {
            return 0;
        }
        if (size == 0 || (uint8_t)text[i] < 0x20 || text[i] == '"' || text[i] == '\\') {
            return 0;
        }
        i += size;
    }
    return n;
}

/* ---- tries ---- */

struct sorted {
    const struct constrain_vocab *v;
    int32_t *id; /* [n] text tokens by their bytes */
    int32_t n;   /* of them */
};

static int by_bytes(const void *a, const void *b, void *arg)
{
    const struct constrain_vocab *v = arg;
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    uint32_t len = MIN(v->len[x], v->len[y]);
    int order = memcmp(v->text + v->at[x], v->text + v->at[y], len);

    if (order == 0) {
        order = (v->len[x] > v->len[y]) - (v->len[x] < v->len[y]);
    }
    return order ? order : (x > y) - (x < y);
}

static bool in_trie(const struct constrain_vocab *v, int32_t id, enum trie_kind kind)
{
    return kind == TRIE_ALL || !mask_has(v->plain[kind == TRIE_LONG], id);
}

static uint32_t common(const struct constrain_vocab *v, int32_t x, int32_t y)
{
    const char *a = v->text + v->at[x], *b = v->text + v->at[y];
    uint32_t n = 0, len = MIN(v->len[x], v->len[y]);

    while (n < len && a[n] == b[n]) {
        n++;
    }
    return n;
}

static int32_t count_nodes(const struct sorted *s, enum trie_kind kind)
{
    int32_t before = -1, n = 0;

    for (int32_t i = 0; i < s->n; i++) {
        int32_t id = s->id[i];
        if (in_trie(s->v, id, kind)) {
            n += (int32_t)(s->v->len[id] - (before < 0 ? 0 : common(s->v, before, id)));
            before = id;
        }
    }
    return n;
}

/* `open`: the nodes on the path to the token before. */
static void fill_trie(struct constrain_vocab *v, const struct sorted *s, enum trie_kind kind,
                      int32_t *open)
{
    struct trie *t = &v->trie[kind];
    int32_t before = -1, depth = 0;

    for (int32_t i = 0; i < s->n; i++) {
        int32_t id = s->id[i], same = before < 0 ? 0 : (int32_t)common(v, before, id);
        if (!in_trie(v, id, kind)) {
            continue;
        }
        while (depth > same) {
            t->node[open[--depth]].end = (uint32_t)t->n & 0xffffff;
        }
        if (before >= 0 && v->len[before] == v->len[id] && same == (int32_t)v->len[id]) {
            v->same[before] = id;
            t->node[open[depth - 1]].token |= TRIE_SAME;
        }
        for (; depth < (int32_t)v->len[id]; depth++) {
            open[depth] = t->n;
            t->node[t->n++] = (struct trie_node){
                .byte = (uint8_t)v->text[v->at[id] + (uint32_t)depth], .token = -1};
        }
        if (t->node[open[depth - 1]].token < 0) {
            t->node[open[depth - 1]].token = id;
        }
        before = id;
    }
    while (depth > 0) {
        t->node[open[--depth]].end = (uint32_t)t->n & 0xffffff;
    }
}

static bool make_tries(struct constrain_vocab *v, const struct sorted *s)
{
    int32_t *open = malloc(MAX_TOKEN_BYTES * sizeof(*open));

    for (enum trie_kind kind = 0; kind < N_TRIES && open; kind++) {
        struct trie *t = &v->trie[kind];
        t->node = malloc(((size_t)count_nodes(s, kind) + 1) * sizeof(*t->node));
        if (!t->node) {
            free(open);
            return false;
        }
        fill_trie(v, s, kind, open);
    }
    free(open);
    return open;
}

/* Where the subtrees of TRIE_ALL are in the trie of the others, and its plain tokens:
 * the nodes of the others are some of its nodes, in the same order. */
static bool link_tries(struct constrain_vocab *v)
{
    const struct trie *all = &v->trie[TRIE_ALL], *rest = &v->trie[TRIE_NOT_PLAIN];
    size_t size = ((size_t)all->n + 1) * sizeof(*v->rest_at);
    int32_t at = 0, n_plain = 0;
    bool *kept = calloc((size_t)all->n + 1, 1);

    v->rest_at = malloc(size);
    v->plain_at = malloc(size);
    v->plain_ids = malloc(((size_t)v->n + 1) * sizeof(*v->plain_ids));
    if (!kept || !v->rest_at || !v->plain_at || !v->plain_ids) {
        free(kept);
        return false;
    }
    for (int32_t i = all->n - 1; i >= 0;
         i--) { /* a node is kept if its subtree has another token */
        kept[i] = all->node[i].token >= 0 && in_trie(v, trie_token(&all->node[i]), TRIE_NOT_PLAIN);
        for (int32_t c = i + 1; c < (int32_t)all->node[i].end && !kept[i];
             c = (int32_t)all->node[c].end) {
            kept[i] = kept[c];
        }
    }
    for (int32_t i = 0; i <= all->n; i++) {
        v->rest_at[i] = at;
        v->plain_at[i] = n_plain;
        at += kept[i];
        for (int32_t id = i < all->n ? trie_token(&all->node[i]) : -1; id >= 0; id = v->same[id]) {
            if (mask_has(v->plain[0], id)) {
                v->plain_ids[n_plain++] = id;
            }
        }
    }
    free(kept);
    return at == rest->n;
}

int vocab_kind(uint8_t byte)
{
    static const char marks[] = " \"\\-./:,"; /* the rest of ASCII is one kind */

    if (byte < 0x20 || byte == 0x7f) {
        return 1;
    }
    if ((byte | 0x20) >= 'a' && (byte | 0x20) <= 'z') {
        return (byte & 0x20 ? 2 : 28) + (byte | 0x20) - 'a';
    }
    if (byte >= '0' && byte <= '9') {
        return 54;
    }
    const char *at = memchr(marks, byte, sizeof(marks) - 1);
    return at ? MIN(55 + (int)(at - marks), KIND_BROKEN - 2) : KIND_BROKEN - 1;
}

/* Whether a pattern's \s takes a character beyond ASCII that ends no line. */
static bool is_space(const uint8_t *text, size_t len)
{
    static const char spaces[][4] = {"\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\xaf",
                                     "\xe2\x81\x9f", "\xe3\x80\x80", "\xef\xbb\xbf"};

    for (size_t i = 0; i < ARRAY_LEN(spaces); i++) {
        size_t n = strlen(spaces[i]);
        if (len >= n && memcmp(text, spaces[i], n) == 0) {
            return true;
        }
    }
    return len >= 3 && text[0] == 0xe2 && text[1] == 0x80 && text[2] <= 0x8a;
}

/* The kinds of what the token has beyond ASCII; 0: it has nothing. */
static uint64_t beyond_ascii(const struct constrain_vocab *v, int32_t id)
{
    const uint8_t *text = (const uint8_t *)v->text + v->at[id];
    uint64_t kinds = 0;
    int bad;

    for (size_t i = 0, len = v->len[id]; i < len;) {
        int n = text[i] < 0x80 ? 1 : utf8_next(text + i, len - i, &bad);
        if (n == 0 || ends_line(text + i, len - i)) {
            return (uint64_t)1 << KIND_BROKEN;
        }
        if (text[i] >= 0x80) {
            kinds |= (uint64_t)1 << (is_space(text + i, len - i) ? KIND_SPACE : KIND_BEYOND_ASCII);
        }
        i = n < 0 ? len : i + (size_t)n;
    }
    return kinds;
}

/* What is below each node: its tokens, and the kinds of their bytes. */
static bool list_tokens(struct constrain_vocab *v)
{
    const struct trie *t = &v->trie[TRIE_ALL];
    int32_t n = 0;

    v->below = calloc((size_t)t->n + 1, sizeof(*v->below));
    v->height = calloc((size_t)t->n + 1, sizeof(*v->height));
    v->all_at = malloc(((size_t)t->n + 1) * sizeof(*v->all_at));
    v->all_ids = malloc(((size_t)v->n + 1) * sizeof(*v->all_ids));
    if (!v->below || !v->height || !v->all_at || !v->all_ids) {
        return false;
    }
    for (int32_t i = t->n - 1; i >= 0; i--) {
        for (int32_t c = i + 1; c < (int32_t)t->node[i].end; c = (int32_t)t->node[c].end) {
            uint8_t byte = (uint8_t)t->node[c].byte;
            v->height[i] = MAX(v->height[i], (uint16_t)(v->height[c] + 1));
            v->below[i] |= v->below[c] | (byte < 0x80 ? (uint64_t)1 << vocab_kind(byte) : 0);
            if (t->node[c].token >= 0) {
                v->below[i] |= beyond_ascii(v, trie_token(&t->node[c]));
            }
        }
    }
    for (int32_t i = 0; i <= t->n; i++) {
        v->all_at[i] = n;
        for (int32_t id = i < t->n ? trie_token(&t->node[i]) : -1; id >= 0; id = v->same[id]) {
            v->all_ids[n++] = id;
        }
    }
    return true;
}

/* Where the children of TRIE_ALL are in a trie of fewer tokens. */
static void match_children(const struct constrain_vocab *v, const struct trie *t, int32_t *ret)
{
    const struct trie_node *all = v->trie[TRIE_ALL].node;
    int32_t at = 0;

    for (int32_t k = 0; k < v->n_children; k++) {
        ret[k] = at;
        if (at < t->n && t->node[at].byte == all[v->child[k]].byte) {
            at = (int32_t)t->node[at].end;
        }
    }
    ret[v->n_children] = at;
}

static void find_children(struct constrain_vocab *v)
{
    const struct trie *t = &v->trie[TRIE_ALL];

    for (int32_t i = 0; i < t->n; i = (int32_t)t->node[i].end) {
        v->child[v->n_children++] = i;
    }
    v->child[v->n_children] = t->n;
    match_children(v, &v->trie[TRIE_NOT_PLAIN], v->rest_child);
    match_children(v, &v->trie[TRIE_LONG], v->long_child);
    for (int b = 0; b < 128; b++) {
        v->kind[b] = (uint8_t)vocab_kind((uint8_t)b);
    }
}

static bool index_tokens(struct constrain_vocab *v)
{
    struct sorted s = {.v = v};

    s.id = malloc(((size_t)v->n + 1) * sizeof(*s.id));
    if (!s.id) {
        return false;
    }
    for (int32_t id = 0; id < v->n; id++) {
        v->same[id] = -1;
        if (v->len[id] == 0 || v->special[id] || mask_has(v->eos, id)) {
            continue;
        }
        int32_t chars = plain_chars(v, id);
        if (chars > 0) {
            mask_set(v->plain[0], id);
        }
        if (chars > 0 && chars <= SLICE_CHARS) {
            mask_set(v->plain[1], id);
        }
        for (int32_t most = chars; chars > 0 && most <= SLICE_CHARS; most++) {
            mask_set(v->few + (size_t)(most - 1) * (size_t)v->words, id);
        }
        v->depth = MAX(v->depth, (int32_t)v->len[id]);
        s.id[s.n++] = id;
    }
    qsort_r(s.id, (size_t)s.n, sizeof(*s.id), by_bytes, v);
    bool ok = make_tries(v, &s) && link_tries(v) && list_tokens(v);
    free(s.id);
    if (ok) {
        find_children(v);
    }
    return ok;
}

int constrain_vocab_new(struct constrain_vocab **ret, const struct constrain_tokens *t,
                        struct err *e)
{
    struct constrain_vocab *v = calloc(1, sizeof(*v));
    size_t n = (size_t)MAX(t->n, 1);
    int rc = 0;

    if (!v) {
        return err_nomem(e, "the vocabulary of constrained decoding");
    }
    v->n = t->n;
    v->words = (t->n + 31) / 32;
    v->encode = t->encode;
    v->arg = t->arg;
    v->same = malloc(n * sizeof(*v->same));
    v->at = calloc(n, sizeof(*v->at));
    v->len = calloc(n, sizeof(*v->len));
    v->special = calloc(n, sizeof(*v->special));
    v->eos = calloc((size_t)v->words + 1, sizeof(*v->eos));
    v->plain[0] = calloc((size_t)v->words + 1, sizeof(*v->plain[0]));
    v->plain[1] = calloc((size_t)v->words + 1, sizeof(*v->plain[1]));
    v->few = calloc((size_t)v->words * SLICE_CHARS + 1, sizeof(*v->few));
    if (!v->same || !v->at || !v->len || !v->special || !v->eos || !v->plain[0] || !v->plain[1] ||
        !v->few) {
        rc = err_nomem(e, "the vocabulary of constrained decoding");
        goto out;
    }
    for (int32_t i = 0; i < t->n_eos; i++) {
        if (t->eos[i] >= 0 && t->eos[i] < t->n) {
            mask_set(v->eos, t->eos[i]);
        }
    }
    rc = copy_tokens(v, t, e);
    if (rc == 0 && !index_tokens(v)) {
        rc = err_nomem(e, "the vocabulary of constrained decoding");
    }
out:
    if (rc != 0) {
        constrain_vocab_free(v);
        return rc;
    }
    *ret = v;
    return 0;
}

void constrain_vocab_free(struct constrain_vocab *v)
{
    if (!v) {
        return;
    }
    for (int i = 0; i < N_TRIES; i++) {
        free(v->trie[i].node);
    }
    free(v->same);
    free(v->at);
    free(v->len);
    free(v->text);
    free(v->special);
    free(v->eos);
    free(v->plain[0]);
    free(v->plain[1]);
    free(v->few);
    free(v->rest_at);
    free(v->plain_at);
    free(v->plain_ids);
    free(v->below);
    free(v->height);
    free(v->all_at);
    free(v->all_ids);
    free(v);
}

int32_t vocab_special(const struct constrain_vocab *v, const char *text, size_t len)
{
    for (int32_t id = 0; id < v->n; id++) {
        if (v->special[id] && v->len[id] == len && len > 0 &&
            memcmp(v->text + v->at[id], text, len) == 0) {
            return id;
        }
    }
    return -1;
}
