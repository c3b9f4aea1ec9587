#include "engine/speculate/text/followers.h"

#include <stdlib.h>
#include <string.h>

enum {
    TOTAL_MOST = 1024, /* then all counts are halved */
    FIRM = 4,          /* a set seen so often gives way only when its counts have been halved */
    SEEN_FIRST = 8,    /* tokens that the first chances count as */
    SEEN_MOST = 512,
};

/* The hash of the last n tokens. */
static uint64_t hash_of(uint64_t scope, const struct follow_context *c, int32_t n)
{
    const uint64_t FACTOR = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t h = (scope + (uint64_t)n) * FACTOR;

    for (int32_t i = 0; i < n; i++) {
        h = ((h ^ h >> 29) + (uint32_t)c->token[i]) * FACTOR;
    }
    return h ^ h >> 32;
}

static struct follower_set *pair_of(const struct followers *f, uint64_t hash)
{
    return &f->set[hash & (uint64_t)(f->n_sets - 1) & ~UINT64_C(1)];
}

static struct follower_set *find(const struct followers *f, uint64_t hash)
{
    struct follower_set *s = pair_of(f, hash);

    for (int32_t i = 0; i < 2; i++) {
        if (s[i].total > 0 && s[i].tag == (uint32_t)(hash >> 32)) {
            return &s[i];
        }
    }
    return NULL;
}

static int32_t class_of(const struct follower_set *s, int32_t n)
{
    int32_t count = s->count[0] <= 2 ? s->count[0] - 1 : s->count[0] <= 4 ? 2 : 3;
    int32_t share = (4 * s->count[0] + s->total / 2) / s->total;

    return ((n - 1) * FOLLOW_COUNTS + count) * FOLLOW_SHARES + MIN(share, FOLLOW_SHARES - 1);
}

static void halve(struct follower_set *s)
{
    s->total = MAX(s->total / 2, 1);
    for (int32_t i = 0; i < FOLLOWERS; i++) {
        s->count[i] /= 2;
    }
    s->count[0] = MAX(s->count[0], 1);
}

/* The set of a context that is new. */
static struct follower_set *make(const struct followers *f, uint64_t hash)
{
    struct follower_set *s = pair_of(f, hash);

    s += s[1].total < s[0].total;
    if (s->total >= FIRM) {
        halve(s);
        return NULL;
    }
    *s = (struct follower_set){.tag = (uint32_t)(hash >> 32)};
    return s;
}

/* One more; a token that has no place wears off the least frequent. */
static void count(struct follower_set *s, int32_t token)
{
    int32_t i = 0, least = 0;

    while (i < FOLLOWERS && (s->count[i] == 0 || s->token[i] != token)) {
        least = s->count[i] < s->count[least] ? i : least;
        i++;
    }
    s->total++;
    if (i == FOLLOWERS && s->count[least] > 1) {
        s->count[least]--;
        return;
    }
    if (i == FOLLOWERS) {
        i = least;
        s->token[i] = token;
        s->count[i] = 0;
    }
    s->count[i]++;
    if (s->count[i] >= s->count[0]) { /* on a tie the latest */
        uint16_t n = s->count[i];
        s->count[i] = s->count[0];
        s->token[i] = s->token[0];
        s->count[0] = n;
        s->token[0] = token;
    }
    if (s->total >= TOTAL_MOST) {
        halve(s);
    }
}

void followers_add(struct followers *f, uint64_t scope, const struct follow_context *c,
                   int32_t token)
{
    for (int32_t n = 1; n <= c->n && f->n_sets > 0; n++) {
        uint64_t hash = hash_of(scope, c, n);
        struct follower_set *s = find(f, hash);
        if (s) {
            int32_t at = class_of(s, n);
            f->n_seen[at] = MIN(f->n_seen[at] + 1, SEEN_MOST - SEEN_FIRST);
            f->chance[at] += ((float)(s->token[0] == token) - f->chance[at]) /
                             (float)(SEEN_FIRST + f->n_seen[at]);
        } else {
            s = make(f, hash);
        }
        if (s) {
            count(s, token);
        }
    }
}

struct follow_guess followers_guess(const struct followers *f, uint64_t scope,
                                    const struct follow_context *c)
{
    struct follow_guess best = {0, 0};

    for (int32_t n = 1; n <= c->n && f->n_sets > 0; n++) {
        const struct follower_set *s = find(f, hash_of(scope, c, n));
        float chance = s ? f->chance[class_of(s, n)] : 0;
        if (chance >= best.chance && s) {
            best = (struct follow_guess){s->token[0], chance};
        }
    }
    return best;
}

int followers_init(struct followers *f, int32_t n_sets, struct err *e)
{
    *f = (struct followers){.n_sets = n_sets};
    for (int32_t i = 0; i < FOLLOW_CLASSES; i++) {
        int32_t share = i % FOLLOW_SHARES;
        f->chance[i] = 0.05F + 0.1F * (float)share;
    }
    if (n_sets == 0) {
        return 0;
    }
    f->set = calloc((size_t)n_sets, sizeof(*f->set)); /* touched where needed */
    return f->set ? 0 : err_nomem(e, "followers of tokens");
}

void followers_release(struct followers *f)
{
    free(f->set);
    *f = (struct followers){.set = NULL};
}
