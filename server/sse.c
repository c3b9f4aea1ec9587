#include "server/sse.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api.h"
#include "server/json.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

/* ---- numbers and strings ---- */

/* Decimal digits into `to` (at least 20 bytes); returns how many. */
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
    /* JSON has no infinity; a masked token's is -inf. */
    if (!isfinite(v)) {
        return PUT(b, "-9999.0");
    }
    return buf_printf(b, "%.9g", (double)v);
}

static bool is_text(const char *s, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = utf8_char_len((const unsigned char *)s + i, len - i);
        if (!n) {
            return false;
        }
        i += n;
    }
    return true;
}

int put_token_string(struct buf *b, const struct sse_style *s, int32_t id)
{
    size_t len = 0;
    const char *text = s->token_bytes(s->arg, id, &len);

    buf_putc(b, '"');
    if (is_text(text, len)) {
        buf_json_escape(b, text, len);
    } else {
        PUT(b, "bytes:");
        for (size_t i = 0; i < len; i++) {
            buf_printf(b, "\\\\x%02x", (unsigned char)text[i]);
        }
    }
    return buf_putc(b, '"');
}

/* A token of a top list is left out where an earlier one has the same text: an object holds a name once. */
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

static void put_ranked(struct buf *b, const struct sse_style *s, int32_t id, float logprob, int32_t rank)
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

/* "token", "logprob" and "bytes" of one token, its brace open. */
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
    return buf_printf(b,
                      "\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d,\"prompt_tokens_"
                      "details\":{\"cached_tokens\":%d}}",
                      u->prompt_tokens, u->completion_tokens, u->prompt_tokens + u->completion_tokens,
                      u->cached_tokens);
}

int put_finish(struct buf *b, enum finish_reason finish, const char *stop_string, int32_t stop_string_len,
               int32_t stop_token)
{
    const char *name = finish_reason_name(finish);

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

int sse_style_init(struct sse_style *s, const char *id, int64_t created, const char *model, const char *fingerprint,
                   struct err *e)
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

/* What stands before and after a choice's text. */
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

/* `head`, index, `,"text":"`, the text and its closing quote. */
static void put_opening(struct buf *b, const struct sse_style *s, int32_t index, const struct output *o)
{
    char digits[24];
    struct around a = text_around(s->chat);

    buf_append(b, s->head, s->head_len);
    buf_append(b, digits, format_i64(digits, index));
    buf_append(b, a.before, a.before_len);
    if (plain_text(o->text, o->text_len)) {
        buf_append(b, o->text, o->text_len);
    } else {
        buf_json_escape(b, o->text, o->text_len);
    }
    buf_append(b, a.after, a.after_len);
}

enum logprob_part { PART_TOKENS, PART_LOGPROBS, PART_TOP, PART_OFFSETS, PART_CHAT };

static void put_part(struct buf *b, const struct sse_style *s, const struct output *o, enum logprob_part part)
{
    for (int32_t i = 0; i < o->n_tokens; i++) {
        const struct token_out *t = &o->token[i];
        if (i) {
            buf_putc(b, ',');
        }
        switch (part) {
        case PART_TOKENS:
            put_token_string(b, s, t->id);
            break;
        case PART_LOGPROBS:
            put_logprob(b, t->logprob);
            break;
        case PART_TOP:
            put_top(b, s, t);
            break;
        case PART_OFFSETS:
            put_i64(b, t->text_offset);
            break;
        case PART_CHAT:
            put_chat_token(b, s, t);
        }
    }
}

static void put_logprobs(struct buf *b, const struct sse_style *s, const struct output *o)
{
    bool wanted = o->prompt ? s->echo_logprobs : s->logprobs;

    if (!wanted || o->n_tokens == 0) {
        PUT(b, ",\"logprobs\":null,");
        return;
    }
    if (s->chat) {
        PUT(b, ",\"logprobs\":{\"content\":[");
        put_part(b, s, o, PART_CHAT);
        PUT(b, "],\"refusal\":null},");
        return;
    }
    PUT(b, ",\"logprobs\":{\"tokens\":[");
    put_part(b, s, o, PART_TOKENS);
    PUT(b, "],\"token_logprobs\":[");
    put_part(b, s, o, PART_LOGPROBS);
    PUT(b, "],\"top_logprobs\":[");
    put_part(b, s, o, PART_TOP);
    PUT(b, "],\"text_offset\":[");
    put_part(b, s, o, PART_OFFSETS);
    PUT(b, "]},");
}

static void put_prompt_logprobs(struct buf *b, const struct sse_style *s, const struct output *o)
{
    PUT(b, ",\"prompt_logprobs\":[");
    for (int32_t i = 0; i < o->n_tokens; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_prompt_logprob(b, s, &o->token[i]);
    }
    buf_putc(b, ']');
}

static void put_token_ids(struct buf *b, const struct output *o)
{
    PUT(b, ",\"token_ids\":[");
    for (int32_t i = 0; i < o->n_tokens && !o->prompt; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_i64(b, o->token[i].id);
    }
    buf_putc(b, ']');
}

/* The plain event of a running choice: everything is copied at once, behind one check for room. */
static int put_short(struct buf *b, const struct sse_style *s, int32_t index, const struct output *o)
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

int sse_piece(struct buf *b, const struct sse_style *s, int32_t index, const struct output *o, const int32_t *prompt,
              int32_t n_prompt, const struct usage *total)
{
    bool plain = o->finish == FINISH_NONE && !s->logprobs && !s->token_ids && !s->continuous_usage && !o->prompt;

    if (plain && plain_text(o->text, o->text_len)) {
        return put_short(b, s, index, o);
    }
    put_opening(b, s, index, o);
    put_logprobs(b, s, o);
    put_finish(b, o->finish, o->stop_string, o->stop_string_len, o->stop_token);
    put_choice_error(b, o->finish, o->error);
    if (s->token_ids) {
        put_token_ids(b, o);
    }
    if (prompt) {
        PUT(b, ",\"prompt_token_ids\":");
        put_ids(b, prompt, n_prompt);
    }
    if (o->prompt && s->prompt_logprobs) {
        put_prompt_logprobs(b, s, o);
    }
    PUT(b, "}]");
    if (s->continuous_usage) {
        buf_putc(b, ',');
        put_usage(b, total);
    }
    PUT(b, "}\n\n");
    return b->failed ? ERR_FULL : 0;
}

int sse_role(struct buf *b, const struct sse_style *s, int32_t index)
{
    buf_append(b, s->head, s->head_len);
    put_i64(b, index);
    return PUT(b,
               ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
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
