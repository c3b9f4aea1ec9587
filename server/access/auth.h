/* Who may ask: the keys of the settings and of the keys file, found in constant time,
 * replaced whole on reload. */
#ifndef QUIRE_SERVER_ACCESS_AUTH_H
#define QUIRE_SERVER_ACCESS_AUTH_H

#include "server/access/quota.h"

struct keys {
    pthread_rwlock_t lock;
    struct key_list list;  /* under lock */
    struct client **owner; /* [list.n] under lock */
    /* by tenant; 0: whoever sends no key where none is asked. Added to only */
    struct client *client[LIMIT_TENANTS];
    int32_t n_clients;
};

/* What an Authorization header is worth. */
struct grant {
    struct client *client; /* outlives the request */
    struct key_limits limits;
    /* no other key's, whatever file is read later; "": no key */
    char scope[LIMIT_KEY_SCOPE_BYTES + 1];
};

/* The keys as they are now. None: every request is let in. */
int keys_open(struct keys *k, const struct settings *s, struct err *e);
/* The keys as they are now in place of those before; a name that stays keeps what it
 * has used. On failure nothing has changed. */
int keys_reload(struct keys *k, const struct settings *s, struct err *e);
/* NULL-safe on a struct of zeros. */
void keys_close(struct keys *k);
/* Whether an Authorization header's value (or NULL) is "Bearer" with one of the keys:
 * whose, and what it may. */
bool keys_find(struct keys *k, const char *authorization, struct grant *ret);
/* For routes that ask for no key. */
void keys_anyone(const struct keys *k, struct grant *ret);
int32_t keys_count(struct keys *k);
/* Every key's owner, in the file's order. */
void keys_each(struct keys *k, void (*see)(void *arg, struct client *c), void *arg);

#endif
