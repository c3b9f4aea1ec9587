#include "server/collect.h"

#include <stdlib.h>
#include <string.h>

#include "config/limits.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

static void parts_init(struct choice_parts *p)
{
    struct buf *all[] = {&p->text, &p->tokens, &p->logprobs, &p->top, &p->offsets, &p->ids, &p->prompt_logprobs};

    for (size_t k = 0; k < ARRAY_LEN(all); k++) {
        buf_init(all[k], LIMIT_RESPONSE_BYTES);
    }
    p->stop_token = -1;
}

static void parts_release(struct choice_parts *p)
{
    struct buf *all[] = {&p->text, &p->tokens, &p->logprobs, &p->top, &p->offsets, &p->ids, &p->prompt_logprobs};

    for (size_t k = 0; k < ARRAY_LEN(all); k++) {
        buf_release(all[k]);
    }
    free(p->stop_string);
}

void collector_init(struct collector *c, int32_t n_choices)
{
    *c = (struct collector){.n_choices = n_choices};
}

/* Room for the choices, when the first piece comes: an answer that waits for its turn holds none. */
static int collector_begin(struct collector *c)
{
    if (c->choice) {
        return 0;
    }
    c->choice = calloc((size_t)c->n_choices, sizeof(*c->choice));
    if (!c->choice) {
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < c->n_choices; i++) {
        parts_init(&c->choice[i]);
    }
    return 0;
}

void collector_release(struct collector *c)
{
    for (int32_t i = 0; c->choice && i < c->n_choices; i++) {
        parts_release(&c->choice[i]);
    }
    free(c->choice);
    *c = (struct collector){0};
}

static void comma(struct buf *b)
{
    if (b->len) {
        buf_putc(b, ',');
    }
}

static void add_token(struct choice_parts *p, const struct sse_style *s, const struct output *o,
                      const struct token_out *t)
{
    if (s->token_ids && !o->prompt) {
        comma(&p->ids);
        put_i64(&p->ids, t->id);
    }
    if (o->prompt && s->prompt_logprobs) {
        comma(&p->prompt_logprobs);
        put_prompt_logprob(&p->prompt_logprobs, s, t);
    }
    if (s->chat && s->logprobs && !o->prompt) {
        comma(&p->tokens);
        put_chat_token(&p->tokens, s, t);
    } else if (o->prompt ? s->echo_logprobs : s->logprobs) {
        comma(&p->tokens);
        put_token_string(&p->tokens, s, t->id);
        comma(&p->logprobs);
        put_logprob(&p->logprobs, t->logprob);
        comma(&p->top);
        put_top(&p->top, s, t);
        comma(&p->offsets);
        put_i64(&p->offsets, t->text_offset);
    }
}

static size_t parts_bytes(const struct choice_parts *p)
{
    return p->text.len + p->tokens.len + p->logprobs.len + p->top.len + p->offsets.len + p->ids.len +
           p->prompt_logprobs.len;
}

static bool parts_failed(const struct choice_parts *p)
{
    return p->text.failed || p->tokens.failed || p->logprobs.failed || p->top.failed || p->offsets.failed ||
           p->ids.failed || p->prompt_logprobs.failed;
}

int collector_add(struct collector *c, const struct sse_style *s, int32_t index, const struct output *o)
{
    if (collector_begin(c)) {
        return ERR_NOMEM;
    }
    struct choice_parts *p = &c->choice[index];
    size_t before = parts_bytes(p);

    buf_json_escape(&p->text, o->text, o->text_len);
    for (int32_t i = 0; i < o->n_tokens; i++) {
        add_token(p, s, o, &o->token[i]);
    }
    if (o->finish != FINISH_NONE) {
        p->finish = o->finish;
        p->stop_token = o->stop_token;
        p->error = o->error;
        if (o->stop_string && !p->stop_string) {
            p->stop_string = malloc((size_t)o->stop_string_len + 1);
            if (!p->stop_string) {
                return ERR_NOMEM;
            }
            memcpy(p->stop_string, o->stop_string, (size_t)o->stop_string_len);
            p->stop_string_len = o->stop_string_len;
        }
    }
    c->bytes += parts_bytes(p) - before;
    return parts_failed(p) ? ERR_NOMEM : c->bytes > LIMIT_RESPONSE_BYTES ? ERR_FULL : 0;
}

static void put_list(struct buf *b, const char *opening, const struct buf *inside)
{
    buf_puts(b, opening);
    if (inside->len) {
        buf_append(b, inside->data, inside->len);
    }
    buf_putc(b, ']');
}

static void put_choice(struct buf *b, const struct choice_parts *p, const struct sse_style *s, int32_t index,
                       const struct prompt_ids *prompt)
{
    PUT(b, "{\"index\":");
    put_i64(b, index);
    buf_puts(b, s->chat ? ",\"message\":{\"role\":\"assistant\",\"content\":\"" : ",\"text\":\"");
    if (p->text.len) {
        buf_append(b, p->text.data, p->text.len);
    }
    if (s->chat) {
        PUT(b, "\",\"refusal\":null},\"logprobs\":");
        if (s->logprobs) {
            put_list(b, "{\"content\":[", &p->tokens);
            PUT(b, ",\"refusal\":null},");
        } else {
            PUT(b, "null,");
        }
    } else if (s->logprobs || s->echo_logprobs) {
        put_list(b, "\",\"logprobs\":{\"tokens\":[", &p->tokens);
        put_list(b, ",\"token_logprobs\":[", &p->logprobs);
        put_list(b, ",\"top_logprobs\":[", &p->top);
        put_list(b, ",\"text_offset\":[", &p->offsets);
        PUT(b, "},");
    } else {
        PUT(b, "\",\"logprobs\":null,");
    }
    put_finish(b, p->finish, p->stop_string, p->stop_string_len, p->stop_token);
    put_choice_error(b, p->finish, p->error);
    if (s->token_ids) {
        put_list(b, ",\"token_ids\":[", &p->ids);
        PUT(b, ",\"prompt_token_ids\":");
        put_ids(b, prompt->id, prompt->n);
    }
    if (s->prompt_logprobs) {
        put_list(b, ",\"prompt_logprobs\":[", &p->prompt_logprobs);
    }
    buf_putc(b, '}');
}

int collector_body(struct buf *b, const struct collector *c, const struct sse_style *s,
                   const struct prompt_ids *prompts, int32_t n, const struct usage *total)
{
    static const struct choice_parts nothing = {.stop_token = -1};
    const size_t skip = sizeof("data: ") - 1;

    buf_append(b, s->bare + skip, s->bare_len - skip);
    for (int32_t i = 0; i < c->n_choices; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_choice(b, c->choice ? &c->choice[i] : &nothing, s, i, prompts ? &prompts[i / n] : NULL);
    }
    PUT(b, "],");
    put_usage(b, total);
    buf_putc(b, '}');
    return b->failed ? ERR_FULL : 0;
}
