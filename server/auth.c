#include "server/auth.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <xxhash.h>

static struct key_digest digest_of(const struct keys *k, const char *key)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(key, strlen(key), k->secret);

    return (struct key_digest){h.low64, h.high64};
}

int keys_load(struct keys *k, const struct settings *s, struct err *e)
{
    *k = (struct keys){0};
    if (s->n_api_keys == 0) {
        return 0;
    }
    k->digest = calloc((size_t)s->n_api_keys, sizeof(*k->digest));
    if (!k->digest) {
        return err_nomem(e, "API keys");
    }
    if (getrandom(&k->secret, sizeof(k->secret), 0) != (ssize_t)sizeof(k->secret)) {
        keys_release(k);
        return err_set(e, ERR_IO, "getrandom gave no secret");
    }
    for (int64_t i = 0; i < s->n_api_keys; i++) {
        k->digest[k->n++] = digest_of(k, s->api_key[i]);
    }
    return 0;
}

void keys_release(struct keys *k)
{
    free(k->digest);
    *k = (struct keys){0};
}

bool keys_allow(const struct keys *k, const char *authorization)
{
    if (k->n == 0) {
        return true;
    }
    if (!authorization || strncasecmp(authorization, "Bearer ", 7) != 0) {
        return false;
    }
    struct key_digest given = digest_of(k, authorization + 7 + strspn(authorization + 7, " "));
    unsigned allowed = 0;
    for (int i = 0; i < k->n; i++) {
        uint64_t differ = (k->digest[i].low ^ given.low) | (k->digest[i].high ^ given.high);
        allowed |= differ == 0;
    }
    return allowed != 0;
}
