/* A compiled grammar: its tables, and the automaton that its sequences share. */
#ifndef QUIRE_ENGINE_CONSTRAIN_GRAMMAR_H
#define QUIRE_ENGINE_CONSTRAIN_GRAMMAR_H

#include "engine/constrain/automaton.h"

struct grammar {
    _Atomic(int32_t) refs;               /* of requests and constraints */
    const struct constrain_vocab *vocab; /* not owned */
    struct cfg cfg;                      /* its tables */
    pthread_mutex_t lock;                /* guards `automaton` */
    struct automaton *automaton;         /* the one that new sequences take; a reference */
};

/* A reference to the automaton that sequences should be in. */
struct automaton *grammar_automaton(struct grammar *g);
/* The same, when `full` takes no more states. ERR_NOMEM, ERR_FULL. */
int grammar_renew(struct grammar *g, struct automaton *full, struct automaton **ret);

#endif
