/* What the owner of a key has used and may still use: token buckets of requests, tokens
 * and bytes of bodies a minute, requests under way.
 *
 * A bucket holds a minute's worth and fills evenly. A request takes one from the bucket
 * of requests and its body from the bucket of bytes when it comes, its prompts' tokens
 * from the bucket of tokens before it is queued (what is larger than a bucket: the
 * bucket full), and the tokens drawn for it when the engine has let go of it, which may
 * bring the bucket below zero: the next one waits for that too. Bytes pay for the work
 * on a text that makes no token: a chat that is rendered and refused, /tokenize. There
 * are BODY_BYTES_PER_TOKEN of them for each token a minute.
 */
#ifndef QUIRE_SERVER_ACCESS_QUOTA_H
#define QUIRE_SERVER_ACCESS_QUOTA_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/access/keyfile.h"

enum { BODY_BYTES_PER_TOKEN = 16 };

struct bucket {
    int64_t per_minute; /* 0: no limit */
    double level;
    int64_t at_us; /* when `level` was right */
};

enum quota_kind { QUOTA_REQUESTS, QUOTA_TOKENS, QUOTA_CONCURRENT, QUOTA_BYTES, QUOTA_KINDS };
const char *quota_kind_name(enum quota_kind k);

/* The owner of a key. Lives as long as the server, so that requests may point at it. */
struct client {
    char name[LIMIT_KEY_NAME_BYTES + 1];
    int32_t tenant; /* its number, < LIMIT_TENANTS */
    pthread_mutex_t lock;
    struct bucket requests, tokens, bytes; /* under lock */
    int32_t running;                       /* under lock: requests under way */
    /* For metrics. */
    _Atomic uint64_t n_requests, n_limited[QUOTA_KINDS], prompt_tokens,
        generation_tokens; /* n_limited by enum quota_kind */
};

/* Why not, and when again. */
struct quota_refusal {
    int64_t wait_us;
    char text[200];
};

void client_init(struct client *c, const char *name, int32_t tenant);
void client_release(struct client *c);
/* A request with a body of so many bytes begins: false with the reason, and nothing is
 * taken. What began must end. */
bool client_begin(struct client *c, const struct key_limits *l, int64_t body_bytes, int64_t now_us,
                  struct quota_refusal *ret);
/* Its prompts' tokens. Taken back when the queue refuses the request. */
bool client_take_tokens(struct client *c, const struct key_limits *l, int64_t n, int64_t now_us,
                        struct quota_refusal *ret);
void client_return_tokens(struct client *c, int64_t n);
/* So many tokens were drawn for a request. Any thread. */
void client_charge(struct client *c, int64_t n_drawn);
/* A request ends. */
void client_end(struct client *c);

/* What a client sees in its headers. */
struct quota_view {
    int32_t limit, remaining; /* limit 0: none */
    int64_t reset_us;         /* until the bucket is full */
};
void client_view(struct client *c, const struct key_limits *l, int64_t now_us,
                 struct quota_view *ret_requests, struct quota_view *ret_tokens);

#endif
