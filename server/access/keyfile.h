/* API keys and their limits: the setting api-key, and the keys file with one entry per
 * line:
 *
 *     # comment
 *     sk-a-key-alone
 *     name=alice key=sk-abc weight=2 requests_per_minute=60 tokens_per_minute=100000
 *     name=bob sha256=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
 *
 * A line that begins with "name=" is an entry with limits, any other is a key. `weight`
 * is the share under policy: fair; concurrent_requests=4 and priority=-5..5 are also
 * possible. tokens_per_minute counts prompt and generated tokens, and also bounds the
 * bytes of bodies (quota.h). Only the SHA-256 of a key is kept in memory, and the file
 * may hold that instead of the key (printf %s KEY | sha256sum).
 */
#ifndef QUIRE_SERVER_ACCESS_KEYFILE_H
#define QUIRE_SERVER_ACCESS_KEYFILE_H

#include "config/base/limits.h"
#include "config/settings/settings.h"

enum { KEY_DIGEST_BYTES = 32 };

/* The limits of one key. */
struct key_limits {
    float weight; /* share of tokens under policy: fair; 1: the default */
    int32_t requests_per_minute, tokens_per_minute; /* 0: no limit */
    int32_t concurrent_requests;                    /* 0: no limit */
    int32_t priority_low, priority_high;            /* bounds of the field `priority` */
};

struct key_entry {
    /* For metrics and logs; a key without a name is "key-1", ... by its position. */
    char name[LIMIT_KEY_NAME_BYTES + 1];
    bool named;                       /* the file gives the name */
    uint8_t digest[KEY_DIGEST_BYTES]; /* SHA-256 of the key */
    struct key_limits limits;
};

struct key_list {
    struct key_entry *key; /* [n] with distinct names and distinct digests */
    int32_t n;
};

/* No limits, weight 1. */
struct key_limits key_limits_none(void);
/* The keys of the settings, then those of the file. ERR_INVALID names the line at
 * fault, never the key. */
int key_list_load(struct key_list *ret, const struct settings *s, struct err *e);
/* Append the entries of a keys file's text. */
int key_list_parse(struct key_list *l, const char *text, size_t len, struct err *e);
void key_list_release(struct key_list *l);
/* SHA-256. */
int key_digest(uint8_t ret[KEY_DIGEST_BYTES], const char *key, size_t len);

#endif
