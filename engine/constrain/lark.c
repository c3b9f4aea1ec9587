#include "engine/constrain/builder.h"
sym_id lark_build(struct grammar_builder *b, const char *text, size_t len){(void)text;(void)len;grammar_build_fail(b, ERR_UNSUPPORTED,"lark");return 0;}
