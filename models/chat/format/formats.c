/* The descriptions of all formats (format.h), and how one is found. The first whose
 * marks a template has is the template's. Where the same parameters would be
 * repeated, a macro holds what several formats share. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "models/chat/format/format.h"

#define THINK .think_open = "<think>", .think_close = "</think>"
#define KEYS .key_name = "name", .key_arguments = "arguments"

/* <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call> */
#define HERMES                                                                           \
    .body = BODY_OBJECT, .call_open = "<tool_call>", .call_close = "</tool_call>", KEYS, \
    .before_call = "\n", .after_call = "\n", .between_calls = "\n"

/* <function=name>\n<parameter=key>\ntext\n</parameter>\n</function> */
#define FUNCTION_TAGS                                                                             \
    .body = BODY_TAGGED, .name_open = "<function=", .name_close = ">", .name_end = "</function>", \
    .key_open = "<parameter=", .key_close = ">", .value_close = "</parameter>", .line = "\n",     \
    .before_call = "\n", .after_call = "\n", .between_calls = "\n"

/* <invoke name="name">\n<parameter name="key">text</parameter>\n</invoke> */
#define INVOKE_TAGS(before)                                                             \
    .body = BODY_TAGGED, .name_open = "<" before "invoke name=\"", .name_close = "\">", \
    .name_end = "</" before "invoke>", .key_open = "<" before "parameter name=\"",      \
    .value_close = "</" before "parameter>", .line = "\n", .before_call = "\n",         \
    .after_call = "\n", .between_calls = "\n"

#define DEEPSEEK_CALLS                                                             \
    .body = BODY_NAMED, .section_open = "<｜tool▁calls▁begin｜>",                  \
    .section_close = "<｜tool▁calls▁end｜>", .call_open = "<｜tool▁call▁begin｜>", \
    .call_close = "<｜tool▁call▁end｜>",                                           \
    .header = {"function<｜tool▁sep｜>", "<｜tool▁sep｜>", "```json"}

#define MISTRAL                                                                \
    .think_open = "[THINK]", .think_close = "[/THINK]", .body = BODY_NAMED,    \
    .call_open = "[TOOL_CALLS]", .header = {"[ARGS]"}, .id_mark = "[CALL_ID]", \
    .name_after = "[ARGS]", .list = true, .late_id = true, .id_chars = 9, KEYS, .key_id = "id"

#define COHERE                                                                                     \
    .think_open = "<|START_THINKING|>", .think_close = "<|END_THINKING|>", .think_anywhere = true, \
    .body = BODY_OBJECT, .section_open = "<|START_ACTION|>", .section_close = "<|END_ACTION|>",    \
    .list = true, .key_id = "tool_call_id", .key_name = "tool_name",                               \
    .key_arguments = "parameters", .ignored_tag = "</co: "

static const struct chat_format FORMATS[] = {
    {.name = "gpt-oss",
     .detect = {"<|channel|>", "<|message|>"},
     .think_open = "<|channel|>analysis<|message|>",
     .think_close = "<|end|>",
     .body = BODY_HARMONY},
    {.name = "kimi-k2",
     .detect = {"<|tool_calls_section_begin|>"},
     THINK,
     .think_calls = true,
     .body = BODY_NAMED,
     .section_open = "<|tool_calls_section_begin|>",
     .section_close = "<|tool_calls_section_end|>",
     .call_open = "<|tool_call_begin|>",
     .call_close = "<|tool_call_end|>",
     .header = {"<|tool_call_argument_begin|>", "functions."},
     .name_before = "functions.",
     .name_after = "<|tool_call_argument_begin|>",
     .name_index = true},
    {.name = "deepseek-v3.2",
     .detect = {"DSML", "function_calls"},
     THINK,
     .think_calls = true,
     INVOKE_TAGS("｜DSML｜"),
     .section_open = "<｜DSML｜function_calls>",
     .section_close = "</｜DSML｜function_calls>",
     .key_close = "\" string=\"",
     .typed = "\">"},
    {.name = "deepseek-v4",
     .detect = {"DSML"},
     THINK,
     .think_calls = true,
     INVOKE_TAGS("｜DSML｜"),
     .section_open = "<｜DSML｜tool_calls>",
     .section_close = "</｜DSML｜tool_calls>",
     .key_close = "\" string=\"",
     .typed = "\">"},
    {.name = "deepseek-r1",
     .detect = {"<｜tool▁calls▁begin｜>", "```json"},
     THINK,
     DEEPSEEK_CALLS,
     .name_before = "function<｜tool▁sep｜>",
     .name_after = "\n```json\n",
     .after_call = "\n```",
     .between_calls = "\n"},
    {.name = "deepseek-v3.1",
     .detect = {"<｜tool▁calls▁begin｜>"},
     THINK,
     DEEPSEEK_CALLS,
     .name_after = "<｜tool▁sep｜>"},
    {.name = "minimax-m2",
     .detect = {"<minimax:tool_call>"},
     THINK,
     .think_calls = true,
     INVOKE_TAGS(""),
     .key_close = "\">",
     .section_open = "<minimax:tool_call>",
     .section_close = "</minimax:tool_call>"},
    {.name = "minimax-m1",
     .detect = {"<tool_calls>", "<end_of_sentence>"},
     THINK,
     .body = BODY_OBJECT,
     .section_open = "<tool_calls>",
     .section_close = "</tool_calls>",
     KEYS,
     .before_call = "\n",
     .after_call = "\n",
     .between_calls = "\n"},
    {.name = "tool-calls-list",
     .detect = {"<tool_calls>["},
     .detect_too = {"<tool_calls>", "[{"},
     THINK,
     .body = BODY_OBJECT,
     .section_open = "<tool_calls>",
     .section_close = "</tool_calls>",
     .list = true,
     KEYS},
    {.name = "glm-4.5",
     .detect = {"<tool_call>", "<arg_key>"},
     THINK,
     .think_calls = true,
     .body = BODY_TAGGED,
     .call_open = "<tool_call>",
     .call_close = "</tool_call>",
     .key_open = "<arg_key>",
     .key_close = "</arg_key>",
     .value_open = "<arg_value>",
     .value_close = "</arg_value>",
     .line = "\n",
     .between_calls = "\n",
     .untyped_json = true},
    {.name = "seed-oss",
     .detect = {"<seed:tool_call>"},
     .think_open = "<seed:think>",
     .think_close = "</seed:think>",
     FUNCTION_TAGS,
     .call_open = "<seed:tool_call>",
     .call_close = "</seed:tool_call>"},
    {.name = "qwen3.5",
     .detect = {"<tool_call>", "<function=", "<parameter=", "<think>"},
     THINK,
     .think_calls = true,
     FUNCTION_TAGS,
     .call_open = "<tool_call>",
     .call_close = "</tool_call>",
     .open_too = "<function=",
     .lines = true},
    {.name = "qwen3-coder",
     .detect = {"<tool_call>", "<function=", "<parameter="},
     FUNCTION_TAGS,
     .call_open = "<tool_call>",
     .call_close = "</tool_call>",
     .open_too = "<function=",
     .lines = true},
    {.name = "mistral", .detect = {"[TOOL_CALLS]", "[ARGS]"}, MISTRAL},
    {.name = "mistral-list",
     .detect = {"[TOOL_CALLS]"},
     .think_open = "[THINK]",
     .think_close = "[/THINK]",
     .body = BODY_OBJECT,
     .section_open = "[TOOL_CALLS]",
     .list = true,
     .late_id = true,
     .id_chars = 9,
     KEYS,
     .key_id = "id"},
    {.name = "cohere-command-a",
     .detect = {"<|START_ACTION|>", "<|START_TEXT|>"},
     COHERE,
     .ignored = {"<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
                 "<co>"}},
    {.name = "cohere-command-r7b",
     .detect = {"<|START_ACTION|>"},
     COHERE,
     .ignored = {"<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>",
                 "<co>"}},
    {.name = "cohere-command-r",
     .detect = {"Action:", "tool_name", "<|CHATBOT_TOKEN|>"},
     .ignored = {"<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"},
     .body = BODY_OBJECT,
     .section_open = "Action:\n```json\n",
     .section_close = "```",
     .open_too = "Action: ```json\n",
     .list = true,
     .key_name = "tool_name",
     .key_arguments = "parameters",
     .after_call = "\n"},
    {.name = "gemma-4",
     .detect = {"<|tool_call>"},
     .think_open = "<|channel>",
     .think_close = "<channel|>",
     .think_label = "thought\n",
     .think_empty = "thought<channel|>",
     .think_anywhere = true,
     .body = BODY_LITERAL,
     .call_open = "<|tool_call>",
     .call_close = "<tool_call|>",
     .name_before = "call:",
     .quote = "<|\"|>",
     .open = '{',
     .equal = ':',
     .close = '}'},
    {.name = "functiongemma",
     .detect = {"<start_function_call>"},
     .body = BODY_LITERAL,
     .call_open = "<start_function_call>",
     .call_close = "<end_function_call>",
     .name_before = "call:",
     .quote = "<escape>",
     .open = '{',
     .equal = ':',
     .close = '}'},
    {.name = "nemotron-nano-v2",
     .detect = {"<TOOLCALL>"},
     THINK,
     .body = BODY_OBJECT,
     .section_open = "<TOOLCALL>",
     .section_close = "</TOOLCALL>",
     .list = true,
     KEYS},
    {.name = "lfm2",
     .detect = {"<|tool_call_start|>"},
     .detect_too = {"<|tool_list_start|>"},
     THINK,
     .body = BODY_LITERAL,
     .call_open = "<|tool_call_start|>",
     .call_close = "<|tool_call_end|>",
     .before_call = "[",
     .after_call = "]",
     .between_calls = ", ",
     .list = true,
     .open = '(',
     .equal = '=',
     .close = ')'},
    {.name = "apertus",
     .detect = {"<|tools_prefix|>"},
     .think_open = "<|inner_prefix|>",
     .think_close = "<|inner_suffix|>",
     .body = BODY_OBJECT,
     .section_open = "<|tools_prefix|>",
     .section_close = "<|tools_suffix|>",
     .list = true,
     .name_key = true,
     KEYS},
    {.name = "phi-4-mini",
     .detect = {"<|tool_call|>", "<|/tool_call|>"},
     .detect_too = {"<|tool|>", "<|/tool|>"},
     .body = BODY_OBJECT,
     .section_open = "<|tool_call|>",
     .section_close = "<|/tool_call|>",
     .open_too = "functools",
     .list = true,
     KEYS},
    {.name = "functools",
     .detect = {"functools"},
     .body = BODY_OBJECT,
     .section_open = "functools",
     .list = true,
     KEYS},
    {.name = "granite-3.2",
     .detect = {"<|tool_call|>", "Here is my thought process:"},
     .think_open = "Here is my thought process:",
     .think_close = "Here is my response:",
     .body = BODY_OBJECT,
     .section_open = "<|tool_call|>",
     .open_too = "<tool_call>",
     .list = true,
     KEYS},
    {.name = "granite",
     .detect = {"<|tool_call|>"},
     THINK,
     .ignored = {"<response>", "</response>"},
     .body = BODY_OBJECT,
     .section_open = "<|tool_call|>",
     .open_too = "<tool_call>",
     .list = true,
     KEYS},
    {.name = "smollm3",
     .detect = {"xml_tools", "python_tools"},
     THINK,
     .think_calls = true,
     HERMES},
    {.name = "qwen3", .detect = {"<tool_call>", "<think>"}, THINK, .think_calls = true, HERMES},
    {.name = "hermes", .detect = {"<tool_call>"}, HERMES},
    {.name = "functionary",
     .detect = {"<function=", "</function>"},
     .body = BODY_NAMED,
     .call_open = "<function=",
     .call_close = "</function>",
     .header = {">"},
     .name_after = ">"},
    {.name = "olmo-3",
     .detect = {"<function_calls>"},
     THINK,
     .body = BODY_LITERAL,
     .call_open = "<function_calls>",
     .call_close = "</function_calls>",
     .between_calls = "\n",
     .list = true,
     .open = '(',
     .equal = '=',
     .close = ')'},
    {.name = "llama-pythonic",
     .detect = {"[func_name1("},
     .body = BODY_LITERAL,
     .call_open = "<|python_start|>",
     .call_close = "<|python_end|>",
     .open_too = "<|python_tag|>",
     .bare = '[',
     .before_call = "[",
     .after_call = "]",
     .between_calls = ", ",
     .list = true,
     .open = '(',
     .equal = '=',
     .close = ')'},
    {.name = "llama-json",
     .detect = {"<|python_tag|>"},
     .detect_too = {"{\"name\": function name, \"parameters\":"},
     .body = BODY_OBJECT,
     .call_open = "<|python_tag|>",
     .bare = '{',
     .key_name = "name",
     .key_arguments = "parameters",
     .between_calls = "; "},
    {.name = "think",
     .detect = {"<think>", "</think>"},
     THINK,
     .body = BODY_OBJECT,
     .bare = '{',
     KEYS},
    {.name = "generic", .body = BODY_OBJECT, .bare = '{', KEYS},
};

const struct chat_format *chat_formats(int32_t *ret_n)
{
    *ret_n = ARRAY_LEN(FORMATS);
    return FORMATS;
}

/* Whether a text has all of the marks; an empty set has none. */
static bool has_all(const char *text, size_t len, const char *const *mark)
{
    int32_t n = 0;

    for (; n < FORMAT_MARKS && mark[n]; n++) {
        if (!memmem(text, len, mark[n], strlen(mark[n]))) {
            return false;
        }
    }
    return n > 0;
}

const struct chat_format *chat_format_of_template(const char *text, size_t len)
{
    for (size_t i = 0; text && i < ARRAY_LEN(FORMATS); i++) {
        if (has_all(text, len, FORMATS[i].detect) || has_all(text, len, FORMATS[i].detect_too)) {
            return &FORMATS[i];
        }
    }
    return &FORMATS[ARRAY_LEN(FORMATS) - 1];
}

const struct chat_format *chat_format_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(FORMATS); i++) {
        if (strcmp(FORMATS[i].name, name) == 0) {
            return &FORMATS[i];
        }
    }
    return NULL;
}

const char *chat_format_name(const struct chat_format *f)
{
    return f->name;
}

static char all_names[1024];
static pthread_once_t names_once = PTHREAD_ONCE_INIT;

static void make_names(void)
{
    size_t at = 0;

    for (size_t i = 0; i < ARRAY_LEN(FORMATS) && at < sizeof(all_names); i++) {
        at += (size_t)snprintf(all_names + at, sizeof(all_names) - at, "%s%s", i ? ", " : "",
                               FORMATS[i].name);
    }
}

const char *chat_format_names(void)
{
    pthread_once(&names_once, make_names);
    return all_names;
}

bool chat_format_reasons(const struct chat_format *f)
{
    return f->think_open;
}

bool chat_format_calls(const struct chat_format *f)
{
    return f->body != BODY_NONE;
}

int32_t chat_format_id_chars(const struct chat_format *f)
{
    return f->id_chars;
}

/* The last place of `mark` in a text, or NULL. */
static const char *last_of(const char *text, size_t len, const char *mark)
{
    size_t n = strlen(mark);

    for (size_t at = len >= n ? len - n + 1 : 0; at-- > 0;) {
        if (memcmp(text + at, mark, n) == 0) {
            return text + at;
        }
    }
    return NULL;
}

bool chat_format_opens_reasoning(const struct chat_format *f, const char *prompt, size_t len)
{
    size_t tail = MIN(len, 256); /* where a template's last words stand */

    if (!f->think_open) {
        return false;
    }
    const char *open = last_of(prompt + len - tail, tail, f->think_open);
    if (!open) {
        return false;
    }
    const char *at = open + strlen(f->think_open);
    size_t label = f->think_label ? strlen(f->think_label) : 0;
    if (label && (size_t)(prompt + len - at) >= label && memcmp(at, f->think_label, label) == 0) {
        at += label;
    }
    for (; at < prompt + len; at++) {
        if (!strchr(" \n\r\t", *at)) {
            return false;
        }
    }
    return true;
}
