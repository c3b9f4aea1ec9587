/* Templates and conversations from anyone: a template is read or refused with one
 * sentence, a rendering ends inside its limits. The input is a template, a NUL and the
 * JSON of its variables; without a NUL a fixed conversation is taken. One that begins
 * with a '{' and a quote is tokenizer_config.json instead. covers:
 * models/chat/chat_template.c models/chat/jinja_lex.c models/chat/jinja_parse.c
 * models/chat/jinja_expr.c models/chat/jinja_eval.c models/chat/jinja_run.c
 * models/chat/jinja_value.c models/chat/jinja_text.c models/chat/jinja_strings.c
 * models/chat/jinja_filters.c models/chat/jinja_tests.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/base/limits.h"
#include "models/chat/chat_template.h"

#define CHECK(x)                                                           \
    do {                                                                   \
        if (!(x)) {                                                        \
            fprintf(stderr, "fuzz_chat_template: %s does not hold\n", #x); \
            abort();                                                       \
        }                                                                  \
    } while (0)

static const char conversation[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\" Be kind. \"},{\"role\":\"user\","
    "\"content\":\"\\u00e9 x\"},{\"role\":\"assistant\",\"content\":[{\"type\":\"text\","
    "\"text\":\"yes\"}],\"n\":1.5}],\"add_generation_prompt\":true}";

/* ---- tokenizer_config.json, in a directory of its own ---- */

static char folder[] = "/tmp/fuzz_chat_template.XXXXXX", file[64];

static void remove_folder(void)
{
    unlink(file);
    rmdir(folder);
}

static void open_config(const uint8_t *data, size_t size)
{
    struct chat_template *t;
    struct err e = {0};
    struct buf out;

    if (!file[0]) {
        CHECK(mkdtemp(folder));
        snprintf(file, sizeof(file), "%s/tokenizer_config.json", folder);
        atexit(remove_folder);
    }
    FILE *f = fopen(file, "w");
    CHECK(f && fwrite(data, 1, size, f) == size && fclose(f) == 0);
    if (chat_template_open(&t, folder, NULL, &e) < 0) {
        CHECK(e.text[0]);
        return;
    }
    buf_init(&out, LIMIT_TEMPLATE_OUTPUT_BYTES);
    CHECK(chat_template_render(t, conversation, sizeof(conversation) - 1, &out, &e) <= 0);
    CHECK(!chat_template_broken(t) || chat_template_missing(t));
    (void)(chat_template_wants_parts(t) || chat_template_knows_developer(t));
    buf_release(&out);
    chat_template_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct chat_template *t;
    struct err e = {0};

    if (size > 2 && data[0] == '{' && data[1] == '"') {
        open_config(data, size);
        return 0;
    }
    struct buf out;
    const char *text = (const char *)data, *nul = size ? memchr(data, 0, size) : NULL;
    size_t len = nul ? (size_t)(nul - text) : size;
    CHECK(chat_template_new(&t, size ? text : "", len, "\"bos_token\":\"<s>\",", &e) == 0);
    buf_init(&out, LIMIT_TEMPLATE_OUTPUT_BYTES);
    const char *context = nul ? nul + 1 : conversation;
    int rc =
        chat_template_render(t, context, nul ? size - len - 1 : sizeof(conversation) - 1, &out, &e);
    CHECK(rc <= 0);
    CHECK(rc == 0 || (e.code == rc && e.text[0]));
    CHECK(!chat_template_missing(t) || rc == ERR_UNSUPPORTED);
    CHECK(!chat_template_broken(t) || chat_template_missing(t));
    (void)(chat_template_wants_parts(t) || chat_template_knows_developer(t));
    buf_release(&out);
    chat_template_free(t);
    return 0;
}
