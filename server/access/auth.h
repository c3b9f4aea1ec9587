/* Authentication: the API keys of the settings and of the keys file. A key is looked up
 * in constant time; a reload replaces the whole list. */
#ifndef QUIRE_SERVER_ACCESS_AUTH_H
#define QUIRE_SERVER_ACCESS_AUTH_H

#include "server/access/quota.h"

struct keys {
    pthread_rwlock_t lock; /* read by requests, written by a reload */
    struct key_list list;  /* under lock */
    struct client **owner; /* [list.n] of each key in `list`; under lock */
    /* [n_clients] by tenant number; 0: requests without a key. Entries are added or
     * renamed, never removed, so requests may keep pointers to them. */
    struct client *client[LIMIT_TENANTS];
    int32_t n_clients;
};

/* What an Authorization header allows. */
struct auth_result {
    struct client *client;    /* the key's owner; outlives the request */
    struct key_limits limits; /* as of the list in which the key was found */
    /* Prefix-cache namespace: unique to the key, even across reloads; "": no key. */
    char scope[LIMIT_KEY_SCOPE_BYTES + 1];
};

/* Load the keys. If there are none, every request is accepted. */
int keys_open(struct keys *k, const struct settings *s, struct err *e);
/* Load the keys again in place of the present ones; a name that stays keeps its
 * counters and buckets. On failure nothing changes. */
int keys_reload(struct keys *k, const struct settings *s, struct err *e);
/* NULL-safe on a struct of zeros. */
void keys_close(struct keys *k);
/* Whether an Authorization header's value (or NULL) is "Bearer" and one of the keys, or
 * no keys are set; *ret is filled then. */
bool keys_find(struct keys *k, const char *authorization, struct auth_result *ret);
/* The same of a header whose value is the key alone (x-api-key), or NULL. */
bool keys_find_bare(struct keys *k, const char *key, struct auth_result *ret);
/* The result for routes that need no key. */
void keys_anonymous(const struct keys *k, struct auth_result *ret);
int32_t keys_count(struct keys *k);
/* Call `visit` for every key's owner, in the order of the file. */
void keys_each(struct keys *k, void (*visit)(void *arg, struct client *c), void *arg);

#endif
