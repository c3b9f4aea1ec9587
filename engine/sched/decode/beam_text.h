/* Stop strings inside a beam search: matched against the text of each live beam.
 *
 * For samples the output side detokenizes and finds stop strings after the commit. That
 * is too late for beams: a hypothesis that ends in a stop string must be scored as
 * finished, and another beam takes its place. So for such searches the engine's thread
 * detokenizes the candidates, with the same detokenizer and automata as emit.c, which
 * therefore cuts the text at the same token. Searches without stop strings have no
 * struct beam_text.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_BEAM_TEXT_H
#define QUIRE_ENGINE_SCHED_DECODE_BEAM_TEXT_H

#include "engine/request.h"
#include "engine/sched/decode/stops.h"
#include "models/tokenizer/tokenizer.h"

/* Where a beam's text ends, as far as the next token depends on it. */
struct text_state {
    struct detokenizer detok; /* incomplete characters */
    struct stop_state stop;   /* incomplete stop strings */
};

/* In the memory of a group that has started (sched_start.c). */
struct beam_text {
    const struct stop_set *stops; /* the request's */
    int32_t min_tokens;           /* stop strings do not count before */
    struct buf *piece;            /* scratch, shared by all searches: what one token adds */
    struct text_state tried;      /* of the last candidate given to beam_text_ends */
    struct text_state *live;      /* [width] by sequence */
    struct text_state *saved;     /* [width] by next live beam */
};

/* Reserve `piece` for the longest text that one token can add; it does not grow
 * afterwards. `t` NULL: no text. */
int beam_text_reserve(struct buf *piece, const struct tokenizer *t, struct err *e);
/* The detokenizer at the start of the beams' texts, behind the prompt, which it walks
 * if the request echoes it. *ret is owned by the caller; NULL for a request without
 * stop strings. */
int beam_text_start(struct detokenizer **ret, const struct request *r, const struct tokenizer *t,
                    struct err *e);
/* Whether `token`, as the n_out-th one after beam `from`, completes a stop string;
 * `last`: no token follows. */
bool beam_text_ends(struct beam_text *t, int32_t from, int32_t token, int32_t n_out, bool last);
/* The last candidate given to beam_text_ends becomes the k-th of the next live beams;
 * that one is the sequence `to`. */
void beam_text_keep(struct beam_text *t, int32_t k);
void beam_text_assign(struct beam_text *t, int32_t k, int32_t to);

#endif
