/* Answers of /v1/messages: a list of content blocks (thinking, text, tool_use), as
 * events or as one message.
 *
 * The events: message_start, ping; for each block content_block_start, any number of
 * content_block_delta, content_block_stop; then message_delta, which tells why the
 * message ended, and message_stop.
 */
#include <string.h>

#include "config/base/limits.h"
#include "server/api/json_fields.h"
#include "server/stream/agents/answer_items.h"
#include "server/stream/agents/dialects.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

struct messages_state {
    const struct answer_info *info; /* the stream's */
    struct answer_items items;
    /* Of one body only: the JSON of all blocks; the open block's text, as the inside of
     * a JSON string, or the open call's arguments as they are. */
    struct buf content, text;
    const char *stop_reason; /* NULL until the choice has ended */
    struct buf stop;         /* the stop sequence that matched, as a JSON string, or empty */
};

static int messages_init(void *state, const struct answer_info *info, struct err *e)
{
    struct messages_state *s = state;

    (void)e;
    s->info = info;
    answer_items_init(&s->items);
    buf_init(&s->content, LIMIT_RESPONSE_BYTES);
    buf_init(&s->text, LIMIT_RESPONSE_BYTES);
    buf_init(&s->stop, LIMIT_RESPONSE_BYTES);
    return 0;
}

static void messages_release(void *state)
{
    struct messages_state *s = state;

    answer_items_release(&s->items);
    buf_release(&s->content);
    buf_release(&s->text);
    buf_release(&s->stop);
}

static size_t messages_held(const void *state)
{
    const struct messages_state *s = state;

    return s->content.cap + s->text.cap + s->stop.cap + s->items.space.cap;
}

static int result(const struct messages_state *s, const struct buf *b)
{
    return b->failed || s->content.failed || s->text.failed || s->stop.failed ? ERR_FULL : 0;
}

/* ---- fragments ---- */

/* Prompt tokens that the prefix cache had are counted apart from the others. */
static void put_message_usage(struct buf *b, const struct usage *u)
{
    buf_printf(b,
               "\"usage\":{\"input_tokens\":%d,\"cache_creation_input_tokens\":0,"
               "\"cache_read_input_tokens\":%d,\"output_tokens\":%d}",
               u->prompt_tokens - u->cached_tokens, u->cached_tokens, u->completion_tokens);
}

/* "stop_reason":…,"stop_sequence":… */
static void put_stop(struct buf *b, const struct messages_state *s)
{
    PUT(b, "\"stop_reason\":");
    if (s->stop_reason) {
        buf_json_puts(b, s->stop_reason);
    } else {
        PUT(b, "null");
    }
    PUT(b, ",\"stop_sequence\":");
    buf_append(b, s->stop.len ? s->stop.data : "null", s->stop.len ? s->stop.len : 4);
}

static void put_message(struct buf *b, const struct messages_state *s, const struct usage *usage)
{
    PUT(b, "{\"id\":");
    buf_json_puts(b, s->info->id);
    PUT(b, ",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
    buf_json_puts(b, s->info->model);
    PUT(b, ",\"content\":[");
    buf_append(b, s->content.data ? s->content.data : "", s->content.len);
    PUT(b, "],");
    put_stop(b, s);
    buf_putc(b, ',');
    put_message_usage(b, usage);
    buf_putc(b, '}');
}

/* A thinking block's signature: clients send it back, and some drop blocks that have
 * none. It is not read. */
static void put_signature(struct buf *b, const struct messages_state *s)
{
    PUT(b, "\"signature\":");
    buf_json_puts(b, s->info->id);
}

/* ---- blocks ---- */

static void open_block_event(struct buf *b, const struct messages_state *s, const char *name)
{
    put_named_event(b, name);
    buf_printf(b, ",\"index\":%d", s->items.n - 1);
}

static void put_call_head(struct buf *b, const struct answer_event *event)
{
    PUT(b, "{\"type\":\"tool_use\",\"id\":");
    buf_json_puts(b, event->id ? event->id : "");
    PUT(b, ",\"name\":");
    buf_json_puts(b, event->name ? event->name : "");
    PUT(b, ",\"input\":");
}

static int open_block(struct buf *b, void *state, const struct answer_event *event)
{
    struct messages_state *s = state;
    bool whole = s->info->whole;
    struct buf *to = whole ? &s->content : b;

    buf_clear(&s->text);
    if (whole && s->content.len) {
        buf_putc(to, ',');
    }
    if (!whole) {
        open_block_event(b, s, "content_block_start");
        PUT(b, ",\"content_block\":");
    }
    switch (s->items.kind) {
    case ITEM_CALL:
        put_call_head(to, event);
        buf_puts(to, whole ? "" : "{}}");
        break;
    case ITEM_REASONING:
        buf_puts(to, whole ? "{\"type\":\"thinking\",\"thinking\":\""
                           : "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}");
        break;
    default:
        buf_puts(to,
                 whole ? "{\"type\":\"text\",\"text\":\"" : "{\"type\":\"text\",\"text\":\"\"}");
    }
    if (!whole) {
        PUT(b, "}\n\n");
    }
    return result(s, b);
}

static int add_piece(struct buf *b, void *state, const char *text, size_t len)
{
    static const char *const delta[] = {
        [ITEM_NONE] = "",
        [ITEM_TEXT] = ",\"delta\":{\"type\":\"text_delta\",\"text\":\"",
        [ITEM_REASONING] = ",\"delta\":{\"type\":\"thinking_delta\",\"thinking\":\"",
        [ITEM_CALL] = ",\"delta\":{\"type\":\"input_json_delta\",\"partial_json\":\"",
    };
    struct messages_state *s = state;

    if (!s->info->whole) {
        open_block_event(b, s, "content_block_delta");
        buf_puts(b, delta[s->items.kind]);
        buf_json_escape(b, text, len);
        PUT(b, "\"}}\n\n");
    } else if (s->items.kind == ITEM_CALL) {
        buf_append(&s->text, text, len);
    } else {
        buf_json_escape(&s->content, text, len);
    }
    return result(s, b);
}

/* The arguments of a call, which must be an object; those of a call that was cut off
 * are none. */
static void put_input(struct buf *b, const struct buf *arguments)
{
    const char *text = arguments->len ? arguments->data : "";
    size_t space = strspn(text, " \t\r\n");
    bool object = text[space] == '{' && json_check(text, arguments->len, NULL) == 0;

    buf_append(b, object ? text : "{}", object ? arguments->len : 2);
}

static int close_block(struct buf *b, void *state, bool cut)
{
    struct messages_state *s = state;
    bool thinking = s->items.kind == ITEM_REASONING;

    (void)cut;
    if (!s->info->whole) {
        if (thinking) {
            open_block_event(b, s, "content_block_delta");
            PUT(b, ",\"delta\":{\"type\":\"signature_delta\",");
            put_signature(b, s);
            PUT(b, "}}\n\n");
        }
        open_block_event(b, s, "content_block_stop");
        PUT(b, "}\n\n");
        return result(s, b);
    }
    if (s->items.kind == ITEM_CALL) {
        put_input(&s->content, &s->text);
    } else {
        PUT(&s->content, "\"");
    }
    if (thinking) {
        buf_putc(&s->content, ',');
        put_signature(&s->content, s);
    }
    buf_putc(&s->content, '}');
    return result(s, b);
}

static const struct item_writer block_writer = {open_block, add_piece, close_block};

/* ---- the dialect ---- */

static int messages_begin(struct buf *b, void *state, const struct usage *usage)
{
    struct messages_state *s = state;

    if (!s->info->whole) {
        put_named_event(b, "message_start");
        PUT(b, ",\"message\":");
        put_message(b, s, usage);
        PUT(b, "}\n\n");
        put_named_event(b, "ping");
        PUT(b, "}\n\n");
    }
    return result(s, b);
}

static int messages_event(struct buf *b, void *state, int32_t choice,
                          const struct answer_event *event)
{
    struct messages_state *s = state;

    return choice ? 0 : answer_items_event(&s->items, &block_writer, b, state, event);
}

static int messages_finish(struct buf *b, void *state, int32_t choice, enum finish_reason finish,
                           const char *stop_string, bool calls)
{
    struct messages_state *s = state;
    bool matched = finish == FINISH_STOP && !calls && stop_string;

    if (choice || s->stop_reason) {
        return 0;
    }
    /* An answer that was cut off for any reason is said to have had too few tokens:
     * clients know no other reason that means so. */
    s->stop_reason = finish != FINISH_STOP ? "max_tokens"
                     : calls               ? "tool_use"
                     : matched             ? "stop_sequence"
                                           : "end_turn";
    if (matched) {
        buf_json_puts(&s->stop, stop_string);
    }
    return answer_items_close(&s->items, &block_writer, b, state, finish != FINISH_STOP);
}

static int messages_end(struct buf *b, void *state, const struct usage *usage)
{
    struct messages_state *s = state;

    if (s->info->whole) {
        put_message(b, s, usage);
        return result(s, b);
    }
    put_named_event(b, "message_delta");
    PUT(b, ",\"delta\":{");
    put_stop(b, s);
    PUT(b, "},");
    put_message_usage(b, usage);
    PUT(b, "}\n\n");
    put_named_event(b, "message_stop");
    PUT(b, "}\n\n");
    return result(s, b);
}

static const char *error_type(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 503:
        return "overloaded_error";
    case 504:
        return "timeout_error";
    default:
        return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

static void put_error(struct buf *b, int status, const char *message)
{
    buf_printf(b, ",\"error\":{\"type\":\"%s\",\"message\":", error_type(status));
    buf_json_puts(b, message);
    PUT(b, "}}");
}

static int messages_error(struct buf *b, void *state, int status, const char *message)
{
    put_named_event(b, "error");
    put_error(b, status, message);
    PUT(b, "\n\n");
    return result(state, b);
}

void messages_error_body(struct buf *b, int status, const char *param, const char *message)
{
    (void)param; /* the message names the field */
    PUT(b, "{\"type\":\"error\"");
    put_error(b, status, message);
}

const struct dialect messages_dialect = {
    .state_bytes = sizeof(struct messages_state),
    .init = messages_init,
    .release = messages_release,
    .held = messages_held,
    .begin = messages_begin,
    .event = messages_event,
    .finish = messages_finish,
    .end = messages_end,
    .error = messages_error,
    .error_body = messages_error_body,
};
