#include "engine/beam_text.h"

#include <stdlib.h>

#include "engine/stops.h"
#include "models/tokenizer.h"

/* One push makes a few characters at most; more is taken when a vocabulary has longer tokens. */
/* What one token adds at most: a space, and three bytes for each that is no part of a
 * character, those held back too. */
static size_t piece_bytes(const struct tokenizer *t)
{
    return 1 + 3 * (tokenizer_longest(t) + sizeof(((struct detokenizer *)0)->pending));
}

/* As far as the next token needs it. */
struct text_state {
    struct detokenizer detok;
    struct stop_state stop;
};

struct beam_text {
    struct stop_set *stops;
    int32_t min_tokens;
    struct buf piece;         /* scratch: what one token adds */
    struct text_state tried;  /* looked at last */
    struct text_state *live;  /* [width] by beam */
    struct text_state *saved; /* [width] by survivor */
};

/* Where a beam's text begins: behind the prompt's, if that is part of it. */
static int start(struct beam_text *t, const struct request *r, const struct tokenizer *tokenizer)
{
    const struct gen_params *p = &r->params;
    struct detokenizer *d = &t->live[0].detok;
    detokenizer_init(d, tokenizer, p->skip_special, p->spaces_between_special);
    d->started = !p->echo;
    for (int32_t i = 0; p->echo && i < r->n_prompt; i++) {
        buf_clear(&t->piece);
        if (detokenizer_push(d, r->prompt[i], &t->piece) < 0)
            return ERR_NOMEM;
    }
    return 0;
}

int beam_text_new(struct beam_text **ret, const struct request *r, const struct tokenizer *tokenizer, struct err *e)
{
    const struct gen_params *p = &r->params;
    *ret = NULL;
    if (p->n_stop == 0 || !tokenizer)
        return 0;
    struct beam_text *t = calloc(1, sizeof(*t));
    if (!t)
        return err_nomem(e, "a beam search's texts");
    int rc = stop_set_new(&t->stops, p->stop, p->stop_len, p->n_stop, e);
    t->min_tokens = p->min_tokens;
    t->live = calloc((size_t)p->beam_width, sizeof(*t->live));
    t->saved = calloc((size_t)p->beam_width, sizeof(*t->saved));
    buf_init(&t->piece, (size_t)1 << 20);
    if (rc == 0 &&
        (!t->live || !t->saved || buf_reserve(&t->piece, piece_bytes(tokenizer)) < 0 || start(t, r, tokenizer) < 0))
        rc = err_nomem(e, "a beam search's texts");
    if (rc < 0) {
        beam_text_free(t);
        return rc;
    }
    *ret = t;
    return 0;
}

void beam_text_free(struct beam_text *t)
{
    if (!t)
        return;
    stop_set_free(t->stops);
    buf_release(&t->piece);
    free(t->live);
    free(t->saved);
    free(t);
}

bool beam_text_ends(struct beam_text *t, int32_t from, int32_t token, int32_t n_out, bool last)
{
    int32_t which;
    t->tried = t->live[from];
    buf_clear(&t->piece);
    /* Without memory for the piece it is read as far as it goes: the output side, which has none either, ends the choice. */
    if (detokenizer_push(&t->tried.detok, token, &t->piece) == 0 && last)
        detokenizer_finish(&t->tried.detok, &t->piece);
    return t->piece.len > 0 &&
           stop_feed(t->stops, &t->tried.stop, t->piece.data, t->piece.len, n_out > t->min_tokens, &which) >= 0;
}

void beam_text_keep(struct beam_text *t, int32_t k)
{
    t->saved[k] = t->tried;
}

void beam_text_move(struct beam_text *t, int32_t k, int32_t to)
{
    t->live[to] = t->saved[k];
}
