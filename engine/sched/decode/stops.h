/* Stop strings, found across token borders in text that arrives piece by piece. Pure:
 * no thread, no output. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_STOPS_H
#define QUIRE_ENGINE_SCHED_DECODE_STOPS_H

#include "config/base/base.h"
#include "config/base/limits.h"

struct stop_string {
    const char *text; /* the request's */
    int32_t len;
    /* [len + 1] border[m]: longest proper prefix of `text` that ends its first m
     * bytes */
    int16_t *border;
};

/* Of a request; immutable. */
struct stop_set {
    int32_t n;
    bool first[256]; /* bytes some stop string begins with */
    struct stop_string stop[LIMIT_STOP_STRINGS];
};

/* Of a choice. matched[i]: bytes of stop string i that end the text so far. Zeroed:
 * nothing. */
struct stop_state {
    int16_t matched[LIMIT_STOP_STRINGS];
    /* the greatest of them: so many bytes at the text's end may yet be part of a stop
     * string */
    int16_t held;
};

/* NULL through ret_ when n is 0. `stop` must outlive the set; stop_len[i]: bytes of
 * each, NULL: each ends at its NUL. */
int stop_set_new(struct stop_set **ret, char *const *stop, const int32_t *stop_len, int32_t n,
                 struct err *e);
void stop_set_free(struct stop_set *s);
/* Read on until a stop string is complete: the bytes read including its last one, its
 * index in ret_which; or -1 when all of `text` was read and none was. With `armed`
 * false matches count for nothing (min_tokens). Of two that end at the same byte the
 * longer one is found. O(len * n), whatever the strings. */
int64_t stop_feed(const struct stop_set *s, struct stop_state *st, const char *text, size_t len,
                  bool armed, int32_t *ret_which);

#endif
