/* Tools for a template that has no place for them: lines in front of its text, in its
 * own language, that give it other messages instead. The functions stand in the system
 * message (or, where the template has none, in the first message), calls become text
 * of the assistant in the form of "hermes", and what tools answered the next message of
 * the user. Without tools and calls the messages are what they were. */
#include <stdlib.h>
#include <string.h>

#include "models/chat/chat_template.h"

/* quire.list: the messages that the template gets; quire.answers: what tools have
 * answered since the last of them. */
static const char BEFORE[] =
    "{%- set quire = namespace(list=[], tools='', calls='', answers='') -%}"
    "{%- if tools -%}"
    "{%- set quire.tools = 'You may call functions to answer. They are, with the JSON Schemas "
    "of their arguments:\\n<tools>' -%}"
    "{%- for t in tools -%}"
    "{%- set quire.tools = quire.tools ~ '\\n' ~ (t.function | tojson) -%}"
    "{%- endfor -%}"
    "{%- set quire.tools = quire.tools ~ '\\n</tools>\\n"
    "For each call write one JSON object between marks and nothing else:\\n"
    "<tool_call>\\n{\"name\": \"the function\\'s name\", \"arguments\": {its arguments}}\\n"
    "</tool_call>' -%}"
    "{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{%- set quire.answers = quire.answers ~ '<tool_response>\\n' ~ m.content ~ "
    "'\\n</tool_response>\\n' -%}"
    "{%- elif quire.answers and m.role == 'user' -%}"
    "{%- set quire.list = quire.list + [{'role': 'user', 'content': quire.answers ~ m.content}] -%}"
    "{%- set quire.answers = '' -%}"
    "{%- else -%}"
    "{%- if quire.answers -%}"
    "{%- set quire.list = quire.list + [{'role': 'user', 'content': quire.answers}] -%}"
    "{%- set quire.answers = '' -%}"
    "{%- endif -%}"
    "{%- set quire.calls = '' -%}"
    "{%- for c in m.tool_calls or [] -%}"
    "{%- set quire.calls = quire.calls ~ '\\n<tool_call>\\n{\"name\": ' ~ "
    "(c.function.name | tojson) ~ ', \"arguments\": ' ~ (c.function.arguments | tojson) ~ "
    "'}\\n</tool_call>' -%}"
    "{%- endfor -%}"
    "{%- if quire.calls -%}"
    "{%- set quire.list = quire.list + [{'role': m.role, 'content': ((m.content or '') ~ "
    "quire.calls) | trim}] -%}"
    "{%- else -%}"
    "{%- set quire.list = quire.list + [m] -%}"
    "{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if quire.answers -%}"
    "{%- set quire.list = quire.list + [{'role': 'user', 'content': quire.answers}] -%}"
    "{%- endif -%}";

/* Where the functions go: behind the first message if it is the system's, else into a
 * system message of their own; or in front of what the first message says. */
static const char INTO_SYSTEM[] =
    "{%- if quire.tools and quire.list and quire.list[0].role == 'system' -%}"
    "{%- set quire.list = [{'role': 'system', 'content': quire.list[0].content ~ '\\n\\n' ~ "
    "quire.tools}] + quire.list[1:] -%}"
    "{%- elif quire.tools -%}"
    "{%- set quire.list = [{'role': 'system', 'content': quire.tools}] + quire.list -%}"
    "{%- endif -%}";
static const char INTO_FIRST[] =
    "{%- if quire.tools and quire.list -%}"
    "{%- set quire.list = [{'role': quire.list[0].role, 'content': quire.tools ~ '\\n\\n' ~ "
    "quire.list[0].content}] + quire.list[1:] -%}"
    "{%- endif -%}";
static const char AFTER[] = "{%- set messages = quire.list -%}";

int chat_template_add_tools(struct chat_template **t, struct err *e)
{
    struct chat_template *with;
    struct buf text;
    size_t len;
    const char *own = chat_template_text(*t, &len);

    if (chat_template_missing(*t) || chat_template_caps(*t)->tools) {
        return 0;
    }
    if (chat_template_wants_parts(*t)) {
        return err_set_param(e, ERR_UNSUPPORTED, "generic_tools",
                             "generic_tools: the model's chat template takes content as lists of "
                             "parts");
    }
    buf_init(&text,
             len + sizeof(BEFORE) + sizeof(INTO_SYSTEM) + sizeof(INTO_FIRST) + sizeof(AFTER));
    buf_puts(&text, BEFORE);
    buf_puts(&text, chat_template_caps(*t)->system ? INTO_SYSTEM : INTO_FIRST);
    buf_puts(&text, AFTER);
    buf_append(&text, own, len);
    int rc = text.failed
                 ? err_nomem(e, "a chat template")
                 : chat_template_new(&with, text.data, text.len, chat_template_specials(*t), e);
    buf_release(&text);
    if (rc == 0) {
        chat_template_free(*t);
        *t = with;
    }
    return rc;
}
