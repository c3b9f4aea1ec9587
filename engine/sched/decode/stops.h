/* Stop strings, matched across token boundaries in text that arrives in pieces. Pure:
 * no threads, no output. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_STOPS_H
#define QUIRE_ENGINE_SCHED_DECODE_STOPS_H

#include "config/base/base.h"
#include "config/base/limits.h"

struct stop_string {
    const char *text; /* the request's; borrowed */
    int32_t len;      /* bytes */
    /* [len + 1] border[m]: length of the longest proper prefix of `text` that is a
     * suffix of its first m bytes */
    int16_t *border;
};

/* A request's stop strings; immutable. */
struct stop_set {
    int32_t n;                                   /* of `stop` */
    bool first[256];                             /* by byte: some stop string begins with it */
    struct stop_string stop[LIMIT_STOP_STRINGS]; /* in the request's order */
};

/* How far a choice's text matches them. Zeroed: not at all. */
struct stop_state {
    /* [i]: length of the longest prefix of stop string i that ends the text so far */
    int16_t matched[LIMIT_STOP_STRINGS];
    /* The greatest of them: this many bytes at the text's end may become part of a stop
     * string. */
    int16_t held;
};

/* *ret is NULL if n is 0. `stop` must outlive the set; stop_len[i]: bytes of each,
 * NULL: each ends at its NUL. */
int stop_set_new(struct stop_set **ret, char *const *stop, const int32_t *stop_len, int32_t n,
                 struct err *e);
void stop_set_free(struct stop_set *s);
/* Read `text` until a stop string is complete. Returns the bytes read, including its
 * last one, and its index in ret_which; or -1 if none was completed. With `armed` false
 * matches do not count (min_tokens). Of two that end at the same byte the longer one is
 * found. O(len * n) for any strings. */
int64_t stop_feed(const struct stop_set *s, struct stop_state *st, const char *text, size_t len,
                  bool armed, int32_t *ret_which);

#endif
