/* Context-free grammars: whatever the bytes, a sentence of refusal or a grammar whose
 * masks, states and rollbacks agree. Texts that begin with a bracket are also read as a
 * list of choices. max_len: 1024 */
/* covers: engine/constrain/notation/lark.c engine/constrain/notation/choice.c
 * engine/constrain/cfg.c engine/constrain/rows.c engine/constrain/automaton.c
 * engine/constrain/constraint.c */
#include "tests/fuzz/grammar_use.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    bool list = len > 0 && data[0] == '[';

    use_grammar(list ? GRAMMAR_CHOICE : GRAMMAR_LARK, (const char *)data, len);
    return 0;
}
