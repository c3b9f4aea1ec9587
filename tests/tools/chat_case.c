/* Reads cases of chat formats and templates, a JSON object a line, and prints what
 * becomes of each, an object a line. For scripts/judge-chat-formats and the tests.
 *
 *     {"format": "hermes", "text": "…", "tools": [{"name": …, "parameters": {…}}],
 *      "reasoning": false}                      what a parser makes of an answer
 *     {"format": "hermes", "grammar": true, "tools": […], "choice": "required"}
 *     {"format": "hermes", "pieces": ["…"], "end": false, …}   the events of the last piece
 *     {"template": "…", "context": {…}}         a rendered prompt
 *     {"template": "…", "caps": true}           what a template can do
 *
 * A template's text may stand in place of a format's name. A parsed answer is cut at
 * every byte: "split" tells the first cut whose pieces gave another result, or -1, and
 * "prefix" the first beginning of it whose events the whole answer takes back. */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/chat/chat_format.h"
#include "models/chat/chat_template.h"

/* What the events add up to, as text: equal texts are equal results. */
struct result {
    struct buf content, reasoning, calls;
    int32_t ended, n;
};

static void result_init(struct result *r)
{
    buf_init(&r->content, (size_t)1 << 26);
    buf_init(&r->reasoning, (size_t)1 << 26);
    buf_init(&r->calls, (size_t)1 << 26);
    r->ended = r->n = 0;
}

static void result_release(struct result *r)
{
    buf_release(&r->content);
    buf_release(&r->reasoning);
    buf_release(&r->calls);
}

static void take(void *arg, const struct chat_event *ev)
{
    struct result *r = arg;

    switch (ev->kind) {
    case CHAT_CONTENT:
        buf_append(&r->content, ev->text, ev->len);
        break;
    case CHAT_REASONING:
        buf_append(&r->reasoning, ev->text, ev->len);
        break;
    case CHAT_CALL:
        r->n++;
        buf_printf(&r->calls, "%c%s%c%s%c", 1, ev->name, 2, ev->id ? ev->id : "", 3);
        break;
    case CHAT_ARGUMENTS:
        buf_append(&r->calls, ev->text, ev->len);
        break;
    default:
        r->ended++;
        buf_putc(&r->calls, 4);
        break;
    }
}

static bool same(const struct buf *a, const struct buf *b)
{
    return a->len == b->len && (!a->len || memcmp(a->data, b->data, a->len) == 0);
}

static bool begins(const struct buf *whole, const struct buf *part)
{
    return part->len <= whole->len &&
           (!part->len || memcmp(whole->data, part->data, part->len) == 0);
}

struct chat_case {
    const struct chat_format *f;
    struct chat_tools tools;
    bool reasoning;
    const char *text;
    size_t len;
};

/* Feed text up to `cut`, then, unless `only`, the rest; step 1: byte by byte. */
static void run(const struct chat_case *c, size_t cut, bool only, size_t step, struct result *r)
{
    struct chat_parser *p;
    struct err e = {0};

    result_init(r);
    if (chat_parser_new(&p, c->f, c->tools.n ? &c->tools : NULL, c->reasoning, &e)) {
        exit(1);
    }
    for (size_t at = 0; step && at < cut; at += step) {
        chat_parser_feed(p, c->text + at, MIN(step, cut - at), take, r);
    }
    if (!step) {
        chat_parser_feed(p, c->text, cut, take, r);
    }
    if (!only) {
        chat_parser_feed(p, c->text + cut, c->len - cut, take, r);
        chat_parser_end(p, take, r);
    }
    chat_parser_free(p);
}

static void add_calls(cJSON *out, const struct buf *calls)
{
    cJSON *list = cJSON_AddArrayToObject(out, "calls");
    char *at = calls->data;

    while (at && *at == 1) {
        cJSON *call = cJSON_CreateObject();
        char *id = strchr(at, 2), *arguments = strchr(at, 3);
        size_t len = strcspn(arguments + 1, "\1\4");
        bool ended = arguments[1 + len] == 4;
        char *next = arguments + 1 + len + (ended ? 1 : 0);
        char last = *next;
        *id = *arguments = '\0';
        arguments[1 + len] = '\0';
        cJSON_AddStringToObject(call, "name", at + 1);
        cJSON_AddStringToObject(call, "id", id + 1);
        cJSON_AddStringToObject(call, "arguments", arguments + 1);
        cJSON_AddBoolToObject(call, "ended", ended);
        cJSON_AddItemToArray(list, call);
        *next = last;
        at = next;
    }
}

static void parse(const struct chat_case *c, cJSON *out)
{
    struct result whole, r;
    int64_t split = -1, prefix = -1;

    run(c, c->len, false, 1, &whole);
    for (size_t cut = 0; cut <= c->len && split < 0; cut++) {
        run(c, cut, false, 0, &r);
        if (!same(&r.content, &whole.content) || !same(&r.reasoning, &whole.reasoning) ||
            !same(&r.calls, &whole.calls)) {
            split = (int64_t)cut;
        }
        result_release(&r);
        run(c, cut, true, 0, &r);
        if (prefix < 0 &&
            (!begins(&whole.content, &r.content) || !begins(&whole.reasoning, &r.reasoning) ||
             !begins(&whole.calls, &r.calls))) {
            prefix = (int64_t)cut;
        }
        result_release(&r);
    }
    cJSON_AddStringToObject(out, "format", chat_format_name(c->f));
    cJSON_AddStringToObject(out, "content", whole.content.data ? whole.content.data : "");
    cJSON_AddStringToObject(out, "reasoning", whole.reasoning.data ? whole.reasoning.data : "");
    add_calls(out, &whole.calls);
    cJSON_AddNumberToObject(out, "split", (double)split);
    cJSON_AddNumberToObject(out, "prefix", (double)prefix);
    result_release(&whole);
}

/* ---- an answer in pieces ---- */

static void add_event(void *arg, const struct chat_event *ev)
{
    static const char *const KINDS[] = {"content", "reasoning", "call", "arguments", "end"};
    cJSON *out = cJSON_CreateObject();
    char *text = ev->text ? strndup(ev->text, ev->len) : NULL;

    cJSON_AddStringToObject(out, "kind", KINDS[ev->kind]);
    cJSON_AddNumberToObject(out, "call", ev->call);
    cJSON_AddStringToObject(out, "text", text ? text : "");
    cJSON_AddStringToObject(out, "name", ev->kind == CHAT_CALL ? ev->name : "");
    cJSON_AddStringToObject(out, "id", ev->kind == CHAT_CALL && ev->id ? ev->id : "");
    cJSON_AddItemToArray(arg, out);
    free(text);
}

static void ignore(void *arg, const struct chat_event *ev)
{
    (void)arg;
    (void)ev;
}

/* The events of the last piece, and with `end` those of the answer's end. */
static void feed(const struct chat_case *c, const cJSON *pieces, bool end, cJSON *out)
{
    cJSON *events = cJSON_AddArrayToObject(out, "events");
    const cJSON *piece;
    struct chat_parser *p;
    struct err e = {0};

    if (chat_parser_new(&p, c->f, c->tools.n ? &c->tools : NULL, c->reasoning, &e)) {
        exit(1);
    }
    cJSON_ArrayForEach(piece, pieces)
    {
        const char *text = cJSON_GetStringValue(piece);
        chat_parser_feed(p, text, strlen(text), piece->next ? ignore : add_event, events);
    }
    if (end) {
        chat_parser_end(p, add_event, events);
    }
    chat_parser_free(p);
}

/* ---- cases ---- */

static void read_tools(struct chat_tools *t, const cJSON *in)
{
    static const char *const CHOICES[] = {"auto", "none", "required", "named"};
    const cJSON *list = cJSON_GetObjectItem(in, "tools"), *tool;
    const char *choice = cJSON_GetStringValue(cJSON_GetObjectItem(in, "choice"));
    const cJSON *parallel = cJSON_GetObjectItem(in, "parallel");

    memset(t, 0, sizeof(*t));
    t->tool = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof(*t->tool));
    t->parallel = !parallel || cJSON_IsTrue(parallel);
    for (size_t i = 0; choice && i < ARRAY_LEN(CHOICES); i++) {
        if (strcmp(choice, CHOICES[i]) == 0) {
            t->choice = (enum tool_choice)i;
        }
    }
    cJSON_ArrayForEach(tool, list)
    {
        struct chat_tool *to = &t->tool[t->n++];
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(tool, "name"));
        const cJSON *parameters = cJSON_GetObjectItem(tool, "parameters");
        to->name = strdup(name ? name : "");
        to->parameters = cJSON_IsObject(parameters) ? cJSON_PrintUnformatted(parameters) : NULL;
        to->strict = cJSON_IsTrue(cJSON_GetObjectItem(tool, "strict"));
    }
}

static void grammar(const struct chat_case *c, const cJSON *in, cJSON *out)
{
    const cJSON *schema = cJSON_GetObjectItem(in, "answer");
    char *answer = schema ? cJSON_PrintUnformatted(schema) : NULL;
    struct err e = {0};
    struct buf text;
    bool needed = false;

    buf_init(&text, (size_t)1 << 24);
    int rc = chat_format_grammar(c->f, c->tools.n ? &c->tools : NULL, answer, c->reasoning, &text,
                                 &needed, &e);
    if (rc) {
        cJSON_AddStringToObject(out, "error", e.text);
    } else {
        cJSON_AddBoolToObject(out, "needed", needed);
        cJSON_AddStringToObject(out, "grammar", text.data ? text.data : "");
    }
    buf_release(&text);
    free(answer);
}

static void render(const char *template, const cJSON *context, cJSON *out)
{
    struct chat_template *t;
    struct err e = {0};
    struct buf text;
    char *json = cJSON_PrintUnformatted(context);

    buf_init(&text, (size_t)1 << 24);
    if (chat_template_new(&t, template, strlen(template), "", &e) == 0) {
        int rc = chat_template_render(t, json, strlen(json), &text, &e);
        chat_template_free(t);
        if (rc == 0) {
            cJSON_AddStringToObject(out, "rendered", text.data ? text.data : "");
        }
    }
    if (e.code) {
        cJSON_AddStringToObject(out, "error", e.text);
    }
    buf_release(&text);
    free(json);
}

static void caps(const char *template, cJSON *out)
{
    struct chat_template *t;
    struct err e = {0};

    if (chat_template_new(&t, template, strlen(template),
                          "\"bos_token\":\"<s>\",\"eos_token\":\"</s>\",", &e)) {
        exit(1);
    }
    const struct chat_caps *c = chat_template_caps(t);
    cJSON_AddStringToObject(out, "format", chat_format_name(chat_template_format(t)));
    cJSON_AddBoolToObject(out, "system", c->system);
    cJSON_AddBoolToObject(out, "developer", c->developer);
    cJSON_AddBoolToObject(out, "parts", c->parts);
    cJSON_AddBoolToObject(out, "tools", c->tools);
    cJSON_AddBoolToObject(out, "calls", c->calls);
    cJSON_AddBoolToObject(out, "arguments", c->arguments);
    cJSON_AddBoolToObject(out, "null", c->null);
    cJSON_AddBoolToObject(out, "results", c->results);
    cJSON_AddBoolToObject(out, "reasoning", c->reasoning);
    chat_template_free(t);
}

static void one(const cJSON *in, cJSON *out)
{
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(in, "format"));
    const char *template = cJSON_GetStringValue(cJSON_GetObjectItem(in, "template"));
    const cJSON *context = cJSON_GetObjectItem(in, "context");
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(in, "text"));
    struct chat_case c = {.text = text ? text : "",
                          .len = text ? strlen(text) : 0,
                          .reasoning = cJSON_IsTrue(cJSON_GetObjectItem(in, "reasoning"))};

    if (context && template) {
        render(template, context, out);
        return;
    }
    if (template && cJSON_IsTrue(cJSON_GetObjectItem(in, "caps"))) {
        caps(template, out);
        return;
    }
    c.f = name ? chat_format_find(name)
               : chat_format_of_template(template, template ? strlen(template) : 0);
    if (!c.f) {
        cJSON_AddStringToObject(out, "error", "no such format");
        return;
    }
    const char *prompt = cJSON_GetStringValue(cJSON_GetObjectItem(in, "prompt"));
    if (prompt) {
        c.reasoning = chat_format_opens_reasoning(c.f, prompt, strlen(prompt));
        cJSON_AddBoolToObject(out, "opened", c.reasoning);
    }
    read_tools(&c.tools, in);
    if (cJSON_IsTrue(cJSON_GetObjectItem(in, "grammar"))) {
        grammar(&c, in, out);
    } else if (cJSON_IsArray(cJSON_GetObjectItem(in, "pieces"))) {
        feed(&c, cJSON_GetObjectItem(in, "pieces"), cJSON_IsTrue(cJSON_GetObjectItem(in, "end")),
             out);
    } else {
        parse(&c, out);
    }
    chat_tools_release(&c.tools);
}

int main(void)
{
    char *line = NULL;
    size_t cap = 0;

    while (getline(&line, &cap, stdin) > 0) {
        cJSON *in = cJSON_Parse(line), *out = cJSON_CreateObject();
        if (in) {
            one(in, out);
        } else {
            cJSON_AddStringToObject(out, "error", "no JSON");
        }
        char *text = cJSON_PrintUnformatted(out);
        puts(text);
        fflush(stdout);
        free(text);
        cJSON_Delete(in);
        cJSON_Delete(out);
    }
    free(line);
    return 0;
}
