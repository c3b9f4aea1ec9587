#include "engine/sched/decode/commit.h"

const char *const NO_NUMBER = "the model's logits for the next token are NaN or infinite";
const char *const IMPOSSIBLE =
    "no next token is allowed: allowed_token_ids, logit_bias, bad_words, "
    "min_tokens and the penalties leave none";

static bool id_in(const int32_t *list, int32_t n, int32_t token)
{
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == token) {
            return true;
        }
    }
    return false;
}

int finish_by_token(const struct sched *s, const struct group *g, int32_t token, int32_t n_out,
                    int32_t *ret_stop_token)
{
    const struct gen_params *p = &g->request->params;
    bool may_stop = n_out > p->min_tokens;

    if (may_stop && !p->ignore_eos && id_in(s->c.eos, s->c.n_eos, token)) {
        return FINISH_STOP;
    }
    if (may_stop && id_in(p->stop_token, p->n_stop_token, token)) {
        *ret_stop_token = token;
        return FINISH_STOP;
    }
    return n_out >= g->max_tokens ? FINISH_LENGTH : FINISH_NONE;
}

void emit_finish(struct delta_out *out, const struct group *g, int32_t choice, int finish,
                 int32_t stop_token, const char *error)
{
    struct delta d = {.request = g->request,
                      .kind = DELTA_FINISH,
                      .choice = choice,
                      .token = -1,
                      .finish = finish,
                      .stop_token = stop_token,
                      .cached_tokens = g->cached_tokens,
                      .error = error};

    out->emit(out, g, &d);
}
