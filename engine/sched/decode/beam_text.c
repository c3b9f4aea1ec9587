#include "engine/sched/decode/beam_text.h"

#include <stdlib.h>

int beam_text_reserve(struct buf *piece, const struct tokenizer *t, struct err *e)
{
    /* A space, and three bytes (U+FFFD) for each byte that is not part of a character,
     * pending ones included. */
    size_t longest = t ? tokenizer_longest(t) : 0;
    size_t most = 1 + 3 * (longest + sizeof(((struct detokenizer *)0)->pending));

    buf_init(piece, most);
    return buf_reserve(piece, most) < 0 ? err_nomem(e, "beams' texts") : 0;
}

int beam_text_start(struct detokenizer **ret, const struct request *r, const struct tokenizer *t,
                    struct err *e)
{
    const struct gen_params *p = &r->params;
    struct buf piece;
    int rc = 0;

    *ret = NULL;
    if (p->n_stop == 0 || !t) {
        return 0;
    }
    struct detokenizer *d = malloc(sizeof(*d));
    if (!d) {
        return err_nomem(e, "a beam search's texts");
    }
    detokenizer_init(d, t, p->skip_special, p->spaces_between_special);
    d->started = !p->echo;
    buf_init(&piece, (size_t)1 << 20);
    for (int32_t i = 0; p->echo && i < r->n_prompt && rc == 0; i++) {
        buf_clear(&piece);
        rc = detokenizer_push(d, r->prompt[i], &piece);
    }
    buf_release(&piece);
    if (rc < 0) {
        free(d);
        return err_nomem(e, "a beam search's texts");
    }
    *ret = d;
    return 0;
}

bool beam_text_ends(struct beam_text *t, int32_t from, int32_t token, int32_t n_out, bool last)
{
    int32_t which;

    t->tried = t->live[from];
    buf_clear(t->piece);
    if (detokenizer_push(&t->tried.detok, token, t->piece) == 0 && last) {
        detokenizer_finish(&t->tried.detok, t->piece);
    }
    return t->piece->len > 0 && stop_feed(t->stops, &t->tried.stop, t->piece->data, t->piece->len,
                                          n_out > t->min_tokens, &which) >= 0;
}

void beam_text_keep(struct beam_text *t, int32_t k)
{
    t->saved[k] = t->tried;
}

void beam_text_assign(struct beam_text *t, int32_t k, int32_t to)
{
    t->live[to] = t->saved[k];
}
