/* API keys, compared so that the time taken tells nothing of them. */
#ifndef QUIRE_SERVER_AUTH_H
#define QUIRE_SERVER_AUTH_H

#include "config/settings.h"

/* Keys as digests under a secret drawn at start: equal work for every key and every guess. */
struct keys {
    uint64_t secret;
    struct key_digest {
        uint64_t low, high;
    } * digest; /* [n] */
    int n;
};

/* Keys of the setting api-key (those of api-key-file are among them). None: every request is let in. */
int keys_load(struct keys *k, const struct settings *s, struct err *e);
void keys_release(struct keys *k);
/* Whether an Authorization header's value (or NULL) is "Bearer" with one of the keys. */
bool keys_allow(const struct keys *k, const char *authorization);

#endif
