/* Where texts lead from a config: plain ones, and those of some kinds of bytes.
 *
 * What is asked while the stepper is paused is answered with no, which costs time at
 * most: every answer of no leads to a walk of all, and that ends at the first step
 * which is not made. Such answers are not noted. */
#ifndef QUIRE_ENGINE_CONSTRAIN_MASKS_LEADS_H
#define QUIRE_ENGINE_CONSTRAIN_MASKS_LEADS_H

#include "engine/constrain/automaton.h"

/* Of ASCII, and may stand in a JSON string as it is. */
static inline bool is_plain(int byte)
{
    return byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\';
}

/* The configs that plain characters lead to, into next[CONFIG_NEXT]: how many, or
 * NEXT_DEAD where not all may follow, NEXT_MANY. */
int32_t plain_next(struct stepper *s, int32_t c, int32_t *next);
/* Whether any plain text may follow. It is asked only where a character leads to a
 * config that it leads back to, which leaves out what counts characters; and of those
 * that are found on the way the answer is the same, or is taken to be no. */
bool is_open(struct stepper *s, int32_t c);
/* The same, asked only where it is likely. */
bool is_body(struct stepper *s, int32_t c);
/* Whether any text of so many plain characters may follow, and leads to where all texts
 * of as many lead. (Others, as of words that are counted, have so many configs on the
 * way that a walk takes less.) */
bool has_room(struct stepper *s, int32_t c, int32_t chars);
/* Whether any text of these kinds and of at most `most` bytes may come next: all lead
 * back to the config, or on through as many as there may be characters. */
bool takes(struct stepper *s, int32_t c, uint64_t kinds, int32_t most);

#endif
