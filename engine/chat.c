/* The chat side of the engine: the model's template, and the format in which the model
 * writes tool calls and reasoning. */
#include <string.h>

#include "engine/engine_state.h"
#include "models/chat/chat_template.h"

/* ---- the template ---- */

static bool mentions(const struct engine *e, const char *word)
{
    size_t len;
    const char *text = chat_template_text(e->chat, &len);

    return text && memmem(text, len, word, strlen(word));
}

int engine_chat_open(struct engine *e, const char *name, struct err *err)
{
    struct engine_chat *c = &e->chat_abilities;
    const struct chat_caps *caps = chat_template_caps(e->chat);
    const struct chat_format *f = name ? chat_format_find(name) : chat_template_format(e->chat);

    if (!f) {
        return err_set_param(err, ERR_INVALID, "chat_format",
                             "chat_format '%.40s' is not known; there are %s", name,
                             chat_format_names());
    }
    e->chat_format = f;
    *c = (struct engine_chat){
        .wants_parts = chat_template_wants_parts(e->chat),
        .knows_developer = chat_template_knows_developer(e->chat),
        .knows_tools = caps->tools,
        .knows_calls = caps->calls,
        .object_arguments = caps->arguments,
        .null_content = caps->null,
        .thinking = mentions(e, ".thinking") && !mentions(e, "reasoning_content"),
        .reasons = chat_format_reasons(f),
        .calls = chat_format_calls(f),
        .format = chat_format_name(f),
        .id_chars = chat_format_id_chars(f),
    };
    return 0;
}

void engine_chat(const struct engine *e, struct engine_chat *ret)
{
    *ret = e->chat_abilities;
    ret->missing = chat_template_missing(e->chat);
    ret->skips_vision = e->skips_vision;
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
    return e->chat_format
               ? chat_format_grammar(e->chat_format, t, answer, reasoning, out, ret_needed, err)
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

bool engine_chat_parser_reasoning(const struct chat_parser *p)
{
    return chat_parser_reasoning(p);
}

size_t engine_chat_parser_bytes(const struct chat_parser *p)
{
    return chat_parser_bytes(p);
}
