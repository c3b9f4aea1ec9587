/* Answers of /v1/responses: a list of output items (reasoning, messages, function
 * calls), as events or as one response object.
 *
 * The events of an item, in order:
 *
 *     response.output_item.added
 *       response.content_part.added                        text and reasoning only
 *       response.{output_text,reasoning_text,function_call_arguments}.delta, any number
 *       response.{output_text,reasoning_text,function_call_arguments}.done
 *       response.content_part.done                         text and reasoning only
 *     response.output_item.done
 *
 * The closing event repeats all items, so their JSON is kept until then.
 */
#include <string.h>

#include "config/base/limits.h"
#include "server/api/api.h"
#include "server/stream/agents/answer_items.h"
#include "server/stream/agents/dialects.h"
#include "server/stream/sse.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

struct responses_state {
    const struct answer_info *info; /* the stream's */
    struct answer_items items;
    int64_t sequence;          /* sequence_number of the next event */
    struct buf output;         /* JSON of the items that have ended, comma-separated */
    struct buf text;           /* of the open item, as the inside of a JSON string */
    struct buf call;           /* "call_id":…,"name":… of the open call */
    struct buf tokens;         /* log-probabilities of the open or next text, comma-separated */
    size_t tokens_sent;        /* bytes of it that events have shown */
    size_t text_sent;          /* bytes of `text` likewise, where it waits for its tokens */
    enum finish_reason finish; /* FINISH_NONE until the choice has ended */
    const char *error;         /* why the response failed; NULL: it has not */
    const char *impossible;    /* of FINISH_IMPOSSIBLE: a static string, or NULL */
};

static int responses_init(void *state, const struct answer_info *info, struct err *e)
{
    struct responses_state *s = state;

    (void)e;
    s->info = info;
    answer_items_init(&s->items);
    buf_init(&s->output, LIMIT_RESPONSE_BYTES);
    buf_init(&s->text, LIMIT_RESPONSE_BYTES);
    buf_init(&s->call, LIMIT_RESPONSE_BYTES);
    buf_init(&s->tokens, LIMIT_RESPONSE_BYTES);
    return 0;
}

static void responses_release(void *state)
{
    struct responses_state *s = state;

    answer_items_release(&s->items);
    buf_release(&s->output);
    buf_release(&s->text);
    buf_release(&s->call);
    buf_release(&s->tokens);
}

static size_t responses_held(const void *state)
{
    const struct responses_state *s = state;

    return s->output.cap + s->text.cap + s->call.cap + s->tokens.cap + s->items.space.cap;
}

static int result(const struct responses_state *s, const struct buf *b)
{
    bool failed =
        b->failed || s->output.failed || s->text.failed || s->call.failed || s->tokens.failed;

    return failed ? ERR_FULL : 0;
}

/* ---- fragments ---- */

/* The answer's id without its prefix. */
static const char *bare_id(const struct answer_info *info)
{
    const char *at = strchr(info->id, '_');

    return at ? at + 1 : info->id;
}

/* The open item's id, in quotes. */
static void put_item_id(struct buf *b, const struct responses_state *s)
{
    static const char *const prefix[] = {
        [ITEM_NONE] = "", [ITEM_TEXT] = "msg", [ITEM_REASONING] = "rs", [ITEM_CALL] = "fc"};

    buf_printf(b, "\"%s_", prefix[s->items.kind]);
    buf_json_escape(b, bare_id(s->info), strlen(bare_id(s->info)));
    buf_printf(b, "_%d\"", s->items.n - 1);
}

static void put_text(struct buf *b, const struct responses_state *s)
{
    buf_append(b, s->text.data ? s->text.data : "", s->text.len);
}

/* The log-probabilities from a byte of `tokens` on, as a member. */
static void put_tokens(struct buf *b, const struct responses_state *s, size_t from)
{
    size_t comma = from && from < s->tokens.len ? 1 : 0;

    PUT(b, ",\"logprobs\":[");
    if (from < s->tokens.len) {
        buf_append(b, s->tokens.data + from + comma, s->tokens.len - from - comma);
    }
    buf_putc(b, ']');
}

/* The content part of the open item, with its text so far. */
static void put_part(struct buf *b, const struct responses_state *s)
{
    if (s->items.kind == ITEM_REASONING) {
        PUT(b, "{\"type\":\"reasoning_text\",\"text\":\"");
        put_text(b, s);
        PUT(b, "\"}");
        return;
    }
    PUT(b, "{\"type\":\"output_text\",\"text\":\"");
    put_text(b, s);
    PUT(b, "\",\"annotations\":[]");
    put_tokens(b, s, 0);
    buf_putc(b, '}');
}

/* The open item; `begun`: as it begins, without content. */
static void put_item(struct buf *b, const struct responses_state *s, const char *status, bool begun)
{
    static const char *const type[] = {[ITEM_NONE] = "",
                                       [ITEM_TEXT] = "message",
                                       [ITEM_REASONING] = "reasoning",
                                       [ITEM_CALL] = "function_call"};

    PUT(b, "{\"id\":");
    put_item_id(b, s);
    buf_printf(b, ",\"type\":\"%s\",\"status\":\"%s\",", type[s->items.kind], status);
    if (s->items.kind == ITEM_CALL) {
        buf_append(b, s->call.data, s->call.len);
        PUT(b, ",\"arguments\":\"");
        put_text(b, s);
        PUT(b, "\"}");
        return;
    }
    buf_puts(b, s->items.kind == ITEM_TEXT ? "\"role\":\"assistant\"" : "\"summary\":[]");
    PUT(b, ",\"content\":[");
    if (!begun) {
        put_part(b, s);
    }
    PUT(b, "]}");
}

static void put_response_usage(struct buf *b, const struct usage *u)
{
    buf_printf(b,
               "{\"input_tokens\":%d,\"input_tokens_details\":{\"cached_tokens\":%d,"
               "\"cache_write_tokens\":0},"
               "\"output_tokens\":%d,\"output_tokens_details\":{\"reasoning_tokens\":%d},"
               "\"total_tokens\":%d}",
               u->prompt_tokens, u->cached_tokens, u->completion_tokens, u->reasoning_tokens,
               u->prompt_tokens + u->completion_tokens);
}

/* The response object; `usage` is NULL while it is in progress. */
static void put_response(struct buf *b, const struct responses_state *s, const char *status,
                         const struct usage *usage)
{
    const struct answer_info *info = s->info;

    PUT(b, "{\"id\":");
    buf_json_puts(b, info->id);
    buf_printf(b,
               ",\"object\":\"response\",\"created_at\":%lld,\"completed_at\":null,\"status\":"
               "\"%s\",\"error\":",
               (long long)info->created, status);
    if (s->error) {
        PUT(b, "{\"code\":");
        buf_json_puts(b, s->error == s->impossible ? "invalid_prompt" : "server_error");
        PUT(b, ",\"message\":");
        buf_json_puts(b, s->error);
        buf_putc(b, '}');
    } else {
        PUT(b, "null");
    }
    buf_puts(b, strcmp(status, "incomplete") == 0
                    ? ",\"incomplete_details\":{\"reason\":\"max_output_tokens\"},\"model\":"
                    : ",\"incomplete_details\":null,\"model\":");
    buf_json_puts(b, info->model);
    PUT(b, ",\"output\":[");
    buf_append(b, s->output.data ? s->output.data : "", s->output.len);
    PUT(b, "],");
    buf_puts(b, info->echo ? info->echo : "");
    PUT(b, "\"usage\":");
    if (usage) {
        put_response_usage(b, usage);
    } else {
        PUT(b, "null");
    }
    buf_putc(b, '}');
}

/* ---- events ---- */

static void open_event(struct buf *b, struct responses_state *s, const char *name)
{
    put_named_event(b, name);
    buf_printf(b, ",\"sequence_number\":%lld", (long long)s->sequence++);
}

static void close_event(struct buf *b)
{
    PUT(b, "}\n\n");
}

/* An event about the open item; `part`: about its content part. */
static void open_item_event(struct buf *b, struct responses_state *s, const char *name, bool part)
{
    open_event(b, s, name);
    PUT(b, ",\"item_id\":");
    put_item_id(b, s);
    buf_printf(b, ",\"output_index\":%d", s->items.n - 1);
    if (part) {
        PUT(b, ",\"content_index\":0");
    }
}

static void put_item_event(struct buf *b, struct responses_state *s, const char *name,
                           const char *status, bool begun)
{
    open_event(b, s, name);
    buf_printf(b, ",\"output_index\":%d,\"item\":", s->items.n - 1);
    put_item(b, s, status, begun);
    close_event(b);
}

static void put_response_event(struct buf *b, struct responses_state *s, const char *name,
                               const char *status, const struct usage *usage)
{
    open_event(b, s, name);
    PUT(b, ",\"response\":");
    put_response(b, s, status, usage);
    close_event(b);
}

/* ---- items ---- */

static void clear_tokens(struct responses_state *s)
{
    buf_clear(&s->tokens);
    s->tokens_sent = 0;
}

static int open_output_item(struct buf *b, void *state, const struct answer_event *event)
{
    struct responses_state *s = state;

    buf_clear(&s->text);
    s->text_sent = 0;
    if (s->items.kind != ITEM_TEXT) {
        clear_tokens(s);
    }
    if (s->items.kind == ITEM_CALL) {
        buf_clear(&s->call);
        PUT(&s->call, "\"call_id\":");
        buf_json_puts(&s->call, event->id ? event->id : "");
        PUT(&s->call, ",\"name\":");
        buf_json_puts(&s->call, event->name ? event->name : "");
    }
    if (s->info->whole) {
        return result(s, b);
    }
    put_item_event(b, s, "response.output_item.added", "in_progress", true);
    if (s->items.kind != ITEM_CALL) {
        open_item_event(b, s, "response.content_part.added", true);
        PUT(b, ",\"part\":{\"type\":");
        buf_puts(b, s->items.kind == ITEM_REASONING
                        ? "\"reasoning_text\",\"text\":\"\"}"
                        : "\"output_text\",\"text\":\"\",\"annotations\":[],\"logprobs\":[]}");
        close_event(b);
    }
    return result(s, b);
}

/* Whether what is open, or comes next, is text whose log-probabilities are shown. */
static bool shows_tokens(const struct responses_state *s)
{
    return s->items.kind <= ITEM_TEXT && s->info->style && s->info->style->logprobs;
}

static int add_piece(struct buf *b, void *state, const char *text, size_t len)
{
    static const char *const name[] = {
        [ITEM_NONE] = "",
        [ITEM_TEXT] = "response.output_text.delta",
        [ITEM_REASONING] = "response.reasoning_text.delta",
        [ITEM_CALL] = "response.function_call_arguments.delta",
    };
    struct responses_state *s = state;

    buf_json_escape(&s->text, text, len);
    if (s->info->whole || (s->items.kind == ITEM_TEXT && shows_tokens(s))) {
        return result(s, b); /* text waits for its tokens */
    }
    open_item_event(b, s, name[s->items.kind], s->items.kind != ITEM_CALL);
    PUT(b, ",\"delta\":\"");
    buf_json_escape(b, text, len);
    buf_puts(b, s->items.kind == ITEM_TEXT ? "\",\"logprobs\":[]" : "\"");
    close_event(b);
    return result(s, b);
}

/* The text that has waited, with the log-probabilities of its tokens. */
static void put_waiting(struct buf *b, struct responses_state *s)
{
    if (s->text_sent == s->text.len && s->tokens_sent == s->tokens.len) {
        return;
    }
    open_item_event(b, s, "response.output_text.delta", true);
    PUT(b, ",\"delta\":\"");
    if (s->text_sent < s->text.len) {
        buf_append(b, s->text.data + s->text_sent, s->text.len - s->text_sent);
    }
    buf_putc(b, '"');
    put_tokens(b, s, s->tokens_sent);
    close_event(b);
    s->text_sent = s->text.len;
    s->tokens_sent = s->tokens.len;
}

/* The events that end a text, a reasoning or a call. */
static void put_done_events(struct buf *b, struct responses_state *s)
{
    if (s->items.kind == ITEM_CALL) {
        open_item_event(b, s, "response.function_call_arguments.done", false);
        buf_putc(b, ',');
        buf_append(b, s->call.data, s->call.len);
        PUT(b, ",\"arguments\":\"");
        put_text(b, s);
        PUT(b, "\"");
        close_event(b);
        return;
    }
    bool reasoning = s->items.kind == ITEM_REASONING;
    open_item_event(b, s, reasoning ? "response.reasoning_text.done" : "response.output_text.done",
                    true);
    PUT(b, ",\"text\":\"");
    put_text(b, s);
    buf_putc(b, '"');
    if (!reasoning) {
        put_tokens(b, s, 0);
    }
    close_event(b);
    open_item_event(b, s, "response.content_part.done", true);
    PUT(b, ",\"part\":");
    put_part(b, s);
    close_event(b);
}

static int close_output_item(struct buf *b, void *state, bool cut)
{
    struct responses_state *s = state;
    const char *status = cut ? "incomplete" : "completed";

    if (!s->info->whole) {
        if (s->items.kind == ITEM_TEXT && shows_tokens(s)) {
            put_waiting(b, s);
        }
        put_done_events(b, s);
        put_item_event(b, s, "response.output_item.done", status, false);
    }
    if (s->output.len) {
        buf_putc(&s->output, ',');
    }
    put_item(&s->output, s, status, false);
    clear_tokens(s);
    return result(s, b);
}

static const struct item_writer item_writer = {open_output_item, add_piece, close_output_item};

/* ---- the dialect ---- */

static int responses_begin(struct buf *b, void *state, const struct usage *usage)
{
    struct responses_state *s = state;

    (void)usage;
    if (!s->info->whole) {
        put_response_event(b, s, "response.created", "in_progress", NULL);
        put_response_event(b, s, "response.in_progress", "in_progress", NULL);
    }
    return result(s, b);
}

static int responses_event(struct buf *b, void *state, int32_t choice,
                           const struct answer_event *event)
{
    struct responses_state *s = state;

    return choice ? 0 : answer_items_event(&s->items, &item_writer, b, state, event);
}

/* Log-probabilities of text; those of reasoning and calls have no place here. */
static int responses_tokens(struct buf *b, void *state, int32_t choice, const struct output *o,
                            int32_t from, int32_t n)
{
    struct responses_state *s = state;

    if (!choice && o->finish == FINISH_IMPOSSIBLE) {
        s->impossible = o->error;
    }
    if (choice || !shows_tokens(s)) {
        return 0;
    }
    for (int32_t i = from; i < from + n; i++) {
        if (s->tokens.len) {
            buf_putc(&s->tokens, ',');
        }
        put_chat_token(&s->tokens, s->info->style, &o->token[i]);
    }
    if (!s->info->whole && s->items.kind == ITEM_TEXT) {
        put_waiting(b, s);
    }
    return result(s, b);
}

static int responses_finish(struct buf *b, void *state, int32_t choice, enum finish_reason finish,
                            const char *stop_string, bool calls)
{
    struct responses_state *s = state;
    int rc = 0;

    (void)stop_string, (void)calls;
    if (choice || s->finish != FINISH_NONE) {
        return 0;
    }
    s->finish = finish;
    if (finish != FINISH_STOP && finish != FINISH_LENGTH) {
        s->error = s->impossible ? s->impossible : "the response could not be completed";
    }
    /* An answer without any text is one empty message. */
    if (s->items.n == 0) {
        s->items.kind = ITEM_TEXT;
        s->items.n = 1;
        rc = open_output_item(b, state, &(struct answer_event){0});
    }
    return rc ? rc : answer_items_close(&s->items, &item_writer, b, state, finish != FINISH_STOP);
}

static int responses_end(struct buf *b, void *state, const struct usage *usage)
{
    struct responses_state *s = state;
    const char *status = s->error                     ? "failed"
                         : s->finish == FINISH_LENGTH ? "incomplete"
                                                      : "completed";
    char name[32] = "response.";

    if (s->info->whole) {
        put_response(b, s, status, usage);
        return result(s, b);
    }
    strcat(name, status);
    put_response_event(b, s, name, status, usage);
    sse_done(b);
    return result(s, b);
}

static int responses_error(struct buf *b, void *state, int status, const char *message)
{
    struct responses_state *s = state;

    (void)status;
    s->error = message;
    open_event(b, s, "error");
    PUT(b, ",\"code\":\"server_error\",\"message\":");
    buf_json_puts(b, message);
    PUT(b, ",\"param\":null");
    close_event(b);
    put_response_event(b, s, "response.failed", "failed", NULL);
    sse_done(b);
    s->error = "the response failed"; /* the message is the caller's */
    return result(s, b);
}

const struct dialect responses_dialect = {
    .state_bytes = sizeof(struct responses_state),
    .init = responses_init,
    .release = responses_release,
    .held = responses_held,
    .begin = responses_begin,
    .event = responses_event,
    .tokens = responses_tokens,
    .finish = responses_finish,
    .end = responses_end,
    .error = responses_error,
    .error_body = api_error,
};
