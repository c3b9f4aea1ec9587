/* Compiled grammars: made from the text of requests for the model's vocabulary, and
 * kept for the requests that send the same text again. */
#ifndef QUIRE_ENGINE_GRAMMARS_H
#define QUIRE_ENGINE_GRAMMARS_H

#include "engine/constrain/constrain.h"
#include "engine/engine.h"
#include "engine/sched/decode/constrained.h"
#include "models/tokenizer/tokenizer.h"

struct grammars;

/* The functions of constrain.h. */
extern const struct constraint_ops grammar_ops;

/* `t` and the ids in `c` must outlive it. The vocabulary's trie is made for the first
 * grammar. 0 or ERR_NOMEM. */
int grammars_open(struct grammars **ret, const struct tokenizer *t, const struct sched_config *c,
                  struct err *e);
/* No grammar of it may be in use. NULL: nothing. */
void grammars_free(struct grammars *g);
/* A reference to the grammar of a client's text. Any thread. Errors as grammar_new.
 * `work`: what compiling it may take at most, from which is taken off what it took;
 * NULL: as much as one text may. */
int grammars_get(struct grammars *g, enum grammar_kind kind, const char *text, size_t len,
                 int64_t *work, struct grammar **ret, struct err *e);
/* As engine_grammar_walk, with masks over `vocab` ids. */
int grammars_walk(struct grammar *g, int32_t vocab, const int32_t *id, int32_t n,
                  struct grammar_walk *ret, struct err *e);

#endif
