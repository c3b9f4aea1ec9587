/* See chat_template.h: finds the template of a model and its special tokens; jinja.h
 * runs it. */
#include "models/chat/chat_template.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "models/chat/chat_format.h"
#include "models/chat/jinja.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"

struct chat_template {
    struct jtemplate jinja;
    bool usable;    /* `jinja` can be run */
    bool broken;    /* there is a template, but it cannot be used */
    bool developer; /* its text mentions "developer" */
    struct chat_caps caps;
    const struct chat_format *format;
    char *specials; /* members of a JSON object, see chat_template_new; owned */
    char *text;     /* [len] the template's, owned; NULL: none */
    size_t len;
    char missing[400]; /* why it is not usable */
};

/* ---- files ---- */

/* What the model's files say. */
struct config {
    char *text; /* the template, owned, or NULL */
    size_t len;
    struct buf specials;
};

/* A string of any length, malloc'd. */
static char *read_text(struct json *j, size_t *ret_len)
{
    size_t cap = (size_t)(j->end - j->at) + 1;

    if (json_peek(j) != JSON_STRING) {
        json_skip(j);
        return NULL;
    }
    const char *end = j->at + 1;
    while (end < j->end && *end != '"') {
        end += *end == '\\' && j->end - end > 1 ? 2 : 1;
    }
    cap = (size_t)(end - j->at) + 2;
    char *text = malloc(cap);
    if (!text) {
        json_fail(j, "no memory");
        return NULL;
    }
    if (!json_read_string(j, text, cap, ret_len)) {
        free(text);
        return NULL;
    }
    return text;
}

static void keep_template(struct config *c, char *text, size_t len)
{
    if (!text) {
        return;
    }
    free(c->text);
    c->text = text;
    c->len = len;
}

/* {"name": "default", "template": "…"}: keep the one named "default", else the
 * first. */
static void read_named(struct json *j, struct config *c)
{
    char name[JINJA_MAX_NAME] = "", *text = NULL;
    size_t len = 0;

    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "name")) {
            json_read_string(j, name, sizeof(name), NULL);
        } else if (json_key_is(j, "template")) {
            free(text);
            text = read_text(j, &len);
        } else {
            json_skip(j);
        }
    }
    if (!c->text || strcmp(name, "default") == 0) {
        keep_template(c, text, len);
    } else {
        free(text);
    }
}

static void read_template(struct json *j, struct config *c)
{
    size_t len = 0;

    if (json_peek(j) != JSON_ARRAY) {
        char *text = read_text(j, &len);
        keep_template(c, text, len);
        return;
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (json_peek(j) == JSON_OBJECT) {
            read_named(j, c);
        } else {
            json_skip(j);
        }
    }
}

static void put_special(struct config *c, const char *name, const char *text, size_t len)
{
    buf_printf(&c->specials, "\"%s\":\"", name);
    buf_json_escape(&c->specials, text, len);
    buf_puts(&c->specials, "\",");
}

/* "bos_token": "<s>", or {"content": "<s>", …}. */
static void read_special(struct json *j, struct config *c, const char *name)
{
    char text[JSON_KEY_BYTES];
    size_t len = 0;

    if (json_peek(j) == JSON_STRING) {
        if (json_read_string(j, text, sizeof(text), &len)) {
            put_special(c, name, text, len);
        }
    } else if (json_peek(j) == JSON_OBJECT) {
        json_enter_object(j);
        while (json_next_member(j)) {
            if (!json_key_is(j, "content") || json_peek(j) != JSON_STRING) {
                json_skip(j);
            } else if (json_read_string(j, text, sizeof(text), &len)) {
                put_special(c, name, text, len);
            }
        }
    } else {
        json_skip(j);
    }
}

static int read_config(struct config *c, const char *dir, const char *name, struct err *e)
{
    static const char *const SPECIALS[] = {"bos_token", "eos_token", "unk_token", "pad_token",
                                           "sep_token", "cls_token", "mask_token"};
    struct json j;
    size_t len;
    char *text;
    int rc = model_file_read(dir, name, LIMIT_TOKENIZER_JSON_BYTES, &text, &len, e);

    if (rc) {
        return rc == ERR_NOT_FOUND ? 0 : rc;
    }
    json_init(&j, text, len, name, e);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        size_t k = 0;
        while (k < ARRAY_LEN(SPECIALS) && !json_key_is(&j, SPECIALS[k])) {
            k++;
        }
        if (k < ARRAY_LEN(SPECIALS)) {
            read_special(&j, c, SPECIALS[k]);
        } else if (json_key_is(&j, "chat_template")) {
            read_template(&j, c);
        } else {
            json_skip(&j);
        }
    }
    json_finish(&j);
    free(text);
    return j.failed ? ERR_INVALID : 0;
}

static void put_token(struct config *c, const char *name, const struct tokenizer *t, int32_t id)
{
    size_t len = 0;
    const char *text = id >= 0 ? tokenizer_bytes(t, id, &len) : NULL;

    if (text) {
        put_special(c, name, text, len);
    }
}

static int read_gguf(struct config *c, const char *path, const struct tokenizer *t, struct err *e)
{
    struct gguf *g;
    struct gguf_text text;
    int rc = gguf_open_one(&g, path, e);

    if (rc < 0) {
        return rc;
    }
    rc = gguf_string(g, "tokenizer.chat_template", &text, e);
    if (rc > 0) {
        c->text = malloc(text.len + 1);
        c->len = text.len;
        if (c->text) {
            memcpy(c->text, text.at, text.len);
        }
        rc = c->text ? 0 : err_nomem(e, "a chat template");
    }
    gguf_free(g);
    put_token(c, "bos_token", t, tokenizer_bos(t));
    put_token(c, "eos_token", t, tokenizer_eos(t));
    return rc;
}

static int read_directory(struct config *c, const char *dir, struct err *e)
{
    char *file;
    size_t len;
    int rc = read_config(c, dir, "tokenizer_config.json", e);

    if (rc) {
        return rc;
    }
    rc = model_file_read(dir, "chat_template.jinja", LIMIT_TEMPLATE_BYTES, &file, &len, e);
    if (rc == 0) {
        keep_template(c, file, len);
    } else if (rc == ERR_NOT_FOUND) {
        rc = c->text ? 0 : read_config(c, dir, "chat_template.json", e);
    }
    return rc;
}

/* ---- what a template can do ---- */

#define PROBE_USER "{\"role\":\"user\",\"content\":\"qzuser\"}"
#define PROBE_RESULT                                                                     \
    "{\"role\":\"tool\",\"tool_call_id\":\"abcdefgh1\",\"name\":\"qzcall\",\"content\":" \
    "\"qzresult\"}"
#define PROBE_TOOLS                                                                        \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"qzcall\",\"description\":" \
    "\"qzwhat\",\"parameters\":{\"type\":\"object\",\"properties\":{\"qzkey\":{\"type\":"  \
    "\"string\",\"description\":\"qzkind\"}},\"required\":[\"qzkey\"]}}}],"
#define OBJECT "{\"qzkey\":\"qzvalue\"}"
#define TEXT "\"{\\\"qzkey\\\":\\\"qzvalue\\\"}\""

/* Trial renderings of a template. */
struct probes {
    const struct chat_template *t;
    struct buf out; /* the last prompt */
    bool no_memory; /* for one of them: what was found counts for nothing */
};

/* The prompt of some messages in p->out; false: the template refuses them. */
static bool probe(struct probes *p, const char *tools, const char *messages)
{
    struct err e = {0};
    struct buf context;

    buf_clear(&p->out);
    buf_init(&context, 16384);
    buf_printf(&context, "{%s\"add_generation_prompt\":true,\"messages\":[%s]}", tools, messages);
    int rc = context.failed ? ERR_NOMEM
                            : chat_template_render(p->t, context.data, context.len, &p->out, &e);
    buf_release(&context);
    p->no_memory = p->no_memory || rc == ERR_NOMEM;
    return rc == 0;
}

/* Whether the last prompt has the word. */
static bool has(const struct probes *p, const char *word)
{
    return p->out.data && strstr(p->out.data, word);
}

/* The prompt of a call with its result; `content`: of the message that calls. */
static bool probe_call(struct probes *p, const char *content, const char *arguments)
{
    char messages[1024];

    snprintf(messages, sizeof(messages),
             PROBE_USER ",{\"role\":\"assistant\",\"content\":%s,\"reasoning_content\":"
                        "\"qzthought\",\"tool_calls\":[{\"id\":\"abcdefgh1\",\"type\":"
                        "\"function\",\"function\":{\"name\":\"qzcall\",\"arguments\":%s}}]}"
                        "," PROBE_RESULT,
             content, arguments);
    return probe(p, PROBE_TOOLS, messages);
}

static void find_call_caps(struct chat_caps *c, struct probes *p, const char *content)
{
    /* A template that writes each argument by itself needs an object. Else, as text,
     * they keep the spelling that the client sent, if the template writes them as
     * they are. */
    bool ok = probe_call(p, content, OBJECT) && has(p, "qzvalue") && !has(p, "'qzkey'");
    bool apart = ok && !has(p, "\"qzkey\": ") && !has(p, "\"qzkey\":\"");
    bool as_text = !apart && probe_call(p, content, TEXT) && has(p, "{\"qzkey\":\"qzvalue\"}");

    if (!as_text) {
        c->arguments = probe_call(p, content, OBJECT) && ok;
    }
    c->calls = as_text || c->arguments;
    c->results = has(p, "qzresult");
    c->reasoning = has(p, "qzthought");
    ok = probe_call(p, "null", c->arguments ? OBJECT : TEXT);
    c->null = ok && !has(p, "None");
}

/* 0 or ERR_NOMEM. */
static int find_caps(struct chat_template *t)
{
    struct chat_caps *c = &t->caps;
    struct probes p = {.t = t};

    buf_init(&p.out, LIMIT_TEMPLATE_OUTPUT_BYTES);
    c->system = probe(&p, "", "{\"role\":\"system\",\"content\":\"qzrule\"}," PROBE_USER) &&
                has(&p, "qzrule");
    c->developer = probe(&p, "", "{\"role\":\"developer\",\"content\":\"qzrule\"}," PROBE_USER) &&
                   has(&p, "qzrule");
    c->parts = probe(&p, "",
                     "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"qzpart\"}]}") &&
               has(&p, "qzpart") && !has(&p, "'text'");
    c->tools = probe(&p, PROBE_TOOLS, PROBE_USER) && has(&p, "qzcall");
    find_call_caps(c, &p, "\"\"");
    if (!c->calls) { /* some templates write calls only where there is no content */
        find_call_caps(c, &p, "null");
    }
    buf_release(&p.out);
    return p.no_memory ? ERR_NOMEM : 0;
}

const struct chat_caps *chat_template_caps(const struct chat_template *t)
{
    static const struct chat_caps none;

    return t ? &t->caps : &none;
}

const struct chat_format *chat_template_format(const struct chat_template *t)
{
    return t && t->format ? t->format : chat_format_of_template(NULL, 0);
}

/* ---- making ---- */

int chat_template_new(struct chat_template **ret, const char *text, size_t len,
                      const char *specials, struct err *e)
{
    struct chat_template *t = calloc(1, sizeof(*t));
    struct err why = {0};

    if (t) {
        t->specials = strdup(specials);
        t->text = text ? strndup(text, len) : NULL;
        t->len = t->text ? strlen(t->text) : 0;
    }
    if (!t || !t->specials || (text && !t->text)) {
        chat_template_free(t);
        return err_nomem(e, "a chat template");
    }
    int rc = text ? jinja_parse(&t->jinja, text, len, &why) : ERR_NOT_FOUND;
    if (rc == ERR_NOMEM) {
        chat_template_free(t);
        return err_nomem(e, "a chat template");
    }
    t->usable = rc == 0;
    t->broken = rc != 0 && text;
    t->developer = text && memmem(text, len, "developer", 9);
    t->format = chat_format_of_template(text, len);
    if (t->usable && find_caps(t) < 0) {
        chat_template_free(t);
        return err_nomem(e, "a chat template");
    }
    if (!text) {
        snprintf(t->missing, sizeof(t->missing), "the model has no chat template");
    } else if (rc) {
        snprintf(t->missing, sizeof(t->missing), "the model's %.360s", why.text);
    }
    *ret = t;
    return 0;
}

int chat_template_open(struct chat_template **ret, const char *path,
                       const struct tokenizer *tokenizer, struct err *e)
{
    struct err own = {0};
    struct config c = {0};

    e = e ? e : &own;
    buf_init(&c.specials, 64 * 1024);
    int rc = gguf_is_file(path) ? read_gguf(&c, path, tokenizer, e) : read_directory(&c, path, e);
    if (rc == 0) {
        rc = c.specials.failed
                 ? err_nomem(e, "special tokens")
                 : chat_template_new(ret, c.text, c.len, c.specials.data ? c.specials.data : "", e);
    }
    free(c.text);
    buf_release(&c.specials);
    return rc;
}

void chat_template_free(struct chat_template *t)
{
    if (!t) {
        return;
    }
    jinja_release(&t->jinja);
    free(t->specials);
    free(t->text);
    free(t);
}

/* ---- asking ---- */

const char *chat_template_missing(const struct chat_template *t)
{
    return !t ? "the model has no chat template" : t->usable ? NULL : t->missing;
}

bool chat_template_broken(const struct chat_template *t)
{
    return t && t->broken;
}

bool chat_template_wants_parts(const struct chat_template *t)
{
    return t && t->jinja.loops_over_content && !t->jinja.tests_for_string;
}

const char *chat_template_text(const struct chat_template *t, size_t *ret_len)
{
    *ret_len = t ? t->len : 0;
    return t ? t->text : NULL;
}

const char *chat_template_specials(const struct chat_template *t)
{
    return t ? t->specials : "";
}

bool chat_template_knows_developer(const struct chat_template *t)
{
    return t && t->developer;
}

int chat_template_render(const struct chat_template *t, const char *context, size_t len,
                         struct buf *out, struct err *e)
{
    struct buf own;
    const char *missing = chat_template_missing(t);

    if (missing) {
        return err_set(e, ERR_UNSUPPORTED, "%s", missing);
    }
    if (len < 2 || context[0] != '{') {
        return err_set(e, ERR_INVALID, "the variables must be an object");
    }
    buf_init(&own, strlen(t->specials) + 64);
    buf_printf(&own, "{%s\"tools\":null,\"documents\":null}", t->specials);
    int rc = own.failed ? err_nomem(e, "messages")
                        : jinja_render(&t->jinja, own.data, context, len, out, e);
    buf_release(&own);
    return rc;
}
