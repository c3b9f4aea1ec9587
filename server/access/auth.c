/* Keys and their owners (struct client), which survive reloads by name. */
#include "server/access/auth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- owners ---- */

static struct client *add_client(struct keys *k, const char *name, struct err *e)
{
    struct client *c = calloc(1, sizeof(*c));

    if (!c) {
        err_nomem(e, "the owner of a key");
        return NULL;
    }
    client_init(c, name, k->n_clients);
    k->client[k->n_clients++] = c;
    return c;
}

static bool named_in(const struct key_list *l, const char *name)
{
    for (int32_t i = 0; i < l->n; i++) {
        if (strcmp(l->key[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* All tenant numbers are in use: rename a client whose key is gone. Its requests that
 * still run count for the new name then. */
static struct client *reuse_client(struct keys *k, const char *name, const struct key_list *wanted)
{
    for (int32_t i = 1; i < k->n_clients; i++) {
        struct client *c = k->client[i];
        if (named_in(wanted, c->name)) {
            continue;
        }
        pthread_mutex_lock(&c->lock);
        memcpy(c->name, name, strlen(name) + 1);
        c->requests = c->tokens = c->bytes = (struct bucket){0};
        c->n_requests = c->prompt_tokens = c->generation_tokens = 0;
        memset(c->n_limited, 0, sizeof(c->n_limited));
        pthread_mutex_unlock(&c->lock);
        return c;
    }
    return NULL; /* impossible: there are as many clients as a list may have keys */
}

static struct client *find_client(struct keys *k, const char *name, const struct key_list *wanted,
                                  struct err *e)
{
    for (int32_t i = 1; i < k->n_clients; i++) {
        if (strcmp(k->client[i]->name, name) == 0) {
            return k->client[i];
        }
    }
    return k->n_clients < LIMIT_TENANTS ? add_client(k, name, e) : reuse_client(k, name, wanted);
}

/* ---- the keys ---- */

int keys_reload(struct keys *k, const struct settings *s, struct err *e)
{
    struct key_list list = {0};
    int rc = key_list_load(&list, s, e);

    if (rc) {
        return rc;
    }
    struct client **owner = calloc((size_t)list.n + 1, sizeof(struct client *));
    rc = owner ? 0 : err_nomem(e, "API keys");
    pthread_rwlock_wrlock(&k->lock);
    for (int32_t i = 0; i < list.n && rc == 0; i++) {
        owner[i] = find_client(k, list.key[i].name, &list, e);
        rc = owner[i] ? 0 : ERR_NOMEM;
    }
    struct key_list old_list = rc ? list : k->list;
    struct client **old_owner = rc ? owner : k->owner;
    if (rc == 0) {
        k->list = list;
        k->owner = owner;
    }
    pthread_rwlock_unlock(&k->lock);
    key_list_release(&old_list);
    free(old_owner);
    return rc;
}

int keys_open(struct keys *k, const struct settings *s, struct err *e)
{
    *k = (struct keys){0};
    pthread_rwlock_init(&k->lock, NULL);
    int rc = add_client(k, "", e) ? keys_reload(k, s, e) : ERR_NOMEM;
    if (rc) {
        keys_close(k);
    }
    return rc;
}

void keys_close(struct keys *k)
{
    if (k->n_clients == 0) {
        return;
    }
    for (int32_t i = 0; i < k->n_clients; i++) {
        client_release(k->client[i]);
        free(k->client[i]);
    }
    key_list_release(&k->list);
    free(k->owner);
    pthread_rwlock_destroy(&k->lock);
    *k = (struct keys){0};
}

void keys_anonymous(const struct keys *k, struct auth_result *ret)
{
    *ret = (struct auth_result){.client = k->client[0], .limits = key_limits_none()};
}

/* The key's name. A generated name ("key-3") may belong to another key after a reload,
 * so half of the digest is appended to it. */
static void put_scope(char ret[LIMIT_KEY_SCOPE_BYTES + 1], const struct key_entry *k)
{
    size_t n = (size_t)snprintf(ret, LIMIT_KEY_SCOPE_BYTES + 1, "%s", k->name);

    for (size_t i = 0; !k->named && i < 16; i++) {
        n += (size_t)snprintf(ret + n, LIMIT_KEY_SCOPE_BYTES + 1 - n, i ? "%02x" : "/%02x",
                              k->digest[i]);
    }
}

/* The index of the key with this digest, or -1; in constant time for every key and
 * every guess. */
static int32_t find_digest(const struct key_list *l, const uint8_t digest[KEY_DIGEST_BYTES])
{
    int32_t found = -1;

    for (int32_t i = 0; i < l->n; i++) {
        unsigned differ = 0;
        for (int b = 0; b < KEY_DIGEST_BYTES; b++) {
            differ |= l->key[i].digest[b] ^ digest[b];
        }
        int32_t same = (int32_t)((differ - 1) >> 31); /* 1 or 0 */
        found += same * (i - found);
    }
    return found;
}

bool keys_find(struct keys *k, const char *authorization, struct auth_result *ret)
{
    static const char scheme[] = "Bearer ";
    size_t n = sizeof(scheme) - 1;
    bool bearer = authorization && strncasecmp(authorization, scheme, n) == 0;

    return keys_find_bare(k, bearer ? authorization + n + strspn(authorization + n, " ") : NULL,
                          ret);
}

bool keys_find_bare(struct keys *k, const char *key, struct auth_result *ret)
{
    uint8_t digest[KEY_DIGEST_BYTES];
    bool given = key && key_digest(digest, key, strlen(key)) == 0, found = false;

    pthread_rwlock_rdlock(&k->lock);
    int32_t i = given ? find_digest(&k->list, digest) : -1;
    if (i >= 0) {
        *ret = (struct auth_result){.client = k->owner[i], .limits = k->list.key[i].limits};
        put_scope(ret->scope, &k->list.key[i]);
        found = true;
    } else if (k->list.n == 0) {
        keys_anonymous(k, ret);
        found = true;
    }
    pthread_rwlock_unlock(&k->lock);
    return found;
}

int32_t keys_count(struct keys *k)
{
    pthread_rwlock_rdlock(&k->lock);
    int32_t n = k->list.n;
    pthread_rwlock_unlock(&k->lock);
    return n;
}

void keys_each(struct keys *k, void (*visit)(void *arg, struct client *c), void *arg)
{
    pthread_rwlock_rdlock(&k->lock);
    for (int32_t i = 0; i < k->list.n; i++) {
        visit(arg, k->owner[i]);
    }
    pthread_rwlock_unlock(&k->lock);
}
