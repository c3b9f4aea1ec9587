/* Buffers of each choice and prompt, filled output by output and joined at the end. */
#include "server/stream/collect.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"

#define PUT(b, literal) buf_append((b), (literal), sizeof(literal) - 1)

static bool shows_tokens(const struct sse_style *s)
{
    return s->token_ids || s->logprobs || s->echo_logprobs || s->prompt_logprobs;
}

static void choice_json_init(struct choice_json *p, struct token_lists *list)
{
    *p = (struct choice_json){.list = list, .stop_token = -1};
    buf_init(&p->text, LIMIT_RESPONSE_BYTES);
    for (size_t k = 0; list && k < N_TOKEN_LISTS; k++) {
        buf_init(&list->of[k], LIMIT_RESPONSE_BYTES);
    }
}

static void choice_json_release(struct choice_json *p)
{
    buf_release(&p->text);
    for (size_t k = 0; p->list && k < N_TOKEN_LISTS; k++) {
        buf_release(&p->list->of[k]);
    }
    free(p->stop_string);
}

void collector_init(struct collector *c, int32_t n_choices)
{
    *c = (struct collector){.n_choices = n_choices, .per_prompt = n_choices};
}

void collector_share_prompts(struct collector *c, int32_t n_prompts)
{
    c->n_prompts = n_prompts;
    c->per_prompt = c->n_choices / n_prompts;
}

/* [n] choices; `list` [n]: their token lists, or NULL. */
static struct choice_json *choice_json_new(int32_t n, struct token_lists *list)
{
    struct choice_json *p = malloc((size_t)n * sizeof(*p));

    for (int32_t i = 0; p && i < n; i++) {
        choice_json_init(&p[i], list ? &list[i] : NULL);
    }
    return p;
}

/* Allocate the choices at the first output: a request that waits in the queue needs
 * none. */
static int collector_begin(struct collector *c, const struct sse_style *s)
{
    if (!c->list && shows_tokens(s)) {
        c->list = calloc((size_t)c->n_choices + (size_t)c->n_prompts, sizeof(*c->list));
        if (!c->list) {
            return ERR_NOMEM;
        }
    }
    if (!c->choice) {
        c->choice = choice_json_new(c->n_choices, c->list);
    }
    if (!c->prompt && c->n_prompts) {
        c->prompt = choice_json_new(c->n_prompts, c->list ? c->list + c->n_choices : NULL);
    }
    if (!c->choice || (c->n_prompts && !c->prompt)) {
        return ERR_NOMEM;
    }
    return 0;
}

void collector_release(struct collector *c)
{
    for (int32_t i = 0; c->choice && i < c->n_choices; i++) {
        choice_json_release(&c->choice[i]);
    }
    for (int32_t i = 0; c->prompt && i < c->n_prompts; i++) {
        choice_json_release(&c->prompt[i]);
    }
    free(c->choice);
    free(c->prompt);
    free(c->list);
    *c = (struct collector){0};
}

static void comma(struct buf *b)
{
    if (b->len) {
        buf_putc(b, ',');
    }
}

static void add_token(struct choice_json *p, const struct sse_style *s, const struct output *o,
                      const struct token_out *t)
{
    struct token_lists *list = p->list;

    if (s->token_ids && !o->prompt) {
        comma(&list->of[LIST_IDS]);
        put_i64(&list->of[LIST_IDS], t->id);
    }
    if (o->prompt && s->prompt_logprobs) {
        comma(&list->of[LIST_PROMPT_LOGPROBS]);
        put_prompt_logprob(&list->of[LIST_PROMPT_LOGPROBS], s, t);
    }
    if (s->chat && s->logprobs && !o->prompt) {
        comma(&list->of[LIST_TOKENS]);
        put_chat_token(&list->of[LIST_TOKENS], s, t);
    } else if (o->prompt ? s->echo_logprobs : s->logprobs) {
        comma(&list->of[LIST_TOKENS]);
        put_token_string(&list->of[LIST_TOKENS], s, t->id);
        comma(&list->of[LIST_LOGPROBS]);
        put_logprob(&list->of[LIST_LOGPROBS], t->logprob);
        comma(&list->of[LIST_TOP]);
        put_top(&list->of[LIST_TOP], s, t);
        comma(&list->of[LIST_OFFSETS]);
        put_i64(&list->of[LIST_OFFSETS], t->text_offset);
    }
}

/* Bytes of JSON, and of the memory allocated for them. */
static size_t choice_json_bytes(struct choice_json *p, size_t *ret_held)
{
    size_t n = p->text.len;

    *ret_held = p->text.cap;
    for (size_t k = 0; p->list && k < N_TOKEN_LISTS; k++) {
        n += p->list->of[k].len;
        *ret_held += p->list->of[k].cap;
    }
    return n;
}

static bool choice_json_failed(struct choice_json *p)
{
    bool failed = p->text.failed;

    for (size_t k = 0; p->list && k < N_TOKEN_LISTS; k++) {
        failed = failed || p->list->of[k].failed;
    }
    return failed;
}

/* Add tokens of the output while *units last; true: the last token was added. */
static bool add_tokens(struct choice_json *p, const struct sse_style *s, const struct output *o,
                       struct sse_cursor *at, int32_t *units)
{
    struct token_out t;

    while (*units > 0) {
        if (!sse_next_token(&p->text, o, at, &t)) {
            return true;
        }
        if (at->text.len) {
            buf_json_escape(&p->text, at->text.data, at->text.len);
        }
        add_token(p, s, o, &t);
        *units -= 4 + 2 * t.n_top;
    }
    return false;
}

static int note_finish(struct choice_json *p, const struct output *o)
{
    if (o->finish == FINISH_NONE) {
        return 0;
    }
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
    return 0;
}

int collector_add_some(struct collector *c, const struct sse_style *s, int32_t index,
                       const struct output *o, struct sse_cursor *at, int32_t *units)
{
    if (collector_begin(c, s)) {
        return ERR_NOMEM;
    }
    bool shared = o->prompt && !o->token && c->prompt;
    struct choice_json *p = shared ? &c->prompt[index / c->per_prompt] : &c->choice[index];
    size_t before_held, held, before = choice_json_bytes(p, &before_held);

    if (p->whole) {
        return 0; /* the prompt was added for an earlier choice */
    }
    if (at->at == 0) {
        buf_json_escape(&p->text, o->text, o->text_len);
    }
    bool done = add_tokens(p, s, o, at, units);
    p->whole = shared && done;
    int rc = note_finish(p, o);
    size_t more = choice_json_bytes(p, &held) - before;
    c->held += held - before_held;
    c->bytes += shared ? more * (size_t)c->per_prompt : more;
    if (rc || choice_json_failed(p)) {
        return ERR_NOMEM;
    }
    return c->bytes > LIMIT_RESPONSE_BYTES ? ERR_FULL : done ? 0 : COLLECT_MORE;
}

int collector_add(struct collector *c, const struct sse_style *s, int32_t index,
                  const struct output *o)
{
    struct sse_cursor at = {0};
    int32_t units = INT32_MAX;
    int rc = collector_add_some(c, s, index, o, &at, &units);

    sse_cursor_release(&at);
    return rc;
}

/* ---- the body ---- */

/* JSON that a choice has in common with the other choices of its prompt. */
struct shared_json {
    struct choice_json *prompt; /* NULL: none */
    struct buf *ids;            /* prompt_token_ids; NULL: the style has none */
    bool last;                  /* this is the last choice of the prompt */
};

/* Append a shared buffer; the last choice takes it over. */
static void put_shared(struct segments *g, struct buf *json, bool last)
{
    if (last) {
        segments_take(g, json);
    } else {
        segments_share(g, json);
    }
}

/* A JSON list of the prompt's entries followed by the choice's. */
static void put_list(struct segments *g, const char *opening, struct buf *prompt,
                     struct buf *inside, bool last)
{
    bool comma = prompt && prompt->len && inside->len;

    buf_puts(&g->literal, opening);
    if (prompt) {
        put_shared(g, prompt, last);
    }
    if (comma) {
        buf_putc(&g->literal, ',');
    }
    segments_take(g, inside);
    buf_putc(&g->literal, ']');
}

static void put_logprobs(struct segments *g, struct choice_json *p, const struct sse_style *s,
                         const struct shared_json *h)
{
    struct choice_json *q = h->prompt;
    struct buf *b = &g->literal;

    if (s->chat && s->logprobs) {
        put_list(g, "\",\"refusal\":null},\"logprobs\":{\"content\":[", NULL,
                 &p->list->of[LIST_TOKENS], false);
        PUT(b, ",\"refusal\":null},");
    } else if (s->chat) {
        PUT(b, "\",\"refusal\":null},\"logprobs\":null,");
    } else if (s->logprobs || s->echo_logprobs) {
        put_list(g, "\",\"logprobs\":{\"tokens\":[", q ? &q->list->of[LIST_TOKENS] : NULL,
                 &p->list->of[LIST_TOKENS], h->last);
        put_list(g, ",\"token_logprobs\":[", q ? &q->list->of[LIST_LOGPROBS] : NULL,
                 &p->list->of[LIST_LOGPROBS], h->last);
        put_list(g, ",\"top_logprobs\":[", q ? &q->list->of[LIST_TOP] : NULL,
                 &p->list->of[LIST_TOP], h->last);
        put_list(g, ",\"text_offset\":[", q ? &q->list->of[LIST_OFFSETS] : NULL,
                 &p->list->of[LIST_OFFSETS], h->last);
        PUT(b, "},");
    } else {
        PUT(b, "\",\"logprobs\":null,");
    }
}

static void put_choice(struct segments *g, struct choice_json *p, const struct sse_style *s,
                       int32_t index, const struct shared_json *h)
{
    struct choice_json *q = h->prompt;
    struct buf *b = &g->literal;

    PUT(b, "{\"index\":");
    put_i64(b, index);
    buf_puts(b, s->chat ? ",\"message\":{\"role\":\"assistant\",\"content\":\"" : ",\"text\":\"");
    if (q) {
        put_shared(g, &q->text, h->last);
    }
    segments_take(g, &p->text);
    put_logprobs(g, p, s, h);
    put_finish(b, p->finish, p->stop_string, p->stop_string_len, p->stop_token);
    put_choice_error(b, p->finish, p->error);
    if (s->token_ids) {
        put_list(g, ",\"token_ids\":[", NULL, &p->list->of[LIST_IDS], false);
        PUT(b, ",\"prompt_token_ids\":");
        put_shared(g, h->ids, h->last);
    }
    if (s->prompt_logprobs) {
        put_list(g, ",\"prompt_logprobs\":[", q ? &q->list->of[LIST_PROMPT_LOGPROBS] : NULL,
                 &p->list->of[LIST_PROMPT_LOGPROBS], h->last);
    }
    buf_putc(b, '}');
}

int collector_segments(struct segments *g, struct collector *c, const struct sse_style *s,
                       const struct prompt_ids *prompts, int32_t n, const struct usage *total)
{
    struct choice_json nothing;
    struct token_lists no_tokens;
    const size_t skip = sizeof("data: ") - 1;
    struct buf *b = &g->literal, ids;

    choice_json_init(&nothing, &no_tokens);
    buf_init(&ids, LIMIT_RESPONSE_BYTES);
    buf_append(b, s->bare + skip, s->bare_len - skip);
    for (int32_t i = 0; i < c->n_choices; i++) {
        struct shared_json h = {
            .prompt = c->prompt ? &c->prompt[i / n] : NULL, .ids = &ids, .last = i % n == n - 1};
        if (i) {
            buf_putc(b, ',');
        }
        if (prompts && i % n == 0) {
            put_ids(&ids, prompts[i / n].id, prompts[i / n].n);
        }
        put_choice(g, c->choice ? &c->choice[i] : &nothing, s, i, &h);
    }
    buf_release(&ids);
    PUT(b, "],");
    put_usage(b, total);
    buf_putc(b, '}');
    return segments_close(g);
}

int collector_body(struct buf *b, struct collector *c, const struct sse_style *s,
                   const struct prompt_ids *prompts, int32_t n, const struct usage *total)
{
    struct segments g;

    segments_init(&g, LIMIT_RESPONSE_BYTES);
    int rc = collector_segments(&g, c, s, prompts, n, total);
    rc = rc ? rc : buf_reserve(b, g.total);
    if (!rc) {
        b->len += segments_read(&g, b->data + b->len, g.total);
        b->data[b->len] = '\0';
    }
    b->failed = b->failed || rc;
    segments_release(&g);
    return rc;
}
