/* /debug/masks: how many tokens a schema's grammar allows in front of each token of a
 * text, for the page. What one call may take is bounded in tokens and in time. */
#include <stdlib.h>
#include <string.h>

#include "server/api/json_fields.h"
#include "server/http/http.h"
#include "server/stream/sse.h"

enum { MASKS_MOST = 512, MASKS_TIME_US = 250000 };

/* What the body asks. */
struct masks_body {
    cJSON *tree;      /* owned */
    char *schema;     /* owned, of cJSON */
    const char *text; /* of the tree */
};

static int read_body(struct masks_body *ret, const struct http_request *x, struct err *e)
{
    int rc = json_parse(&ret->tree, x->body.data ? x->body.data : "", x->body.len, e);

    if (rc < 0) {
        return rc;
    }
    const cJSON *schema = cJSON_GetObjectItemCaseSensitive(ret->tree, "schema");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(ret->tree, "text");
    if (!cJSON_IsObject(schema) && !cJSON_IsBool(schema)) {
        return err_set_param(e, ERR_INVALID, "schema", "schema must be a JSON Schema");
    }
    if (text && !cJSON_IsString(text)) {
        return err_set_param(e, ERR_INVALID, "text", "text must be a string");
    }
    ret->text = text ? text->valuestring : "";
    ret->schema = cJSON_PrintUnformatted(schema);
    return ret->schema ? 0 : err_nomem(e, "a schema");
}

static void put_walk(struct buf *b, const struct server *s, const struct grammar_walk *w,
                     const int32_t *id)
{
    const struct sse_style style = {.token_bytes = s->api.token_bytes, .arg = s->api.arg};
    static const char *const ends[] = {
        [WALK_WHOLE] = "text", [WALK_REFUSED] = "grammar", [WALK_TIME] = "time"};

    buf_printf(b, "{\"vocabulary\":%d,\"tokens\":[", s->api.info.vocab);
    for (int32_t i = 0; i < w->n; i++) {
        buf_puts(b, i ? "," : "");
        put_token_string(b, &style, id[i]);
    }
    buf_puts(b, "],\"allowed\":[");
    for (int32_t i = 0; i < w->n_allowed; i++) {
        buf_printf(b, "%s%d", i ? "," : "", w->allowed[i]);
    }
    buf_printf(b, "],\"end\":\"%s\",\"complete\":%s}", ends[w->end],
               w->complete ? "true" : "false");
}

static int walk(struct http_request *x, const struct masks_body *body, struct reply *r,
                struct err *e)
{
    struct engine *engine = atomic_load(&x->server->engine);
    struct grammar_walk w = {.most = MASKS_MOST, .until_us = clock_us() + MASKS_TIME_US};
    struct grammar *g = NULL;
    struct err why = {0};
    int32_t *id = NULL, n = 0;

    w.allowed = calloc(MASKS_MOST + 1, sizeof(*w.allowed));
    int rc = w.allowed ? engine_grammar_new(engine, GRAMMAR_JSON_SCHEMA, body->schema,
                                            strlen(body->schema), NULL, &g, &why)
                       : err_nomem(&why, "masks");
    if (rc < 0) {
        err_set_param(e, rc, "schema", "%s", why.text);
    } else if (body->text[0]) {
        rc = engine_encode(engine, body->text, strlen(body->text), false, INT32_MAX, &id, &n, e);
    }
    if (rc == 0) {
        rc = engine_grammar_walk(engine, g, id, n, &w, e);
    }
    if (rc == 0) {
        put_walk(&r->body, x->server, &w, id);
    }
    grammar_unref(g);
    free(w.allowed);
    free(id);
    return rc;
}

void handle_masks(struct http_request *x, const char *arg, struct reply *r)
{
    struct masks_body body = {0};
    struct quota_refusal why;
    struct err e = {0};

    (void)arg;
    if (!x->server->settings->ui) {
        reply_error(r, 404, NULL, "the page is turned off (--no-ui)");
        return;
    }
    x->counted =
        client_begin(x->auth.client, &x->auth.limits, (int64_t)x->body.len, clock_us(), &why);
    if (!x->counted) {
        reply_error(r, 429, NULL, why.text);
        r->retry_us = why.wait_us;
        return;
    }
    if (!reply_grow(x, r, 0)) {
        return;
    }
    int rc = read_body(&body, x, &e);
    if (rc == 0) {
        rc = walk(x, &body, r, &e);
    }
    if (rc < 0) {
        reply_error(r, http_status_of(e.code), e.param[0] ? e.param : NULL, e.text);
    }
    cJSON_free(body.schema);
    cJSON_Delete(body.tree);
}
