/* The grammar of a request: of what a field asks for, or in chats of that together with
 * the calls of tools. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api_structured.h"

/* Steps of compiling that all grammars of one request may take together, and what is
 * left of them for the last one, with the schemas that could be enforced. */
enum { WORK = 2000000, WORK_OF_LAST = 800000 };

/* Compile a grammar; an error names the field and the value in it. */
static int compile(struct grammar **ret, const struct api_context *ctx, enum grammar_kind kind,
                   const char *text, size_t len, const char *field, const char *path, int64_t *work,
                   struct err *e)
{
    struct err why = {0};
    int rc = ctx->grammar_new
                 ? ctx->grammar_new(ctx->arg, kind, text, len, work, ret, &why)
                 : err_set(&why, ERR_UNSUPPORTED, "this server has no constrained output");

    return rc ? err_set_param(e, rc, field, "%s: %.400s", path, why.text) : 0;
}

/* Whether a JSON Schema can be enforced; if not, the error says why. */
static int try_schema(const struct api_context *ctx, const char *schema, const char *field,
                      const char *path, int64_t *work, struct err *e)
{
    struct gen_params p = {0};

    if (*work <= WORK_OF_LAST) {
        return err_set_param(e, ERR_INVALID, field,
                             "%s: the request's schemas take too many steps to compile", path);
    }
    *work -= WORK_OF_LAST;
    int rc =
        compile(&p.grammar, ctx, GRAMMAR_JSON_SCHEMA, schema, strlen(schema), field, path, work, e);
    *work += WORK_OF_LAST;
    gen_params_release(&p);
    return rc;
}

/* The grammar of calls and of an answer with `schema` (NULL: any text) did not compile.
 * Find the schema at fault: that of the answer or of a strict tool is an error; other
 * tools lose theirs in `lax`, and are named as ignored. *ret_lost: their number. */
static int find_fault(struct completion *c, struct chat_tool *lax, struct wish *w,
                      const char *schema, const struct api_context *ctx, int *ret_lost,
                      struct err *e)
{
    static char any[] = "{\"type\":\"object\"}";
    const char *field = c->functions ? "functions" : "tools";
    char name[LIMIT_TOOL_NAME_BYTES + 32];
    int rc = schema ? try_schema(ctx, schema, w->field, w->path, &w->work, e) : 0;

    *ret_lost = 0;
    for (int32_t i = 0; i < c->tools.n && !rc; i++) {
        const struct chat_tool *t = &c->tools.tool[i];
        struct err why = {0};
        lax[i] = *t;
        if (!t->parameters) {
            continue;
        }
        snprintf(name, sizeof(name), "%s.%s.parameters", field, t->name);
        int wrong = try_schema(ctx, t->parameters, field, name, &w->work, &why);
        if (wrong == ERR_NOMEM || (wrong && t->strict)) {
            rc = wrong;
            if (e) {
                *e = why;
            }
        } else if (wrong) {
            lax[i].parameters = any;
            note_ignored(c->ignored, sizeof(c->ignored), name);
            ++*ret_lost;
        }
    }
    return rc;
}

/* The format's grammar of an answer with these tools. */
static int compile_format(struct completion *c, const struct chat_tools *tools, struct wish *w,
                          const char *schema, const struct api_context *ctx, struct err *e)
{
    const char *field = w->field       ? w->field
                        : c->functions ? "functions"
                                       : "tools",
               *path = w->field ? w->path : field;
    struct buf lark;
    bool needed = false;

    buf_init(&lark, LIMIT_GRAMMAR_BYTES);
    int rc = ctx->chat_grammar(ctx->arg, tools->n ? tools : NULL, schema, c->opens_reasoning, &lark,
                               &needed, e);
    if (rc && e && !e->param[0]) {
        snprintf(e->param, sizeof(e->param), "%s", field);
    }
    if (!rc && needed && lark.failed) {
        rc = lark.no_memory ? err_nomem(e, "a grammar")
                            : err_set_param(e, ERR_INVALID, field,
                                            "%s: the grammar has more than %zu bytes, which are "
                                            "the most that are taken",
                                            path, LIMIT_GRAMMAR_BYTES);
    } else if (!rc && needed) {
        rc = compile(&c->params.grammar, ctx, GRAMMAR_LARK, lark.data, lark.len, field, path,
                     &w->work, e);
    }
    buf_release(&lark);
    return rc;
}

/* The grammar of a chat whose answer may hold calls or reasoning; `schema` constrains
 * the text that is neither (NULL: any). */
static int read_with_format(struct completion *c, struct wish *w, const char *schema,
                            const struct api_context *ctx, struct err *e)
{
    struct chat_tools none = {0}, lax = c->tools;
    struct err why = {0};
    int lost, rc;

    if (!tools_active(c) && !schema) {
        return 0;
    }
    if (!ctx->chat_grammar) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field ? w->field : "tools",
                             "this server has no constrained output");
    }
    rc = compile_format(c, tools_active(c) ? &c->tools : &none, w, schema, ctx, e);
    if (!rc || rc == ERR_NOMEM || (!tools_active(c) && !schema)) {
        return rc;
    }
    lax.tool = calloc((size_t)MAX(c->tools.n, 1), sizeof(*lax.tool));
    if (!lax.tool) {
        return err_nomem(e, "tools");
    }
    int fault = find_fault(c, lax.tool, w, schema, ctx, &lost, &why);
    if (fault) {
        rc = fault;
        if (e) {
            *e = why;
        }
    } else if (lost) {
        rc = compile_format(c, &lax, w, schema, ctx, e);
    }
    free(lax.tool);
    return rc;
}

/* The whole answer is constrained, or its text beside calls and reasoning. */
static int read_chat(struct completion *c, struct wish *w, const struct api_context *ctx,
                     struct err *e)
{
    bool schema = w->field && w->kind == GRAMMAR_JSON_SCHEMA,
         object = w->field && w->kind == GRAMMAR_JSON_OBJECT;

    if (!w->field || schema || object) {
        buf_putc(&w->text, '\0'); /* an end for the text of a schema */
        return read_with_format(c, w,
                                schema   ? w->text.data
                                : object ? "{\"type\":\"object\"}"
                                         : NULL,
                                ctx, e);
    }
    if (tools_active(c)) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field,
                             "%s does not go with tools: beside calls only JSON can be "
                             "constrained",
                             w->field);
    }
    if (c->opens_reasoning) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field,
                             "%s does not go with reasoning, with which the answer begins; only "
                             "JSON does",
                             w->field);
    }
    return compile(&c->params.grammar, ctx, w->kind, w->text.data, w->text.len, w->field, w->path,
                   &w->work, e);
}

int structured_read(struct completion *c, const cJSON *tree, const struct api_context *ctx,
                    struct err *e)
{
    struct wish w = {.work = WORK};
    int rc;

    buf_init(&w.text, LIMIT_GRAMMAR_BYTES);
    rc = read_wish(&w, tree, e);
    if (!rc && c->parsed) {
        rc = read_chat(c, &w, ctx, e);
    } else if (!rc && w.field) {
        rc = compile(&c->params.grammar, ctx, w.kind, w.text.data ? w.text.data : "", w.text.len,
                     w.field, w.path, &w.work, e);
    }
    buf_release(&w.text);
    return rc;
}
