/* The part of a JSON string that is copied as it is, found eight bytes at a time. */
#ifndef QUIRE_CONFIG_BASE_JSON_PLAIN_H
#define QUIRE_CONFIG_BASE_JSON_PLAIN_H

#include <string.h>

#include "config/base/base.h"

/* Whether the byte stands for itself inside a JSON string, and is ASCII that may be
 * printed: no quote, backslash or control character. */
static inline bool json_is_plain(char c)
{
    return (signed char)c >= 0x20 && c != '"' && c != '\\' && c != 0x7f;
}

/* The number of bytes at the beginning of `s` that are plain. */
static inline size_t json_plain_len(const char *s, size_t len)
{
    const uint64_t ones = 0x0101010101010101, high = 0x8080808080808080;
    size_t n = 0;

    for (; len - n >= 8; n += 8) {
        uint64_t w;
        memcpy(&w, s + n, sizeof(w));
        /* The high bit of a byte of x - ones is set where that byte of x is 0. */
        uint64_t quote = w ^ ones * '"', slash = w ^ ones * '\\', del = w ^ ones * 0x7f;
        uint64_t found = (w - ones * 0x20) | (quote - ones) | (slash - ones) | (del - ones) | w;
        if (found & high) {
            break;
        }
    }
    while (n < len && json_is_plain(s[n])) {
        n++;
    }
    return n;
}

#endif
