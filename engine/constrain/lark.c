#include "engine/constrain/builder.h"
sym_id lark_build(struct grammar_builder *b, const char *text, size_t len){(void)text;(void)len;grammar_build_fail(b, ERR_UNSUPPORTED,"lark");return 0;}
sym_id json_schema_build(struct grammar_builder *b, const char *schema, size_t len){(void)schema;(void)len;grammar_build_fail(b, ERR_UNSUPPORTED,"GRAMMAR_JSON_SCHEMA: this build has no compiler of JSON Schema");return 0;}
