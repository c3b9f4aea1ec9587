/* The chat side of the engine: the model's template, and the format in which the model
 * writes tool calls and reasoning.
 *
 * Templates differ in what they take, and do not say so. At start, short chats are
 * rendered: what appears in the prompt is what the template knows. */
#include <string.h>

#include "engine/engine_state.h"
#include "models/chat/chat_template.h"

/* ---- what the template can render ---- */

/* Words that no template contains by itself. */
#define TOOL "probe_tool_name"
#define CALL "probe_call_name"
#define KEY "probe_argument"

#define AS_OBJECT "{\"" KEY "\":\"7\"}"
#define AS_TEXT "\"{\\\"" KEY "\\\": \\\"7\\\"}\""

static void put_content(struct buf *b, bool parts, const char *text)
{
    buf_printf(b, parts ? "[{\"type\":\"text\",\"text\":\"%s\"}]" : "\"%s\"", text);
}

/* A chat with a tool and, unless `arguments` is NULL, an answered call. */
static void put_chat(struct buf *b, bool parts, const char *content, const char *arguments)
{
    buf_puts(b, "{\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"" TOOL
                "\",\"description\":\"a tool\",\"parameters\":{\"type\":\"object\","
                "\"properties\":{}}}}],\"add_generation_prompt\":true,"
                "\"messages\":[{\"role\":\"user\",\"content\":");
    put_content(b, parts, "hello");
    if (arguments) {
        buf_printf(b,
                   "},{\"role\":\"assistant\",\"content\":%s,\"tool_calls\":[{\"id\":"
                   "\"call00001\",\"type\":\"function\",\"function\":{\"name\":\"" CALL
                   "\",\"arguments\":%s}}]},{\"role\":\"tool\",\"name\":\"" CALL
                   "\",\"tool_call_id\":\"call00001\",\"content\":",
                   content, arguments);
        put_content(b, parts, "done");
    }
    buf_puts(b, "}]}");
}

/* Whether the template renders such a chat, with `word` in the prompt. Arguments that
 * appear as Python would print them are not rendered: the template expects text. */
static bool renders(const struct engine *e, const char *content, const char *arguments,
                    const char *word)
{
    struct buf chat, out;

    buf_init(&chat, 4096);
    buf_init(&out, LIMIT_TEMPLATE_OUTPUT_BYTES);
    put_chat(&chat, e->chat_abilities.wants_parts, content, arguments);
    int rc = chat.failed ? ERR_NOMEM
                         : chat_template_render(e->chat, chat.data, chat.len, &out, NULL);
    bool found = rc == 0 && out.data && strstr(out.data, word) &&
                 !strstr(out.data, "'" KEY "'");
    buf_release(&chat);
    buf_release(&out);
    return found;
}

static void probe(const struct engine *e, struct engine_chat *c)
{
    bool object_null = renders(e, "null", AS_OBJECT, KEY),
         text_null = renders(e, "null", AS_TEXT, KEY);

    c->knows_tools = renders(e, NULL, NULL, TOOL);
    c->object_arguments = object_null || renders(e, "\"\"", AS_OBJECT, KEY);
    c->knows_calls = c->object_arguments || text_null || renders(e, "\"\"", AS_TEXT, KEY);
    c->null_content = c->object_arguments ? object_null : text_null;
}

static bool mentions(const struct engine *e, const char *word)
{
    size_t len;
    const char *text = chat_template_text(e->chat, &len);

    return text && memmem(text, len, word, strlen(word));
}

int engine_chat_open(struct engine *e, const char *name, struct err *err)
{
    struct engine_chat *c = &e->chat_abilities;
    size_t len;
    const char *text = chat_template_text(e->chat, &len);

    e->chat_format =
        name ? chat_format_find(name) : chat_format_of_template(text ? text : "", len);
    if (!e->chat_format) {
        return err_set_param(err, ERR_INVALID, "chat_format",
                             "chat_format '%.40s' is not known; there are %s", name,
                             chat_format_names());
    }
    c->wants_parts = chat_template_wants_parts(e->chat);
    c->knows_developer = chat_template_knows_developer(e->chat);
    c->thinking = mentions(e, ".thinking") && !mentions(e, "reasoning_content");
    c->reasons = chat_format_reasons(e->chat_format);
    c->calls = chat_format_calls(e->chat_format);
    c->format = chat_format_name(e->chat_format);
    c->id_chars = chat_format_id_chars(e->chat_format);
    if (!chat_template_missing(e->chat)) {
        probe(e, c);
    }
    return 0;
}

void engine_chat(const struct engine *e, struct engine_chat *ret)
{
    *ret = e->chat_abilities;
    ret->missing = chat_template_missing(e->chat);
}

int engine_render_chat(const struct engine *e, const char *context, size_t len, struct buf *out,
                       struct err *err)
{
    return chat_template_render(e->chat, context, len, out, err);
}

/* ---- the format of calls and reasoning ---- */

bool engine_chat_opens_reasoning(const struct engine *e, const char *prompt, size_t len)
{
    return e->chat_format && chat_format_opens_reasoning(e->chat_format, prompt, len);
}

static int no_format(struct err *err)
{
    return err_set(err, ERR_UNSUPPORTED, "the model has no chat format");
}

int engine_chat_grammar(const struct engine *e, const struct chat_tools *t, const char *answer,
                        bool reasoning, struct buf *out, bool *ret_needed, struct err *err)
{
    return e->chat_format ? chat_format_grammar(e->chat_format, t, answer, reasoning, out,
                                                ret_needed, err)
                          : no_format(err);
}

int engine_chat_parser_new(const struct engine *e, struct chat_parser **ret,
                           const struct chat_tools *tools, bool reasoning, struct err *err)
{
    return e->chat_format ? chat_parser_new(ret, e->chat_format, tools, reasoning, err)
                          : no_format(err);
}

int engine_chat_parser_feed(struct chat_parser *p, const char *text, size_t len, chat_event_fn *fn,
                            void *arg)
{
    return chat_parser_feed(p, text, len, fn, arg);
}

int engine_chat_parser_end(struct chat_parser *p, chat_event_fn *fn, void *arg)
{
    return chat_parser_end(p, fn, arg);
}

void engine_chat_parser_free(struct chat_parser *p)
{
    chat_parser_free(p);
}

size_t engine_chat_parser_bytes(const struct chat_parser *p)
{
    return chat_parser_bytes(p);
}
