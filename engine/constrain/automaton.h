/* The states of a grammar, made as texts need them and shared by all its sequences.
 *
 * A config is what is known after a text: rows with a state of the lexer each, which
 * says what is being read behind that row, and whether the text is complete. Configs
 * are numbered and never change; their transitions by symbol are filled in as they
 * are asked for. Walking over a finished transition takes no lock.
 *
 * A row is a set of Earley's: the items after a terminal was read. Items do not hold
 * the position where their rule began but the row, and equal rows are one row, so
 * that texts that leave the same to be read (the elements of an array) lead to the
 * same config. An item whose rule ends with the rule it waits for hands on where to
 * return (as in Leo 1991), so right recursion makes no new rows either.
 *
 * Locks: `lock` guards all but the transitions and notes, which are atomic, and the
 * masks, which have `mask_lock`. */
#ifndef QUIRE_ENGINE_CONSTRAIN_AUTOMATON_H
#define QUIRE_ENGINE_CONSTRAIN_AUTOMATON_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/constrain/lexer.h"
#include "engine/constrain/vocab.h"

enum {
    CONFIG_UNKNOWN = 0, /* a transition that was not asked for yet */
    CONFIG_DEAD = -1,   /* no text begins so */
    CONFIG_FULL = -2,   /* of automaton_next: a limit was reached */
    CONFIG_NOMEM = -3,  /* of automaton_next: memory ran out */
    CONFIG_WORK = -4,   /* of automaton_next: one step took too much work */
    CONFIG_PAUSED = -5, /* of automaton_next: the caller's work is used up */
    CHUNK = 64,         /* configs allocated together */
    MAX_CHUNKS = 1 << 12,
    STEP_LEAST = 20, /* units of work of a step beside what it charges */
    CONFIG_NEXT = 4, /* configs that plain characters may lead to, if it is noted */
};

enum { ROOT_ROW = -1, OWN_ROW = -2 }; /* in place of a row: where the whole text ends; itself */

/* A position in a production, and where its rule returns to. */
struct item {
    int32_t dot, count; /* a dot of the cfg; repetitions passed */
    int32_t row, rule;  /* the items of `row` that wait for `rule` */
};

struct waiting {
    int32_t symbol;   /* what stands behind the dot */
    struct item item; /* and the item */
};

struct row {
    int32_t first_item, n_items; /* item[..]: what makes the row, sorted */
    int32_t first_wait, n_waits; /* wait[..]: those and what they predict, by symbol */
    int32_t lex;                 /* the lexer's state there; 0: no terminal may follow */
};

/* What is being read behind a row: a state of the lexer. */
struct entry {
    int32_t row, lex;
};

struct config {
    int32_t first, n;                   /* entry[first .. first + n), sorted */
    bool complete;                      /* the text is a sentence */
    _Atomic(uint8_t) ends;              /* enum note: nothing may follow */
    _Atomic(uint8_t) open;              /* enum note: any plain text may follow */
    _Atomic(uint8_t) room;              /* so many plain characters may follow, whatever they are */
    _Atomic(int8_t) n_next;             /* how many of next[], or enum next_note */
    _Atomic(int32_t) next[CONFIG_NEXT]; /* what plain characters lead to */
    /* Kinds of bytes (vocab_kind) of which all lead to `alike_to`, and of which not all
     * do; the others were not asked for. */
    _Atomic(uint64_t) alike, unlike;
    _Atomic(int32_t) alike_to; /* CONFIG_DEAD: none, CONFIG_UNKNOWN: not asked for */
    _Atomic(int32_t) slot;     /* of the mask cache, or -1; a hint */
    /* Configs whose masks bound this one's (config_bounds); `low` CONFIG_UNKNOWN: not
     * asked for, CONFIG_DEAD: none. */
    _Atomic(int32_t) low, high;
};

enum note { NOTE_UNKNOWN, NOTE_YES, NOTE_NO };
enum next_note { NEXT_UNKNOWN, NEXT_DEAD = -1, NEXT_MANY = -2 };

struct mask_slot {
    int32_t config; /* whose mask; 0: none */
    bool used;      /* since the replacement hand passed */
};

struct automaton {
    _Atomic(int32_t) refs;               /* of the grammar and its constraints */
    const struct constrain_vocab *vocab; /* not owned */
    const struct cfg *cfg;               /* of the grammar, which outlives this */
    struct budget budget;                /* of everything here, under lock */
    struct rx rx;                        /* the grammar's arena and more, under lock */
    struct lexer lexer;                  /* over that, under lock */
    int32_t n_symbols;                   /* of rx: fixed */
    int32_t n_compiled; /* nodes that the grammar was compiled to: the first ones */

    pthread_mutex_t lock;
    struct row *row;                  /* [n_rows], owned */
    int32_t n_rows, cap_rows;         /* rows, and how many fit */
    struct item *item;                /* of all rows, owned */
    int32_t n_items, cap_items;       /* of them, and how many fit */
    struct waiting *wait;             /* of all rows, owned */
    int32_t n_waits, cap_waits;       /* of them, and how many fit */
    struct entry *entry;              /* of all configs, owned */
    int32_t n_entries, cap_entries;   /* of them, and how many fit */
    struct index_table rows, configs; /* by content */
    int32_t n_configs;                /* config 0 is none; 1 is the start */

    /* Chunks of CHUNK configs, and of their transitions by symbol; owned. */
    _Atomic(struct config *) chunk[MAX_CHUNKS];
    _Atomic(_Atomic(int32_t) *) edges[MAX_CHUNKS];

    /* What a step gathers; owned. */
    struct item *work;                  /* items to be looked at */
    int32_t n_work, cap_work;           /* of them, and how many fit */
    struct index_table in_work;         /* those that are there */
    struct entry *next;                 /* entries of the config being made */
    int32_t n_next, cap_next;           /* of them, and how many fit */
    struct waiting *waits;              /* of the row being made */
    int32_t n_new_waits, cap_new_waits; /* of them, and how many fit */
    int32_t *mark;                      /* [rules] generation that predicted a rule last */
    struct item *returns;               /* [rules] where it returns to, of that row */
    int32_t generation;                 /* rows that were begun */
    bool completed;                     /* the step ended a sentence */

    pthread_mutex_t mask_lock; /* guards what follows */
    struct mask_slot *slot;    /* [n_slots], owned */
    uint32_t *masks;           /* [n_slots][words], owned */
    int32_t n_kept;            /* slots that ever held a mask */
    int32_t n_slots, hand;     /* masks that are kept; the next to be replaced */
};

/* An automaton at its start. It takes over the arena, which is frozen and whose memory
 * is `held` bytes. `bytes`: the memory that it may take. ERR_NOMEM, ERR_FULL. */
int automaton_new(struct automaton **ret, const struct constrain_vocab *v, const struct cfg *cfg,
                  struct rx *rx, size_t held, size_t bytes);
/* Another automaton of the same grammar, at its start. */
int automaton_renew(struct automaton **ret, struct automaton *of);
void automaton_unref(struct automaton *a);
/* An automaton, as a caller asks for its transitions. */
struct stepper {
    struct automaton *a;
    int64_t work; /* left, as budget.h counts; one step may take more than that */
    bool paused;  /* a step was not made, for there was none left */
};

/* The config behind a symbol: its number, CONFIG_DEAD, or why it is not known,
 * CONFIG_FULL and those behind it. Where no step is to be made it takes no work. */
int32_t automaton_step(struct stepper *s, int32_t config, int32_t symbol);
size_t automaton_bytes(struct automaton *a);
/* The config of another automaton of the same grammar that leaves the same to be read;
 * CONFIG_FULL or CONFIG_NOMEM. */
int32_t automaton_import(struct automaton *to, struct automaton *from, int32_t config);

static inline struct config *config_at(struct automaton *a, int32_t c)
{
    return atomic_load_explicit(&a->chunk[c / CHUNK], memory_order_acquire) + c % CHUNK;
}

static inline _Atomic(int32_t) *edges_of(struct automaton *a, int32_t c)
{
    return atomic_load_explicit(&a->edges[c / CHUNK], memory_order_acquire) +
           (ptrdiff_t)(c % CHUNK) * a->n_symbols;
}

static inline int32_t automaton_next(struct stepper *s, int32_t config, int32_t symbol)
{
    int32_t to = atomic_load_explicit(edges_of(s->a, config) + symbol, memory_order_acquire);

    return to != CONFIG_UNKNOWN ? to : automaton_step(s, config, symbol);
}

static inline int32_t symbol_of_byte(const struct automaton *a, uint8_t byte)
{
    return a->rx.class_of[byte];
}

/* ---- for the files of the automaton ---- */

/* Begin a set of items; add an item and what it completes and skips; the row of those
 * that are left, or ROOT_ROW where none is, or CONFIG_FULL. */
void items_begin(struct automaton *a);
void items_add(struct automaton *a, struct item i);
void items_advance(struct automaton *a, int32_t row, int32_t symbol);
int32_t items_row(struct automaton *a);
/* The config of a->next and a->completed: its number, CONFIG_DEAD or CONFIG_FULL. */
int32_t config_intern(struct automaton *a);
/* Why the budget has failed, as automaton_step says it. Where one step took too much
 * work the automaton is as it was, and may go on. */
int32_t automaton_failure(struct automaton *a);
/* Append to a->next what may be read behind a row. */
void entry_add(struct automaton *a, int32_t row, int32_t lex);

#endif
