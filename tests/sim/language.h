/* Small random languages in the place of grammars: whether a token may come next is a
 * hash of the language and of all tokens before. The reference and the fake constraint
 * share only the four questions below. */
#ifndef QUIRE_TESTS_SIM_LANGUAGE_H
#define QUIRE_TESTS_SIM_LANGUAGE_H

#include "engine/sched/decode/constrained.h"

/* A place in a language is a hash of the tokens read so far: of none, and with one
 * more. */
uint64_t language_start(uint64_t key);
uint64_t language_read(uint64_t place, int32_t token);
/* Whether `token` may come next; ids of c->eos may where a text is complete. Some other
 * id always may. */
bool language_allows(uint64_t place, int32_t token, const struct sched_config *c);
/* Whether only an end may come next. (The question before does not know that.) */
bool language_ended(uint64_t place);
/* Whether the place is too costly to go on from. */
bool language_fails(uint64_t place);

/* A bit of the key: at half of the places a mask takes the work of several steps, and
 * where they are too costly it never ends. */
#define LANGUAGE_SLOW (UINT64_C(1) << 5)

/* A node at the start of a language, held by one sequence. `fails`: some places are too
 * costly. NULL: no memory. */
struct constraint_node *language_node(uint64_t key, bool fails, const struct sched_config *c);
/* States that exist. */
int64_t language_states(void);

#endif
