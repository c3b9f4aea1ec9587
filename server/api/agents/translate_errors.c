/* Errors of a chat request that was made of another API's body, in the words of that
 * body: its fields, and its entries by their own numbers. */
#include "server/api/agents/translate.h"
#include "server/api/json_fields.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the text or the field of an error begins with, and what stands there instead. */
struct renaming {
    const char *from, *to;
};

static const struct renaming responses_names[] = {
    {"response_format.json_schema", "text.format"},
    {"response_format", "text.format"},
    {"verbosity", "text.verbosity"},
    {NULL, NULL},
};
static const struct renaming messages_names[] = {
    {"response_format.json_schema", "output_config.format"},
    {"response_format", "output_config.format"},
    {NULL, NULL},
};

/* Put `to` in the place of the text's first `n` bytes. */
static void replace_start(struct err *e, size_t n, const char *to)
{
    char rest[sizeof(e->text)];

    snprintf(rest, sizeof(rest), "%s", e->text + n);
    snprintf(e->text, sizeof(e->text), "%.100s%.*s", to, (int)sizeof(e->text) - 101, rest);
}

/* The number in "LIST[number]" at the text's start, and how long that is; -1: another
 * text. */
static int entry_of(const struct err *e, const char *list, size_t *len)
{
    size_t n = strlen(list);
    char *end;

    if (strncmp(e->text, list, n) != 0 || e->text[n] != '[') {
        return -1;
    }
    long i = strtol(e->text + n + 1, &end, 10);
    if (*end != ']' || i < 0 || i > LIMIT_MESSAGES) {
        return -1;
    }
    *len = (size_t)(end + 1 - e->text);
    return (int)i;
}

void translated_message_error(const struct translation *t, struct err *e)
{
    bool responses = t->c->api == API_RESPONSES;
    size_t len;
    int i = e ? entry_of(e, "messages", &len) : -1;
    const cJSON *m = i >= 0 ? cJSON_GetArrayItem(t->messages, i) : NULL;
    char name[40];

    if (!m) {
        return;
    }
    if (m->valueint > 0) {
        snprintf(name, sizeof(name), "%s[%d]", responses ? "input" : "messages", m->valueint - 1);
    } else if (json_is(tree_member(m, "role"), "system")) {
        snprintf(name, sizeof(name), "%s", responses ? "instructions" : "system");
    } else {
        snprintf(name, sizeof(name), "input");
    }
    replace_start(e, len, name);
}

/* "tools[2].function" is tools[4] if two others were left out. An error of the body
 * itself names an entry behind those that the chat request has so far. */
static void name_tool(const struct translation *t, struct err *e)
{
    static const char function[] = ".function";
    size_t len, n = sizeof(function) - 1;
    int i = entry_of(e, "tools", &len);
    const cJSON *tool = i >= 0 ? cJSON_GetArrayItem(tree_member(t->chat, "tools"), i) : NULL;
    char name[40];

    if (tool) {
        snprintf(name, sizeof(name), "tools[%d]", tool->valueint - 1);
        replace_start(e, len + (strncmp(e->text + len, function, n) == 0 ? n : 0), name);
    }
}

/* A tool's schema, which /v1/messages calls input_schema. */
static void name_schema(struct err *e)
{
    static const char parameters[] = ".parameters";
    char *at = strncmp(e->text, "tools", 5) == 0 ? strstr(e->text, parameters) : NULL;

    if (at) {
        char rest[sizeof(e->text)];
        snprintf(rest, sizeof(rest), ".input_schema%s", at + sizeof(parameters) - 1);
        snprintf(at, sizeof(e->text) - (size_t)(at - e->text), "%.*s",
                 (int)(sizeof(e->text) - 1 - (size_t)(at - e->text)), rest);
    }
}

void translated_error(const struct translation *t, struct err *e)
{
    bool responses = t->c->api == API_RESPONSES;
    const struct renaming *names = responses ? responses_names : messages_names;

    name_tool(t, e);
    if (!responses) {
        name_schema(e);
    }
    for (size_t i = 0; names[i].from; i++) {
        size_t n = strlen(names[i].from);
        if (strncmp(e->text, names[i].from, n) == 0) {
            replace_start(e, n, names[i].to);
            break;
        }
    }
    if (responses && strcmp(e->param, "messages") == 0) {
        memcpy(e->param, "input", sizeof("input"));
    } else if (strcmp(e->param, "response_format") == 0) {
        snprintf(e->param, sizeof(e->param), "%s", responses ? "text" : "output_config");
    } else if (responses && strcmp(e->param, "verbosity") == 0) {
        memcpy(e->param, "text", sizeof("text"));
    }
}
