/* The dialect of chat completions: events of chat.completion.chunk, or one
 * chat.completion. Log-probabilities of a slice of tokens are an event of their own,
 * behind the text that was read of them. */
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "server/stream/answer.h"
#include "server/stream/sse.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

/* A choice. The buffers are used for whole bodies, and hold the insides of JSON
 * values. */
struct chat_choice {
    struct buf content, reasoning; /* of strings */
    struct buf calls;              /* of the list tool_calls, or the object function_call */
    struct buf tokens, ids;        /* of the lists logprobs.content and token_ids */
    struct buf end;                /* finish_reason and what follows it */
    bool open;                     /* the string of arguments at the end of `calls` is open */
    bool begun;                    /* the event with the role was written */
    bool prompted;                 /* the event with the prompt's ids was written */
};

struct chat_answer {
    const struct answer_info *info;
    const struct usage *usage;     /* so far */
    struct chat_choice *choice;    /* [info->n_choices] owned */
    const struct output *last;     /* of the tokens that came last; NULL: none yet */
    const struct request *request; /* its request, the stream's; NULL: none yet */
};

static int chat_init(void *state, const struct answer_info *info, struct err *e)
{
    struct chat_answer *a = state;

    a->info = info;
    a->choice = calloc((size_t)info->n_choices, sizeof(*a->choice));
    if (!a->choice) {
        return err_nomem(e, "an answer");
    }
    for (int32_t i = 0; i < info->n_choices; i++) {
        struct chat_choice *c = &a->choice[i];
        buf_init(&c->content, LIMIT_RESPONSE_BYTES);
        buf_init(&c->reasoning, LIMIT_RESPONSE_BYTES);
        buf_init(&c->calls, LIMIT_RESPONSE_BYTES);
        buf_init(&c->tokens, LIMIT_RESPONSE_BYTES);
        buf_init(&c->ids, LIMIT_RESPONSE_BYTES);
        buf_init(&c->end, LIMIT_RESPONSE_BYTES);
    }
    return 0;
}

static void chat_release(void *state)
{
    struct chat_answer *a = state;

    for (int32_t i = 0; i < a->info->n_choices; i++) {
        struct chat_choice *c = &a->choice[i];
        buf_release(&c->content);
        buf_release(&c->reasoning);
        buf_release(&c->calls);
        buf_release(&c->tokens);
        buf_release(&c->ids);
        buf_release(&c->end);
    }
    free(a->choice);
}

static size_t chat_held(const void *state)
{
    const struct chat_answer *a = state;
    size_t n = sizeof(*a);

    for (int32_t i = 0; i < a->info->n_choices; i++) {
        const struct chat_choice *c = &a->choice[i];
        n += sizeof(*c) + c->content.cap + c->reasoning.cap + c->calls.cap + c->tokens.cap +
             c->ids.cap + c->end.cap;
    }
    return n;
}

static int chat_begin(struct buf *b, void *state, const struct usage *usage)
{
    (void)b;
    ((struct chat_answer *)state)->usage = usage;
    return 0;
}

/* ---- events ---- */

/* `"name":`, and the text. */
static void put_text(struct buf *b, const char *name, const char *text, size_t len)
{
    buf_printf(b, "\"%s\":", name);
    buf_json_string(b, text, len);
}

/* Open an event of the choice, behind the one that gives its role. */
static void open_event(struct buf *b, struct chat_answer *a, int32_t index)
{
    const struct sse_style *s = a->info->style;

    if (!a->choice[index].begun) {
        a->choice[index].begun = true;
        sse_role(b, s, index);
    }
    buf_append(b, s->head, s->head_len);
    put_i64(b, index);
    PUT(b, ",\"delta\":{");
}

static int close_event(struct buf *b, const struct chat_answer *a)
{
    PUT(b, "},\"logprobs\":null,\"finish_reason\":null");
    return sse_close(b, a->info->style, a->usage);
}

static void put_call(struct buf *b, const struct chat_answer *a, const struct answer_event *v)
{
    bool begins = v->kind == ANSWER_CALL;

    if (a->info->functions) {
        PUT(b, "\"function_call\":{");
    } else {
        buf_printf(b, "\"tool_calls\":[{\"index\":%d,", v->call);
        if (begins) {
            put_text(b, "id", v->id, strlen(v->id));
            PUT(b, ",\"type\":\"function\",");
        }
        PUT(b, "\"function\":{");
    }
    if (begins) {
        put_text(b, "name", v->name, strlen(v->name));
        buf_putc(b, ',');
    }
    put_text(b, "arguments", v->text, begins ? 0 : v->len);
    buf_puts(b, a->info->functions ? "}" : "}}]");
}

static int stream_event(struct buf *b, struct chat_answer *a, int32_t index,
                        const struct answer_event *v)
{
    if (v->kind == ANSWER_CALL_END) {
        return 0;
    }
    open_event(b, a, index);
    if (v->kind == ANSWER_CONTENT) {
        put_text(b, "content", v->text, v->len);
    } else if (v->kind == ANSWER_REASONING) {
        put_text(b, "reasoning", v->text, v->len);
        buf_putc(b, ',');
        put_text(b, "reasoning_content", v->text, v->len);
    } else {
        put_call(b, a, v);
    }
    return close_event(b, a);
}

/* ---- parts of a whole body ---- */

static void close_call(struct chat_choice *c, bool functions)
{
    if (c->open) {
        buf_puts(&c->calls, functions ? "\"}" : "\"}}");
    }
    c->open = false;
}

static void keep_call(struct chat_choice *c, const struct answer_event *v, bool functions)
{
    struct buf *b = &c->calls;

    close_call(c, functions);
    buf_puts(b, b->len ? ",{" : "{");
    if (!functions) {
        put_text(b, "id", v->id, strlen(v->id));
        PUT(b, ",\"type\":\"function\",\"function\":{");
    }
    put_text(b, "name", v->name, strlen(v->name));
    PUT(b, ",\"arguments\":\"");
    c->open = true;
}

static int keep_event(struct chat_answer *a, int32_t index, const struct answer_event *v)
{
    struct chat_choice *c = &a->choice[index];

    switch (v->kind) {
    case ANSWER_CONTENT:
        return buf_json_escape(&c->content, v->text, v->len);
    case ANSWER_REASONING:
        return buf_json_escape(&c->reasoning, v->text, v->len);
    case ANSWER_CALL:
        keep_call(c, v, a->info->functions);
        break;
    case ANSWER_ARGUMENTS:
        return buf_json_escape(&c->calls, v->text, v->len);
    case ANSWER_CALL_END:
        close_call(c, a->info->functions);
    }
    return c->calls.failed ? ERR_FULL : 0;
}

static int chat_event(struct buf *b, void *state, int32_t choice, const struct answer_event *event)
{
    struct chat_answer *a = state;

    return a->info->whole ? keep_event(a, choice, event) : stream_event(b, a, choice, event);
}

/* ---- tokens ---- */

/* n tokens' log-probabilities, or their ids. */
static void put_tokens(struct buf *b, const struct sse_style *s, const struct token_out *t,
                       int32_t n, bool ids)
{
    for (int32_t i = 0; i < n; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        if (ids) {
            put_i64(b, t[i].id);
        } else {
            put_chat_token(b, s, &t[i]);
        }
    }
}

static void keep_tokens(struct buf *b, const struct sse_style *s, const struct token_out *t,
                        int32_t n, bool ids)
{
    if (b->len && n) {
        buf_putc(b, ',');
    }
    put_tokens(b, s, t, n, ids);
}

/* An event with what is asked of n tokens; the choice's first one has the prompt's
 * ids. */
static int stream_tokens(struct buf *b, struct chat_answer *a, int32_t choice,
                         const struct token_out *t, int32_t n)
{
    const struct sse_style *s = a->info->style;
    const struct request *r = a->last->request;
    struct chat_choice *c = &a->choice[choice];

    open_event(b, a, choice);
    if (s->logprobs && n) {
        PUT(b, "},\"logprobs\":{\"content\":[");
        put_tokens(b, s, t, n, false);
        PUT(b, "],\"refusal\":null},\"finish_reason\":null");
    } else {
        PUT(b, "},\"logprobs\":null,\"finish_reason\":null");
    }
    if (s->token_ids) {
        sse_put_drafted(b, t, n);
        PUT(b, ",\"token_ids\":[");
        put_tokens(b, s, t, n, true);
        buf_putc(b, ']');
    }
    if (s->token_ids && !c->prompted) {
        PUT(b, ",\"prompt_token_ids\":");
        put_ids(b, r->prompt, r->n_prompt);
        c->prompted = true;
    }
    return sse_close(b, s, a->usage);
}

static int chat_tokens(struct buf *b, void *state, int32_t choice, const struct output *o,
                       int32_t from, int32_t n)
{
    struct chat_answer *a = state;
    struct chat_choice *c = &a->choice[choice];
    const struct sse_style *s = a->info->style;
    const struct token_out *t = n ? o->token + from : NULL;

    a->last = o;
    a->request = o->request;
    if (!a->info->whole) {
        bool shown = n ? s->logprobs || s->token_ids : s->token_ids && !c->prompted;
        return shown ? stream_tokens(b, a, choice, t, n) : 0;
    }
    if (s->logprobs) {
        keep_tokens(&c->tokens, s, t, n, false);
    }
    if (s->token_ids) {
        keep_tokens(&c->ids, s, t, n, true);
    }
    return c->tokens.failed || c->ids.failed ? ERR_FULL : 0;
}

/* ---- ends ---- */

static void put_end(struct buf *b, const struct chat_answer *a, enum finish_reason finish,
                    const char *stop, bool calls)
{
    const struct output *o = a->last;
    const char *name = !calls               ? finish_reason_name(finish)
                       : a->info->functions ? "function_call"
                                            : "tool_calls";
    int32_t len = stop && o ? o->stop_string_len : 0;

    put_finish_as(b, name, finish, stop && o ? o->stop_string : NULL, len, o ? o->stop_token : -1);
    put_choice_error(b, finish, o ? o->error : NULL);
}

static int chat_finish(struct buf *b, void *state, int32_t choice, enum finish_reason finish,
                       const char *stop_string, bool calls)
{
    struct chat_answer *a = state;
    struct chat_choice *c = &a->choice[choice];

    if (a->info->whole) {
        close_call(c, a->info->functions);
        put_end(&c->end, a, finish, stop_string, calls);
        return c->end.failed || c->calls.failed ? ERR_FULL : 0;
    }
    open_event(b, a, choice);
    PUT(b, "},\"logprobs\":null,");
    put_end(b, a, finish, stop_string, calls);
    return sse_close(b, a->info->style, a->usage);
}

static int put_buf(struct buf *b, const struct buf *from)
{
    return from->len ? buf_append(b, from->data, from->len) : 0;
}

static void put_message(struct buf *b, const struct chat_answer *a, const struct chat_choice *c)
{
    PUT(b, "{\"role\":\"assistant\",\"content\":");
    if (c->calls.len && !c->content.len) {
        PUT(b, "null");
    } else {
        buf_putc(b, '"');
        put_buf(b, &c->content);
        buf_putc(b, '"');
    }
    PUT(b, ",\"refusal\":null");
    if (c->reasoning.len) {
        PUT(b, ",\"reasoning\":\"");
        put_buf(b, &c->reasoning);
        PUT(b, "\",\"reasoning_content\":\"");
        put_buf(b, &c->reasoning);
        buf_putc(b, '"');
    }
    if (c->calls.len) {
        buf_puts(b, a->info->functions ? ",\"function_call\":" : ",\"tool_calls\":[");
        put_buf(b, &c->calls);
        buf_puts(b, a->info->functions ? "" : "]");
    }
    buf_putc(b, '}');
}

static void put_choice(struct buf *b, const struct chat_answer *a, int32_t index)
{
    const struct chat_choice *c = &a->choice[index];

    buf_printf(b, index ? ",{\"index\":%d,\"message\":" : "{\"index\":%d,\"message\":", index);
    put_message(b, a, c);
    if (a->info->style->logprobs) {
        PUT(b, ",\"logprobs\":{\"content\":[");
        put_buf(b, &c->tokens);
        PUT(b, "],\"refusal\":null},");
    } else {
        PUT(b, ",\"logprobs\":null,");
    }
    put_buf(b, &c->end);
    if (a->info->style->token_ids && a->request) {
        PUT(b, ",\"token_ids\":[");
        put_buf(b, &c->ids);
        PUT(b, "],\"prompt_token_ids\":");
        put_ids(b, a->request->prompt, a->request->n_prompt);
    }
    buf_putc(b, '}');
}

static int chat_end(struct buf *b, void *state, const struct usage *usage)
{
    const struct chat_answer *a = state;
    const struct sse_style *s = a->info->style;
    const size_t skip = sizeof("data: ") - 1;

    if (!a->info->whole) {
        if (a->info->include_usage) {
            sse_usage(b, s, usage);
        }
        return sse_done(b);
    }
    buf_append(b, s->bare + skip, s->bare_len - skip);
    for (int32_t i = 0; i < a->info->n_choices; i++) {
        put_choice(b, a, i);
    }
    PUT(b, "],");
    put_usage(b, usage);
    return buf_putc(b, '}');
}

static int chat_error(struct buf *b, void *state, int status, const char *message)
{
    (void)state;
    sse_error(b, status, message);
    return sse_done(b);
}

const struct dialect chat_dialect = {
    .state_bytes = sizeof(struct chat_answer),
    .init = chat_init,
    .release = chat_release,
    .held = chat_held,
    .begin = chat_begin,
    .event = chat_event,
    .tokens = chat_tokens,
    .finish = chat_finish,
    .end = chat_end,
    .error = chat_error,
    .error_body = api_error,
};
