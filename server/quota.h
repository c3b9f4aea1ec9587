/* What the owner of a key has used and may still use: token buckets of requests and tokens a minute, requests under way.
 *
 * A bucket holds a minute's worth and fills evenly. A request takes one from the bucket of requests when it comes, its
 * prompts' tokens from the bucket of tokens before it is queued (a prompt larger than the bucket: the bucket full), and
 * the tokens made for it when it ends, which may bring the bucket below zero: the next one waits for that too.
 */
#ifndef QUIRE_SERVER_QUOTA_H
#define QUIRE_SERVER_QUOTA_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/keyfile.h"

struct bucket {
    int32_t per_minute; /* 0: no limit */
    double level;
    int64_t at_us; /* when `level` was right */
};

/* The owner of a key. Lives as long as the server, so that requests may point at it. */
struct client {
    char name[LIMIT_KEY_NAME_BYTES + 1];
    int32_t tenant; /* its number, < LIMIT_TENANTS */
    pthread_mutex_t lock;
    struct bucket requests, tokens; /* under lock */
    int32_t running;                /* under lock: requests under way */
    /* For metrics. */
    _Atomic uint64_t n_requests, n_limited[3], prompt_tokens, generation_tokens; /* n_limited by enum quota_kind */
};

enum quota_kind { QUOTA_REQUESTS, QUOTA_TOKENS, QUOTA_CONCURRENT };
const char *quota_kind_name(enum quota_kind k);

/* Why not, and when again. */
struct quota_refusal {
    int64_t wait_us;
    char text[200];
};

void client_init(struct client *c, const char *name, int32_t tenant);
void client_release(struct client *c);
/* A request begins: false with the reason. What began must end. */
bool client_begin(struct client *c, const struct key_limits *l, int64_t now_us, struct quota_refusal *ret);
/* Its prompts' tokens. Taken back when the queue refuses the request. */
bool client_take_tokens(struct client *c, const struct key_limits *l, int64_t n, int64_t now_us,
                        struct quota_refusal *ret);
void client_return_tokens(struct client *c, int64_t n);
/* A request ends, for which so many tokens were made. */
void client_end(struct client *c, int64_t generation_tokens);

/* What a client sees in its headers. */
struct quota_view {
    int32_t limit, remaining; /* limit 0: none */
    int64_t reset_us;         /* until the bucket is full */
};
void client_view(struct client *c, const struct key_limits *l, int64_t now_us, struct quota_view *ret_requests,
                 struct quota_view *ret_tokens);

#endif
