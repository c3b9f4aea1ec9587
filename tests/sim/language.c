#include "tests/sim/language.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "engine/loop/masks.h"
#include "tests/sim/toy.h"

static _Atomic int64_t n_states;

struct constraint {
    const struct sched_config *config;
    uint64_t place;
    bool fails;
    bool settled; /* nothing was read since the last settle */
};

uint64_t language_start(uint64_t key)
{
    return toy_read(toy_start() ^ key, 1);
}

uint64_t language_read(uint64_t place, int32_t token)
{
    return toy_read(place, token);
}

static bool is_eos(const struct sched_config *c, int32_t token)
{
    for (int32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] == token) {
            return true;
        }
    }
    return false;
}

/* An id that may always come next. */
static int32_t way_on(uint64_t place, const struct sched_config *c)
{
    int32_t t = (int32_t)(place % (uint64_t)c->vocab);

    while (is_eos(c, t)) {
        t = (t + 1) % c->vocab;
    }
    return t;
}

/* Whether there is no choice: one token may come next, and no end. */
static bool is_forced(uint64_t place)
{
    return place >> 30 & 1;
}

bool language_allows(uint64_t place, int32_t token, const struct sched_config *c)
{
    if (is_forced(place)) {
        return token == way_on(place, c);
    }
    if (is_eos(c, token)) {
        return place >> 8 & 1;
    }
    return toy_read(place, token) % 4 == 0 || token == way_on(place, c);
}

bool language_ended(uint64_t place)
{
    return place >> 20 & 1 ? place % 7 == 0 : false;
}

bool language_fails(uint64_t place)
{
    return place % 101 == 0;
}

/* ---- the fake constraint ---- */

static int fake_fork(struct constraint **ret, const struct constraint *c, struct err *e)
{
    (void)e;
    struct constraint *made = malloc(sizeof(*made));
    if (!made) {
        return ERR_NOMEM;
    }
    *made = *c;
    n_states++;
    *ret = made;
    return 0;
}

static void fake_free(struct constraint *c)
{
    n_states--;
    free(c);
}

static int fake_mask(struct constraint *c, uint32_t *mask)
{
    if (c->fails && language_fails(c->place)) {
        return ERR_FULL;
    }
    for (int32_t t = 0; t < c->config->vocab; t++) {
        if (language_allows(c->place, t, c->config)) {
            mask[t / 32] |= UINT32_C(1) << t % 32;
        }
    }
    return c->settled ? 0 : ERR_INVALID;
}

static int fake_accept(struct constraint *c, int32_t token)
{
    if (language_ended(c->place) || !language_allows(c->place, token, c->config)) {
        return ERR_INVALID;
    }
    c->place = language_read(c->place, token);
    c->settled = false;
    return 0;
}

static void fake_settle(struct constraint *c)
{
    c->settled = true;
}

static bool fake_ended(struct constraint *c)
{
    return language_ended(c->place);
}

/* Some are wrong, as where a model writes the same bytes in other tokens. */
static int32_t fake_forced(struct constraint *c, int32_t *ret, int32_t max)
{
    uint64_t place = c->place;
    int32_t n = 0;

    while (n < max && is_forced(place) && !language_ended(place)) {
        ret[n] = way_on(place, c->config);
        place = language_read(place, ret[n]);
        ret[n] = place % 31 == 0 ? (ret[n] + 1) % c->config->vocab : ret[n];
        n++;
    }
    return n;
}

static const struct constraint_ops FAKE = {.fork = fake_fork,
                                           .free = fake_free,
                                           .mask = fake_mask,
                                           .accept = fake_accept,
                                           .settle = fake_settle,
                                           .ended = fake_ended,
                                           .forced = fake_forced};

struct constraint_node *language_node(uint64_t key, bool fails, const struct sched_config *c)
{
    struct constraint start = {.config = c, .place = language_start(key), .fails = fails}, *state;
    struct constraint_node *n;
    struct err e;

    return fake_fork(&state, &start, &e) == 0 && constraint_node_new(&n, &FAKE, state, &e) == 0
               ? n
               : NULL;
}

int64_t language_states(void)
{
    return n_states;
}
