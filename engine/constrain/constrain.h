/* Constrained decoding: which tokens may come next under a grammar.
 *
 * Three objects. A `vocabulary` is made once per model: a trie over the tokens' bytes
 * and what is precomputed from it. A `grammar` is compiled once per distinct text,
 * immutable and reference-counted: requests, their sequences and all threads share it.
 * A `constraint` is the state of one sequence: it starts at the grammar's start, takes
 * each token that was sampled, gives the mask of the tokens that may follow, and forks
 * with its sequence.
 *
 * Grammars are over bytes. A token is allowed if its bytes lead from the state to one
 * from which the grammar can still be completed; so an answer that ended by its grammar
 * is a sentence of it whatever the tokenization. End-of-sequence tokens are allowed
 * where a sentence is complete, other special tokens only where the grammar names them.
 *
 * Threads: a vocabulary and a grammar may be used by any number of threads at once; a
 * constraint by one at a time.
 */
#ifndef QUIRE_ENGINE_CONSTRAIN_CONSTRAIN_H
#define QUIRE_ENGINE_CONSTRAIN_CONSTRAIN_H

#include "config/base/base.h"

/* ---- the vocabulary ---- */

struct constrain_vocab;

/* What a vocabulary is made from; read during the call only. */
struct constrain_tokens {
    int32_t n;          /* ids: the width of the logits, and of a mask */
    int32_t n_eos;      /* entries of `eos` */
    const int32_t *eos; /* [n_eos] ids that end a text */
    /* The bytes of token `id`; length 0: the token has no text and is never allowed. */
    const char *(*bytes)(const void *arg, int32_t id, size_t *ret_len);
    /* Whether the token is special: its text is a name that stands for the token. */
    bool (*special)(const void *arg, int32_t id);
    /* The model's own encoding of a text, for forced tokens; NULL: nothing is forced.
     * *ret_ids is malloc'd. */
    int (*encode)(const void *arg, const char *text, size_t len, int32_t **ret_ids, int32_t *ret_n);
    const void *arg; /* for the functions; must outlive the vocabulary */
};

/* ERR_NOMEM. */
int constrain_vocab_new(struct constrain_vocab **ret, const struct constrain_tokens *t,
                        struct err *e);
/* No grammar of it may exist any more. */
void constrain_vocab_free(struct constrain_vocab *v);

/* ---- grammars ---- */

enum grammar_kind {
    GRAMMAR_JSON_OBJECT, /* any JSON object; the text is empty */
    GRAMMAR_JSON_SCHEMA, /* the text is a JSON Schema, draft 2020-12 or 7 */
    GRAMMAR_REGEX,       /* the whole answer matches the expression (rx_parse.c) */
    GRAMMAR_CHOICE,      /* the text is a JSON array of strings: one of them */
    GRAMMAR_LARK,        /* a context-free grammar (lark.h) */
};

/* What compiling one grammar may cost; ERR_INVALID names the limit that is exceeded. */
struct grammar_limits {
    size_t text_bytes; /* of the schema, expression or grammar */
    int32_t depth;     /* of nesting in it */
    int32_t items;     /* nodes of the compiled grammar */
    size_t bytes;      /* memory of the compiled grammar, and of compiling it */
    int64_t work;      /* steps of compiling it, of some ten nanoseconds each */
    int64_t *used;     /* gets the steps that it took, also where it failed; NULL: nothing */
};
/* The limits for text that a client sent. */
void grammar_limits_init(struct grammar_limits *l);

struct grammar;

/* Compile `text` [len] for the vocabulary, which must outlive the grammar. ERR_INVALID:
 * the text is malformed, cannot be satisfied or exceeds a limit; ERR_UNSUPPORTED: it
 * asks for what cannot be enforced, named in the message; ERR_NOMEM. */
int grammar_new(struct grammar **ret, const struct constrain_vocab *v, enum grammar_kind kind,
                const char *text, size_t len, const struct grammar_limits *l, struct err *e);
struct grammar *grammar_ref(struct grammar *g);
void grammar_unref(struct grammar *g); /* NULL: nothing */
/* Memory held by the compiled grammar and the states cached with it. */
size_t grammar_bytes(const struct grammar *g);

/* ---- the state of a sequence ---- */

struct constraint;

/* A state at the grammar's start; it takes a reference to the grammar. */
int constraint_new(struct constraint **ret, struct grammar *g, struct err *e);
/* An independent copy. ERR_NOMEM. */
int constraint_fork(struct constraint **ret, const struct constraint *c, struct err *e);
void constraint_free(struct constraint *c); /* NULL: nothing */
/* Memory of the state, without the grammar. */
size_t constraint_bytes(const struct constraint *c);

/* `work` of the functions below: how much they may do, in units of ten to thirty
 * nanoseconds; what they did is taken off, which may leave it below 0. INT64_MAX: no
 * limit. Where it is used up they return CONSTRAINT_UNFINISHED, and the state is as
 * before: called again, they go on from what was found out. */
enum { CONSTRAINT_UNFINISHED = 2 };

/* Set the bits of the tokens that may come next: bit t % 32 of mask[t / 32] for id t,
 * mask_words(n) words. At least one bit is set. ERR_NOMEM; ERR_FULL: a limit of memory,
 * or of work that has no pauses, was reached; ERR_UNSUPPORTED: no token of the
 * vocabulary can come next. The sequence must then end with an error. */
int constraint_mask(struct constraint *c, uint32_t *mask, int64_t *work);
/* Whether the token may come next: one bit of the mask, without computing the
 * others. */
bool constraint_allows(struct constraint *c, int32_t token);
/* The token was appended. ERR_INVALID: the grammar does not allow it, and the state is
 * unchanged; ERR_NOMEM, ERR_FULL as constraint_mask. */
int constraint_accept(struct constraint *c, int32_t token, int64_t *work);
/* Take back the last n tokens that were accepted; at most as many as were accepted
 * since the last call of constraint_settle. */
void constraint_rollback(struct constraint *c, int32_t n);
/* No accepted token will be taken back any more: what rollback needs is dropped. */
void constraint_settle(struct constraint *c);
/* Whether the text so far is a sentence of the grammar. */
bool constraint_complete(const struct constraint *c);
/* Whether it is one that nothing may follow but an end-of-sequence token: 1 or 0. */
int constraint_ended(struct constraint *c, int64_t *work);
/* The tokens that must come next, in the model's own tokenization: at most `max` into
 * ret. Returns their number; 0 where there is a choice. The state is unchanged. */
int32_t constraint_forced(struct constraint *c, int32_t *ret, int32_t max);

#endif
