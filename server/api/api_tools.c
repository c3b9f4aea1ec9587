/* The tools of a chat request: `tools` with `tool_choice`, and the older `functions`
 * with `function_call`, which become tools. */
#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

static const cJSON *member(const cJSON *object, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, name);

    return cJSON_IsNull(v) ? NULL : v;
}

/* The list of tools, or of functions; NULL: none, or an empty one. */
static const cJSON *list_of(const cJSON *tree, bool *ret_functions)
{
    const cJSON *tools = member(tree, "tools"), *functions = member(tree, "functions");

    tools = tools && tools->child ? tools : NULL;
    functions = functions && functions->child ? functions : NULL;
    *ret_functions = !tools && functions;
    return tools ? tools : functions;
}

bool tools_active(const struct completion *c)
{
    return c->tools.n > 0 && c->tools.choice != TOOL_NONE;
}

/* ---- one tool ---- */

/* The position of an error, "tools[3].function" or "functions[3]". */
struct place {
    const char *list;
    int i;
    const char *inside;
};

static int refuse(struct err *e, const struct place *at, const char *what)
{
    return err_set_param(e, ERR_INVALID, at->list, "%s[%d]%s%s", at->list, at->i, at->inside, what);
}

static int check_name(const cJSON *name, const struct place *at, struct err *e)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.:";

    if (!cJSON_IsString(name)) {
        return refuse(e, at, ".name must be a string");
    }
    size_t len = json_string_len(name);
    if (len < 1 || len > LIMIT_TOOL_NAME_BYTES || strspn(name->valuestring, allowed) != len) {
        return err_set_param(e, ERR_INVALID, at->list,
                             "%s[%d]%s.name must be 1 to %d letters, digits, '_', '-', '.' or ':'",
                             at->list, at->i, at->inside, LIMIT_TOOL_NAME_BYTES);
    }
    return 0;
}

/* The schema's JSON text, malloc'd. */
static int copy_schema(char **ret, const cJSON *schema, struct err *e)
{
    struct buf b;

    buf_init(&b, LIMIT_RESPONSE_BYTES);
    json_put(&b, schema);
    if (b.failed) {
        buf_release(&b);
        return err_nomem(e, "a tool's parameters");
    }
    *ret = b.data; /* the buffer's memory is handed over */
    return 0;
}

static int read_function(struct chat_tool *ret, const cJSON *f, const struct place *at,
                         struct err *e)
{
    const cJSON *name = member(f, "name"), *parameters = member(f, "parameters"),
                *strict = member(f, "strict");
    int rc = check_name(name, at, e);

    if (rc) {
        return rc;
    }
    if (member(f, "description") && !cJSON_IsString(member(f, "description"))) {
        return refuse(e, at, ".description must be a string");
    }
    if (strict && !cJSON_IsBool(strict)) {
        return refuse(e, at, ".strict must be true or false");
    }
    if (parameters && !cJSON_IsObject(parameters)) {
        return refuse(e, at, ".parameters must be a JSON Schema, an object");
    }
    ret->strict = cJSON_IsTrue(strict);
    ret->name = strdup(name->valuestring);
    return !ret->name   ? err_nomem(e, "a tool")
           : parameters ? copy_schema(&ret->parameters, parameters, e)
                        : 0;
}

/* One entry of the list: its function is read into *ret. */
static int read_tool(struct chat_tool *ret, const cJSON *v, int i, bool functions, struct err *e)
{
    struct place at = {functions ? "functions" : "tools", i, ""};
    const cJSON *type = member(v, "type"), *function = member(v, "function");

    if (!cJSON_IsObject(v)) {
        return refuse(e, &at, " must be an object");
    }
    if (functions) {
        return read_function(ret, v, &at, e);
    }
    if (!cJSON_IsString(type)) {
        return refuse(e, &at, ".type must be \"function\"");
    }
    if (!json_is(type, "function")) {
        return err_set_param(e, ERR_UNSUPPORTED, "tools",
                             "tools[%d] is of type '%.40s'; this server takes only 'function'", i,
                             type->valuestring);
    }
    if (!cJSON_IsObject(function)) {
        return refuse(e, &at, ".function must be an object with a name");
    }
    at.inside = ".function";
    return read_function(ret, function, &at, e);
}

/* The index of the tool of this name, or -1. */
static int32_t find(const struct chat_tools *t, const char *name)
{
    for (int32_t i = 0; i < t->n; i++) {
        if (strcmp(t->tool[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

static int read_entries(struct chat_tools *t, const cJSON *list, bool functions, struct err *e)
{
    const char *name = functions ? "functions" : "tools";
    int n = cJSON_GetArraySize(list), rc = 0;

    if (n > LIMIT_TOOLS) {
        return err_set_param(e, ERR_INVALID, name, "%s has %d entries; at most %d are allowed",
                             name, n, LIMIT_TOOLS);
    }
    t->tool = calloc((size_t)n, sizeof(*t->tool));
    if (!t->tool) {
        return err_nomem(e, "tools");
    }
    for (const cJSON *v = list->child; v && !rc; v = v->next) {
        struct chat_tool *tool = &t->tool[t->n];
        rc = read_tool(tool, v, t->n, functions, e);
        if (!rc && find(t, tool->name) >= 0) {
            rc = err_set_param(e, ERR_INVALID, name, "%s[%d] has the name '%s' of another one",
                               name, t->n, tool->name);
        }
        t->n++; /* released with the others, whatever was read of it */
    }
    return rc;
}

/* ---- the choice ---- */

/* A function is named: {"type": "function", "function": {"name"}}, or with `functions`
 * {"name"}. */
static int read_named(struct chat_tools *t, const char *field, const cJSON *v, struct err *e)
{
    const cJSON *name = member(v, "name");

    if (!name && cJSON_IsObject(member(v, "function"))) {
        name = member(member(v, "function"), "name");
    }
    if (!cJSON_IsString(name)) {
        return err_set_param(e, ERR_INVALID, field,
                             "%s must be \"none\", \"auto\", \"required\" or name a function",
                             field);
    }
    t->named = json_has_nul(name) ? -1 : find(t, name->valuestring);
    if (t->named < 0) {
        return err_set_param(e, ERR_INVALID, field, "%s names the function '%.100s'; %s", field,
                             name->valuestring,
                             t->n ? "no tool has that name" : "the request has no tools");
    }
    t->choice = TOOL_NAMED;
    return 0;
}

static int read_choice(struct chat_tools *t, const cJSON *tree, bool functions, struct err *e)
{
    const char *field = functions || (!member(tree, "tool_choice") && member(tree, "function_call"))
                            ? "function_call"
                            : "tool_choice";
    const cJSON *v = member(tree, field);

    t->choice = TOOL_AUTO;
    if (!v || json_is(v, "auto")) {
        return 0;
    }
    if (json_is(v, "none")) {
        t->choice = TOOL_NONE;
        return 0;
    }
    if (json_is(v, "required") && strcmp(field, "tool_choice") == 0) {
        t->choice = TOOL_REQUIRED;
        return t->n ? 0
                    : err_set_param(e, ERR_INVALID, field,
                                    "tool_choice is \"required\", but the request has no tools");
    }
    if (cJSON_IsObject(v) && json_is(member(v, "type"), "allowed_tools")) {
        return err_set_param(e, ERR_UNSUPPORTED, field,
                             "tool_choice of type 'allowed_tools' is not supported; give only the "
                             "tools that are allowed");
    }
    return read_named(t, field, v, e);
}

/* Whether the model can be given tools and can call them. */
static int check_model(const struct completion *c, const struct api_context *ctx, struct err *e)
{
    const char *field = c->functions ? "functions" : "tools";

    if (!tools_active(c)) {
        return 0;
    }
    if (!ctx->chat.missing && !ctx->chat.knows_tools) {
        return err_set_param(e, ERR_UNSUPPORTED, field,
                             "%s is not possible: the chat template of model '%.100s' has no place "
                             "for tools; leave it out",
                             field, ctx->info.model_name);
    }
    return ctx->chat.missing || ctx->chat.calls
               ? 0
               : err_set_param(e, ERR_UNSUPPORTED, field,
                               "%s is not possible: the format in which model '%.100s' calls tools "
                               "is not known (setting chat-format)",
                               field, ctx->info.model_name);
}

int tools_read(struct completion *c, const cJSON *tree, const struct api_context *ctx,
               struct err *e)
{
    const cJSON *list = list_of(tree, &c->functions);

    if (list && !c->functions && member(tree, "functions") && member(tree, "functions")->child) {
        return err_set_param(e, ERR_INVALID, "functions",
                             "functions is the older name of tools; give one of them");
    }
    int rc = list ? read_entries(&c->tools, list, c->functions, e) : 0;
    rc = rc ? rc : read_choice(&c->tools, tree, c->functions, e);
    c->tools.parallel = c->parallel_tool_calls && !c->functions;
    return rc ? rc : check_model(c, ctx, e);
}

/* Refuse an entry that nests deeper than templates are given. The levels around it: the
 * template's variables and the list, and what a function is wrapped in. */
static int check_depth(const cJSON *v, const struct place *at, struct err *e)
{
    const cJSON *function = at->inside[0] ? member(v, "function") : v,
                *parameters = member(function, "parameters");

    if (parameters && !template_reaches(parameters, 4)) {
        return err_set_param(e, ERR_INVALID, at->list,
                             "%s[%d]%s.parameters nests deeper than %d levels", at->list, at->i,
                             at->inside, LIMIT_FILE_JSON_DEPTH - 4);
    }
    int outside = at->inside[0] ? 2 : 3;
    return template_reaches(v, outside)
               ? 0
               : err_set_param(e, ERR_INVALID, at->list, "%s[%d] nests deeper than %d levels",
                               at->list, at->i, LIMIT_FILE_JSON_DEPTH - outside);
}

static int check_list(const cJSON *list, bool functions, struct err *e)
{
    struct place at = {functions ? "functions" : "tools", 0, functions ? "" : ".function"};
    int rc = template_numbers(at.list, list, e);

    for (const cJSON *v = list->child; v && !rc; v = v->next, at.i++) {
        rc = check_depth(v, &at, e);
    }
    return rc;
}

int tools_put(struct buf *b, const cJSON *tree, struct err *e)
{
    bool functions;
    const cJSON *list = list_of(tree, &functions);
    int rc = list ? check_list(list, functions, e) : 0;

    if (!list || rc) {
        return rc;
    }
    buf_puts(b, ",\"tools\":");
    if (!functions) {
        json_put(b, list);
        return 0;
    }
    for (const cJSON *f = list->child; f; f = f->next) {
        buf_puts(b, f == list->child ? "[" : ",");
        buf_puts(b, "{\"type\":\"function\",\"function\":");
        json_put(b, f);
        buf_putc(b, '}');
    }
    buf_putc(b, ']');
    return 0;
}
