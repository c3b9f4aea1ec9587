/* Templates and conversations from anyone: a template is read or refused with one sentence, a rendering ends inside its limits.
 * The input is a template, a NUL and the JSON of its variables; without a NUL a fixed conversation is taken.
 * covers: models/chat_template.c models/jinja_lex.c models/jinja_parse.c models/jinja_expr.c models/jinja_eval.c models/jinja_run.c models/jinja_value.c models/jinja_text.c models/jinja_strings.c models/jinja_filters.c models/jinja_tests.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/limits.h"
#include "models/chat_template.h"

#define CHECK(x)                                                           \
    do {                                                                   \
        if (!(x)) {                                                        \
            fprintf(stderr, "fuzz_chat_template: %s does not hold\n", #x); \
            abort();                                                       \
        }                                                                  \
    } while (0)

static const char conversation[] = "{\"messages\":[{\"role\":\"system\",\"content\":\" Be kind. \"},{\"role\":\"user\","
                                   "\"content\":\"\\u00e9 x\"},{\"role\":\"assistant\",\"content\":[{\"type\":\"text\","
                                   "\"text\":\"yes\"}],\"n\":1.5}],\"add_generation_prompt\":true}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct chat_template *t;
    struct err e = {0};
    struct buf out;
    const char *text = (const char *)data, *nul = size ? memchr(data, 0, size) : NULL;
    size_t len = nul ? (size_t)(nul - text) : size;
    CHECK(chat_template_new(&t, size ? text : "", len, "\"bos_token\":\"<s>\",", &e) == 0);
    buf_init(&out, LIMIT_TEMPLATE_OUTPUT_BYTES);
    const char *context = nul ? nul + 1 : conversation;
    int rc = chat_template_render(t, context, nul ? size - len - 1 : sizeof(conversation) - 1, &out, &e);
    CHECK(rc <= 0);
    CHECK(rc == 0 || (e.code == rc && e.text[0]));
    CHECK(!chat_template_missing(t) || rc == ERR_UNSUPPORTED);
    buf_release(&out);
    chat_template_free(t);
    return 0;
}
