/* Regular expressions over bytes and tokens, and their derivatives.
 *
 * An arena holds the nodes; equal nodes are one node, so that ids are compared instead
 * of expressions. The derivative of x by a symbol matches what may follow that symbol
 * in a text of x (Brzozowski 1964); it is taken as a set of alternatives (Antimirov
 * 1996). Node 0 is none, after a failure: every function takes it.
 *
 * Symbols are the classes of bytes that no set of the arena tells apart, then the
 * tokens that the grammar names. Before rx_freeze the classes may become finer with
 * each new set; afterwards no set is made any more.
 */
#ifndef QUIRE_ENGINE_CONSTRAIN_RX_RX_H
#define QUIRE_ENGINE_CONSTRAIN_RX_RX_H

#include "engine/constrain/budget.h"
#include "engine/constrain/grammar_build.h"

enum rx_kind {
    RX_NONE,
    RX_EMPTY,  /* the empty text */
    RX_NEVER,  /* no text */
    RX_SET,    /* one byte of set a */
    RX_TOKEN,  /* the token `token[a]` */
    RX_CONCAT, /* a, then b; c: the same with no RX_CONCAT on the left, once known */
    RX_OR,     /* a or b; chains lean to the left */
    RX_AND,    /* a and b */
    RX_NOT,    /* any bytes and tokens that a does not match */
    RX_REPEAT, /* a from b to c times; c -1: any number */
};

/* Derivatives that are kept; a bound of the lengths that are counted. */
enum { RX_KNOWN = 1 << 12, RX_MOST_LEAST = 1 << 20 };

enum { RX_ID_EMPTY = 1, RX_ID_NEVER = 2, RX_ID_ALL = 3 };

enum {
    RX_NULLABLE = 1, /* matches the empty text */
    RX_PLAIN = 2,    /* has no intersection or complement: some text matches */
    RX_LIVE = 4,     /* some text matches */
    RX_DEAD = 8,     /* no text matches */
    RX_SEEN = 16,    /* a search for a text of it is under way */
};

struct rx_node {
    uint8_t kind;    /* enum rx_kind */
    uint8_t flags;   /* RX_NULLABLE and its like */
    uint16_t height; /* of recursion over it */
    int32_t a, b, c; /* see enum rx_kind */
    uint32_t least;  /* no text of it has fewer bytes and tokens; at most RX_MOST_LEAST */
};

struct byte_set {
    uint32_t bit[8]; /* bit b % 32 of bit[b / 32]: byte b */
};

/* A derivative that was made as one node. */
struct rx_known {
    rx_id x, to;           /* of which node, and what it is; x 0: none */
    int32_t symbol;        /* by which symbol */
    struct byte_set alike; /* classes by which it is the same */
};

/* A node whose liveness is sought. */
struct rx_sought {
    rx_id x;
    int32_t from; /* the one in the stack whose derivative it is; -1: none */
};

struct rx {
    struct budget *budget;                /* not owned */
    struct rx_node *node;                 /* [n_nodes], owned */
    int32_t n_nodes, cap_nodes;           /* nodes, and how many fit */
    uint32_t *table;                      /* [table_size] hash table of ids, see rx.c */
    int32_t table_size;                   /* a power of two */
    struct byte_set *set;                 /* [n_sets], owned */
    int32_t n_sets, cap_sets;             /* sets, and how many fit */
    int32_t *token, n_tokens, cap_tokens; /* ids of the tokens that are symbols */
    int32_t *out, n_out, cap_out;         /* stack of derivatives being collected */
    struct rx_sought *seen;               /* stack of nodes whose liveness is sought, owned */
    int32_t n_seen, cap_seen;             /* of them, and how many fit */
    int32_t *heap, n_heap, cap_heap;      /* those to be tried, the shortest first; owned */
    struct rx_known *known;               /* [RX_KNOWN] by hash, of a frozen arena; owned */
    int32_t n_classes, n_classed;         /* classes; sets that they tell apart */
    uint8_t class_of[256], byte_of[256];  /* the class of a byte; a byte of a class */
    struct byte_set *classes_in; /* [n_sets] of a frozen arena: classes in each set; owned */
    bool frozen;                 /* no more sets */
    bool noting;                 /* derivatives note in `alike` what they looked at */
    struct byte_set alike;       /* classes that were in the same sets as the symbol */
};

bool rx_init(struct rx *r, struct budget *b);
void rx_release(struct rx *r);
/* A copy of a frozen arena's first n_nodes nodes that grows on its own. */
bool rx_copy(struct rx *to, const struct rx *from, int32_t n_nodes, struct budget *b);
/* Memory that an arena holds. */
size_t rx_held(const struct rx *r);
/* Bring the classes up to date with the sets. */
void rx_classify(struct rx *r);
bool rx_freeze(struct rx *r);
static inline int32_t rx_symbols(const struct rx *r)
{
    return r->n_classes + r->n_tokens;
}

/* ---- nodes ---- */

rx_id rx_make_set(struct rx *r, const struct byte_set *s);
rx_id rx_make_range(struct rx *r, int first, int last);
rx_id rx_make_token(struct rx *r, int32_t token);
rx_id rx_make_concat(struct rx *r, rx_id left, rx_id right);
rx_id rx_make_or(struct rx *r, rx_id left, rx_id right);
rx_id rx_make_and(struct rx *r, rx_id left, rx_id right);
rx_id rx_make_not(struct rx *r, rx_id x);
rx_id rx_make_repeat(struct rx *r, rx_id x, int32_t min, int32_t max);

static inline bool rx_has(const struct rx *r, rx_id x, int flag)
{
    return r->node[x].flags & flag;
}

/* ---- derivatives ---- */

/* Append to r->out the alternatives of the derivative of x by a symbol; none is
 * RX_ID_NEVER, equal ones may repeat. */
void rx_derive(struct rx *r, rx_id x, int32_t symbol);
/* The derivative as one node. */
rx_id rx_derived(struct rx *r, rx_id x, int32_t symbol);
/* Add to `ret` the classes of bytes that a text of x may begin with, or more; of a
 * frozen arena. */
void rx_first(struct rx *r, rx_id x, struct byte_set *ret);
/* Whether some text matches. After a failure of the budget true. */
bool rx_live(struct rx *r, rx_id x);

#endif
