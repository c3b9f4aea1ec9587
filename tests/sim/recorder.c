#include "tests/sim/recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/wait.h"

static void record_token(struct recorded_choice *c, const struct token_out *t, bool prompt)
{
    int32_t at = c->n_prompt + c->n_tokens;

    if (at < RECORD_TOKENS) {
        c->id[at] = t->id;
        c->offset[at] = t->text_offset;
        c->logprob[at] = t->logprob;
        c->n_top[at] = t->n_top;
        c->top0[at] = t->n_top > 0 ? t->top_id[0] : -1;
    }
    *(prompt ? &c->n_prompt : &c->n_tokens) += 1;
}

static void record_prompt(struct recorded_choice *c, const struct request *r)
{
    struct prompt_walk *w;
    struct token_out t;

    if (prompt_walk_new(&w, r, NULL) < 0) {
        abort();
    }
    while (prompt_walk_next(w, &t, &c->text) == 0) {
        record_token(c, &t, true);
    }
    prompt_walk_free(w);
}

static void record_tokens(struct recorded_choice *c, const struct output *o)
{
    if (o->prompt) {
        record_prompt(c, o->request);
        return;
    }
    for (int32_t i = 0; i < o->n_tokens; i++) {
        record_token(c, &o->token[i], false);
    }
}

static void record_choice(struct recording *rec, struct recorded_choice *c, const struct output *o)
{
    rec->n_after_end += c->finish != FINISH_NONE;
    buf_append(&c->text, o->text, o->text_len);
    record_tokens(c, o);
    c->n_pieces++;
    if (o->finish == FINISH_NONE) {
        return;
    }
    c->n_ends++;
    c->finish = o->finish;
    c->stop_token = o->stop_token;
    snprintf(c->stop_string, sizeof(c->stop_string), "%s", o->stop_string ? o->stop_string : "");
    snprintf(c->error, sizeof(c->error), "%s", o->error ? o->error : "");
}

static void record(struct sink *s, const struct output *o)
{
    struct recorder *r = CONTAINER_OF(s, struct recorder, sink);
    struct recording *rec = o->request->user;

    pthread_mutex_lock(&r->lock);
    r->n_outputs++;
    rec->n_after_last += rec->last;
    rec->usage = o->usage;
    if (o->choice >= 0 && o->choice < RECORD_CHOICES) {
        record_choice(rec, &rec->choice[o->choice], o);
    }
    rec->last |= o->last;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void flush(struct sink *s)
{
    struct recorder *r = CONTAINER_OF(s, struct recorder, sink);

    pthread_mutex_lock(&r->lock);
    r->n_flushes++;
    pthread_mutex_unlock(&r->lock);
}

void recorder_init(struct recorder *r)
{
    *r = (struct recorder){.sink = {record, flush}};
    pthread_mutex_init(&r->lock, NULL);
    wait_init(&r->changed);
}

void recorder_release(struct recorder *r)
{
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
}

struct recording *recording_new(void)
{
    struct recording *r = calloc(1, sizeof(*r));

    if (!r) {
        abort();
    }
    for (int i = 0; i < RECORD_CHOICES; i++) {
        buf_init(&r->choice[i].text, 1 << 24);
    }
    return r;
}

void recording_free(struct recording *r)
{
    for (int i = 0; i < RECORD_CHOICES; i++) {
        buf_release(&r->choice[i].text);
    }
    free(r);
}

static bool seen(const struct recording *rec, int32_t n_tokens)
{
    return n_tokens > 0 ? rec->choice[0].n_tokens >= n_tokens : rec->last;
}

static bool wait_for(struct recorder *r, struct recording *rec, int32_t n_tokens, double seconds)
{
    int64_t until_us = clock_us() + (int64_t)(seconds * 1e6);
    bool early = true;

    pthread_mutex_lock(&r->lock);
    while (!seen(rec, n_tokens) && early) {
        early = wait_until(&r->changed, &r->lock, until_us);
    }
    bool ok = seen(rec, n_tokens);
    pthread_mutex_unlock(&r->lock);
    return ok;
}

bool recorder_ended(struct recorder *r, const struct recording *rec)
{
    pthread_mutex_lock(&r->lock);
    bool ended = rec->last;
    pthread_mutex_unlock(&r->lock);
    return ended;
}

bool recorder_wait(struct recorder *r, struct recording *rec, double seconds)
{
    return wait_for(r, rec, 0, seconds);
}

bool recorder_wait_tokens(struct recorder *r, struct recording *rec, int32_t n, double seconds)
{
    return wait_for(r, rec, n, seconds);
}
