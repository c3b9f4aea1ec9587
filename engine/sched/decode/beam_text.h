/* Stop strings inside a beam search: what the text of each live beam looks like to
 * them.
 *
 * The output side turns tokens into text and looks for stop strings after the fact,
 * which is too late for beams: a hypothesis that ends in one must be scored as
 * finished, and its place go to another beam. So the engine's thread decodes the
 * candidates of such searches, with the same detokenizer and automata as emit.c, which
 * therefore cuts the text at the same token. Searches without stop strings have none of
 * this.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_BEAM_TEXT_H
#define QUIRE_ENGINE_SCHED_DECODE_BEAM_TEXT_H

#include "engine/request.h"
#include "engine/sched/decode/stops.h"
#include "models/tokenizer/tokenizer.h"

/* As far as the next token needs it. */
struct text_state {
    struct detokenizer detok;
    struct stop_state stop;
};

/* In the memory of a group that has started (sched_start.c). */
struct beam_text {
    const struct stop_set *stops;
    int32_t min_tokens;
    struct buf *piece;        /* scratch, of all searches: what one token adds */
    struct text_state tried;  /* looked at last */
    struct text_state *live;  /* [width] by beam */
    struct text_state *saved; /* [width] by survivor */
};

/* Memory for what one token adds to a text, whichever it is: the buffer does not grow
 * afterwards. `t` NULL: none. */
int beam_text_reserve(struct buf *piece, const struct tokenizer *t, struct err *e);
/* Where the beams' texts begin: behind the prompt's, if that is part of them, which
 * takes a walk over the prompt. NULL through ret for a request without stop strings;
 * else freed by the caller. */
int beam_text_start(struct detokenizer **ret, const struct request *r, const struct tokenizer *t,
                    struct err *e);
/* The text of beam `from` and then `token`, its n_out-th; with `last` nothing follows.
 * True: a stop string ends in it. */
bool beam_text_ends(struct beam_text *t, int32_t from, int32_t token, int32_t n_out, bool last);
/* The text looked at last is that of survivor `k`; survivor k becomes beam `to`. */
void beam_text_keep(struct beam_text *t, int32_t k);
void beam_text_move(struct beam_text *t, int32_t k, int32_t to);

#endif
