/* Refuses requests that ban every first token, before any work is done for them. A
 * choice that runs out of allowed tokens later (by a bad word of several tokens) ends
 * at commit: decode.c, beam.c. */
#include <math.h>
#include <stdlib.h>

#include "engine/sched/sched.h"
#include "engine/sched/seq.h"

/* The set of tokens that must not come first. */
struct bans {
    uint64_t *bit;    /* [vocab / 64, rounded up] one bit a token */
    int32_t vocab, n; /* n: bits that are set */
};

static void ban(struct bans *b, int32_t token)
{
    if (token < 0 || token >= b->vocab) { /* a model's end token may lie outside */
        return;
    }
    uint64_t mask = UINT64_C(1) << (token % 64);
    b->n += (b->bit[token / 64] & mask) == 0;
    b->bit[token / 64] |= mask;
}

static bool is_banned(const struct bans *b, int32_t token)
{
    return b->bit[token / 64] >> (token % 64) & 1;
}

/* Ban what pack.c bans for a sequence without generated tokens. Returns a field that
 * bans some. */
static const char *ban_all(struct bans *b, const struct gen_params *p,
                           const struct word_list *words, const struct sched_config *c)
{
    const char *field = NULL;

    for (int32_t i = 0; p->min_tokens > 0 && !p->ignore_eos && i < c->n_eos; i++) {
        ban(b, c->eos[i]);
        field = "min_tokens";
    }
    for (int32_t i = 0; p->min_tokens > 0 && i < p->n_stop_token; i++) {
        ban(b, p->stop_token[i]);
        field = "min_tokens";
    }
    for (int32_t i = 0; words && i < words->n; i++) {
        if (words->first[i + 1] - words->first[i] == 1) {
            ban(b, words->token[words->first[i]]);
            field = "bad_words";
        }
    }
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (p->bias[i].bias == -INFINITY) {
            ban(b, p->bias[i].token);
            field = "logit_bias";
        }
    }
    return field;
}

int group_check_allowed(const struct request *r, const struct word_list *words,
                        const struct sched_config *c, struct err *e)
{
    const struct gen_params *p = &r->params;
    int64_t most = (int64_t)c->n_eos + p->n_stop_token + (words ? words->n : 0) + p->n_bias;
    struct bans b = {.vocab = c->vocab};

    if (p->max_tokens == 0 || most == 0 || (p->n_allowed == 0 && most < c->vocab)) {
        return 0;
    }
    b.bit = calloc((size_t)div_ceil(c->vocab, 64), sizeof(*b.bit));
    if (!b.bit) {
        return err_nomem(e, "a request");
    }
    const char *field = ban_all(&b, p, words, c);
    int32_t i = 0;
    while (i < p->n_allowed && is_banned(&b, p->allowed_token[i])) {
        i++;
    }
    bool none = p->n_allowed > 0 ? i == p->n_allowed : b.n == c->vocab;
    free(b.bit);
    if (!none) {
        return 0;
    }
    if (p->n_allowed > 0) {
        return err_set_param(
            e, ERR_INVALID, "allowed_token_ids",
            "allowed_token_ids: each of the %d ids is banned, at least as the first "
            "token, by logit_bias, bad_words, or min_tokens and the ids that end a text",
            p->n_allowed);
    }
    return err_set_param(
        e, ERR_INVALID, field,
        "each of the vocabulary's %d tokens is banned, at least as the first one, by "
        "logit_bias, bad_words, or min_tokens and the ids that end a text",
        c->vocab);
}
