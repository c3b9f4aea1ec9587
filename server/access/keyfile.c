/* Parsing of keys and of the keys file. */
#include "server/access/keyfile.h"

#include <ctype.h>
#include <gnutls/crypto.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/buf.h"

#define FILE_PARAM "api_key_file"

int key_digest(uint8_t ret[KEY_DIGEST_BYTES], const char *key, size_t len)
{
    return gnutls_hash_fast(GNUTLS_DIG_SHA256, key, len, ret) == 0 ? 0 : ERR_IO;
}

struct key_limits key_limits_none(void)
{
    return (struct key_limits){.weight = 1, .priority_low = INT32_MIN, .priority_high = INT32_MAX};
}

void key_list_release(struct key_list *l)
{
    free(l->key);
    *l = (struct key_list){0};
}

/* ---- one entry ---- */

static int check_new(const struct key_list *l, const struct key_entry *k, struct err *e)
{
    for (int32_t i = 0; i < l->n; i++) {
        if (strcmp(l->key[i].name, k->name) == 0) {
            return err_set(e, ERR_INVALID, "the name '%s' appears twice", k->name);
        }
        if (memcmp(l->key[i].digest, k->digest, sizeof(k->digest)) == 0) {
            return err_set(e, ERR_INVALID, "'%s' has the same key as '%s'", k->name,
                           l->key[i].name);
        }
    }
    return l->n < LIMIT_API_KEYS ? 0 : err_set(e, ERR_INVALID, "more than %d keys", LIMIT_API_KEYS);
}

static int append(struct key_list *l, const struct key_entry *k, struct err *e)
{
    int rc = check_new(l, k, e);

    if (rc) {
        return rc;
    }
    struct key_entry *grown = realloc(l->key, ((size_t)l->n + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(e, "API keys");
    }
    l->key = grown;
    grown[l->n++] = *k;
    return 0;
}

static int set_key(struct key_entry *k, const char *key, size_t len, struct err *e)
{
    for (size_t i = 0; i < len; i++) {
        if (!isgraph((unsigned char)key[i])) {
            return err_set(e, ERR_INVALID,
                           "a key holds a character that an HTTP header cannot carry; only "
                           "printable ASCII without spaces is allowed, and a line of several "
                           "words must begin with name=");
        }
    }
    if (len < 1 || len > LIMIT_API_KEY_BYTES) {
        return err_set(e, ERR_INVALID, "a key must have 1 to %d bytes, not %zu",
                       LIMIT_API_KEY_BYTES, len);
    }
    return key_digest(k->digest, key, len) ? err_set(e, ERR_IO, "SHA-256 is not available") : 0;
}

static int add_plain(struct key_list *l, const char *key, size_t len, struct err *e)
{
    struct key_entry k = {.limits = key_limits_none()};

    snprintf(k.name, sizeof(k.name), "key-%d", l->n + 1);
    int rc = set_key(&k, key, len, e);
    return rc ? rc : append(l, &k, e);
}

/* ---- the words of an entry ---- */

/* Error messages quote nothing but names: a misplaced word may be a key. */

static int set_name(struct key_entry *k, const char *value, struct err *e)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t len = strlen(value);

    if (len < 1 || len > LIMIT_KEY_NAME_BYTES || strspn(value, allowed) != len) {
        return err_set(e, ERR_INVALID, "a name must be 1 to %d letters, digits, '.', '_' or '-'",
                       LIMIT_KEY_NAME_BYTES);
    }
    memcpy(k->name, value, len + 1);
    k->named = true;
    return 0;
}

static int set_digest(struct key_entry *k, const char *value, struct err *e)
{
    static const char digits[] = "0123456789abcdef";
    bool right = strlen(value) == 2 * KEY_DIGEST_BYTES;

    for (size_t i = 0; right && i < KEY_DIGEST_BYTES; i++) {
        const char *high = strchr(digits, tolower((unsigned char)value[2 * i]));
        const char *low = strchr(digits, tolower((unsigned char)value[2 * i + 1]));
        right = high && low;
        if (right) {
            k->digest[i] = (uint8_t)((high - digits) << 4 | (low - digits));
        }
    }
    return right ? 0
                 : err_set(e, ERR_INVALID, "sha256 must be %d hexadecimal digits",
                           2 * KEY_DIGEST_BYTES);
}

static int set_count(int32_t *ret, const char *word, const char *value, struct err *e)
{
    char *end;

    long long n = strtoll(value, &end, 10);

    if (!isdigit((unsigned char)value[0]) || *end || n < 1 || n > INT32_MAX) {
        return err_set(e, ERR_INVALID,
                       "%s must be an integer of at least 1; leave it out for no limit", word);
    }
    *ret = (int32_t)n;
    return 0;
}

static int set_weight(struct key_limits *l, const char *value, struct err *e)
{
    char *end;
    double w = strtod(value, &end);

    if (end == value || *end || !(w >= 0.001 && w <= 1000)) {
        return err_set(e, ERR_INVALID, "weight must be a number from 0.001 to 1000");
    }
    l->weight = (float)w;
    return 0;
}

static int set_priority(struct key_limits *l, const char *value, struct err *e)
{
    char *end, *last = NULL;

    long long low = strtoll(value, &end, 10), high = low;
    bool range = strncmp(end, "..", 2) == 0;

    if (range) {
        high = strtoll(end + 2, &last, 10);
    }
    if (end == value || (range ? last == end + 2 || *last : *end) || low < INT32_MIN ||
        high > INT32_MAX || low > high) {
        return err_set(e, ERR_INVALID, "priority must be LOW..HIGH or one number");
    }
    l->priority_low = (int32_t)low;
    l->priority_high = (int32_t)high;
    return 0;
}

static int set_word(struct key_entry *k, const char *word, const char *value, bool *has_key,
                    struct err *e)
{
    struct key_limits *l = &k->limits;

    if (strcmp(word, "name") == 0) {
        return set_name(k, value, e);
    }
    if (strcmp(word, "key") == 0 || strcmp(word, "sha256") == 0) {
        if (*has_key) {
            return err_set(e, ERR_INVALID, "an entry must have one key or one sha256, not several");
        }
        *has_key = true;
        return word[0] == 'k' ? set_key(k, value, strlen(value), e) : set_digest(k, value, e);
    }
    if (strcmp(word, "weight") == 0) {
        return set_weight(l, value, e);
    }
    if (strcmp(word, "priority") == 0) {
        return set_priority(l, value, e);
    }
    int32_t *count = strcmp(word, "requests_per_minute") == 0   ? &l->requests_per_minute
                     : strcmp(word, "tokens_per_minute") == 0   ? &l->tokens_per_minute
                     : strcmp(word, "concurrent_requests") == 0 ? &l->concurrent_requests
                                                                : NULL;
    return count ? set_count(count, word, value, e)
                 : err_set(e, ERR_INVALID,
                           "an unknown word; known are name, key, sha256, weight, priority, "
                           "requests_per_minute, tokens_per_minute and concurrent_requests");
}

/* `line` is NUL-terminated; it is split into words in place. */
static int add_entry(struct key_list *l, char *line, struct err *e)
{
    struct key_entry k = {.limits = key_limits_none()};
    bool has_key = false;
    char *rest = NULL;

    for (char *word = strtok_r(line, " \t", &rest); word; word = strtok_r(NULL, " \t", &rest)) {
        char *value = strchr(word, '=');
        if (!value) {
            return err_set(e, ERR_INVALID, "an entry must consist of words of the form name=value");
        }
        *value++ = '\0';
        int rc = set_word(&k, word, value, &has_key, e);
        if (rc) {
            return rc;
        }
    }
    return has_key ? append(l, &k, e)
                   : err_set(e, ERR_INVALID, "the entry '%s' has neither key nor sha256", k.name);
}

/* ---- the file ---- */

static int add_line(struct key_list *l, char *line, size_t len, struct err *e)
{
    while (len > 0 && strchr(" \t\r", line[len - 1])) {
        line[--len] = '\0';
    }
    if (strlen(line) != len) {
        return err_set(e, ERR_INVALID, "the line holds a NUL byte");
    }
    if (len == 0 || line[0] == '#') {
        return 0;
    }
    return strncmp(line, "name=", 5) == 0 ? add_entry(l, line, e) : add_plain(l, line, len, e);
}

int key_list_parse(struct key_list *l, const char *text, size_t len, struct err *e)
{
    char *copy = malloc(len + 1);
    int32_t before = l->n;
    int rc = 0;

    if (!copy) {
        return err_nomem(e, "API keys");
    }
    memcpy(copy, text, len);
    copy[len] = '\0';
    char *line = copy, *end = copy + len;
    for (int number = 1; rc == 0 && line < end; number++) {
        char *stop = memchr(line, '\n', (size_t)(end - line));
        stop = stop ? stop : end;
        *stop = '\0';
        rc = add_line(l, line, (size_t)(stop - line), e);
        if (rc == ERR_INVALID) {
            err_prefix(e, FILE_PARAM " line %d", number);
        }
        line = stop + 1;
    }
    free(copy);
    return rc || l->n > before ? rc : err_set(e, ERR_INVALID, FILE_PARAM " holds no key");
}

static int add_file(struct key_list *l, const char *path, struct err *e)
{
    struct buf text;

    buf_init(&text, LIMIT_YAML_BYTES);
    int rc = buf_read_file(&text, path, e);
    if (rc) {
        err_prefix(e, FILE_PARAM);
    } else {
        rc = key_list_parse(l, text.data ? text.data : "", text.len, e);
    }
    buf_release(&text);
    if (rc && e) {
        snprintf(e->param, sizeof(e->param), FILE_PARAM);
    }
    return rc;
}

int key_list_load(struct key_list *ret, const struct settings *s, struct err *e)
{
    struct key_list l = {0};
    int rc = 0;

    for (int64_t i = 0; i < s->n_api_keys && rc == 0; i++) {
        rc = add_plain(&l, s->api_key[i], strlen(s->api_key[i]), e);
        if (rc) {
            err_prefix(e, "api_key %lld", (long long)i + 1);
        }
    }
    if (rc == 0 && s->api_key_file) {
        rc = add_file(&l, s->api_key_file, e);
    }
    if (rc) {
        key_list_release(&l);
        return rc;
    }
    *ret = l;
    return 0;
}
