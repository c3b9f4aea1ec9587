/* Which tokens have followed the last one, two and three: counts over the texts of the
 * server, for drafts where no longer passage is found again.
 *
 * A context is one to three tokens of a scope; its most frequent followers are counted.
 * How often the first of them is the one that follows is learned by the number of
 * tokens of the context, by how often the follower was seen, and by its share, from
 * every token that is added: no draft need be verified for it. Contexts are found by
 * hashes, which collide seldom, and then a draft is wrong. Memory is fixed; contexts
 * that were seen least give way. */
#ifndef QUIRE_ENGINE_SPECULATE_TEXT_FOLLOWERS_H
#define QUIRE_ENGINE_SPECULATE_TEXT_FOLLOWERS_H

#include "config/base/base.h"

enum {
    FOLLOW_TOKENS = 3, /* of the longest context */
    FOLLOWERS = 4,     /* that are counted for a context */
    FOLLOW_COUNTS = 4, /* classes of guesses by count: 1, 2, 3 or 4, more */
    FOLLOW_SHARES = 5, /* and by share, in quarters */
    FOLLOW_CLASSES = FOLLOW_TOKENS * FOLLOW_COUNTS * FOLLOW_SHARES,
};

/* What followed one context, the most frequent first. */
struct follower_set {
    uint32_t tag;   /* of the context's hash */
    uint16_t total; /* 0: unused */
    uint16_t count[FOLLOWERS];
    int32_t token[FOLLOWERS];
};

struct followers {
    struct follower_set *set; /* [n_sets] in pairs, by hash */
    int32_t n_sets;           /* a power of two; 0: nothing is counted */
    float chance[FOLLOW_CLASSES];
    int32_t n_seen[FOLLOW_CLASSES]; /* tokens that `chance` is a mean of, up to a bound */
};

/* The last tokens of a text, the latest first. */
struct follow_context {
    int32_t token[FOLLOW_TOKENS];
    int32_t n;
};

struct follow_guess {
    int32_t token;
    float chance; /* 0: none */
};

/* n_sets is a power of two, or 0. ERR_NOMEM. */
int followers_init(struct followers *f, int32_t n_sets, struct err *e);
void followers_release(struct followers *f);
/* `token` followed. */
void followers_add(struct followers *f, uint64_t scope, const struct follow_context *c,
                   int32_t token);
/* The likeliest follower. */
struct follow_guess followers_guess(const struct followers *f, uint64_t scope,
                                    const struct follow_context *c);

static inline void follow_push(struct follow_context *c, int32_t token)
{
    for (int32_t i = FOLLOW_TOKENS - 1; i > 0; i--) {
        c->token[i] = c->token[i - 1];
    }
    c->token[0] = token;
    c->n = MIN(c->n + 1, FOLLOW_TOKENS);
}

#endif
