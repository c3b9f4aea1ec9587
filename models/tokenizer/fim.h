/* Fill-in-the-middle: the tokens by which a code model is told what stands before a gap
 * and what behind it. The prompt is
 *
 *     <prefix> text before <suffix> text behind <middle>
 *
 * and what the model goes on with belongs into the gap (Bavarian et al., "Efficient
 * Training of Language Models to Fill in the Middle", 2022; "prefix, suffix, middle"
 * order, which all these families were trained on).
 */
#ifndef QUIRE_MODELS_TOKENIZER_FIM_H
#define QUIRE_MODELS_TOKENIZER_FIM_H

#include "models/tokenizer/tokenizer.h"

struct fim {
    int32_t prefix, suffix, middle;
    int32_t end; /* ends the gap where that is not the end of sequence; -1: none */
};
/* False where the vocabulary has no such tokens: then `ret` is untouched. */
bool fim_find(const struct tokenizer *t, struct fim *ret);

#endif
