/* Token buckets and the counters of a key's owner. */
#include "server/access/quota.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MINUTE_US 60e6

/* ---- buckets ---- */

/* Bring the level up to date, at the rate `per_minute`, which may have changed. */
static void bucket_fill(struct bucket *b, int64_t per_minute, int64_t now_us)
{
    if (b->per_minute == 0) { /* first use, or there was no limit before */
        b->level = (double)per_minute;
    } else {
        b->level += (double)(now_us - b->at_us) / MINUTE_US * (double)per_minute;
    }
    b->level = MIN(b->level, (double)per_minute);
    b->per_minute = per_minute;
    b->at_us = now_us;
}

/* Time until `level` is reached. */
static int64_t bucket_reach_us(const struct bucket *b, double level)
{
    return (int64_t)ceil(MAX(level - b->level, 0) / (double)b->per_minute * MINUTE_US);
}

/* 0, or the time until `n` may be taken. */
static int64_t bucket_wait_us(struct bucket *b, int64_t per_minute, int64_t n, int64_t now_us)
{
    bucket_fill(b, per_minute, now_us);
    return per_minute ? bucket_reach_us(b, (double)MIN(n, per_minute)) : 0;
}

static void bucket_take(struct bucket *b, int64_t n)
{
    b->level -= b->per_minute ? (double)n : 0;
}

static struct quota_view bucket_view(struct bucket *b, int32_t per_minute, int64_t now_us)
{
    bucket_fill(b, per_minute, now_us);
    if (per_minute == 0) {
        return (struct quota_view){0};
    }
    return (struct quota_view){per_minute, (int32_t)MAX(b->level, 0),
                               bucket_reach_us(b, per_minute)};
}

/* ---- clients ---- */

const char *quota_kind_name(enum quota_kind k)
{
    static const char *const name[] = {"requests", "tokens", "concurrent", "bytes"};

    return name[k];
}

void client_init(struct client *c, const char *name, int32_t tenant)
{
    memset(c, 0, sizeof(*c));
    snprintf(c->name, sizeof(c->name), "%s", name);
    c->tenant = tenant;
    pthread_mutex_init(&c->lock, NULL);
}

void client_release(struct client *c)
{
    pthread_mutex_destroy(&c->lock);
}

static void refuse(struct client *c, enum quota_kind kind, int64_t limit, int64_t wait_us,
                   struct quota_refusal *ret)
{
    atomic_fetch_add(&c->n_limited[kind], 1);
    ret->wait_us = wait_us;
    if (kind == QUOTA_CONCURRENT) {
        snprintf(ret->text, sizeof(ret->text),
                 "rate limit: this key allows %lld concurrent requests, and as many are "
                 "running",
                 (long long)limit);
    } else {
        snprintf(ret->text, sizeof(ret->text),
                 "rate limit: this key allows %lld %s%s per minute; try again in %.3f s",
                 (long long)limit, quota_kind_name(kind),
                 kind == QUOTA_BYTES ? " of request bodies" : "", (double)wait_us / 1e6);
    }
}

static int64_t bytes_per_minute(const struct key_limits *l)
{
    return (int64_t)l->tokens_per_minute * BODY_BYTES_PER_TOKEN;
}

bool client_begin(struct client *c, const struct key_limits *l, int64_t body_bytes, int64_t now_us,
                  struct quota_refusal *ret)
{
    enum { BUSY_WAIT_US = 1000000 }; /* when a running request will end is unknown */

    atomic_fetch_add(&c->n_requests, 1);
    pthread_mutex_lock(&c->lock);
    bool busy = l->concurrent_requests && c->running >= l->concurrent_requests;
    int64_t requests_us = bucket_wait_us(&c->requests, l->requests_per_minute, 1, now_us);
    int64_t bytes_us = bucket_wait_us(&c->bytes, bytes_per_minute(l), body_bytes, now_us);
    bool begins = !busy && requests_us == 0 && bytes_us == 0;
    if (begins) {
        bucket_take(&c->requests, 1);
        bucket_take(&c->bytes, body_bytes);
        c->running++;
    }
    pthread_mutex_unlock(&c->lock);
    if (busy) {
        refuse(c, QUOTA_CONCURRENT, l->concurrent_requests, BUSY_WAIT_US, ret);
    } else if (requests_us) {
        refuse(c, QUOTA_REQUESTS, l->requests_per_minute, requests_us, ret);
    } else if (bytes_us) {
        refuse(c, QUOTA_BYTES, bytes_per_minute(l), bytes_us, ret);
    }
    return begins;
}

bool client_take_tokens(struct client *c, const struct key_limits *l, int64_t n, int64_t now_us,
                        struct quota_refusal *ret)
{
    pthread_mutex_lock(&c->lock);
    int64_t wait_us = bucket_wait_us(&c->tokens, l->tokens_per_minute, n, now_us);
    bucket_take(&c->tokens, wait_us ? 0 : n);
    pthread_mutex_unlock(&c->lock);
    if (wait_us) {
        refuse(c, QUOTA_TOKENS, l->tokens_per_minute, wait_us, ret);
        return false;
    }
    atomic_fetch_add(&c->prompt_tokens, (uint64_t)n);
    return true;
}

void client_return_tokens(struct client *c, int64_t n)
{
    atomic_fetch_sub(&c->prompt_tokens, (uint64_t)n);
    pthread_mutex_lock(&c->lock);
    bucket_take(&c->tokens, -n);
    pthread_mutex_unlock(&c->lock);
}

void client_charge(struct client *c, int64_t n_generated)
{
    atomic_fetch_add(&c->generation_tokens, (uint64_t)n_generated);
    pthread_mutex_lock(&c->lock);
    bucket_take(&c->tokens, n_generated);
    pthread_mutex_unlock(&c->lock);
}

void client_end(struct client *c)
{
    pthread_mutex_lock(&c->lock);
    c->running--;
    pthread_mutex_unlock(&c->lock);
}

void client_view(struct client *c, const struct key_limits *l, int64_t now_us,
                 struct quota_view *ret_requests, struct quota_view *ret_tokens)
{
    pthread_mutex_lock(&c->lock);
    *ret_requests = bucket_view(&c->requests, l->requests_per_minute, now_us);
    *ret_tokens = bucket_view(&c->tokens, l->tokens_per_minute, now_us);
    pthread_mutex_unlock(&c->lock);
}
