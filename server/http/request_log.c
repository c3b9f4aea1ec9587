/* Log lines of a request: its prompts when it is submitted (setting log-prompts), and
 * one line when it has ended (setting access-log). */
#include <stdio.h>
#include <string.h>

#include "server/http/http.h"

struct line {
    struct log_field field[32];
    size_t n;
};

static void add(struct line *l, struct log_field f)
{
    if (l->n < ARRAY_LEN(l->field)) {
        l->field[l->n++] = f;
    }
}

/* Milliseconds; -1 if the request did not get that far. */
static void add_ms(struct line *l, const char *key, int64_t us)
{
    add(l, LOG_F64(key, us > 0 ? (double)us / 1e3 : -1));
}

/* Of its prompts the longest times and the sums of preemptions and drafts. */
static void add_course(struct line *l, struct stream *s)
{
    pthread_mutex_lock(&s->lock);
    struct request_timing c = s->course;
    pthread_mutex_unlock(&s->lock);
    add_ms(l, "queue_ms", c.queue_us);
    add_ms(l, "prefill_ms", c.prefill_us);
    add_ms(l, "decode_ms", c.decode_us);
    add(l, LOG_I64("preemptions", c.preemptions));
    if (c.drafted > 0) {
        add(l, LOG_I64("draft_tokens", c.drafted));
        add(l, LOG_I64("accepted_tokens", c.accepted));
    }
}

static void add_answer(struct line *l, const struct http_request *x)
{
    struct stream *s = x->stream;

    add_ms(l, "ttft_ms", s->first_us ? s->first_us - x->begin_us : 0);
    add_course(l, s);
    add(l, LOG_I64("prompts", s->n_requests));
    add(l, LOG_I64("n", s->n));
    add(l, LOG_I64("prompt_tokens", s->total.prompt_tokens));
    add(l, LOG_I64("cached_tokens", s->total.cached_tokens));
    add(l, LOG_I64("completion_tokens", s->total.completion_tokens));
    add(l, LOG_STR("finish", s->finish ? finish_reason_name(s->finish) : "none"));
}

static bool is_wanted(const struct http_request *x, enum log_level level)
{
    int which = x->server->settings->access_log;

    return level >= log_least() &&
           (which == ACCESS_ALL || (which == ACCESS_ERRORS && x->status >= 400));
}

void request_log(const struct http_request *x)
{
    enum log_level level = x->route && x->route->quiet ? LOG_DEBUG : LOG_INFO;
    struct line l = {.n = 0};

    if (!is_wanted(x, level)) {
        return;
    }
    add(&l, LOG_STR("id", x->request_id));
    add(&l, LOG_STR("method", x->method_name));
    add(&l, LOG_STR("route", x->route ? x->route->label : "other"));
    add(&l, LOG_I64("status", x->status));
    add(&l, LOG_F64("ms", (double)(clock_us() - x->begin_us) / 1e3));
    if (x->stream && x->stream->n_requests > 0) {
        add_answer(&l, x);
    }
    if (x->auth.client && x->auth.client->tenant > 0) {
        add(&l, LOG_STR("key", x->auth.client->name));
    }
    if (x->trace.id[0]) {
        add(&l, LOG_STR("trace_id", x->trace.id));
        add(&l, LOG_STR("span_id", x->trace.span));
        add(&l, LOG_STR("parent_id", x->trace.parent));
    }
    log_fields(level, "request", l.field, l.n);
}

/* ---- prompts ---- */

/* Log the beginning of the prompt as the model gets it: special tokens are written out,
 * and a chat is rendered. */
static void log_prompt(const struct http_request *x, const struct request *r)
{
    enum { TOKENS = 1024 }; /* usually more text than fits into a line */
    const struct engine *engine = atomic_load(&x->server->engine);
    struct err e = {0};
    struct buf text;

    buf_init(&text, LIMIT_TEMPLATE_OUTPUT_BYTES);
    if (engine_decode(engine, r->prompt, MIN(r->n_prompt, TOKENS), false, &text, &e) == 0) {
        log_event(LOG_INFO, "prompt", LOG_STR("id", x->request_id), LOG_I64("index", r->index),
                  LOG_I64("tokens", r->n_prompt),
                  LOG_PART("text", text.data ? text.data : "", text.len));
    } else {
        log_event(LOG_INFO, "prompt", LOG_STR("id", x->request_id), LOG_I64("index", r->index),
                  LOG_I64("tokens", r->n_prompt), LOG_STR("error", e.text));
    }
    buf_release(&text);
}

void prompts_log(const struct http_request *x)
{
    enum { PROMPTS = 16 };
    const struct stream *s = x->stream;

    if (!x->server->settings->log_prompts || LOG_INFO < log_least()) {
        return;
    }
    for (int32_t i = 0; i < MIN(s->n_requests, PROMPTS); i++) {
        log_prompt(x, s->request[i]);
    }
    if (s->n_requests > PROMPTS) {
        log_event(LOG_INFO, "more prompts", LOG_STR("id", x->request_id),
                  LOG_I64("prompts", s->n_requests - PROMPTS));
    }
}
