/* Stop strings inside a beam search: what the text of each live beam looks like to them.
 *
 * The output side turns tokens into text and looks for stop strings after the fact, which is too late for beams: a hypothesis
 * that ends in one must be scored as finished, and its place go to another beam. So the engine's thread decodes
 * the candidates of such searches, with the same detokenizer and automata as emit.c, which therefore cuts the text at
 * the same token. Searches without stop strings have none of this.
 */
#ifndef QUIRE_ENGINE_BEAM_TEXT_H
#define QUIRE_ENGINE_BEAM_TEXT_H

#include "engine/engine.h"

struct tokenizer;
struct beam_text;

/* NULL through ret_ for a request without stop strings. All memory is taken here. */
int beam_text_new(struct beam_text **ret, const struct request *r, const struct tokenizer *t, struct err *e);
void beam_text_free(struct beam_text *t);

/* The text of beam `from` and then `token`, its n_out-th; with `last` nothing follows. True: a stop string ends in it. */
bool beam_text_ends(struct beam_text *t, int32_t from, int32_t token, int32_t n_out, bool last);
/* The text looked at last is that of survivor `k`; survivor k becomes beam `to`. */
void beam_text_keep(struct beam_text *t, int32_t k);
void beam_text_move(struct beam_text *t, int32_t k, int32_t to);

#endif
