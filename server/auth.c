#include "server/auth.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "config/limits.h"

static int keys_add(struct keys *k, const char *key, size_t len, const char *from, struct err *e)
{
    if (len < 1 || len >= KEY_BYTES) {
        return err_set_param(e, ERR_INVALID, from, "%s holds a key of %zu characters; 1 to %d are allowed", from, len, KEY_BYTES - 1);
    }
    for (size_t i = 0; i < len; i++) {
        if (key[i] <= ' ' || key[i] > '~') {
            return err_set_param(e, ERR_INVALID, from, "%s holds a key with a space or a character outside ASCII", from);
        }
    }
    if (k->n >= LIMIT_API_KEYS) {
        return err_set_param(e, ERR_INVALID, from, "more than %d API keys", LIMIT_API_KEYS);
    }
    char(*grown)[KEY_BYTES] = realloc(k->key, (size_t)(k->n + 1) * sizeof(*k->key));
    if (!grown) {
        return err_nomem(e, "API keys");
    }
    k->key = grown;
    memset(k->key[k->n], 0, KEY_BYTES);
    memcpy(k->key[k->n++], key, len);
    return 0;
}

static int keys_read_file(struct keys *k, const char *path, struct err *e)
{
    FILE *f = fopen(path, "re");
    char line[1024];
    int rc = 0, before = k->n;

    if (!f) {
        return err_set_param(e, ERR_IO, "api-key-file", "cannot read api-key-file '%s': %s", path, strerror(errno));
    }
    while (!rc && fgets(line, sizeof(line), f)) {
        char *begin = line + strspn(line, " \t");
        size_t len = strcspn(begin, "\r\n");
        while (len && (begin[len - 1] == ' ' || begin[len - 1] == '\t')) {
            len--;
        }
        if (len && begin[0] != '#') {
            rc = keys_add(k, begin, len, "api-key-file", e);
        }
    }
    fclose(f);
    if (!rc && k->n == before) {
        rc = err_set_param(e, ERR_INVALID, "api-key-file", "api-key-file '%s' holds no key", path);
    }
    return rc;
}

int keys_load(struct keys *k, const struct settings *s, struct err *e)
{
    int rc = 0;

    *k = (struct keys){0};
    for (int64_t i = 0; i < s->n_api_keys && !rc; i++) {
        rc = keys_add(k, s->api_key[i], strlen(s->api_key[i]), "api-key", e);
    }
    if (!rc && s->api_key_file) {
        rc = keys_read_file(k, s->api_key_file, e);
    }
    if (rc) {
        keys_release(k);
    }
    return rc;
}

void keys_release(struct keys *k)
{
    if (k->key) {
        explicit_bzero(k->key, (size_t)k->n * sizeof(*k->key));
    }
    free(k->key);
    *k = (struct keys){0};
}

bool keys_allow(const struct keys *k, const char *authorization)
{
    char given[KEY_BYTES] = {0};
    unsigned allowed = 0;

    if (k->n == 0) {
        return true;
    }
    if (!authorization || strncasecmp(authorization, "Bearer ", 7) != 0) {
        return false;
    }
    const char *token = authorization + 7 + strspn(authorization + 7, " ");
    size_t len = strlen(token);
    if (len < 1 || len >= KEY_BYTES) {
        return false;
    }
    memcpy(given, token, len);
    for (int i = 0; i < k->n; i++) {
        const volatile char *key = k->key[i];
        unsigned differ = 0;
        for (int j = 0; j < KEY_BYTES; j++) {
            differ |= (unsigned char)(key[j] ^ given[j]);
        }
        allowed |= (differ - 1) >> 31; /* 1 where nothing differs */
    }
    return allowed != 0;
}
