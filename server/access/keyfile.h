/* API keys and what each may use: the setting api-key, and the keys file, one entry a
 * line:
 *
 *     # comment
 *     sk-a-key-alone
 *     name=alice key=sk-abc weight=2 requests_per_minute=60 tokens_per_minute=100000
 *     name=bob sha256=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
 *
 * A line is an entry with limits if it begins with "name=", else it is a key. `weight`
 * is the share with policy: fair; concurrent_requests=4 and priority=-5..5 may be given
 * too. tokens_per_minute counts tokens of prompts and tokens
 * drawn, and bounds the bytes of bodies too (quota.h). Keys are kept as their SHA-256
 * only, so the file need not hold them either (printf %s KEY | sha256sum).
 */
#ifndef QUIRE_SERVER_ACCESS_KEYFILE_H
#define QUIRE_SERVER_ACCESS_KEYFILE_H

#include "config/base/limits.h"
#include "config/settings/settings.h"

enum { KEY_DIGEST_BYTES = 32 };

/* What a key's owner may use. */
struct key_limits {
    float weight;
    int32_t requests_per_minute, tokens_per_minute; /* 0: no limit */
    int32_t concurrent_requests;                    /* 0: no limit */
    int32_t priority_low, priority_high;            /* of the request field `priority` */
};

struct key_entry {
    /* for metrics and logs; a key without one is "key-1", ... by its place */
    char name[LIMIT_KEY_NAME_BYTES + 1];
    bool named; /* the file says so */
    uint8_t digest[KEY_DIGEST_BYTES];
    struct key_limits limits;
};

struct key_list {
    struct key_entry *key; /* [n], names and digests distinct */
    int32_t n;
};

/* No limits, weight 1. */
struct key_limits key_limits_none(void);
/* The keys of the settings, then those of the file. ERR_INVALID with the line at fault,
 * never its key. */
int key_list_load(struct key_list *ret, const struct settings *s, struct err *e);
/* Append the entries of a keys file's text. */
int key_list_parse(struct key_list *l, const char *text, size_t len, struct err *e);
void key_list_release(struct key_list *l);
/* SHA-256. */
int key_digest(uint8_t ret[KEY_DIGEST_BYTES], const char *key, size_t len);

#endif
