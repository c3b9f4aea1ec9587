/* Rate limits of a key's owner: token buckets for requests, tokens and body bytes per
 * minute, and the number of concurrent requests.
 *
 * A bucket holds one minute's worth and fills evenly. A request takes 1 from the
 * requests bucket and its body's size from the bytes bucket when it arrives, and its
 * prompts' tokens from the tokens bucket before it is queued; an amount larger than a
 * bucket needs the bucket full. Generated tokens are taken when the request has ended;
 * that may make the level negative, and later requests wait until it is refilled. The
 * bytes bucket limits work on text that yields no tokens: a chat that is rendered and
 * refused, /tokenize. It holds BODY_BYTES_PER_TOKEN bytes for each token per minute.
 */
#ifndef QUIRE_SERVER_ACCESS_QUOTA_H
#define QUIRE_SERVER_ACCESS_QUOTA_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/access/keyfile.h"

enum { BODY_BYTES_PER_TOKEN = 16 };

struct bucket {
    int64_t per_minute; /* capacity and rate; 0: no limit */
    double level;       /* tokens in the bucket at at_us; negative: owed */
    int64_t at_us;      /* the time at which `level` holds */
};

enum quota_kind { QUOTA_REQUESTS, QUOTA_TOKENS, QUOTA_CONCURRENT, QUOTA_BYTES, QUOTA_KINDS };
const char *quota_kind_name(enum quota_kind k);

/* The owner of a key. Lives as long as the server, so that requests may point to it. */
struct client {
    char name[LIMIT_KEY_NAME_BYTES + 1]; /* the key's name; "": no key */
    int32_t tenant;                      /* its number, < LIMIT_TENANTS */
    pthread_mutex_t lock;
    struct bucket requests, tokens, bytes; /* under lock */
    int32_t running;                       /* concurrent requests; under lock */
    /* For metrics; n_limited: refusals by enum quota_kind. */
    _Atomic uint64_t n_requests, n_limited[QUOTA_KINDS], prompt_tokens, generation_tokens;
};

/* Why a request is refused, and when to retry. */
struct quota_refusal {
    int64_t wait_us; /* until a retry can succeed */
    char text[200];  /* the message for the client */
};

void client_init(struct client *c, const char *name, int32_t tenant);
void client_release(struct client *c);
/* A request with a body of body_bytes begins. False: it is refused, with the reason in
 * *ret, and nothing is taken. Each success must be matched by client_end. */
bool client_begin(struct client *c, const struct key_limits *l, int64_t body_bytes, int64_t now_us,
                  struct quota_refusal *ret);
/* Take n prompt tokens; client_return_tokens puts them back if the request is not
 * queued after all. */
bool client_take_tokens(struct client *c, const struct key_limits *l, int64_t n, int64_t now_us,
                        struct quota_refusal *ret);
void client_return_tokens(struct client *c, int64_t n);
/* Take the tokens generated for a request, at its end. Any thread. */
void client_charge(struct client *c, int64_t n_generated);
/* A request ends. */
void client_end(struct client *c);

/* The values of the x-ratelimit-* headers for one bucket. */
struct quota_view {
    int32_t limit, remaining; /* limit 0: no limit, no headers */
    int64_t reset_us;         /* time until the bucket is full */
};
void client_view(struct client *c, const struct key_limits *l, int64_t now_us,
                 struct quota_view *ret_requests, struct quota_view *ret_tokens);

#endif
