/* Regular expressions: whatever the bytes, a sentence of refusal or a grammar whose
 * masks, states and rollbacks agree. max_len: 128 */
/* covers: engine/constrain/rx/rx.c engine/constrain/rx/rx_parse.c
 * engine/constrain/rx/rx_chars.c engine/constrain/rx/rx_derive.c
 * engine/constrain/masks/mask.c engine/constrain/masks/leads.c
 * engine/constrain/masks/bounds.c */
#include "tests/fuzz/grammar_use.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    use_grammar(GRAMMAR_REGEX, (const char *)data, len);
    return 0;
}
