/* Fill-in-the-middle: the tokens that tell a code model which text is before a gap and
 * which is after it. The prompt is
 *
 *     <prefix> text before <suffix> text after <middle>
 *
 * and the model's continuation fills the gap (Bavarian et al., "Efficient Training of
 * Language Models to Fill in the Middle", 2022; in the order "prefix, suffix, middle",
 * which all supported families were trained on).
 */
#ifndef QUIRE_MODELS_TOKENIZER_FIM_H
#define QUIRE_MODELS_TOKENIZER_FIM_H

#include "models/tokenizer/tokenizer.h"

struct fim {
    int32_t prefix, suffix, middle; /* token ids */
    int32_t end;                    /* ends the gap's text; -1: the end-of-sequence token does */
};
/* False if the vocabulary has no such tokens; `ret` is untouched then. */
bool fim_find(const struct tokenizer *t, struct fim *ret);

#endif
