/* JSON fragments, then events: in portions (sse_open, sse_middle, sse_close) or at once
 * (sse_piece). */
#include "server/stream/sse.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/utf8.h"
#include "server/api/api.h"
#include "server/api/json_fields.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

/* ---- numbers and strings ---- */

/* Write `v` in decimal to `to`, at least 20 bytes; returns the length. */
static size_t format_i64(char *to, int64_t v)
{
    char back[20];
    size_t n = 0, len = 0;
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;

    do {
        back[n++] = (char)('0' + u % 10);
        u /= 10;
    } while (u);
    if (v < 0) {
        to[len++] = '-';
    }
    while (n) {
        to[len++] = back[--n];
    }
    return len;
}

int put_i64(struct buf *b, int64_t v)
{
    char digits[24];

    return buf_append(b, digits, format_i64(digits, v));
}

int put_logprob(struct buf *b, float v)
{
    if (isnan(v)) {
        return PUT(b, "null");
    }
    /* JSON has no infinity, and a masked token has -inf. */
    if (!isfinite(v)) {
        return PUT(b, "-9999.0");
    }
    return buf_printf(b, "%.9g", (double)v);
}

int put_token_string(struct buf *b, const struct sse_style *s, int32_t id)
{
    size_t len = 0;
    const char *text = s->token_bytes(s->arg, id, &len);

    buf_putc(b, '"');
    if (utf8_valid(text, len)) {
        buf_json_escape(b, text, len);
    } else {
        PUT(b, "bytes:");
        for (size_t i = 0; i < len; i++) {
            buf_printf(b, "\\\\x%02x", (unsigned char)text[i]);
        }
    }
    return buf_putc(b, '"');
}

/* Whether an earlier token of a top list has the same text: the later one is left out,
 * since a name may occur only once in an object. */
static bool same_text_before(const struct sse_style *s, const int32_t *id, int32_t k)
{
    size_t len, other;
    const char *text = s->token_bytes(s->arg, id[k], &len);

    for (int32_t i = 0; i < k; i++) {
        const char *before = s->token_bytes(s->arg, id[i], &other);
        if (id[i] == id[k] || (other == len && memcmp(before, text, len) == 0)) {
            return true;
        }
    }
    return false;
}

static int put_pair(struct buf *b, const struct sse_style *s, int32_t id, float logprob, bool comma)
{
    if (comma) {
        buf_putc(b, ',');
    }
    put_token_string(b, s, id);
    buf_putc(b, ':');
    return put_logprob(b, logprob);
}

int put_top(struct buf *b, const struct sse_style *s, const struct token_out *t)
{
    int32_t id[LIMIT_LOGPROBS + 1], n = MIN(t->n_top, MIN(s->n_top, LIMIT_LOGPROBS));

    if (isnan(t->logprob)) {
        return PUT(b, "null");
    }
    for (int32_t i = 0; i < n; i++) {
        id[i] = t->top_id[i];
    }
    id[n] = t->id;
    buf_putc(b, '{');
    bool any = false;
    for (int32_t i = 0; i <= n; i++) {
        if (!same_text_before(s, id, i)) {
            put_pair(b, s, id[i], i < n ? t->top_logprob[i] : t->logprob, any);
            any = true;
        }
    }
    return buf_putc(b, '}');
}

static void put_ranked(struct buf *b, const struct sse_style *s, int32_t id, float logprob,
                       int32_t rank)
{
    buf_printf(b, "\"%d\":{\"logprob\":", id);
    put_logprob(b, logprob);
    if (rank) {
        buf_printf(b, ",\"rank\":%d", rank);
    }
    PUT(b, ",\"decoded_token\":");
    put_token_string(b, s, id);
    buf_putc(b, '}');
}

int put_prompt_logprob(struct buf *b, const struct sse_style *s, const struct token_out *t)
{
    int32_t n = MIN(t->n_top, s->n_prompt_top);
    bool seen = false;

    if (isnan(t->logprob)) {
        return PUT(b, "null");
    }
    buf_putc(b, '{');
    for (int32_t i = 0; i < n; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_ranked(b, s, t->top_id[i], t->top_logprob[i], i + 1);
        seen = seen || t->top_id[i] == t->id;
    }
    if (!seen) {
        if (n > 0) {
            buf_putc(b, ',');
        }
        put_ranked(b, s, t->id, t->logprob, 0);
    }
    return buf_putc(b, '}');
}

/* "token", "logprob" and "bytes" of one token; the brace stays open. */
static void put_chat_entry(struct buf *b, const struct sse_style *s, int32_t id, float logprob)
{
    size_t len = 0;
    const char *text = s->token_bytes(s->arg, id, &len);

    PUT(b, "{\"token\":");
    put_token_string(b, s, id);
    PUT(b, ",\"logprob\":");
    put_logprob(b, logprob);
    PUT(b, ",\"bytes\":[");
    for (size_t i = 0; i < len; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_i64(b, (unsigned char)text[i]);
    }
    buf_putc(b, ']');
}

int put_chat_token(struct buf *b, const struct sse_style *s, const struct token_out *t)
{
    put_chat_entry(b, s, t->id, t->logprob);
    PUT(b, ",\"top_logprobs\":[");
    for (int32_t i = 0; i < t->n_top; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_chat_entry(b, s, t->top_id[i], t->top_logprob[i]);
        buf_putc(b, '}');
    }
    return PUT(b, "]}");
}

int put_ids(struct buf *b, const int32_t *id, int32_t n)
{
    buf_putc(b, '[');
    for (int32_t i = 0; i < n; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_i64(b, id[i]);
    }
    return buf_putc(b, ']');
}

int put_usage(struct buf *b, const struct usage *u)
{
    buf_printf(b,
               "\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%"
               "d,\"prompt_tokens_"
               "details\":{\"cached_tokens\":%d}",
               u->prompt_tokens, u->completion_tokens, u->prompt_tokens + u->completion_tokens,
               u->cached_tokens);
    if (u->reasoning_tokens) {
        buf_printf(b, ",\"completion_tokens_details\":{\"reasoning_tokens\":%d}",
                   u->reasoning_tokens);
    }
    return buf_putc(b, '}');
}

int put_finish(struct buf *b, enum finish_reason finish, const char *stop_string,
               int32_t stop_string_len, int32_t stop_token)
{
    return put_finish_as(b, finish_reason_name(finish), finish, stop_string, stop_string_len,
                         stop_token);
}

int put_finish_as(struct buf *b, const char *name, enum finish_reason finish,
                  const char *stop_string, int32_t stop_string_len, int32_t stop_token)
{
    if (!name) {
        return PUT(b, "\"finish_reason\":null");
    }
    buf_printf(b, "\"finish_reason\":\"%s\",\"stop_reason\":", name);
    if (finish == FINISH_STOP && stop_string) {
        buf_putc(b, '"');
        buf_json_escape(b, stop_string, (size_t)stop_string_len);
        return buf_putc(b, '"');
    }
    if (finish == FINISH_STOP && stop_token >= 0) {
        return put_i64(b, stop_token);
    }
    return PUT(b, "null");
}

int put_choice_error(struct buf *b, enum finish_reason finish, const char *error)
{
    if (finish != FINISH_IMPOSSIBLE) {
        return 0;
    }
    PUT(b, ",\"error\":");
    api_error_object(b, 400, "", error);
    return b->failed ? ERR_FULL : 0;
}

/* ---- events ---- */

int sse_style_init(struct sse_style *s, const char *id, int64_t created, const char *model,
                   const char *fingerprint, struct err *e)
{
    struct buf b;

    buf_init(&b, 64 * 1024);
    PUT(&b, "data: {\"id\":\"");
    buf_json_escape(&b, id, strlen(id));
    buf_printf(&b, "\",\"object\":\"%s\",\"created\":%lld,\"model\":\"",
               !s->chat   ? "text_completion"
               : s->whole ? "chat.completion"
                          : "chat.completion.chunk",
               (long long)created);
    buf_json_escape(&b, model, strlen(model));
    PUT(&b, "\",\"system_fingerprint\":\"");
    buf_json_escape(&b, fingerprint, strlen(fingerprint));
    PUT(&b, "\",\"choices\":[");
    size_t bare_len = b.len;
    PUT(&b, "{\"index\":");
    char *bare = b.failed ? NULL : strndup(b.data, bare_len);
    if (!bare) {
        buf_release(&b);
        return err_nomem(e, "an answer");
    }
    s->bare = bare;
    s->bare_len = bare_len;
    s->head = b.data;
    s->head_len = b.len;
    return 0;
}

void sse_style_release(struct sse_style *s)
{
    free(s->head);
    free(s->bare);
    s->head = s->bare = NULL;
}

static bool plain_byte(unsigned char c)
{
    return c >= 0x20 && c < 0x7f && c != '"' && c != '\\';
}

static bool plain_text(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (!plain_byte((unsigned char)s[i])) {
            return false;
        }
    }
    return true;
}

/* The constant JSON before and after a choice's text. */
struct around {
    const char *before, *after;
    size_t before_len, after_len;
};

static struct around text_around(bool chat)
{
    static const char text[] = ",\"text\":\"", delta[] = ",\"delta\":{\"content\":\"";

    return chat ? (struct around){delta, "\"}", sizeof(delta) - 1, 2}
                : (struct around){text, "\"", sizeof(text) - 1, 1};
}

/* ---- an event in portions ---- */

/* The parts of an event's middle, in order. */
enum phase {
    PHASE_TEXT,
    PHASE_LOGPROBS,
    PHASE_TOKENS,
    PHASE_VALUES,
    PHASE_TOP,
    PHASE_OFFSETS,
    PHASE_CHAT,
    PHASE_FINISH,
    PHASE_IDS,
    PHASE_PROMPT_IDS,
    PHASE_PROMPT_LOGPROBS,
    PHASE_END,
};

void sse_cursor_release(struct sse_cursor *c)
{
    prompt_walk_free(c->walk);
    buf_release(&c->text);
    *c = (struct sse_cursor){0};
}

static bool end_of_tokens(struct sse_cursor *c)
{
    prompt_walk_free(c->walk);
    c->walk = NULL;
    c->at = 0;
    return false;
}

bool sse_next_token(struct buf *b, const struct output *o, struct sse_cursor *c,
                    struct token_out *ret)
{
    if (o->token || !o->prompt) {
        if (c->at == o->n_tokens) {
            return end_of_tokens(c);
        }
        *ret = o->token[c->at++];
        return true;
    }
    if (!c->walk) {
        if (!c->text.max) {
            buf_init(&c->text, LIMIT_RESPONSE_BYTES);
        }
        if (prompt_walk_new(&c->walk, o->request, NULL)) {
            b->failed = true;
            return end_of_tokens(c);
        }
    }
    buf_clear(&c->text);
    int rc = prompt_walk_next(c->walk, ret, &c->text);
    c->at++;
    if (rc) {
        b->failed = b->failed || rc != ERR_NOT_FOUND;
        return end_of_tokens(c);
    }
    return true;
}

/* The units, approximately, of one token in this phase. */
static int32_t cost_of(int phase, const struct token_out *t)
{
    switch (phase) {
    case PHASE_TOP:
        return t->n_top + 1;
    case PHASE_CHAT:
    case PHASE_PROMPT_LOGPROBS:
        return 2 * (t->n_top + 1);
    default:
        return 1;
    }
}

static void put_entry(struct buf *b, const struct sse_style *s, const struct sse_cursor *c,
                      const struct token_out *t)
{
    switch (c->phase) {
    case PHASE_TEXT:
        if (c->text.len) {
            buf_json_escape(b, c->text.data, c->text.len);
        }
        break;
    case PHASE_TOKENS:
        put_token_string(b, s, t->id);
        break;
    case PHASE_VALUES:
        put_logprob(b, t->logprob);
        break;
    case PHASE_TOP:
        put_top(b, s, t);
        break;
    case PHASE_OFFSETS:
        put_i64(b, t->text_offset);
        break;
    case PHASE_CHAT:
        put_chat_token(b, s, t);
        break;
    case PHASE_IDS:
        put_i64(b, t->id);
        break;
    default:
        put_prompt_logprob(b, s, t);
    }
}

/* Append entries of the phase's list while *units last; true: the list is complete. */
static bool put_entries(struct buf *b, const struct sse_style *s, const struct output *o,
                        struct sse_cursor *c, int32_t *units)
{
    struct token_out t;

    while (*units > 0) {
        bool comma = c->at > 0 && c->phase != PHASE_TEXT;
        if (!sse_next_token(b, o, c, &t)) {
            return true;
        }
        if (comma) {
            buf_putc(b, ',');
        }
        put_entry(b, s, c, &t);
        *units -= cost_of(c->phase, &t);
    }
    return false;
}

/* Append a prompt's ids while *units last; true: all are appended. */
static bool put_some_ids(struct buf *b, const int32_t *id, int32_t n, struct sse_cursor *c,
                         int32_t *units)
{
    for (; c->at < n && *units > 0; --*units) {
        if (c->at) {
            buf_putc(b, ',');
        }
        put_i64(b, id[c->at++]);
    }
    return c->at == n;
}

static void begin_phase(struct sse_cursor *c, int phase)
{
    c->phase = phase;
    c->at = 0;
}

/* The text and the JSON that follows it; true: it is complete. */
static bool put_text(struct buf *b, const struct sse_style *s, const struct output *o,
                     struct sse_cursor *c, int32_t *units)
{
    struct around a = text_around(s->chat);

    if (o->prompt && !o->token) {
        if (!put_entries(b, s, o, c, units)) {
            return false;
        }
    } else if (plain_text(o->text, o->text_len)) {
        buf_append(b, o->text, o->text_len);
    } else {
        buf_json_escape(b, o->text, o->text_len);
    }
    buf_append(b, a.after, a.after_len);
    return true;
}

/* Open `logprobs`; returns the phase that follows. */
static int open_logprobs(struct buf *b, const struct sse_style *s, const struct output *o)
{
    bool wanted = o->prompt ? s->echo_logprobs : s->logprobs;

    if (!wanted || o->n_tokens == 0) {
        PUT(b, ",\"logprobs\":null,");
        return PHASE_FINISH;
    }
    if (s->chat) {
        PUT(b, ",\"logprobs\":{\"content\":[");
        return PHASE_CHAT;
    }
    PUT(b, ",\"logprobs\":{\"tokens\":[");
    return PHASE_TOKENS;
}

void sse_put_drafted(struct buf *b, const struct token_out *t, int32_t n)
{
    enum { MOST = 256 }; /* events of more tokens are those of whole choices */
    bool any = false;

    for (int32_t i = 0; i < n && n <= MOST; i++) {
        if (t[i].drafted) {
            buf_printf(b, any ? ",%d" : ",\"drafted\":[%d", i);
            any = true;
        }
    }
    if (any) {
        buf_putc(b, ']');
    }
}

static int put_finish_phase(struct buf *b, const struct sse_style *s, const struct output *o)
{
    put_finish(b, o->finish, o->stop_string, o->stop_string_len, o->stop_token);
    put_choice_error(b, o->finish, o->error);
    if (!s->token_ids) {
        return PHASE_PROMPT_IDS;
    }
    if (!o->prompt) {
        sse_put_drafted(b, o->token, o->n_tokens);
    }
    PUT(b, ",\"token_ids\":[");
    return PHASE_IDS;
}

/* A list with one entry per token, then the JSON up to the next list; true: it is
 * complete. */
static bool put_list_phase(struct buf *b, const struct sse_style *s, const struct output *o,
                           struct sse_cursor *c, int32_t *units)
{
    static const char *const behind[PHASE_END] = {
        [PHASE_TOKENS] = "],\"token_logprobs\":[", [PHASE_VALUES] = "],\"top_logprobs\":[",
        [PHASE_TOP] = "],\"text_offset\":[",       [PHASE_OFFSETS] = "]},",
        [PHASE_CHAT] = "],\"refusal\":null},",     [PHASE_IDS] = "]",
    };
    bool none = c->phase == PHASE_IDS && o->prompt;

    if (!none && !put_entries(b, s, o, c, units)) {
        return false;
    }
    buf_puts(b, behind[c->phase]);
    return true;
}

static bool put_prompt_phase(struct buf *b, const struct sse_style *s, const struct output *o,
                             const struct prompt_ids *prompt, struct sse_cursor *c, int32_t *units)
{
    if (c->phase == PHASE_PROMPT_IDS) {
        if (!prompt) {
            return true;
        }
        if (c->at == 0) {
            PUT(b, ",\"prompt_token_ids\":[");
        }
        if (!put_some_ids(b, prompt->id, prompt->n, c, units)) {
            return false;
        }
        buf_putc(b, ']');
        return true;
    }
    if (!o->prompt || !s->prompt_logprobs) {
        return true;
    }
    if (c->at == 0) {
        PUT(b, ",\"prompt_logprobs\":[");
    }
    if (!put_entries(b, s, o, c, units)) {
        return false;
    }
    buf_putc(b, ']');
    return true;
}

bool sse_middle(struct buf *b, const struct sse_style *s, const struct output *o,
                const struct prompt_ids *prompt, struct sse_cursor *c, int32_t *units)
{
    while (c->phase != PHASE_END) {
        bool done = true;
        int next = c->phase + 1;
        if (*units <= 0) {
            return false;
        }
        switch (c->phase) {
        case PHASE_TEXT:
            done = put_text(b, s, o, c, units);
            break;
        case PHASE_LOGPROBS:
            next = open_logprobs(b, s, o);
            break;
        case PHASE_FINISH:
            next = put_finish_phase(b, s, o);
            break;
        case PHASE_PROMPT_IDS:
        case PHASE_PROMPT_LOGPROBS:
            done = put_prompt_phase(b, s, o, prompt, c, units);
            break;
        default:
            next = c->phase == PHASE_OFFSETS ? PHASE_FINISH : next;
            done = put_list_phase(b, s, o, c, units);
        }
        if (!done) {
            return false;
        }
        begin_phase(c, next);
    }
    return true;
}

void sse_open(struct buf *b, const struct sse_style *s, int32_t index)
{
    struct around a = text_around(s->chat);

    buf_append(b, s->head, s->head_len);
    put_i64(b, index);
    buf_append(b, a.before, a.before_len);
}

int sse_close(struct buf *b, const struct sse_style *s, const struct usage *total)
{
    PUT(b, "}]");
    if (s->continuous_usage) {
        buf_putc(b, ',');
        put_usage(b, total);
    }
    PUT(b, "}\n\n");
    return b->failed ? ERR_FULL : 0;
}

/* The plain event of a choice that goes on: copied as a whole after one buf_reserve. */
static int put_short(struct buf *b, const struct sse_style *s, int32_t index,
                     const struct output *o)
{
    static const char tail[] = ",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
    char digits[24];
    struct around a = text_around(s->chat);
    size_t n = format_i64(digits, index);
    size_t need = s->head_len + n + o->text_len + a.before_len + a.after_len + sizeof(tail);

    int rc = buf_reserve(b, need);
    if (rc) {
        b->failed = true;
        return rc;
    }
    char *at = b->data + b->len;
    at = mempcpy(at, s->head, s->head_len);
    at = mempcpy(at, digits, n);
    at = mempcpy(at, a.before, a.before_len);
    at = mempcpy(at, o->text, o->text_len);
    at = mempcpy(at, a.after, a.after_len);
    at = mempcpy(at, tail, sizeof(tail)); /* its NUL too: a buf's data ends with one */
    b->len = (size_t)(at - b->data) - 1;
    return 0;
}

static bool sse_is_plain(const struct sse_style *s, const struct output *o)
{
    return o->finish == FINISH_NONE && !s->logprobs && !s->token_ids && !s->continuous_usage &&
           !o->prompt;
}

int32_t sse_units(const struct sse_style *s, const struct output *o, int32_t n_prompt_ids)
{
    enum { BYTES_A_UNIT = 512 };
    int64_t units = n_prompt_ids / 8 + (int64_t)(o->text_len / BYTES_A_UNIT);

    if (o->prompt) {
        return INT32_MAX;
    }
    for (int32_t i = 0; i < o->n_tokens && s->logprobs && units < INT32_MAX; i++) {
        units += 3 + cost_of(s->chat ? PHASE_CHAT : PHASE_TOP, &o->token[i]);
    }
    units += s->token_ids ? o->n_tokens / 8 : 0;
    return (int32_t)MIN(units, INT32_MAX);
}

int sse_piece(struct buf *b, const struct sse_style *s, int32_t index, const struct output *o,
              const int32_t *prompt, int32_t n_prompt, const struct usage *total)
{
    if (sse_is_plain(s, o) && plain_text(o->text, o->text_len)) {
        return put_short(b, s, index, o);
    }
    struct prompt_ids ids = {prompt, n_prompt};
    struct sse_cursor c = {0};
    int32_t units = INT32_MAX;

    sse_open(b, s, index);
    sse_middle(b, s, o, prompt ? &ids : NULL, &c, &units);
    sse_cursor_release(&c);
    return sse_close(b, s, total);
}

int sse_role(struct buf *b, const struct sse_style *s, int32_t index)
{
    buf_append(b, s->head, s->head_len);
    put_i64(b, index);
    return PUT(b, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_"
                  "reason\":null}]}\n\n");
}

int sse_usage(struct buf *b, const struct sse_style *s, const struct usage *total)
{
    buf_append(b, s->bare, s->bare_len);
    PUT(b, "],");
    put_usage(b, total);
    return PUT(b, "}\n\n");
}

int sse_error(struct buf *b, int status, const char *message)
{
    PUT(b, "data: ");
    api_error(b, status, "", message);
    return PUT(b, "\n\n");
}

int sse_done(struct buf *b)
{
    return PUT(b, "data: [DONE]\n\n");
}

int sse_keepalive(struct buf *b)
{
    return PUT(b, ": keepalive\n\n");
}
