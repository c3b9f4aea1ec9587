#include "engine/constrain/rx/rx.h"

#include <stdlib.h>
#include <string.h>

enum {
    MAX_HEIGHT = 1500,
    FIRST_TABLE = 64,
    NODE_WORK = 8,
    ID_BITS = 22, /* of an entry of the hash table; the others are those of the hash */
    MAX_NODES = 1 << ID_BITS
};

static uint32_t hash_node(int kind, int32_t a, int32_t b, int32_t c)
{
    uint64_t h = (uint64_t)(uint32_t)kind * 0x9e3779b97f4a7c15u;

    h = (h ^ (uint32_t)a) * 0xff51afd7ed558ccdu;
    h = (h ^ (h >> 29) ^ (uint32_t)b) * 0xc4ceb9fe1a85ec53u;
    h = (h ^ (h >> 31) ^ (uint32_t)c) * 0x9fb21c651e98df25u;
    return (uint32_t)(h >> 32);
}

/* The third word of RX_CONCAT is a note, no part of the node. */
static uint32_t hash_of(const struct rx_node *n)
{
    return hash_node(n->kind, n->a, n->b, n->kind == RX_CONCAT ? 0 : n->c);
}

/* An entry tells by its hash that it is another node's, mostly, so that the node need
 * not be looked at, which is seldom in the cache. */
static uint32_t entry_of(uint32_t hash, rx_id id)
{
    return (hash & ~(uint32_t)(MAX_NODES - 1)) | (uint32_t)id;
}

static void enter(uint32_t *table, int32_t size, uint32_t hash, rx_id id)
{
    uint32_t at = hash & (uint32_t)(size - 1);

    while (table[at]) {
        at = (at + 1) & (uint32_t)(size - 1);
    }
    table[at] = entry_of(hash, id);
}

static bool enlarge_table(struct rx *r)
{
    int32_t size = r->table_size ? r->table_size * 2 : FIRST_TABLE;

    while (size < 2 * r->n_nodes) {
        size *= 2;
    }
    uint32_t *table = budget_alloc(r->budget, (size_t)size * sizeof(*table));

    if (!table) {
        return false;
    }
    for (int32_t i = 1; i < r->n_nodes; i++) {
        enter(table, size, hash_of(&r->node[i]), i);
    }
    budget_free(r->budget, r->table, (size_t)r->table_size * sizeof(*table));
    r->table = table;
    r->table_size = size;
    return true;
}

static rx_id add_node(struct rx *r, struct rx_node n)
{
    if (n.height > MAX_HEIGHT) {
        budget_fail(r->budget, ERR_FULL, "depth");
        return 0;
    }
    if (r->n_nodes == MAX_NODES) {
        budget_fail(r->budget, ERR_FULL, "memory");
        return 0;
    }
    if (!budget_item(r->budget) ||
        !budget_grow(r->budget, &r->node, &r->cap_nodes, (int64_t)r->n_nodes + 1,
                     sizeof(*r->node)) ||
        (r->n_nodes * 2 >= r->table_size && !enlarge_table(r))) {
        return 0;
    }
    enter(r->table, r->table_size, hash_of(&n), r->n_nodes);
    r->node[r->n_nodes] = n;
    return r->n_nodes++;
}

static rx_id find_node(const struct rx *r, int kind, int32_t a, int32_t b, int32_t c)
{
    uint32_t mask = (uint32_t)(r->table_size - 1), hash = hash_node(kind, a, b, c);

    for (uint32_t at = hash & mask; r->table[at]; at = (at + 1) & mask) {
        rx_id id = (rx_id)(r->table[at] & (uint32_t)(MAX_NODES - 1));
        const struct rx_node *n = &r->node[id];
        if (r->table[at] == entry_of(hash, id) && n->kind == kind && n->a == a && n->b == b &&
            (kind == RX_CONCAT || n->c == c)) {
            return id;
        }
    }
    return 0;
}

/* Bytes and tokens of the shortest text, or fewer. */
static uint32_t least_of(const struct rx *r, int kind, int32_t a, int32_t b)
{
    const struct rx_node *node = r->node;
    uint64_t n = 0;

    switch ((enum rx_kind)kind) {
    case RX_SET:
    case RX_TOKEN:
        n = 1;
        break;
    case RX_CONCAT:
        n = (uint64_t)node[a].least + node[b].least;
        break;
    case RX_OR:
        n = MIN(node[a].least, node[b].least);
        break;
    case RX_AND:
        n = MAX(node[a].least, node[b].least);
        break;
    case RX_REPEAT:
        n = (uint64_t)node[a].least * (uint32_t)b;
        break;
    case RX_NOT:
        n = node[a].flags & RX_NULLABLE ? 1 : 0;
        break;
    case RX_NEVER:
        n = RX_MOST_LEAST;
        break;
    case RX_NONE:
    case RX_EMPTY:
        break;
    }
    return (uint32_t)MIN(n, (uint64_t)RX_MOST_LEAST);
}

static rx_id intern(struct rx *r, int kind, int32_t a, int32_t b, int32_t c, int flags, int height)
{
    rx_id found = r->table_size ? find_node(r, kind, a, b, c) : 0;

    if (found || !budget_work(r->budget, NODE_WORK)) {
        return found;
    }
    return add_node(r, (struct rx_node){.kind = (uint8_t)kind,
                                        .flags = (uint8_t)flags,
                                        .height = (uint16_t)height,
                                        .a = a,
                                        .b = b,
                                        .c = c,
                                        .least = least_of(r, kind, a, b)});
}

bool rx_init(struct rx *r, struct budget *b)
{
    *r = (struct rx){.budget = b, .n_nodes = 1, .n_classes = 1};
    if (!budget_grow(b, &r->node, &r->cap_nodes, 16, sizeof(*r->node))) {
        return false;
    }
    r->node[0] = (struct rx_node){0};
    intern(r, RX_EMPTY, 0, 0, 0, RX_NULLABLE | RX_PLAIN, 0);
    intern(r, RX_NEVER, 0, 0, 0, RX_DEAD, 0);
    intern(r, RX_NOT, RX_ID_NEVER, 0, 0, RX_NULLABLE | RX_LIVE, 0);
    return !b->failed;
}

void rx_release(struct rx *r)
{
    free(r->node);
    free(r->table);
    free(r->set);
    free(r->classes_in);
    free(r->token);
    free(r->out);
    free(r->seen);
    free(r->heap);
    free(r->known);
    *r = (struct rx){0};
}

size_t rx_held(const struct rx *r)
{
    return (size_t)r->cap_nodes * sizeof(*r->node) + (size_t)r->table_size * sizeof(*r->table) +
           (size_t)(r->cap_sets + r->n_sets + 1) * sizeof(*r->set) +
           (size_t)r->cap_tokens * sizeof(*r->token) +
           (size_t)(r->cap_out + r->cap_heap) * sizeof(*r->out) +
           (size_t)r->cap_seen * sizeof(*r->seen) + (r->known ? RX_KNOWN * sizeof(*r->known) : 0);
}

bool rx_copy(struct rx *to, const struct rx *from, int32_t n_nodes, struct budget *b)
{
    *to = *from;
    to->budget = b;
    to->n_nodes = n_nodes;
    to->node = NULL;
    to->set = to->classes_in = NULL;
    to->table = NULL;
    to->token = to->out = to->heap = NULL;
    to->seen = NULL;
    to->known = NULL;
    to->table_size = to->cap_nodes = to->cap_sets = to->cap_tokens = 0;
    to->cap_out = to->cap_seen = to->cap_heap = to->n_out = to->n_seen = to->n_heap = 0;
    if (!budget_grow(b, &to->node, &to->cap_nodes, n_nodes, sizeof(*to->node)) ||
        !budget_grow(b, &to->set, &to->cap_sets, from->n_sets + 1, sizeof(*to->set)) ||
        !budget_grow(b, &to->token, &to->cap_tokens, from->n_tokens + 1, sizeof(*to->token))) {
        rx_release(to);
        return false;
    }
    memcpy(to->node, from->node, (size_t)n_nodes * sizeof(*to->node));
    for (int32_t i = 0; i < n_nodes; i++) {
        if (to->node[i].kind == RX_CONCAT) {
            to->node[i].c = 0; /* it may be a node that is not copied */
        }
    }
    if (from->n_sets > 0) {
        memcpy(to->set, from->set, (size_t)from->n_sets * sizeof(*to->set));
    }
    if (from->n_tokens > 0) {
        memcpy(to->token, from->token, (size_t)from->n_tokens * sizeof(*to->token));
    }
    if (!enlarge_table(to) || !rx_freeze(to)) {
        rx_release(to);
        return false;
    }
    return true;
}

/* ---- byte sets and classes ---- */

static int32_t add_set(struct rx *r, const struct byte_set *s)
{
    for (int32_t i = r->n_sets - 1; i >= 0; i--) {
        if (memcmp(&r->set[i], s, sizeof(*s)) == 0) {
            return i;
        }
    }
    budget_work(r->budget, r->n_sets / 4);
    if (r->frozen ||
        !budget_grow(r->budget, &r->set, &r->cap_sets, (int64_t)r->n_sets + 1, sizeof(*r->set))) {
        return -1;
    }
    r->set[r->n_sets] = *s;
    return r->n_sets++;
}

static bool in_set(const struct byte_set *s, int byte)
{
    return s->bit[byte / 32] >> (byte % 32) & 1;
}

/* Split each class into what is in the set and what is not. */
static void refine(struct rx *r, const struct byte_set *s)
{
    int16_t inside[256], outside[256];
    int n = 0;

    memset(inside, -1, sizeof(inside));
    memset(outside, -1, sizeof(outside));
    for (int b = 0; b < 256; b++) {
        int16_t *to = in_set(s, b) ? &inside[r->class_of[b]] : &outside[r->class_of[b]];
        if (*to < 0) {
            r->byte_of[n] = (uint8_t)b;
            *to = (int16_t)n++;
        }
        r->class_of[b] = (uint8_t)*to;
    }
    r->n_classes = n;
}

void rx_classify(struct rx *r)
{
    while (r->n_classed < r->n_sets) {
        budget_work(r->budget, 16);
        /* class_of is read for the bytes that are still to come only. */
        refine(r, &r->set[r->n_classed++]);
    }
}

bool rx_freeze(struct rx *r)
{
    rx_classify(r);
    r->classes_in = budget_alloc(r->budget, ((size_t)r->n_sets + 1) * sizeof(*r->classes_in));
    for (int32_t i = 0; i < r->n_sets && r->classes_in; i++) {
        for (int c = 0; c < r->n_classes; c++) {
            if (in_set(&r->set[i], r->byte_of[c])) {
                r->classes_in[i].bit[c / 32] |= 1u << (c % 32);
            }
        }
    }
    r->frozen = true;
    return r->classes_in;
}

/* ---- nodes ---- */

static int height_of(const struct rx *r, rx_id x)
{
    return r->node[x].height;
}

rx_id rx_make_set(struct rx *r, const struct byte_set *s)
{
    static const struct byte_set none;

    if (memcmp(s, &none, sizeof(none)) == 0) {
        return RX_ID_NEVER;
    }
    int32_t set = add_set(r, s);
    return set < 0 ? 0 : intern(r, RX_SET, set, 0, 0, RX_PLAIN, 0);
}

rx_id rx_make_range(struct rx *r, int first, int last)
{
    struct byte_set s = {0};

    for (int b = first; b <= last; b++) {
        s.bit[b / 32] |= 1u << (b % 32);
    }
    return rx_make_set(r, &s);
}

rx_id rx_make_token(struct rx *r, int32_t token)
{
    int32_t i = 0;

    while (i < r->n_tokens && r->token[i] != token) {
        i++;
    }
    if (i == r->n_tokens) {
        if (r->frozen || !budget_grow(r->budget, &r->token, &r->cap_tokens,
                                      (int64_t)r->n_tokens + 1, sizeof(*r->token))) {
            return 0;
        }
        r->token[r->n_tokens++] = token;
    }
    return intern(r, RX_TOKEN, i, 0, 0, RX_PLAIN, 0);
}

rx_id rx_make_concat(struct rx *r, rx_id left, rx_id right)
{
    if (!left || !right) {
        return 0;
    }
    if (left == RX_ID_NEVER || right == RX_ID_NEVER) {
        return RX_ID_NEVER;
    }
    if (left == RX_ID_EMPTY) {
        return right;
    }
    if (right == RX_ID_EMPTY) {
        return left;
    }
    if (left == right && left == RX_ID_ALL) {
        return left;
    }
    const struct rx_node *l = &r->node[left], *n = &r->node[right];
    if (l->kind == RX_REPEAT && l->b == 0 && l->c < 0 &&
        (left == right || (n->kind == RX_CONCAT && n->a == left))) {
        return right; /* any number, and any number again */
    }
    int flags = r->node[left].flags & r->node[right].flags & (RX_NULLABLE | RX_PLAIN);
    int above = r->node[left].kind == RX_CONCAT ? 0 : 1;
    return intern(r, RX_CONCAT, left, right, 0, flags,
                  MAX(height_of(r, left) + above, height_of(r, right)));
}

rx_id rx_make_or(struct rx *r, rx_id left, rx_id right)
{
    struct byte_set s;

    if (!left || !right) {
        return 0;
    }
    if (left == right || right == RX_ID_NEVER || left == RX_ID_ALL) {
        return left;
    }
    if (left == RX_ID_NEVER || right == RX_ID_ALL) {
        return right;
    }
    const struct rx_node *a = &r->node[left], *b = &r->node[right];
    if (a->kind == RX_SET && b->kind == RX_SET && !r->frozen) {
        for (int i = 0; i < 8; i++) {
            s.bit[i] = r->set[a->a].bit[i] | r->set[b->a].bit[i];
        }
        return rx_make_set(r, &s);
    }
    if (left == RX_ID_EMPTY && b->flags & RX_NULLABLE) {
        return right;
    }
    if (right == RX_ID_EMPTY && a->flags & RX_NULLABLE) {
        return left;
    }
    if (a->kind != RX_OR && (b->kind == RX_OR || left > right)) {
        rx_id swap = left;
        left = right;
        right = swap;
        a = &r->node[left];
        b = &r->node[right];
    }
    int flags = ((a->flags | b->flags) & RX_NULLABLE) | (a->flags & b->flags & RX_PLAIN);
    int above = a->kind == RX_OR ? 0 : 1;
    return intern(r, RX_OR, left, right, 0, flags, MAX(a->height + above, b->height + 1));
}

rx_id rx_make_and(struct rx *r, rx_id left, rx_id right)
{
    struct byte_set s;

    if (!left || !right) {
        return 0;
    }
    if (left == right || right == RX_ID_ALL || left == RX_ID_NEVER) {
        return left;
    }
    if (left == RX_ID_ALL || right == RX_ID_NEVER) {
        return right;
    }
    if (left > right) {
        rx_id swap = left;
        left = right;
        right = swap;
    }
    const struct rx_node *a = &r->node[left], *b = &r->node[right];
    if (left == RX_ID_EMPTY) {
        return b->flags & RX_NULLABLE ? left : RX_ID_NEVER;
    }
    if (a->kind == RX_SET && b->kind == RX_SET && !r->frozen) {
        for (int i = 0; i < 8; i++) {
            s.bit[i] = r->set[a->a].bit[i] & r->set[b->a].bit[i];
        }
        return rx_make_set(r, &s);
    }
    return intern(r, RX_AND, left, right, 0, a->flags & b->flags & RX_NULLABLE,
                  MAX(a->height, b->height) + 1);
}

rx_id rx_make_not(struct rx *r, rx_id x)
{
    if (!x || x == RX_ID_ALL) {
        return x ? RX_ID_NEVER : 0;
    }
    if (r->node[x].kind == RX_NOT) {
        return r->node[x].a;
    }
    return intern(r, RX_NOT, x, 0, 0, rx_has(r, x, RX_NULLABLE) ? 0 : RX_NULLABLE,
                  height_of(r, x) + 1);
}

rx_id rx_make_repeat(struct rx *r, rx_id x, int32_t min, int32_t max)
{
    if (!x) {
        return 0;
    }
    if (max == 0 || x == RX_ID_EMPTY) {
        return RX_ID_EMPTY;
    }
    if (x == RX_ID_NEVER) {
        return min == 0 ? RX_ID_EMPTY : RX_ID_NEVER;
    }
    const struct rx_node *n = &r->node[x];
    if (n->flags & RX_NULLABLE) {
        min = 0;
    }
    if (max == 1) {
        return min == 1 || n->flags & RX_NULLABLE ? x : rx_make_or(r, x, RX_ID_EMPTY);
    }
    if (x == RX_ID_ALL || (n->kind == RX_REPEAT && n->b == 0 && n->c < 0)) {
        return x;
    }
    if (n->kind == RX_REPEAT && n->b == 1 && n->c < 0 && max < 0 && min <= 1) {
        return rx_make_repeat(r, n->a, min, -1);
    }
    int flags = (min == 0 ? RX_NULLABLE : 0) | (min == 0 ? RX_PLAIN : n->flags & RX_PLAIN);
    return intern(r, RX_REPEAT, x, min, max, flags, n->height + 1);
}
