/* Response bodies other than completions: errors, models, the OpenAPI document. */
#include <float.h>
#include <math.h>
#include <string.h>
#include <time.h>

#include "server/api/api.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

int http_status_of(int err_code)
{
    switch (err_code) {
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
        return 400;
    case ERR_NOT_FOUND:
        return 404;
    case ERR_FULL:
        return 429;
    case ERR_DRAINING:
    case ERR_NOMEM:
        return 503;
    case ERR_TIMEOUT:
        return 504;
    default:
        return 500;
    }
}

static const char *error_type(int status)
{
    return status == 401   ? "authentication_error"
           : status == 404 ? "not_found_error"
           : status == 429 ? "rate_limit_error"
           : status >= 500 ? "server_error"
                           : "invalid_request_error";
}

void api_error_object(struct buf *b, int status, const char *param, const char *message)
{
    PUT(b, "{\"message\":");
    buf_json_puts(b, message);
    buf_printf(b, ",\"type\":\"%s\",\"param\":", error_type(status));
    if (param && param[0]) {
        buf_json_puts(b, param);
    } else {
        PUT(b, "null");
    }
    buf_printf(b, ",\"code\":%d}", status);
}

void api_error(struct buf *b, int status, const char *param, const char *message)
{
    PUT(b, "{\"error\":");
    api_error_object(b, status, param, message);
    buf_putc(b, '}');
}

/* ,"created_at":…, as Anthropic's clients read it */
static void put_time(struct buf *b, int64_t unix_s)
{
    time_t at = (time_t)unix_s;
    char text[32];
    struct tm tm;

    gmtime_r(&at, &tm);
    strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &tm);
    buf_printf(b, ",\"created_at\":\"%s\"", text);
}

void api_model(struct buf *b, const struct api_context *ctx)
{
    PUT(b, "{\"id\":");
    buf_json_puts(b, ctx->info.model_name);
    buf_printf(b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"quire\",\"root\":",
               (long long)ctx->info.created);
    buf_json_puts(b, ctx->info.model_name);
    /* the length under the names that clients read */
    int32_t len = ctx->info.max_model_len;
    buf_printf(b,
               ",\"parent\":null,\"max_model_len\":%d,\"context_length\":%d,"
               "\"context_window\":%d",
               len, len, len);
    PUT(b, ",\"type\":\"model\",\"display_name\":");
    buf_json_puts(b, ctx->info.model_name);
    put_time(b, ctx->info.created);
    buf_putc(b, '}');
}

void api_models(struct buf *b, const struct api_context *ctx)
{
    PUT(b, "{\"object\":\"list\",\"data\":[");
    api_model(b, ctx);
    PUT(b, "],\"has_more\":false,\"first_id\":");
    buf_json_puts(b, ctx->info.model_name);
    PUT(b, ",\"last_id\":");
    buf_json_puts(b, ctx->info.model_name);
    PUT(b, ",\"models\":[");
    api_codex_model(b, ctx);
    PUT(b, "]}");
}

/* ---- OpenAPI ---- */

/* The bounds of the stored float: above 0 means at least the smallest positive float,
 * and finite means at most the largest float. */
static void put_bounds(struct buf *b, const struct field *f)
{
    bool single = f->type == FIELD_FLOAT;
    double lo = isinf(f->lo) ? -FLT_MAX
                : f->lo_open ? FLT_TRUE_MIN
                             : f->lo,
           hi = isinf(f->hi) ? FLT_MAX : f->hi;

    buf_printf(b, ",\"minimum\":%.*g,\"maximum\":%.*g", single ? 9 : 17, lo, single ? 9 : 17, hi);
}

/* Append a schema with its placeholders replaced. */
static void put_custom(struct buf *b, const char *schema, const struct api_context *ctx)
{
    const struct {
        const char *name;
        int64_t value;
    } known[] = {{"@vocab", ctx->info.vocab - 1},
                 {"@logprobs", ctx->max_logprobs},
                 {"@suffix", ctx->fim.there ? ctx->info.max_model_len : 0}};

    for (const char *at; (at = strchr(schema, '@')) != NULL;) {
        size_t i = 0;
        while (i + 1 < ARRAY_LEN(known) && strncmp(at, known[i].name, strlen(known[i].name)) != 0) {
            i++;
        }
        buf_append(b, schema, (size_t)(at - schema));
        buf_printf(b, "%lld", (long long)known[i].value);
        schema = at + strlen(known[i].name);
    }
    buf_puts(b, schema);
}

static void put_schema(struct buf *b, const struct field *f, const struct api_context *ctx)
{
    switch (f->type) {
    case FIELD_BOOL:
        PUT(b, "{\"type\":\"boolean\"}");
        break;
    case FIELD_STRING:
        PUT(b, "{\"type\":\"string\"}");
        break;
    case FIELD_INT:
    case FIELD_FLOAT:
        buf_printf(b, "{\"type\":\"%s\"", f->type == FIELD_INT ? "integer" : "number");
        put_bounds(b, f);
        buf_putc(b, '}');
        break;
    default:
        put_custom(b, f->schema, ctx);
    }
}

/* Every field but the required one also accepts null, which means not given. */
static void put_property(struct buf *b, const struct field *f, bool required,
                         const struct api_context *ctx)
{
    buf_json_puts(b, f->name);
    PUT(b, ":{\"description\":");
    buf_json_puts(b, f->help);
    if (required) {
        PUT(b, ",\"allOf\":[");
        put_schema(b, f, ctx);
        PUT(b, "]}");
    } else {
        PUT(b, ",\"anyOf\":[");
        put_schema(b, f, ctx);
        PUT(b, ",{\"type\":\"null\"}]}");
    }
}

static void put_table(struct buf *b, const char *name, const struct field_table *t,
                      const char *required, const struct api_context *ctx)
{
    bool any = false;

    buf_json_puts(b, name);
    PUT(b, ":{\"type\":\"object\",\"required\":[");
    buf_json_puts(b, required);
    PUT(b, "],\"properties\":{");
    for (int i = 0; i < t->n; i++) {
        if (t->field[i].type == FIELD_MISSING || !field_in(t, &t->field[i])) {
            continue;
        }
        if (any) {
            buf_putc(b, ',');
        }
        put_property(b, &t->field[i], strcmp(t->field[i].name, required) == 0, ctx);
        any = true;
    }
    PUT(b, "}}");
}

struct error_answer {
    const char *code, *what;
};

/* Error responses that any route may give. */
#define COMMON_ANSWERS                               \
    {"401", "API key missing or wrong"},             \
    {                                                \
        "503", "starting, draining or out of memory" \
    }
#define POST_ANSWERS                                                                  \
    {"400", "a field is wrong"}, {"404", "unknown model"}, {"413", "body too large"}, \
        {"415", "not application/json, or compressed"}, COMMON_ANSWERS

static const struct error_answer GET_ERRORS[] = {COMMON_ANSWERS},
                                 MODEL_ERRORS[] = {{"400", "the path is wrong"},
                                                   {"404", "unknown model"},
                                                   COMMON_ANSWERS},
                                 KEY_ERRORS[] = {{"401", "API key missing or wrong"}},
                                 POST_ERRORS[] = {POST_ANSWERS},
                                 GENERATING_ERRORS[] = {
                                     POST_ANSWERS,
                                     {"429", "the queue is full, or a limit of the key"},
                                     {"500", "the device failed"}};

/* Append each as a member, a comma in front of it. schema: the name of their form. */
static void put_errors(struct buf *b, const struct error_answer *answer, size_t n,
                       const char *schema)
{
    for (size_t i = 0; i < n; i++) {
        buf_printf(b,
                   ",\"%s\":{\"description\":\"%s\",\"content\":{\"application/json\":"
                   "{\"schema\":{\"$ref\":\"#/components/schemas/%s\"}}}}",
                   answer[i].code, answer[i].what, schema);
    }
}

/* The form of a route's errors, by the table of its fields. */
static const char *error_schema(const char *table)
{
    return strcmp(table, "message") == 0 ? "message_error" : "error";
}

static void put_post(struct buf *b, const char *path, const char *summary, const char *table,
                     const char *answer)
{
    buf_printf(b,
               "\"%s\":{\"post\":{\"summary\":\"%s\",\"requestBody\":{\"required\":true,"
               "\"content\":{\"application/"
               "json\":{\"schema\":"
               "{\"$ref\":\"#/components/schemas/"
               "%s\"}}}},\"responses\":{\"200\":{\"description\":\"OK\",\"content\":{%s}}",
               path, summary, table, answer);
    put_errors(b, POST_ERRORS, ARRAY_LEN(POST_ERRORS), error_schema(table));
    PUT(b, "}}}");
}

/* A generating route, which answers with JSON or with events. */
static void put_generating(struct buf *b, const char *path, const char *summary, const char *table)
{
    buf_printf(b,
               "\"%s\":{\"post\":{\"summary\":\"%s\",\"requestBody\":{\"required\":true,"
               "\"content\":{\"application/"
               "json\":{\"schema\":{\"$ref\":\"#/components/schemas/"
               "%s\"}}}},\"responses\":{\"200\":{\"description\":"
               "\"OK\",\"content\":{\"application/json\":{\"schema\":{\"type\":\"object\"}},\"text/"
               "event-stream\":{}}}",
               path, summary, table);
    put_errors(b, GENERATING_ERRORS, ARRAY_LEN(GENERATING_ERRORS), error_schema(table));
    PUT(b, "}}}");
}

static void put_get(struct buf *b, const char *path, const char *summary, const char *content_type,
                    const struct error_answer *errors, size_t n_errors)
{
    buf_printf(b,
               ",\"%s\":{\"get\":{\"summary\":\"%s\",\"responses\":{\"200\":{\"description\":"
               "\"OK\",\"content\":{\"%s\":{}}}",
               path, summary, content_type);
    put_errors(b, errors, n_errors, "error");
    PUT(b, "}}}");
}

/* A route about the process, which says in words of its own why it is not well. */
static void put_health(struct buf *b, const char *path, const char *summary)
{
    buf_printf(b,
               ",\"%s\":{\"get\":{\"summary\":\"%s\",\"responses\":{\"200\":{\"description\":"
               "\"OK\",\"content\":{\"application/json\":{}}},\"503\":{\"description\":"
               "\"starting, draining, stalled or dead\"}}}}",
               path, summary);
}

void api_openapi(struct buf *b, const struct api_context *ctx)
{
    static const char json[] = "\"application/json\":{\"schema\":{\"type\":\"object\"}}";

    PUT(b, "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"Quire\",\"version\":\"" QUIRE_VERSION
           "\"},\"security\":[{\"key\":[]},{}],\"paths\":{");
    put_generating(b, "/v1/completions", "Complete prompts", "completion");
    buf_putc(b, ',');
    put_generating(b, "/v1/chat/completions", "Answer a conversation", "chat_completion");
    buf_putc(b, ',');
    put_generating(b, "/v1/responses", "Answer a conversation of items", "response");
    buf_putc(b, ',');
    put_post(b, "/v1/responses/input_tokens", "Count the tokens of such a conversation", "response",
             json);
    buf_putc(b, ',');
    put_generating(b, "/v1/messages", "Answer a conversation of content blocks", "message");
    buf_putc(b, ',');
    put_post(b, "/v1/messages/count_tokens", "Count the tokens of such a conversation", "message",
             json);
    buf_putc(b, ',');
    put_post(b, "/tokenize", "Text to token ids", "tokenize", json);
    buf_putc(b, ',');
    put_post(b, "/detokenize", "Token ids to text", "detokenize", json);
    put_get(b, "/v1/models", "The served model", "application/json", GET_ERRORS,
            ARRAY_LEN(GET_ERRORS));
    PUT(b, ",\"/v1/models/{id}\":{\"get\":{\"summary\":\"One "
           "model\",\"parameters\":[{\"name\":\"id\",\"in\":\"path\",\"required\":true,"
           "\"schema\":{\"type\":\"string\"}}],\"responses\":{\"200\":{\"description\":\"OK\","
           "\"content\":{"
           "\"application/json\":{}}}");
    put_errors(b, MODEL_ERRORS, ARRAY_LEN(MODEL_ERRORS), "error");
    PUT(b, "}}}");
    put_health(b, "/health", "Whether requests are answered");
    put_health(b, "/ping", "The same");
    put_get(b, "/metrics", "Prometheus metrics", "text/plain", GET_ERRORS, ARRAY_LEN(GET_ERRORS));
    put_get(b, "/version", "Version", "application/json", KEY_ERRORS, ARRAY_LEN(KEY_ERRORS));
    PUT(b, "},\"components\":{\"securitySchemes\":{\"key\":{\"type\":\"http\",\"scheme\":"
           "\"bearer\"}},\"schemas\":{");
    put_table(b, "completion", &completion_fields, "prompt", ctx);
    buf_putc(b, ',');
    put_table(b, "chat_completion", &chat_fields, "messages", ctx);
    buf_putc(b, ',');
    put_table(b, "response", &responses_fields, "input", ctx);
    buf_putc(b, ',');
    put_table(b, "message", &messages_fields, "messages", ctx);
    buf_putc(b, ',');
    put_table(b, "tokenize", &tokenize_fields, "prompt", ctx);
    buf_putc(b, ',');
    put_table(b, "detokenize", &detokenize_fields, "tokens", ctx);
    PUT(b, ",\"error\":{\"type\":\"object\",\"required\":[\"error\"],\"properties\":{\"error\":{"
           "\"type\":\"object\","
           "\"required\":[\"message\",\"type\","
           "\"param\",\"code\"],\"properties\":{\"message\":{\"type\":\"string\"},\"type\":{"
           "\"type\":\"string\"},"
           "\"param\":{\"type\":[\"string\",\"null\"]},"
           "\"code\":{\"type\":\"integer\"}}}}},");
    PUT(b, "\"message_error\":{\"type\":\"object\",\"required\":[\"type\",\"error\"],"
           "\"properties\":{\"type\":{\"const\":\"error\"},\"error\":{\"type\":\"object\","
           "\"required\":[\"type\",\"message\"],\"properties\":{\"type\":{\"type\":\"string\"},"
           "\"message\":{\"type\":\"string\"}}}}}}}}");
}
